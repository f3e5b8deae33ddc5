"""Restoring in several processes under meshes of all their devices: the values, and who reads which bytes.

The functions that the processes run come first; all of them in one start, since that takes seconds.
"""

import traceback
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from benchmarks.measure import bytes_read
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes.harness import run_processes

import orbaxkit as ok
from orbaxkit.optimizer.schema import abstract_state

SHAPES = {"w": (768, 512), "k": (8, 128, 64), "b": (48, 8)}
TX = optax.adam(1e-3)


def array(name: str) -> np.ndarray:
    """What the checkpoint holds under a name; the same in every process."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.integers(-1 << 20, 1 << 20, SHAPES[name]).astype(np.float32)


def mesh_of(rows: int, columns: int, kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(rows, columns), ("x", "y"), axis_types=(kind, kind))


def everywhere(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def save(folder: str) -> None:
    """Plain Orbax in every process: params over a mesh, Adam's moments beside them, a number."""
    mesh = mesh_of(2 * jax.process_count(), 2)
    params = {
        "w": everywhere(array("w"), NamedSharding(mesh, P("x", "y"))),
        "layers": {"k": everywhere(array("k"), NamedSharding(mesh, P("x", None, "y")))},
        "b": everywhere(array("b"), NamedSharding(mesh, P())),
    }
    replicated = NamedSharding(mesh, P())
    opt_state = jax.tree.map(
        lambda x: everywhere(np.asarray(x), replicated) if x.is_fully_addressable else x + 1, TX.init(params)
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/run", {"params": params, "opt_state": opt_state, "step": 7})
    ok.restore(f"{folder}/run", ok.select("params/b"))  # what is imported late is imported before anyone counts


def is_same(made: jax.Array, expected: np.ndarray, sharding: NamedSharding | None = None) -> bool:
    """Whether the parts that this process has are these bits, under this sharding."""
    assert sharding is None or made.sharding == sharding, (made.sharding, sharding)
    assert made.addressable_shards
    return all(np.asarray(s.data).tobytes() == expected[s.index].tobytes() for s in made.addressable_shards)


def bytes_of(call):
    before = bytes_read()
    return call(), bytes_read() - before


def in_eighths(share: float) -> float:
    """Metadata is read as well, so that no share is exact."""
    return round(8 * share) / 8


def shares(folder: str) -> dict[str, float]:
    """The part of its stored bytes that this process reads of `w`, by sharding."""
    ckpt, mesh = ok.open(f"{folder}/run"), mesh_of(2 * jax.process_count(), 2)
    found = {}
    for spec in [P("x", "y"), P("x"), P(("x", "y")), P("y", "x"), P(("y", "x")), P(None, "y"), P()]:
        sharding = NamedSharding(mesh, spec)
        made, nbytes = bytes_of(lambda s=sharding: ok.restore(ckpt, ok.select("params/w"), sharding=s))
        assert is_same(made["params"]["w"], array("w"), sharding)
        found[f"P{tuple(spec)}"] = in_eighths(nbytes / ckpt.specs["params/w"].stored_bytes)
    return found


def beside_orbax(folder: str) -> list[bool]:
    """Shard for shard what Orbax restores, under meshes with all kinds of axes."""
    same = []
    for kind, spec in [(AxisType.Auto, P("y", "x")), (AxisType.Explicit, P(("y", "x")))]:
        sharding = NamedSharding(mesh_of(2, 2 * jax.process_count(), kind), spec)
        ours = ok.restore_params(f"{folder}/run", sharding=sharding)["w"]
        with ocp.PyTreeCheckpointer() as checkpointer:
            item = {"params": {"w": jax.ShapeDtypeStruct(SHAPES["w"], np.float32)}}
            args = {"params": {"w": ocp.ArrayRestoreArgs(sharding=sharding)}}
            theirs = checkpointer.restore(f"{folder}/run", item=item, restore_args=args, partial_restore=True)
        pairs = zip(ours.addressable_shards, theirs["params"]["w"].addressable_shards, strict=True)
        same += [a.device == b.device and a.index == b.index and bool((a.data == b.data).all()) for a, b in pairs]
    return same


TRANSFORMS = {
    "unstack": ("layers/k", [ok.unstack("layers", into="layer_{i}", axis=0)], P("x", "y")),
    "stack": (
        "layers/k",
        [ok.unstack("layers", into="l_{i}", axis=0), ok.stack("l_{i}", into="l", axis=1)],
        P("y", "x"),
    ),
    "transpose": ("w", [ok.transpose("w")], P("y", "x")),
    "reshape": ("layers/k", [ok.reshape("layers/k", (1024, 64))], P("x", "y")),
    "affine": ("w", [ok.affine("w", scale=2.0, shift=1.0)], P("x")),
    "split": ("w", [ok.transpose("w"), ok.split("w", into=["p", "q"], axis=0)], P(None, "x")),
    "cast": ("w", [ok.cast("int32")], P(("x", "y"))),
}


def transforms(folder: str) -> dict[str, float]:
    """The part of the stored bytes that this process reads for each transform; the bits are those of numpy."""
    ckpt = ok.open(f"{folder}/run")
    found = {}
    for name, (leaf, rules, spec) in TRANSFORMS.items():
        chain = ok.chain(ok.select(f"params/{leaf}"), ok.rename({"params/**": "**"}), *rules)
        host = ok.restore(ckpt, chain, as_numpy=True)
        for kind, memory in [(AxisType.Auto, "pinned_host"), (AxisType.Explicit, None)]:
            sharding = NamedSharding(mesh_of(2 * jax.process_count(), 2, kind), spec, memory_kind=memory)
            made, nbytes = bytes_of(lambda rule=chain, s=sharding: ok.restore(ckpt, rule, sharding=s))
            pairs = zip(jax.tree.leaves(made), jax.tree.leaves(host), strict=True)
            assert all(is_same(one, expected, sharding) for one, expected in pairs), (name, kind)
        found[name] = in_eighths(nbytes / ok.plan(ckpt, chain).read_bytes)
    return found


def abstract(mesh: Mesh) -> dict:
    """The state that `save` saved, on another mesh."""

    def param(name: str, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(SHAPES[name], np.float32, sharding=NamedSharding(mesh, spec))

    params = {"w": param("w", P("x", "y")), "layers": {"k": param("k", P(None, ("y", "x")))}, "b": param("b", P())}
    step = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P()))
    return {"params": params, "opt_state": abstract_state(TX, params), "step": step}


