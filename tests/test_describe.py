"""describe(): what is recognised, from specs alone."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import f6_tree, save

import orbaxkit as ok
from orbaxkit.planning.scanned import candidates_text, find_scanned


def test_scanned_subtrees_with_their_axis_and_layers(tmp_path):
    blocks = {"w": jnp.ones((3, 8, 4)), "b": jnp.ones((3, 8))}
    path = save(tmp_path / "c", {"params": {"blocks": blocks, "head": jnp.ones(4)}})
    (found,) = ok.open(path).describe().scanned
    assert str(found) in ("params/blocks: axis 0 (3 layers) or axis 1 (8 layers)",)
    blocks["norm"] = jnp.ones((3, 5))
    (found,) = ok.open(save(tmp_path / "d", {"params": {"blocks": blocks, "head": jnp.ones(4)}})).describe().scanned
    assert (found.path, found.axis, found.layers) == ("params/blocks", 0, 3)


def test_F6_shows_both_candidates(tmp_path):
    (found,) = ok.open(save(tmp_path / "c", f6_tree())).describe().scanned
    assert found.candidates == ((0, 8), (1, 4))
    assert found.axis is None


def test_it_prints_a_line_for_each_thing(tmp_path):
    params = {"w": jnp.ones(4)}
    path = save(tmp_path / "c", {"params": params, "opt_state": optax.adam(1e-3).init(params)})
    text = str(ok.open(path).describe())
    assert "optimizer  opt_state/0 Adam-like (count, mu, nu): moments for 1 param, 4 values each" in text
    assert "note       saved on" in text
    assert str(ok.open(save(tmp_path / "d", {"w": np.ones(2)})).describe()) == "nothing was recognised"


@pytest.mark.parametrize(
    ("shapes", "path"),
    [
        ([(27, 1, 4), (27, 1)], "params/blocks"),
        ([(8, 4, 16), (8, 4)], "params/blocks"),
        ([(3, 5, 4), (3, 6), (3, 7, 2)], "params/blocks"),
    ],
    ids=str,
)
def test_unstack_infers_an_axis_just_where_one_candidate_is_shown(shapes, path):
    tree = {"params": {"blocks": {f"w{k}": np.ones(shape, np.float32) for k, shape in enumerate(shapes)}}}
    specs = ok.plan(tree).source
    (found,) = find_scanned(specs)
    assert found.path == path  # not `params`, which holds nothing else
    rule = ok.unstack(path, into="blocks_{i}")
    if found.axis is None:
        with pytest.raises(ok.TransformError, match=re.escape(candidates_text(found.candidates))):
            ok.plan(tree, rule)
    else:
        assert len(ok.plan(tree, rule).outputs) == found.layers * len(shapes)
