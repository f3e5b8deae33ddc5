"""The plain-text table: totals per level, folding, depth, selection, order, escapes."""

import pytest
from display.standins import Facts, Opened, array, tree

from orbaxkit.display.table import render, table
from orbaxkit.display.text import human_bytes
from orbaxkit.errors import TransformError
from orbaxkit.specs import LeafSpec, SavedSharding, Specs

SMALL = tree(
    {
        "params/dense/kernel": array(2, 3),
        "params/dense/bias": array(3),
        "params/head": array(3, 1024, dtype="bfloat16"),
        "step": LeafSpec((), array().dtype, "scalar"),
        "name": LeafSpec(kind="string"),
        "rest": LeafSpec(kind="empty", empty="None"),
    }
)


def test_every_level_has_its_totals():
    assert table(SMALL) == [
        "            leaves  parameters     bytes",
        "params           3       3,081  6.04 KiB",
        "  dense          2           9      36 B",
        "    kernel                   6      24 B  float32[2, 3]",
        "    bias                     3      12 B  float32[3]",
        "  head                   3,072  6.00 KiB  bfloat16[3, 1024]",
        "step                                 4 B  float32[] scalar",
        "name                                      str",
        "rest                                      None",
    ]


def test_A1_sharded_arrays_count_whole():
    """72 parameters, not the 9 that adding up one process's shards gives."""
    mesh = SavedSharding(("data", "model"), (2, 4), ("data", "model"))
    whole = SavedSharding(("data", "model"), (2, 4), (None,))
    specs = tree({"w": array(8, 8, sharding=mesh), "b": array(8, sharding=whole)})
    text = render(Opened(specs))
    assert "2 leaves, 72 parameters, 288 B" in text
    assert "saved on  a 2x4 mesh (data, model)" in text
    assert "float32[8, 8] P(data, model)" in text


@pytest.mark.parametrize(
    ("depth", "names"),
    [(1, ["params/…", "step", "name", "rest"]), (2, ["params", "dense/…", "head", "step", "name", "rest"])],
    ids=["one level", "two levels"],
)
def test_depth_closes_what_lies_below(depth: int, names: list[str]):
    assert [line.split()[0] for line in table(SMALL, depth=depth)[1:]] == names


def test_select_shows_what_matches_and_its_totals():
    text = render(Opened(SMALL), select="params/**/kernel")
    assert "selected  1 leaf, 6 parameters, 24 B" in text
    assert "bias" not in text


def test_a_pattern_that_matches_nothing_is_an_error_with_near_names():
    with pytest.raises(TransformError, match=r"'params/dense/kernal' matches no leaf(.|\n)*params/dense/kernel"):
        render(Opened(SMALL), select="params/dense/kernal")


def test_sort_size_puts_the_largest_sibling_first():
    names = [line.split()[0] for line in table(SMALL, sort="size")[1:]]
    assert names == ["params", "head", "dense", "kernel", "bias", "step", "name", "rest"]


def test_alike_layers_fold_into_one_line():
    """As jax sorts them on disk: 10 before 2. One layer that differs stands alone."""
    order = sorted(range(12), key=str)
    leaves = {f"layers_{i}/{leaf}": array(4, 8) for i in order for leaf in ("k", "v")}
    specs = tree({**leaves, "layers_11/v": array(4, 9), "layers_20/k": array(4, 8), "layers_20/v": array(4, 8)})
    assert table(specs) == [
        "                leaves  parameters     bytes",
        "layers_{0..10}      22         704  2.75 KiB",
        "  k                 11         352  1.38 KiB  float32[4, 8]",
        "  v                 11         352  1.38 KiB  float32[4, 8]",
        "layers_11            2          68     272 B",
        "  k                             32     128 B  float32[4, 8]",
        "  v                             36     144 B  float32[4, 9]",
        "layers_20            2          64     256 B",
        "  k                             32     128 B  float32[4, 8]",
        "  v                             32     128 B  float32[4, 8]",
    ]


def test_padded_numbers_fold_by_themselves():
    """`07` and `7` are different keys: they never hide each other."""
    names = [*(f"block_{i:02}" for i in range(12)), *(f"block_{i}" for i in range(4))]
    assert [line.split()[0] for line in table(tree({f"{name}/w": array(2) for name in names}))[1:]] == [
        "block_{00..11}/w",
        "block_{0..3}/w",
    ]


