"""Paths as text, and the pattern language."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbaxkit.errors import TransformError
from orbaxkit.paths import check_template, compile_pattern, expand, format_path, is_index, natural_order, parse_path

keys = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=6)
paths = st.lists(st.one_of(keys, st.integers(0, 20)), max_size=5).map(tuple)


@given(paths)
def test_text_of_a_path_parses_back_to_its_segments(path):
    assert parse_path(format_path(path)) == tuple(map(str, path))


@given(paths, paths)
def test_text_tells_different_paths_apart(a, b):
    assert (format_path(a) == format_path(b)) == (tuple(map(str, a)) == tuple(map(str, b)))


def test_haiku_key_with_a_slash_is_quoted():
    assert format_path(("mlp/~/linear_0", "w")) == '"mlp/~/linear_0"/w'


@given(paths)
def test_a_path_as_pattern_matches_itself(path):
    assert compile_pattern(format_path(path)).match(path) is not None


@pytest.mark.parametrize(
    ("pattern", "path", "wild", "named"),
    [
        ("params/**", ("params", "a", 0), (("a", 0),), {}),
        ("**", (), ((),), {}),
        ("**/kernel", ("kernel",), ((),), {}),
        ("a/*/c", ("a", 3, "c"), (3,), {}),
        ("layers_{i}/**", ("layers_12", "w"), (("w",),), {"i": "12"}),
        ("**/{a}_{b}", ("x", "q_k_v"), (("x",),), {"a": "q", "b": "k_v"}),
        ("*b*d", ("abcbd",), ("a", "cb"), {}),
        ("{i}", (7,), (), {"i": 7}),
    ],
)
def test_wildcards_stand_for(pattern, path, wild, named):
    match = compile_pattern(pattern).match(path)
    assert (match.wild, match.named) == (wild, named)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("params", ("params", "w")),
        ("*", ()),
        ("layers_{i}", ("layers_",)),
        ("a/**/b/**/c", ("a", "c", "b")),
        ("*a*a*", ("a",)),
        ('"a/b"', ("a", "b")),
    ],
)
def test_does_not_match(pattern, path):
    assert compile_pattern(pattern).match(path) is None


def _reference(pattern: str) -> re.Pattern[str]:
    """The same language for plain keys, as an ordinary backtracking expression over `/`-ended segments."""
    parts = [r"(?:[^/]*/)*" if p == "**" else re.escape(p).replace(r"\*", "[^/]*") + "/" for p in pattern.split("/")]
    return re.compile("".join(parts))


@given(
    st.lists(st.sampled_from(["**", "*", "a", "a*", "*b", "a*b*", "b"]), min_size=1, max_size=5).map("/".join),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=5).map(tuple),
)
def test_matches_what_a_backtracking_matcher_matches(pattern, path):
    expected = _reference(pattern).fullmatch("".join(f"{segment}/" for segment in path)) is not None
    assert (compile_pattern(pattern).match(path) is not None) == expected


@pytest.mark.parametrize(
    ("pattern", "path"),
    [("*a" * 30 + "b", ("a" * 5000,)), ("**/a/" * 20 + "b", ("a",) * 5000), ("**/*a*/" * 15 + "b", ("aa",) * 3000)],
    ids=["stars", "deep", "both"],
)
def test_matching_is_linear(pattern, path):
    start = time.perf_counter()
    assert compile_pattern(pattern).match(path) is None
    assert time.perf_counter() - start < 2


def test_templates_move_and_keep_typed_segments():
    match = compile_pattern("params/**/layers_{i}/*").match(("params", "list", 3, "layers_7", "w"))
    assert expand(compile_pattern("model/{i}/**/x_*"), match) == ("model", "7", "list", 3, "x_w")


@pytest.mark.parametrize(
    ("template", "message"), [("b/{j}", "does not capture"), ("b/**/*", "has not the same")], ids=["name", "wild"]
)
def test_template_that_a_pattern_cannot_fill_is_refused(template, message):
    with pytest.raises(TransformError, match=message):
        check_template(compile_pattern(template), compile_pattern("a/**"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a//b", "empty segment"),
        ("a**", "stray"),
        ("a{", "stray"),
        ("{i}/{i}", "captures one name twice"),
        ('"a"b', "quoted"),
    ],
)
def test_malformed_patterns_say_why(pattern, message):
    with pytest.raises(TransformError, match=message):
        compile_pattern(pattern)


def test_numeric_siblings_are_in_numeric_order():
    assert natural_order(["0", "10", "2"]) == ["0", "2", "10"]
    assert natural_order(["b", "10", "2"]) == ["b", "10", "2"]
    assert [is_index(t) for t in ("0", "10", "01", "", "+1", "٣")] == [True, True, False, False, False, False]