def targets(folder: str) -> dict[str, bool]:
    """A whole state into a target, numbers and moments too; params alone; without shardings, to a device of its own."""
    run, target = f"{folder}/run", abstract(mesh_of(2, 2 * jax.process_count(), AxisType.Explicit))
    state = ok.restore(run, target=target)
    alone = ok.restore(run, ok.select("params/b"))["params"]["b"]
    with jax.set_mesh(target["step"].sharding.mesh):
        params = ok.restore_params(run, target=target["params"])
    k = target["params"]["layers"]["k"].sharding
    return {
        "number": is_same(state["step"], np.asarray(7, np.int32), target["step"].sharding),
        "moments": is_same(state["opt_state"][0].nu["layers"]["k"], np.ones(SHAPES["k"], np.float32), k),
        "count": is_same(state["opt_state"][0].count, np.asarray(0, np.int32), target["step"].sharding),
        "params": is_same(params["layers"]["k"], array("k"), k),
        "on a local device": alone.devices() == {jax.local_devices()[0]} and is_same(alone, array("b")),
    }


def optimizers(folder: str) -> dict[str, bool]:
    """States that are reset, rebuilt and moved lie as the params do."""
    run, target = f"{folder}/run", abstract(mesh_of(2 * jax.process_count(), 2))
    ok.reset_optimizer(run, TX, target=target)  # imports, compiles
    reset, nbytes = bytes_of(lambda: ok.reset_optimizer(run, TX, target=target, keep="step"))
    stored = sum(spec.stored_bytes for name, spec in ok.open(run).specs.items() if name.startswith("params/"))
    w, k = target["params"]["w"].sharding, target["params"]["layers"]["k"].sharding
    rebuilt = ok.rebuild_opt_state(run, TX, target["params"])
    clipped = optax.chain(optax.clip_by_global_norm(1.0), TX, optax.ema(0.9))
    moved = ok.migrate_opt_state(run, clipped, target["params"], on_missing="init", schedule_count=3)
    new = TX.update(reset["params"], reset["opt_state"], reset["params"])[1]
    return {
        "params alone are read": nbytes < stored,
        "reset": is_same(reset["opt_state"][0].mu["w"], np.zeros(SHAPES["w"], np.float32), w),
        "step": is_same(reset["step"], np.asarray(7, np.int32), target["step"].sharding),
        "rebuilt": is_same(rebuilt[0].mu["layers"]["k"], np.ones(SHAPES["k"], np.float32), k),
        "moved": is_same(moved[1][0].nu["w"], np.ones(SHAPES["w"], np.float32), w),
        "started": is_same(moved[2].ema["w"], np.zeros(SHAPES["w"], np.float32), w),
        "trains on": is_same(new[0].count, np.asarray(1, np.int32)),
    }


