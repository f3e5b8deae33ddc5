"""Typed key paths, their text form, and the one pattern language.

A key path is a tuple of segments: `int` is a sequence index, `str` a mapping key, an attribute or a field.
Its text joins the segments with `/`; a key that would be ambiguous there is quoted as JSON.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from orbaxkit.errors import TransformError

Segment = str | int
KeyPath = tuple[Segment, ...]

_NEEDS_QUOTES = re.compile(r'[/*{"]')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CANONICAL = re.compile(r"0|[1-9][0-9]*")
_WILDCARD = re.compile(r"\{([A-Za-z_]\w*)\}|\*+|\{")
_END = "\0"  # ends each segment of an encoded path; no key holds it (readers refuse NUL in names)


def format_path(path: KeyPath) -> str:
    """`("mlp/~/linear_0", "w", 3)` -> `'"mlp/~/linear_0"/w/3'`; the empty path (a tree that is one leaf) is `''`."""
    return "/".join([_format_segment(segment) for segment in path])


@lru_cache(maxsize=65536)
def _format_segment(segment: Segment) -> str:
    text = str(segment)
    return json.dumps(text, ensure_ascii=False) if not text or _NEEDS_QUOTES.search(text) else text


def parse_path(text: str) -> KeyPath:
    """The segments of a path's text. Their types are not in the text: an index comes back as a string."""
    if not isinstance(text, str):
        raise TransformError(f"{text!r} is no path", hint="the text of one: 'params/head/kernel'")
    return tuple(_unquoted(part) if part.startswith('"') else part for part in _split(text))


def is_index(text: str) -> bool:
    """Whether text is a canonical decimal: `0` and `12` are, `01` and `+1` are not."""
    return _CANONICAL.fullmatch(text) is not None


def natural_order(names: Iterable[Segment]) -> list[Segment]:
    """Siblings in numeric order where every one is a canonical decimal, else as they came."""
    names = list(names)
    return sorted(names, key=int) if all(is_index(str(name)) for name in names) else names


def nearest(text: str, candidates: Iterable[str], most: int = 3) -> list[str]:
    """The candidates most like `text`, best first: those that share its last segment, else those that look like it."""
    pool = list(candidates)
    last = text.rpartition("/")[2]
    alike = [c for c in pool if c.rpartition("/")[2] == last] or pool
    return difflib.get_close_matches(text, alike[:2000], n=most, cutoff=0.5)


def _unquoted(part: str) -> str:
    try:
        return str(json.loads(part))
    except ValueError:
        raise TransformError(f"{part} is not a JSON string", hint='a quoted segment ends with a quote: "a/b"') from None


def _split(text: str) -> list[str]:
    """Cut at `/`, but not inside a JSON-quoted segment."""
    if '"' not in text:
        return text.split("/") if text else []
    parts, at = [], 0
    while True:
        quoted = _QUOTED.match(text, at)
        end = quoted.end() if quoted else text.find("/", at) % (len(text) + 1)
        parts.append(text[at:end])
        if end == len(text):
            return parts
        if text[end] != "/":
            raise TransformError(f"{text!r} has text right after a quoted segment")
        at = end + 1


@dataclass(frozen=True, slots=True)
class Wildcard:
    """`*` (any text within a segment), `**` (any number of segments) or `{name}` (one or more characters)."""

    kind: str
    name: str = ""


Glob = tuple[str | Wildcard, ...]
DEEP = Wildcard("**")


@dataclass(frozen=True, slots=True)
class Match:
    """What the wildcards stood for: `wild` in order, `named` by name.

    `**` stands for a tuple of typed segments, a wildcard that fills a segment for that segment, any other for text; a
    group of a regular expression that took no part for None.
    """

    wild: tuple[KeyPath | Segment | None, ...] = ()
    named: Mapping[str, Segment | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: a glob over segments, or a regular expression that matches a path's whole text."""

    text: str
    globs: tuple[Glob, ...] = ()
    regex: re.Pattern[str] | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def captures(self) -> tuple[str, ...]:
        """The names of the captures, in order."""
        if self.regex is not None:
            return tuple(self.regex.groupindex)
        return tuple(token.name for token in self.wildcards if token.name)

    @property
    def wildcards(self) -> tuple[Wildcard, ...]:
        """The wildcards, in order."""
        return tuple(token for glob in self.globs for token in glob if isinstance(token, Wildcard))

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(_path_regex(self.globs), re.DOTALL)

    def match(self, path: KeyPath) -> Match | None:
        """Match a whole path: what the wildcards stood for, or None. Linear in the path, whatever the wildcards."""
        if self.regex is not None:
            found = self.regex.fullmatch(format_path(path))
            return found and Match(found.groups(), found.groupdict())
        encoded = _encode(path)
        found = self._compiled.fullmatch(encoded)
        return found and self._explain(found, encoded, path)

    def _explain(self, found: re.Match[str], encoded: str, path: KeyPath) -> Match:
        wild: list[KeyPath | Segment] = []
        named: dict[str, Any] = {}  # a capture stays within a segment
        for group, token in enumerate(self.wildcards, start=1):
            value = _typed(encoded, found.span(group), path, token is DEEP)
            if token.name:
                named[token.name] = value
            else:
                wild.append(value)
        return Match(tuple(wild), named)


def compile_pattern(pattern: "str | re.Pattern[str] | Pattern") -> Pattern:
    """Compile a glob over segments (`*`, `**`, `{name}`), or wrap a regular expression that must match in full."""
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, re.Pattern):
        return Pattern(pattern.pattern, regex=pattern)
    if not isinstance(pattern, str):
        raise TransformError(f"{pattern!r} is no pattern", hint="text, or a compiled regular expression")
    return _compile_glob(pattern)


