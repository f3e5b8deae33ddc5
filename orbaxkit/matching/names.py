"""How alike two names are: their words, by what frameworks call the same thing, rare words counting most."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NUMBER = re.compile(r"\d+")
_ORDINAL = re.compile(r"\d+|(?<![A-Za-z])[abcd](?=_)|(?<=_)[abcd](?![A-Za-z])")
# What stands in a row means one thing.
_SYNONYMS = (
    "kernel weight w embedding embeddings embs embed embedder scale gamma",
    "bias beta offset b",
    "norm layernorm layer_norm rmsnorm batchnorm batch_norm ln bn",
    "query q",
    "key k",
    "gate gating",
    "value v",
    "out output outputs o",
    "attention attn att mha multiheaddotproductattention self_attn",
    "mlp ffn ffw feedforward mlpblock",
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
    ("kernel", "bias"),
    ("query", "key"),
    ("query", "value"),
    ("key", "value"),
    ("gate", "up"),
    ("gate", "down"),
)
# The orders that the parts of a block are usually built in.
_PARTS = {"attention": 0, "mlp": 2}
_ROLES = {"query": 0, "key": 1, "value": 2, "out": 3, "gate": 0, "up": 1, "down": 2}
# Which of a block's norms is meant, by what it is said to be before or after.
_NORMS: tuple[tuple[set[str], ...], ...] = (
    ({"in"}, {"before"}, {"pre", "attention"}, {"attention"}),
    ({"post", "attention"},),
    ({"after"}, {"pre", "mlp"}, {"mlp"}),
    ({"post", "mlp"},),
)
_SAME = {word: row.split()[0] for row in _SYNONYMS for word in row.split()}


@lru_cache(maxsize=65536)
def words_of(pattern: str) -> Counter[str]:
    """The words of a path, each by the name that stands for its like."""
    words: list[str] = []
    for segment in pattern.replace('"', "").replace("{i}", "").split("/"):
        whole = _NUMBER.sub("", segment.lower()).strip("_")
        parts = [_SAME.get(word.lower(), word.lower()) for word in _WORD.findall(segment)]
        words += [_SAME[whole]] if whole in _SAME else dict.fromkeys(_apart(parts))
    return Counter(words)


def _apart(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        yield from _PACKED.get(word, (word,))


def kernel_role(segment: str) -> str:
    """Whether a leaf, by the last segment of its place, is a "kernel" [in, out], a torch "weight", or neither: ""."""
    role = _ORDINAL.sub("", segment).strip("_")
    return {"kernel": "kernel", "w": "kernel", "weight": "weight"}.get(role, "")


def numbers_of(text: str) -> tuple[int, ...]:
    """The numbers in a name, and letters that count (`a_weight`, `b_weight`)."""
    return tuple([int(found) if found.isdigit() else "abcd".index(found) for found in _ORDINAL.findall(text)])


def kind_of(place: Iterable[str]) -> tuple[bool, bool]:
    """What is left of a name where frameworks agree on nothing else: whether it is a bias, and of a norm."""
    words = words_of(plain(place))
    return "bias" in words, "norm" in words


def plain(place: Iterable[str]) -> str:
    """A name without what only tells the order: its numbers, and before or after what a norm is."""
    return "/".join(["norm" if _norm_position(segment) is not None else _ORDINAL.sub("", segment) for segment in place])


def order_of(place: Iterable[str]) -> tuple[int, ...]:
    """Where a module comes among its like."""
    out: list[int] = []
    for segment in place:
        position = _norm_position(segment)
        out += numbers_of(segment) if position is None else [position]
    return tuple(out)


def built_order(place: Iterable[str]) -> tuple[int, ...]:
    """Where a module comes in the order that blocks are usually built in: attention, MLP; query, key, value."""
    place = tuple(place)
    words = words_of("/".join(place))
    part = next((rank for word, rank in _PARTS.items() if word in words), 1)
    role = next((rank for word, rank in _ROLES.items() if word in words), 0)
    return part, role, *order_of(place)


@lru_cache(maxsize=65536)
def _norm_position(segment: str) -> int | None:
    words = set(words_of(segment))
    if "norm" not in words:
        return None
    said = words - {"norm", "self"}
    return next((rank for rank, names in enumerate(_NORMS) if said in names), None)


class Likeness:
    """Likeness of names from two trees: the common words, weighed by how rare they are in both."""

    def __init__(self, names: Iterable[str]):
        words = [words_of(name) for name in names]
        seen = Counter(word for each in words for word in each)
        self._weight: Mapping[str, float] = {word: math.log(1 + len(words) / n) for word, n in seen.items()}
        self._usual = math.fsum(self._weight.values()) / (len(seen) or 1)

    def __call__(self, ours: Sequence[str], theirs: Sequence[str]) -> np.ndarray:
        """From 0 to 1, for each of ours a row; names that say opposite things are not alike at all."""
        left, right = ([words_of(name) for name in names] for names in (ours, theirs))
        words = sorted({word for each in left for word in each} & {word for each in right for word in each})
        weights = np.array([self._weight.get(word, self._usual) for word in words], np.float32)
        a, b = (_counted(side, words) for side in (left, right))
        most = max((n for each in left for n in each.values()), default=0)
        levels = [(a >= k, b >= k) for k in range(1, most + 1)]
        common = sum(((x * weights) @ y.T for x, y in levels), np.zeros((len(a), len(b)), np.float32))
        shared = sum((x.astype(np.float32) @ y.T for x, y in levels), np.zeros_like(common))
        totals = [np.array([each.total() for each in side], np.float32) for side in (left, right)]
        others = totals[0][:, None] + totals[1] - 2 * shared  # how rare they are does not tell
        alike = common / np.maximum(common + self._usual * others, 1e-9)
        return np.asarray(np.where(_are_opposed(left, right), 0, alike))


def _counted(names: list[Counter[str]], words: list[str]) -> np.ndarray:
    """How often each name has each word."""
    at = {word: k for k, word in enumerate(words)}
    out = np.zeros((len(names), len(words)), np.float32)
    for row, each in enumerate(names):
        for word in each.keys() & at.keys():
            out[row, at[word]] = each[word]
    return out


def are_opposed(ours: str, theirs: str) -> bool:
    """Whether two names say opposite things, such as encoder and decoder."""
    return bool(_are_opposed([words_of(ours)], [words_of(theirs)]).any())


def _are_opposed(ours: list[Counter[str]], theirs: list[Counter[str]]) -> np.ndarray:
    """Whether one name has only the one word of a pair, and the other only the other."""
    out = np.zeros((len(ours), len(theirs)), bool)
    for one, other in _OPPOSITES:
        (a, b), (c, d) = ([_has_only(side, *pair) for pair in ((one, other), (other, one))] for side in (ours, theirs))
        out |= (a[:, None] & d) | (b[:, None] & c)
    return out


def _has_only(names: list[Counter[str]], word: str, other: str) -> np.ndarray:
    return np.array([word in words and other not in words for words in names], bool)
