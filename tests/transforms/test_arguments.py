"""Arguments that cannot be meant: refused when the rule is made or planned, never taken for something else."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

import orbaxkit as ok
from orbaxkit.specs import LeafSpec, Specs

F32 = np.dtype("float32")
SPECS = Specs.of([(("a", "w"), LeafSpec((4, 6), F32)), (("n",), LeafSpec((), np.dtype("int64"), "scalar"))])


MEANINGLESS = """
select('"abc')
select('"\\\\x"/w')
split("a/w", into=["*", "y"], axis=0)
split("a/w", into=["{z}", "y"], axis=0)
split("a/w", into=["x", "y"], axis="0")
split("a/w", into=["x", "y"], axis=0, sizes=[1.5, 2.5])
split("a/w", into=["x", "y"], axis=0, levels=0)
split("a/w", into=["x", "y"], axis=0, levels=-1)
concat(["a/w", "a/v"], into="{z}", axis=0)
unstack("a", into="a_{i}", axis="0")
unstack("a", into="a_{i}", axis={"**": 0.5})
unstack("a", into="a_{i}", levels=1.0)
stack("a_{i}", into="a", levels=0)
stack("a_{i}", into="a", block="b_{j}", period=0)
transpose("a/w", [0, "1"])
reshape("a/w", [2.0, 12])
reshape("a/w", [-2, 12])
reshape("a/w", "(a b) c -> a b c", a=2.0)
fill("new", 0.0, shape=(-1,), dtype="float32")
unreplicate("a/w", axis=None)
merge_lora("w", a="a", b="b", form="sum")
merge_lora("w", a="a", b="b", rest="drop")
""".strip().splitlines()

# In a process of its own, since the type checker that these tests run under would refuse most of them first.
_TRY = """
import sys, orbaxkit as ok
for call in sys.argv[1:]:
    try:
        print(eval("ok." + call))
    except ok.TransformError:
        pass
"""


def test_a_rule_that_cannot_be_meant_is_refused_when_it_is_made():
    done = subprocess.run([sys.executable, "-c", _TRY, *MEANINGLESS], capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (ok.split("a/w", into=["x", "y"], axis=0, levels=3), "a path is too short"),
        (ok.unstack("a", into="a_{i}", axis=0, levels=9), "a path is too short"),
        (ok.rename({re.compile(r"(?P<x>b)?a/w"): "{x}/w"}), "took no part in the match"),
        (ok.rename(lambda path: 1 / 0), "ZeroDivisionError"),
        (ok.fill("a/w", 1e300), "cannot hold the value"),
        (ok.fill("a/w", 1e-300), "cannot hold the value"),
        (ok.fill("a/w", 16777217), "cannot hold the value"),
        (ok.fill("n", 2**63), "cannot hold the value"),
        (ok.fill("n", math.nan), "cannot hold the value"),
    ],
    ids=repr,
)
def test_a_rule_that_these_leaves_do_not_fit_is_refused_when_it_is_planned(rule, says):
    with pytest.raises(ok.TransformError, match=says):
        ok.plan(SPECS, rule)


@pytest.mark.parametrize("value", [0.1, -0.0, math.inf, math.nan, 3, True])
def test_fills_that_round_or_fit_are_taken(value):
    made = ok.apply({"w": np.ones(2, np.float32)}, ok.fill("w", value))["w"]
    np.testing.assert_array_equal(made, np.full(2, value, np.float32))


def test_plans_that_do_not_follow_each_other_are_refused_by_name():
    first, second = ok.plan(SPECS, ok.select("n")), ok.plan(SPECS)
    with pytest.raises(ok.TransformError, match="do not follow each other") as caught:
        first.then(second)
    assert [name for name, _ in caught.value.leaves] == ["a/w"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_survive_it(value):
    rule = ok.fill("a/w", value)
    text = json.dumps(rule.to_json(), allow_nan=False)
    assert repr(ok.from_json(json.loads(text))) == repr(rule)
    plan = ok.plan(SPECS, rule)
    assert ok.Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan


def test_a_plan_in_json_does_not_depend_on_the_order_of_its_keys():
    plan = ok.plan(
        SPECS, ok.transpose("a/w"), ok.split("a/w", into=["x", "y"], axis=0), ok.affine("a/x", scale=2, shift=1)
    )
    text = json.dumps(plan.to_json(), sort_keys=True)
    assert ok.Plan.from_json(json.loads(text)) == plan