def keys(folder: str) -> dict[str, bool]:
    """Typed PRNG keys, one and many, and equal copies of which one is kept."""
    mesh = mesh_of(2 * jax.process_count(), 2)
    one, many = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"), memory_kind="pinned_host")
    made = ok.restore(f"{folder}/keys", sharding=lambda path, _: many if path == "many" else one)
    flat = ok.restore(f"{folder}/keys", ok.select("many"), ok.reshape("many", (4, 4)), sharding=many)["many"]
    single = ok.restore(f"{folder}/keys", ok.select("copies"), ok.unreplicate("copies"), sharding=one)["copies"]
    expected = jax.random.split(jax.random.key(1), 16)

    def words(keys: jax.Array, index: tuple) -> list:
        return jax.random.key_data(keys)[index].tolist()

    return {
        "one": words(made["one"].addressable_shards[-1].data, ()) == words(jax.random.key(0), ()),
        "many": all(words(s.data, ()) == words(expected, s.index) for s in made["many"].addressable_shards),
        "sharding": made["many"].sharding == many and flat.sharding.is_equivalent_to(many, 2),
        "reshaped": all(words(s.data, ()) == words(expected.reshape(4, 4), s.index) for s in flat.addressable_shards),
        "copies": is_same(single, np.arange(6.0, dtype=np.float32), one),
    }


def saved(folder: str) -> dict[str, bool]:
    """Everything under the sharding that it was saved with, moments and unstacked layers too."""
    mesh = mesh_of(2 * jax.process_count(), 2)
    state = ok.restore(f"{folder}/run", sharding="saved")
    layers = ok.restore_params(f"{folder}/run", sharding="saved", dtype="bfloat16")["layers"]["k"]
    local = ok.restore(f"{folder}/keys", sharding="saved")["copies"]
    other = mesh_of(4, jax.process_count(), AxisType.Explicit)
    with jax.set_mesh(other):
        rules = ok.select("params/layers/k"), ok.unstack("params/layers", into="layer_{i}", axis=0)
        layer = ok.restore(f"{folder}/run", *rules, sharding="saved")["params"]["layer_3"]["k"]
        given = ok.restore(f"{folder}/keys", sharding="saved")["copies"]
    k = NamedSharding(mesh, P("x", None, "y"))
    return {
        "params": is_same(state["params"]["w"], array("w"), NamedSharding(mesh, P("x", "y"))),
        "moments": is_same(state["opt_state"][0]["mu"]["layers"]["k"], np.ones(SHAPES["k"], np.float32), k),
        "count": is_same(state["opt_state"][0]["count"], np.asarray(0, np.int32), NamedSharding(mesh, P())),
        "cast": layers.sharding == k and layers.dtype == jnp.bfloat16,
        "layer": is_same(layer, array("k")[3], NamedSharding(other, P(None, "y"))),
        "saved on one device": local.devices() == {jax.local_devices()[0]},
        "on one device, and there is a mesh": given.sharding == NamedSharding(other, P()),
    }


def elsewhere(folder: str) -> dict[str, bool]:
    """Under a mesh of one process's devices the others have no part, and read none."""
    run, first = f"{folder}/run", [d for d in jax.devices() if d.process_index == 0]
    sharding = NamedSharding(Mesh(np.array(first).reshape(2, -1), ("x", "y")), P("x", "y"))
    made, nbytes = bytes_of(lambda: ok.restore(run, ok.select("params/w"), sharding=sharding)["params"]["w"])
    turned = ok.restore(run, ok.select("params/w"), ok.transpose("params/w"), sharding=sharding)["params"]["w"]
    has_part = jax.process_index() == 0
    return {
        "shards": len(made.addressable_shards) == len(turned.addressable_shards) == has_part * len(first),
        "bytes": (nbytes > array("w").nbytes / 4) == has_part,
        "typed": made.dtype == np.float32 and made.shape == SHAPES["w"],
    }


