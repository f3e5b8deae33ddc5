"""Checkpoints in gs:// and s3:// read as those on disk do: the same leaves and bits, in few requests, faults or not."""

import time
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from cases import save
from formats.golden_cases import CASES, GOLDEN, read_tree
from servers.object_server import Fault, ObjectServer

import orbaxkit as ok
from orbaxkit.cli import main
from orbaxkit.formats import remote

pytest_plugins = ["servers.fixtures"]
pytestmark = pytest.mark.filterwarnings("ignore::orbaxkit.CheckpointWarning")

WORLDS = Path(__file__).parent.parent / "worlds"


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state of 40 random params and their moments, whose values lie in data files."""
    rng = np.random.default_rng(0)
    params = {f"layer_{i}": {"w": rng.random((60, 60), np.float32)} for i in range(40)}
    tx = optax.adam(1e-3)
    _, opt_state = tx.update(params, tx.init(params), params)
    state = {"params": params, "opt_state": opt_state, "step": 7}
    return save(tmp_path_factory.mktemp("adam") / "ckpt", jax.tree.map(lambda x: jax.numpy.asarray(x), state))


def upload(server: ObjectServer, url: str, path: Path) -> str:
    """Put a checkpoint below a URL, under its own name."""
    bucket, _, prefix = f"{url}/{path.name}".partition("://")[2].partition("/")
    if path.is_dir():
        server.put_tree(bucket, prefix, path)
    else:
        server.objects[bucket][prefix] = path.read_bytes()
    server.clear_log()
    return f"{url}/{path.name}"


def opened(server: ObjectServer, url: str, path: Path) -> ok.Checkpoint:
    """An uploaded checkpoint whose metadata is read; the log holds what is asked for after that."""
    ckpt = ok.open(upload(server, url, path))
    assert len(ckpt.specs)
    server.clear_log()
    return ckpt


def without_sizes(source):
    """The specs, but for stored bytes, which stores do not tell of files."""
    return {name: (spec.shape, spec.dtype, spec.kind, spec.chunk_shape) for name, spec in source.specs.items()}


def assert_same(remote_path: str, local: Path, **options) -> None:
    try:
        theirs = ok.open(local, **options)
    except ok.CheckpointError as error:
        with pytest.raises(ok.CheckpointError, match=str(error).splitlines()[0]):
            ok.open(remote_path, **options)
        return
    ours = ok.open(remote_path, **options)
    assert without_sizes(ours) == without_sizes(theirs)
    assert (ours.format, ours.steps, ours.step) == (theirs.format, theirs.steps, theirs.step)
    if theirs.format != "array_metadatas":
        jax.tree.map(np.testing.assert_array_equal, read_tree(ours.source), read_tree(theirs.source))


def test_every_golden_checkpoint(store_url, object_server):
    for case in CASES:
        (found,) = GOLDEN.joinpath(case).glob("ckpt*")
        assert_same(upload(object_server, f"{store_url}/{case}", found), found)


def test_other_formats(store_url, object_server, tmp_path):
    for path in (WORLDS / "praxis/source", WORLDS / "perceiver/language_tiny.flatmapping.pickle"):
        assert_same(upload(object_server, store_url, path), path)
    bundle = WORLDS / "tf_bundle/a_params"
    for part in bundle.parent.glob("a_params*"):
        upload(object_server, store_url, part)
    assert_same(f"{store_url}/a_params", bundle)
    one = Path(ok.convert({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / "one.safetensors"))
    assert_same(upload(object_server, store_url, one), one)


def test_inspect_makes_few_requests(store_url, object_server, adam):
    url = upload(object_server, store_url, adam)
    str(ok.open(url))
    assert len(object_server.log) <= 3 + 6 + 123 / 500


def test_a_run_is_listed_once(store_url, object_server, tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in range(5):
            manager.save(step, args=ocp.args.StandardSave({"w": np.arange(10.0)}))
        manager.wait_until_finished()
    url = upload(object_server, store_url, tmp_path / "run")
    ckpt = ok.open(url)
    assert (ckpt.steps, ckpt.step, len(ckpt.specs)) == ((0, 1, 2, 3, 4), 4, 1)
    assert sum(request.is_list for request in object_server.log) == 1
    assert len(object_server.log) <= 3 + 6
    assert_same(url, tmp_path / "run", step=2)


def test_params_alone_in_few_requests_and_without_the_moments(store_url, object_server, adam):
    ckpt = opened(object_server, store_url, adam)
    stored = sum(ckpt.specs[name].stored_bytes for name in ckpt.specs if name.startswith("params/"))
    params = ok.restore_params(ckpt, as_numpy=True)
    jax.tree.map(np.testing.assert_array_equal, params, ok.restore_params(adam, as_numpy=True))
    # 40 values of 13 KB each lie between 80 of moments: neighbours are read together, gaps and all
    assert len(object_server.log) <= 12
    assert sum(request.sent for request in object_server.log) <= 3.2 * stored


def test_what_lies_far_apart_is_read_alone(store_url, object_server, tmp_path):
    rng = np.random.default_rng(0)
    tree = {name: jax.numpy.asarray(rng.random((300, 300), np.float32)) for name in "abcdef"}
    ckpt = opened(object_server, store_url, save(tmp_path / "ckpt", tree))
    made = ok.restore(ckpt, ok.select("a"), as_numpy=True)
    np.testing.assert_array_equal(made["a"], tree["a"])
    assert len(object_server.log) == 1
    assert object_server.log[0].sent == ckpt.specs["a"].stored_bytes


def test_a_large_value_comes_in_windows(store_url, object_server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_WINDOW_BYTES", 1 << 18)
    tree = {"w": jax.numpy.asarray(np.random.default_rng(0).random((500, 300), np.float32))}
    path = save(tmp_path / "ckpt", tree)
    ckpt = opened(object_server, store_url, path)
    np.testing.assert_array_equal(ok.restore(ckpt, as_numpy=True)["w"], tree["w"])
    stored = ckpt.specs["w"].stored_bytes
    assert len(object_server.log) == -(-stored // (1 << 18))
    assert sum(request.sent for request in object_server.log) == stored


def test_with_little_room_every_bit_still_arrives(store_url, object_server, adam, monkeypatch):
    monkeypatch.setattr(remote, "_HELD_BYTES", 1)
    monkeypatch.setattr(remote, "_SMALLEST_RANGE", 30_000)
    assert_same(upload(object_server, store_url, adam), adam)


@pytest.mark.parametrize("fault", [503, 429, "reset", "cut"])
def test_faults_now_and_then_are_tried_again(store_url, object_server, adam, fault):
    url = upload(object_server, store_url, adam)
    object_server.faults = [Fault(fault, every=5)]
    assert not ok.diff(url, adam, values=True)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (503, "the store answers 503"),
        (403, "access is denied"),
        ("reset", "cannot be reached"),
        ("cut", "cannot be reached"),
        ("hang", "no answer within"),
    ],
)
def test_faults_that_stay_are_one_error(store_url, object_server, adam, fault, told, monkeypatch):
    monkeypatch.setattr(remote, "_SECONDS", 2 if fault == "hang" else 60)
    url = upload(object_server, store_url, adam)
    ckpt = ok.open(url)
    len(ckpt.specs)
    object_server.faults = [Fault(fault, key="/d/")]
    begun = time.monotonic()
    with pytest.raises(ok.CheckpointError, match=told) as caught:
        ok.restore_params(ckpt)
    assert time.monotonic() - begun < 20
    assert len(str(caught.value).splitlines()) <= 4
    object_server.faults = [Fault(fault)]
    with pytest.raises(ok.CheckpointError, match=told):
        ok.open(url)


def test_nothing_there(store_url, object_server, adam):
    url = upload(object_server, store_url, adam)
    for path in (f"{store_url}/none", f"{url}/none", f"{url[:-1]}", store_url.replace("bucket", "no-such-bucket")):
        with pytest.raises(ok.CheckpointError, match=r"no such file or folder|there is no bucket"):
            ok.open(path)


def test_a_lost_data_file_is_named_before_anything_is_read(store_url, object_server, adam):
    url = upload(object_server, store_url, adam)
    held = object_server.objects[store_url.partition("://")[2]]
    sizes = {key: len(data) for key, data in held.items() if "/d/" in key}
    del held[max(sizes, key=sizes.get)]
    ckpt = ok.open(url)
    len(ckpt.specs)
    object_server.clear_log()
    with pytest.raises(ok.CheckpointError, match="is missing") as caught:
        ok.restore(ckpt)
    assert caught.value.leaves
    assert not object_server.log


def test_a_data_file_cut_short_is_an_error(store_url, object_server, adam):
    url = upload(object_server, store_url, adam)
    held = object_server.objects[store_url.partition("://")[2]]
    largest = max((key for key in held if "process_0/d/" in key), key=lambda key: len(held[key]))
    held[largest] = held[largest][: len(held[largest]) // 2]
    with pytest.raises(ok.CheckpointError, match="cut short"):
        ok.restore(ok.open(url))
    assert not ok.verify(url)


@pytest.mark.parametrize("path", ["gs://", "s3:///x", "gs://bucket/a//b", "gs://bucket/../x", "s3://bucket/./x"])
def test_no_paths(path):
    with pytest.raises(ok.CheckpointError, match="no path in a bucket"):
        ok.open(path)


def test_other_schemes_are_refused():
    with pytest.raises(ok.CheckpointError, match="gs://, s3:// can"):
        ok.open("hdfs://cluster/x")


def test_every_way_to_name_it(store_url, object_server, adam):
    from etils import epath

    url = upload(object_server, store_url, adam)
    for path in (f"{url}/", epath.Path(url), ok.open(url)):
        assert len(ok.open(path).specs) == 123
    assert ok.open(epath.Path(url)).path == url


def test_the_verbs(store_url, object_server, adam, capsys):
    url = upload(object_server, store_url, adam)
    tx = optax.adam(1e-3)
    state = ok.reset_optimizer(url, tx, keep="step")
    assert (int(state["step"]), int(state["opt_state"][0].count)) == (7, 0)
    assert int(ok.rebuild_opt_state(url, tx)[0].count) == 1
    assert main(["inspect", url]) == 0
    assert main(["diff", url, str(adam), "--values"]) == 0
    assert main(["verify", url, "--hash"]) == 0
    assert main(["verify", url]) == 0
    assert "checked against" in capsys.readouterr().out


def test_an_unfinished_step_is_never_the_latest(store_url, object_server, tmp_path):
    for step in (1, 2):
        ok.convert({"w": np.full(3, step)}, tmp_path / "run", as_step=step)
    (tmp_path / "run/2/commit_success.txt").unlink()
    url = upload(object_server, store_url, tmp_path / "run")
    ckpt = ok.open(url)
    assert (ckpt.steps, ckpt.step, ckpt.unfinished) == ((1,), 1, ("2",))


def test_a_listing_that_breaks_off_is_no_short_listing(store_url, object_server, adam):
    """At the second of its pages: TensorStore's gs:// driver takes that for the end."""
    url = upload(object_server, store_url, adam)
    bucket = object_server.objects[store_url.partition("://")[2]]
    bucket |= {f"ckpt/!{i:04}": b"x" for i in range(1000)}
    assert len(ok.open(url).specs) == 123
    object_server.faults = [Fault(403, key="/?", every=2), Fault(403, key="ckpt/!")]
    with pytest.raises(ok.CheckpointError, match="access is denied"):
        ok.open(url)