def test_list_entries_are_in_numeric_order_and_fold():
    specs = tree({f"blocks/{i}": array(i // 10 + 1) for i in range(12)})
    assert [line.split()[0] for line in table(specs)[1:]] == ["blocks", "{0..9}", "10", "11"]


def test_a_value_below_a_name_is_one_line():
    """NNX: `kernel/value` is one variable."""
    assert table(tree({"kernel/value": array(2), "bias/value": array(2)}))[1].startswith("kernel/value")


def test_unknown_dtypes_show_unknown_bytes():
    text = render(Opened(tree({"a": LeafSpec((3, 4), is_write_shape=True), "b": array(2)})))
    assert "2 leaves, 14 parameters, bytes unknown" in text
    assert "?  ?[3, 4]" in text


def test_the_header_says_what_the_files_tell():
    facts = Facts(
        format="orbax",
        writer="orbax-checkpoint 0.11.20 or later",
        step=20,
        steps=((10, "10"), (20, "20")),
        unfinished=("30.orbax-checkpoint-tmp",),
        items={"params": "/p", "train_state": "/t"},
        other_items={"assets": "/a"},
    )
    lines = render(Opened(SMALL, facts, ("the saved devices are unknown",))).split("\n")
    assert lines[:10] == [
        "path         /runs/pi0",
        "format       orbax",
        "written by   orbax-checkpoint 0.11.20 or later",
        "step         20",
        "steps        10, 20",
        "unfinished   30.orbax-checkpoint-tmp",
        "items        params, train_state",
        "other items  assets",
        "total        6 leaves, 3,081 parameters, 6.04 KiB",
        "note         the saved devices are unknown",
    ]


def test_an_unfinished_save_says_so():
    assert "finished  no" in render(Opened(SMALL, Facts(is_finished=False)))


def test_many_steps_are_shortened():
    facts = Facts(step=99, steps=tuple((i, str(i)) for i in range(100)))
    assert "steps   0, 1, 2, 3, 4, 5, … 98, 99 (100)" in render(Opened(SMALL, facts))


def test_the_optimizer_is_named():
    adam = {f"opt_state/0/{m}/w": array(4) for m in ("mu", "nu")}
    text = render(Opened(tree({"params/w": array(4), "opt_state/0/count": array(dtype="int32"), **adam})))
    assert "optimizer  opt_state/0 Adam-like (count, mu, nu): moments for 1 param, 4 values each" in text


@pytest.mark.parametrize("key", ["\x1b[2J", "a\nb", "\u202eabc", "\r"], ids=["escape", "newline", "bidi", "return"])
def test_hostile_keys_are_escaped(key: str):
    text = render(Opened(Specs.of([((key, "w"), array(2)), (("x",), array(3))]), notes=(key,)))
    assert key not in text.replace("\n", "", 1) or key == "\n"
    assert key.encode("unicode_escape").decode() in text


@pytest.mark.parametrize(
    ("leaves", "name"),
    [([((), array(3))], "(root)"), ([(("",), array(3))], '""'), ([], None)],
    ids=["one leaf", "empty key", "no leaf"],
)
def test_odd_trees_have_rows(leaves: list, name: str | None):
    lines = table(Specs.of(leaves))
    assert [line.split()[0] for line in lines[1:]] == ([name] if name else [])


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10**9, "954 MiB")],
)
def test_bytes_are_three_digits(number: int, text: str):
    assert human_bytes(number) == text


def test_very_deep_paths_are_one_row_at_the_end():
    """Deeper than Python's recursion allows, and harmless."""
    lines = table(Specs.of([(tuple("a" for _ in range(3000)), array(2))]), depth=5000)
    assert len(lines) < 110
    assert "float32[2]" in lines[-1]


def test_very_many_leaves_fit_sixty_rows():
    """Names without any run of numbers, so that nothing folds."""
    names = [f"{chr(97 + i % 26)}{i % 7}x{i}" for i in range(100)]
    specs = Specs.of([((a, b, "kernel"), array(2, 3 + j % 5)) for a in names for j, b in enumerate(names)])
    lines = table(specs)
    assert len(lines) == 64
    assert lines[-3] == "… and 40 more"
    assert len(table(specs, depth=1)) == 101