def in_memory(folder: str) -> dict[str, bool]:
    """Arrays over all processes, reshaped in memory, the sharded axis too; and given for what the checkpoint lacks."""
    mesh = mesh_of(4, jax.process_count())
    k = everywhere(array("k"), NamedSharding(mesh, P("x", None, "y")))
    layers = ok.apply({"layers": {"k": k}}, ok.unstack("layers", into="layer_{i}", axis=0))
    rows = NamedSharding(mesh, P("x"))
    fills = ok.fill("here", jnp.arange(8.0)), ok.fill("there", everywhere(np.arange(8.0, dtype="f"), rows))
    filled = ok.restore(f"{folder}/run", ok.select("params/b"), *fills, sharding=rows)
    return {
        "unstacked": all(is_same(layers[f"layer_{i}"]["k"], array("k")[i]) for i in range(8)),
        "transposed": is_same(ok.apply({"k": k}, ok.transpose("k"))["k"], array("k").T),
        "filled": all(is_same(filled[name], np.arange(8.0, dtype="f"), rows) for name in ("here", "there")),
    }


def refusals(folder: str) -> list[str]:
    mesh = mesh_of(2 * jax.process_count(), 2)
    try:
        ok.restore(f"{folder}/run", ok.select("params/**"), sharding=NamedSharding(mesh, P("x", None, None, "y")))
    except ok.TargetError as error:
        return [name for name, _ in error.leaves]
    return []


def alone(folder: str) -> bool:
    """What one process does while the others do nothing: restoring waits for nobody, kernels or not."""
    if jax.process_index() != 0:
        return True
    mesh = mesh_of(2 * jax.process_count(), 2)
    rules = ok.select("params/**"), ok.transpose("params/w"), ok.reshape("params/layers/k", (1024, 64))
    made = ok.restore(f"{folder}/run", *rules, sharding=NamedSharding(mesh, P("y", "x")))["params"]
    state = ok.reset_optimizer(f"{folder}/run", TX, target=abstract(mesh))
    fresh = state["opt_state"][0].mu["w"]
    return is_same(made["w"], array("w").T) and is_same(fresh, np.zeros(SHAPES["w"], np.float32))


def in_turn(folder: str, *names: str) -> dict:
    """What each function finds, or how it fails."""
    save(folder)
    found = {}
    for name in names:
        try:
            found[name] = globals()[name](folder)
        except Exception:
            found[name] = traceback.format_exc()
    return found


CHECKS = [shares, beside_orbax, transforms, targets, optimizers, keys, saved, elsewhere, in_memory, refusals, alone]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes with four devices each found, by check."""
    folder = tmp_path_factory.mktemp("two")
    copies = jnp.stack([jnp.arange(6.0)] * 3)
    ok.convert(
        {"one": jax.random.key(0), "many": jax.random.split(jax.random.key(1), 16), "copies": copies}, folder / "keys"
    )
    ended = run_processes(2, in_turn, str(folder), *(check.__name__ for check in CHECKS))
    return {check: [one.value[check.__name__] for one in ended] for check in CHECKS}


def test_each_process_reads_what_its_devices_hold_once(two):
    half = ["'x', 'y'", "'x',", "('x', 'y'),", "'y', 'x'", "('y', 'x'),"]
    expected = {f"P({spec})": 0.5 for spec in half} | {"P(None, 'y')": 1.0, "P()": 1.0}
    assert two[shares] == [expected] * 2


def test_the_same_shards_as_orbax(two):
    assert two[beside_orbax] == [[True] * 8] * 2


def test_transforms_read_what_local_devices_need(two):
    # Chunks of two layers hold rows of both processes; everything else is cut as the mesh is.
    assert two[transforms] == [dict.fromkeys(TRANSFORMS, 0.5) | {"unstack": 1.0}] * 2


@pytest.mark.parametrize(
    "check", [targets, optimizers, keys, saved, elsewhere, in_memory, alone], ids=lambda check: check.__name__
)
def test_all_of_it_holds_in_every_process(two, check):
    for found in two[check]:
        assert found is True or (isinstance(found, dict) and all(found.values())), found


def test_every_leaf_that_does_not_fit_is_named_in_every_process(two):
    assert two[refusals] == [["params/b", "params/layers/k", "params/w"]] * 2


def test_four_processes_read_a_quarter_each(tmp_path):
    quarter = ["'x', 'y'", "'x',", "('x', 'y'),", "('y', 'x'),"]
    whole = {f"P({spec})": 0.25 for spec in quarter} | {"P('y', 'x')": 0.5, "P(None, 'y')": 1.0, "P()": 1.0}
    ended = run_processes(4, in_turn, str(tmp_path), "shares", "targets")
    for found in (one.value for one in ended):
        assert found["shares"] == whole
        assert all(found["targets"].values()), found["targets"]