@lru_cache(maxsize=4096)
def _compile_glob(text: str) -> Pattern:
    pattern = Pattern(text, tuple(_parse_glob(part, text) for part in _split(text)))
    if len(set(pattern.captures)) < len(pattern.captures):
        raise TransformError(f"the pattern {text!r} captures one name twice", hint="name every {capture} differently")
    return pattern


def _parse_glob(part: str, text: str) -> Glob:
    if part.startswith('"'):
        return (_unquoted(part),)
    if part == "**":
        return (DEEP,)
    if not part:
        raise TransformError(f"the pattern {text!r} has an empty segment", hint='an empty key is written ""')
    tokens: list[str | Wildcard] = []
    at = 0
    for found in _WILDCARD.finditer(part):
        tokens += [part[at : found.start()], _parse_wildcard(found, text)]
        at = found.end()
    return tuple(token for token in (*tokens, part[at:]) if token != "")


def _parse_wildcard(found: re.Match[str], text: str) -> Wildcard:
    if found[1]:
        return Wildcard("{}", found[1])
    if found[0] == "*":
        return Wildcard("*")
    hint = 'a key that holds "{" is quoted: "a{b"' if found[0] == "{" else "** stands alone between slashes"
    raise TransformError(f"the pattern {text!r} has a stray {found[0]!r}", hint=hint)


def _encode(path: KeyPath) -> str:
    return "".join([f"{segment}{_END}" for segment in path])


def _path_regex(globs: tuple[Glob, ...]) -> str:
    """Every `**` but the last takes as little as it can, for good: no match is lost by it, none is searched twice."""
    blocks: list[str] = [""]
    for glob in globs:
        if glob == (DEEP,):
            blocks.append("")
        else:
            blocks[-1] += f"(?>{_segment_regex(glob)}{_END})"
    anything = f"((?:[^{_END}]*{_END})*{{lazy}})"
    middle = "".join(f"(?>{anything.format(lazy='?')}{block})" for block in blocks[1:-1])
    last = anything.format(lazy="") + blocks[-1] if len(blocks) > 1 else ""
    return blocks[0] + middle + last


def _segment_regex(glob: Glob) -> str:
    """The same within a segment: a wildcard and the literal behind it are one atomic step, all but the last."""
    wild = [i for i, token in enumerate(glob) if isinstance(token, Wildcard)]
    out = []
    for i, token in enumerate(glob):
        if isinstance(token, str):
            out.append(re.escape(token))
            continue
        some = f"[^{_END}]{'+' if token.name else '*'}"
        out.append(f"({some})" if i == wild[-1] else f"({some}?)")
    for i in wild[:-1]:
        behind = out[i + 1] if isinstance(glob[i + 1], str) else ""
        out[i] = f"(?>{out[i]}{behind})"
        if behind:
            out[i + 1] = ""
    return "".join(out)


def _typed(encoded: str, span: tuple[int, int], path: KeyPath, is_deep: bool) -> KeyPath | Segment:
    start, end = span
    first = encoded.count(_END, 0, start)
    if is_deep:
        return path[first : first + encoded.count(_END, start, end)]
    fills_segment = (start == 0 or encoded[start - 1] == _END) and encoded[end] == _END
    return path[first] if fills_segment else encoded[start:end]


def expand(template: Pattern, match: Match) -> KeyPath:
    """Fill a template (`"layers/{i}/**"`) with what wildcards stood for; one that fills a segment keeps its type."""
    wild = iter(match.wild)
    out: list[Segment] = []
    for glob in template.globs:
        values = [_value_of(token, match, wild) for token in glob]
        if glob == (DEEP,):
            out.extend(values[0])  # type: ignore[arg-type]
        else:
            out.append(values[0] if len(values) == 1 else "".join(map(str, values)))  # type: ignore[arg-type]
    return tuple(out)


def _value_of(token: str | Wildcard, match: Match, wild: Iterator[KeyPath | Segment | None]) -> KeyPath | Segment:
    if isinstance(token, str):
        return token
    value = match.named[token.name] if token.name else next(wild)
    if value is None:  # an optional group of a regular expression
        raise TransformError(
            f"a group that the template needs took no part in the match ({{{token.name}}})",
            hint="make it match the empty text instead: (?P<name>…|)",
        )
    return value


def check_template(template: Pattern, pattern: Pattern) -> None:
    """Refuse a template whose wildcards the pattern cannot fill."""
    unknown = sorted(set(template.captures) - set(pattern.captures))
    if unknown:
        raise TransformError(f"{template.text!r} uses {{{unknown[0]}}}, which {pattern.text!r} does not capture")
    if pattern.regex is None and _unnamed(template) != _unnamed(pattern):
        raise TransformError(
            f"{template.text!r} has not the same * and ** as {pattern.text!r}",
            hint="each stands for what the one in its place stood for; name parts to reorder or drop them: {name}",
        )


def _unnamed(pattern: Pattern) -> list[str]:
    return [token.kind for token in pattern.wildcards if not token.name]
