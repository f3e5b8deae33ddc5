"""Laws of plans, over random trees and random transforms."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.random_plans import NARROW, data_for, is_same, plans, run, same_bits, trees

from orbaxkit import transforms as t
from orbaxkit.errors import NotInvertibleError
from orbaxkit.planning import Plan, fold, make_plan
from orbaxkit.specs import Specs

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=25)


@given(plans(), SEEDS)
def test_predicted_specs_are_what_comes_out(plan: Plan, seed: int):
    specs = plan.specs
    assert list(specs.leaves) == list(plan.outputs)
    for name, value in run(plan, data_for(plan.source, seed)).items():
        assert (value.shape, value.dtype) == (specs[name].data_shape, specs[name].dtype)


@given(plans(), SEEDS)
def test_a_plan_and_its_inverse_are_the_identity(plan: Plan, seed: int):
    inverse = plan.inverse()
    back = plan.then(inverse)
    kept = [name for name in plan.source if name in plan.reads]
    assert dict(back.outputs) == dict(Plan.identity(plan.source.subset(kept)).outputs)
    data = data_for(plan.source, seed)
    for name, value in run(inverse, run(plan, data)).items():
        assert is_same(plan)(value, data[name])


@given(plans(), SEEDS, st.data())
def test_an_inverse_is_exact_or_names_what_is_lost(plan: Plan, seed: int, draws):
    chosen = draws.draw(st.sets(st.sampled_from(list(plan.outputs)))) if plan.outputs else set()
    part = plan.with_outputs({name: output for name, output in plan.outputs.items() if name in chosen})
    data = data_for(plan.source, seed)
    try:
        inverse = part.inverse()
    except NotInvertibleError as error:
        lost = {name for name, _ in error.leaves}
        assert lost <= set(part.reads)
        return
    assert set(inverse.outputs) == set(part.reads)
    for name, value in run(inverse, run(part, data)).items():
        assert is_same(plan)(value, data[name])


@given(trees(), st.data())
def test_select_and_drop_partition_the_outputs(specs, draws):
    name = draws.draw(st.sampled_from(list(specs)))
    selected, rest = make_plan(specs, t.select(name)), make_plan(specs, t.drop(name))
    assert set(selected.outputs) | set(rest.outputs) == set(specs)
    assert not set(selected.outputs) & set(rest.outputs)
    assert set(selected.dropped) == set(rest.reads)


@given(trees(), st.data())
def test_unstack_then_stack_is_the_identity_on_every_axis(specs, draws):
    arrays = [
        n
        for n, spec in specs.leaves.items()
        if spec.kind in ("array", "numpy", "key") and spec.shape and all(spec.shape)
    ]
    if not arrays:
        return
    name = draws.draw(st.sampled_from(arrays))
    axis = draws.draw(st.integers(-len(specs[name].shape), len(specs[name].shape) - 1))
    rule = t.unstack(name, into="layer_{i}", axis=axis)
    back = make_plan(specs, rule, rule.inverse())
    assert {n: o.expr for n, o in back.outputs.items()} == {n: o.expr for n, o in Plan.identity(specs).outputs.items()}


@given(trees())
def test_chain_is_associative(specs: Specs):
    a, b, c = (t.select("**"), t.rename({"**": "root/**"}), t.rename({"root/**": "other/**"}))
    assert t.chain(t.chain(a, b), c) == t.chain(a, t.chain(b, c)) == t.chain(a, b, c)
    assert t.chain(a, b, c)(Plan.identity(specs)) == t.chain(b, c)(t.chain(a)(Plan.identity(specs)))


@given(plans())
def test_composition_is_associative(plan: Plan):
    again = Plan.identity(plan.specs)
    assert plan.then(again).outputs == plan.outputs
    assert Plan.identity(plan.source).then(plan).outputs == plan.outputs


@given(plans())
def test_json_gives_the_plan_back(plan: Plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@given(plans(), SEEDS)
def test_regions_hold_all_that_is_needed_and_no_more_than_a_leaf(plan: Plan, seed: int):
    """Garbage outside the regions changes nothing."""
    data = data_for(plan.source, seed)
    spoiled = {}
    for name, value in data.items():
        other = np.zeros_like(value)
        for region in plan.reads.get(name, []):
            other[region] = value[region]
        spoiled[name] = other
    expected = run(plan, data)
    assert all(same_bits(value, expected[name]) for name, value in run(plan, spoiled).items())


@given(plans())
def test_groups_partition_the_outputs_by_shared_leaves(plan: Plan):
    assert sorted(name for group in plan.groups for name in group) == sorted(plan.outputs)
    used = []
    for group in plan.groups:
        names: set[str] = set()
        fold([plan.outputs[n].expr for n in group], lambda node, _, names=names: names.add(getattr(node, "name", "")))
        used.append(names - {""} if "" not in plan.source.leaves else names)
    for k, names in enumerate(used):
        assert not any(names & other for other in used[:k])


@FEW
@given(plans(tuple(NARROW.split()), 3), SEEDS)
def test_as_function_is_the_host_bit_for_bit(plan: Plan, seed: int):
    jax = pytest.importorskip("jax")
    data = data_for(plan.source, seed)
    leaves = {name: _to_jax(plan.source[name], value) for name, value in data.items()}
    out = jax.jit(plan.as_function())(leaves)
    expected = run(plan, data)
    assert set(out) == set(expected)
    for name, value in out.items():
        assert is_same(plan)(_to_host(value), expected[name]), name


def _to_jax(spec, value: np.ndarray):
    import jax

    return jax.random.wrap_key_data(value) if spec.kind == "key" else jax.numpy.asarray(value)


def _to_host(value) -> np.ndarray:
    import jax

    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)
