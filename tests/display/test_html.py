"""The folding tree for notebooks."""

from html.parser import HTMLParser

import pytest
from display.standins import Opened, array, tree

import orbaxkit as ok
from orbaxkit.display.html import to_html
from orbaxkit.specs import Specs


class Outline(HTMLParser):
    """Checks that tags nest, and collects them and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(specs: Specs, notes: tuple[str, ...] = ()) -> Outline:
    found = Outline()
    found.feed(to_html(Opened(specs, notes=notes)))
    found.close()
    assert found.open == []
    return found


def test_levels_fold_and_show_their_totals():
    found = outline(tree({"params/dense/kernel": array(2, 3), "params/dense/bias": array(3), "step": array()}))
    assert {"details", "summary"} <= found.tags <= {"details", "summary", "div", "span"}
    assert "dense 2 leaves, 9 parameters, 36 B" in found.text
    assert "kernel float32[2, 3], 24 B" in found.text


@pytest.mark.parametrize(
    "key",
    ["<script>alert(1)</script>", "</details><b>", '" onclick="x', "&lt;"],
    ids=["script", "close", "quote", "amp"],
)
def test_markup_in_keys_and_notes_is_text(key: str):
    found = outline(Specs.of([((key, "w"), array(2)), (("x",), array(2))]), (key,))
    assert found.tags <= {"details", "summary", "div", "span"}
    assert found.text.count(key.replace('"', '"')) >= 1


def test_control_characters_are_escaped():
    assert "\x1b" not in to_html(Opened(Specs.of([(("\x1b[2J",), array(2))])))


def test_alike_layers_fold():
    found = outline(tree({f"layers_{i}/w": array(4) for i in range(48)}))
    assert "layers_{0..47}/w 48 × float32[4], 768 B" in found.text


def test_very_many_leaves_are_cut():
    """A notebook with a hundred thousand lines in it would hang."""
    specs = Specs.of([((f"{i:b}".replace("0", "o").replace("1", "l"),), array(2)) for i in range(5000)])
    text = to_html(Opened(specs))
    assert "… and 3,000 more" in text
    assert text.count("<div>") < 2100


def test_plans_fold_by_what_happens_to_their_leaves():
    specs = Specs.of([(("a", "w"), array(2, 3)), (("b<script>",), array(4)), (("c",), array(5))])
    plan = ok.plan(specs, ok.drop("c"), ok.transpose("a/w"), ok.fill("new", 0.0, shape=(2,), dtype="float32"))
    found = Outline()
    found.feed(plan._repr_html_())
    found.close()
    assert found.open == []
    assert found.tags == {"div", "details", "summary"}
    assert "b<script>" in found.text
    for label in ("kept: 1 line", "changed: 1 line", "filled: 1 line", "dropped: 1 line"):
        assert label in found.text
    assert "transpose(a/w, 1, 0)" in found.text
