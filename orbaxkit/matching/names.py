"""How alike two names are: their words, by what frameworks call the same thing, rare words counting most."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NUMBER = re.compile(r"\d+")
# What stands in a row means one thing.
_SYNONYMS = (
    "kernel weight w embedding embeddings embedder scale gamma",
    "bias beta offset b",
    "layernorm layer_norm norm ln",
    "query q",
    "key k",
    "gate gating",
    "value v",
    "out output outputs o",
    "attention attn att mha multiheaddotproductattention self_attn",
    "mlp ffn feedforward mlpblock",
    "dense linear fc proj projection",
    "layer layers block blocks encoderblock h",
    "position pos positions",
    "in input inputs",
    "decoder decoding",
    "image img vision",
    "llm language",
)
# What is written as one word.
_PACKED = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}
# Two places of one thing: a name with the one word is not a name with the other.
_OPPOSITES = (
    ("pre", "post"),
    ("in", "out"),
    ("up", "down"),
    ("encoder", "decoder"),
    ("left", "right"),
    ("first", "last"),
)
_OPPOSITE = {word: other for pair in _OPPOSITES for word, other in (pair, pair[::-1])}
_SAME = {word: row.split()[0] for row in _SYNONYMS for word in row.split()}


@lru_cache(maxsize=65536)
def words_of(pattern: str) -> Counter[str]:
    """The words of a path, each by the name that stands for its like."""
    words: list[str] = []
    for segment in pattern.replace('"', "").replace("{i}", "").split("/"):
        whole = _NUMBER.sub("", segment.lower()).strip("_")
        parts = [_SAME.get(word.lower(), word.lower()) for word in _WORD.findall(segment)]
        words += [_SAME[whole]] if whole in _SAME else dict.fromkeys(_unpacked(parts))
    return Counter(words)


def _unpacked(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        yield from _PACKED.get(word, (word,))


def role_of(pattern: str) -> str:
    """What a leaf is to its module, `kernel` or `bias`: the last segment, but not the `value` of an NNX box."""
    return pattern.removesuffix("/value").rpartition("/")[2]


def module_of(pattern: str) -> str:
    """Where a leaf is: all but what it is to its module."""
    return pattern.removesuffix("/value").rpartition("/")[0]


def numbers_of(pattern: str) -> tuple[int, ...]:
    """The numbers in a path, which tell apart what has the same words."""
    return tuple([int(number) for number in _NUMBER.findall(pattern)])


class Likeness:
    """Likeness of names from two trees: the common words, weighed by how rare they are in both."""

    def __init__(self, patterns: Iterable[str]):
        words = [words_of(pattern) for pattern in patterns]
        seen = Counter(word for each in words for word in each)
        self._known: dict[str, float] = {}
        self._weight: Mapping[str, float] = {word: math.log(1 + len(words) / n) for word, n in seen.items()}

    def __call__(self, ours: str, theirs: str) -> float:
        """From 0 to 1; names that say opposite things are not alike at all."""
        if not one_sided(ours).isdisjoint(map(_OPPOSITE.__getitem__, one_sided(theirs))):
            return 0.0
        common = self._sum(words_of(ours) & words_of(theirs))
        whole = self._whole(ours) + self._whole(theirs) - common
        return common / whole if whole else 0.0

    def _whole(self, pattern: str) -> float:
        if pattern not in self._known:
            self._known[pattern] = self._sum(words_of(pattern))
        return self._known[pattern]

    def _sum(self, words: Counter[str]) -> float:
        return math.fsum(self._weight[word] * n for word, n in words.items())


@lru_cache(maxsize=65536)
def one_sided(pattern: str) -> frozenset[str]:
    """The words of a name of which it does not have the opposite too."""
    words = words_of(pattern)
    return frozenset(word for word in words if word in _OPPOSITE and _OPPOSITE[word] not in words)
