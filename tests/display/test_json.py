"""The JSON that other programs rely on."""

import json

import numpy as np
import pytest
from display.standins import Facts, Opened, array, tree

from orbaxkit.display.json import dump, to_json
from orbaxkit.errors import TransformError
from orbaxkit.specs import LeafSpec, SavedSharding, Specs

SHARDED = SavedSharding(("data", "model"), (2, 4), ("data", ("model",), None), None)
SPECS = Specs.of(
    [
        (("a", 0, "w/x"), array(4, 8, stored_bytes=99, chunk_shape=(2, 8), sharding=SHARDED)),
        (("a", "1"), array(2, dtype="bfloat16", sharding=SavedSharding(device="cuda:0"))),
        (("key",), LeafSpec((3,), np.dtype("uint32"), "key", stored_shape=(3, 2), key_impl="threefry2x32")),
        (("lost",), LeafSpec((5,), None)),
        (("none",), LeafSpec(kind="empty", empty="None")),
    ]
)


def test_a_leaf_has_exactly_the_documented_members():
    found = to_json(Opened(SPECS, Facts(step=7, steps=((7, "7"),))))
    assert found["format"] == "orbax"
    assert found["step"] == 7
    leaves = found["items"]["default"]["leaves"]
    assert leaves[0] == {
        "path": 'a/0/"w/x"',
        "keys": ["a", 0, "w/x"],
        "kind": "array",
        "shape": [4, 8],
        "dtype": "float32",
        "nbytes": 128,
        "stored_bytes": 99,
        "chunk_shape": [2, 8],
        "sharding": {
            "axis_names": ["data", "model"],
            "mesh_shape": [2, 4],
            "partition": ["data", ["model"], None],
            "device": None,
        },
    }
    assert leaves[1]["keys"] == ["a", "1"]
    assert leaves[1]["sharding"]["device"] == "cuda:0"


def test_totals_are_those_of_the_item():
    item = to_json(Opened(SPECS))["items"]["default"]
    assert (item["parameters"], item["nbytes"]) == (4 * 8 + 2 + 5, 4 * 8 * 4 + 2 * 2 + 3 * 2 * 4)
    assert list(item) == ["leaves", "parameters", "nbytes"]


def test_what_is_not_on_disk_is_null():
    leaves = {leaf["path"]: leaf for leaf in to_json(Opened(SPECS))["items"]["default"]["leaves"]}
    assert (leaves["lost"]["dtype"], leaves["lost"]["nbytes"]) == ("?", None)
    assert (leaves["none"]["kind"], leaves["none"]["dtype"], leaves["none"]["nbytes"]) == ("empty", "None", 0)
    assert leaves["key"]["dtype"] == "key<fry>"
    assert [leaves["key"][name] for name in ("stored_bytes", "chunk_shape", "sharding")] == [None, None, None]


def test_it_is_json_whatever_the_keys_are():
    specs = Specs.of([(("\x1b[0m\udc80é",), array(2))])
    found = to_json(Opened(specs, several={"a": specs, "b": tree({})}))
    text = dump(found)
    assert json.loads(text) == found
    assert json.loads(text)["items"]["a"]["leaves"][0]["keys"] == ["\x1b[0m\udc80é"]
    assert text.isascii()


def _two_items() -> Opened:
    params, state = tree({"w": array(2)}), tree({"w": array(3), "step": array()})
    both = Specs.of([*((("params", *params.paths[n]), params[n]) for n in params)])
    both = Specs.of([*((("params", n), params[n]) for n in params), *((("state", n), state[n]) for n in state)])
    return Opened(both, Facts(items={"params": "/p", "state": "/s"}), several={"params": params, "state": state})


def test_items_are_apart_and_their_paths_start_within():
    items = to_json(_two_items())["items"]
    assert {name: [leaf["path"] for leaf in item["leaves"]] for name, item in items.items()} == {
        "params": ["w"],
        "state": ["w", "step"],
    }


def test_select_matches_paths_as_they_are_shown():
    """With several items, the item's name comes first: as in the table and in restore."""
    items = to_json(_two_items(), select="state/*")["items"]
    assert {name: len(item["leaves"]) for name, item in items.items()} == {"params": 0, "state": 2}
    assert items["state"]["parameters"] == 4
    with pytest.raises(TransformError, match="matches no leaf"):
        to_json(_two_items(), select="nothing")


def test_a_root_lists_its_steps():
    facts = Facts(step=2, steps=((1, "ckpt_1"), (2, "ckpt_2")), unfinished=("ckpt_3.orbax-checkpoint-tmp",))
    found = to_json(Opened(SPECS, facts, ("a note",)))
    assert (found["steps"], found["unfinished"], found["finished"], found["notes"]) == (
        [1, 2],
        ["ckpt_3.orbax-checkpoint-tmp"],
        True,
        ["a note"],
    )
