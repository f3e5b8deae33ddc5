"""The index of an OCDBT store against TensorStore's own dump of its nodes, and damaged nodes."""

import random
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
import zstandard

from orbaxkit.errors import CheckpointError
from orbaxkit.formats.files import Folder
from orbaxkit.formats.ocdbt import read_index
from orbaxkit.formats.ocdbt_nodes import NODE_MAGIC, Damaged, Leaf, read_node

ZARR = (".zarray", "zarr.json")
GOLDEN = Path(__file__).parents[1] / "golden"
STORES = sorted(path.parent for path in GOLDEN.rglob("manifest.ocdbt") if "key_slash" not in str(path))


def dumped(folder, location=None, prefix=b""):
    """Every key of a store with its value, or the place of its value."""
    base = ts.KvStore.open(f"file://{folder}/").result()
    if location is None:
        root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
        return dumped(folder, root["location"]) if "location" in root else {}
    node = ts.ocdbt.dump(base, location).result()
    if node["height"]:
        below = [(e["location"], prefix + e["subtree_common_prefix"]) for e in node["entries"]]
        return {key: value for place, start in below for key, value in dumped(folder, place, start).items()}
    return {(prefix + e["key"]).decode(): e.get("inline_value", e.get("indirect_value")) for e in node["entries"]}


def grouped(values):
    """Keys by array: of the folders that a key lies in, the innermost that is one."""
    arrays = {key.rpartition("/")[0] for key in values if key.rpartition("/")[2] in ZARR}
    out = {name: {} for name in arrays}
    for key, value in values.items():
        parts = key.split("/")
        owners = ["/".join(parts[:i]) for i in range(len(parts) - 1, -1, -1)]
        owner = next((name for name in owners if name in arrays), None)
        if owner is not None and parts[-1] not in ZARR:
            out[owner][key[len(owner) + bool(owner) :]] = value
    return out


def place_of(value):
    return value.inline if value.inline is not None else f"{value.file}:{value.offset}:{value.length}"


def check(folder):
    index, wanted = read_index(Folder(str(folder))), grouped(dumped(folder))
    found = {name: {key: place_of(v) for key, v in index.values(name).items()} for name in index.arrays}
    wanted = {
        name: {k: v if isinstance(v, bytes) else v.removeprefix("value:").replace(":", "", 1) for k, v in own.items()}
        for name, own in wanted.items()
    }
    sizes = {name: sum(v.length for v in index.values(name).values()) for name in index.arrays}
    assert sizes == {name: index.nbytes(name) for name in index.arrays}
    assert found == wanted


@pytest.mark.parametrize("folder", STORES[::7], ids=str)
def test_golden_stores(folder):
    check(folder)


def keys_of(kind, name, count):
    start = f"{name}/" if name else ""
    if kind == "zarr":
        return [f"{start}.zarray", *(f"{start}{i}.{i % 3}" for i in range(count))]
    return [f"{start}zarr.json", *(f"{start}c/{i}/{i % 3}" for i in range(count))]


@pytest.mark.parametrize("seed", range(20))
def test_stores_of_many_nodes(tmp_path, seed):
    """Arrays beside and inside one another, of both versions, cut into nodes anywhere."""
    rng = random.Random(seed)
    config = {"max_decoded_node_bytes": rng.choice([200, 600, 3000, 100_000]), "max_inline_value_bytes": 8}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    names = ["a", "a.b", "a/b", "a/c", "ab", "a/zarr.jso", "é%", "x" * 300, *(["", "b"] if seed % 3 == 0 else [])]
    for name in rng.sample(names, len(names) - 2):
        transaction = ts.Transaction(atomic=True)
        writing = store.with_transaction(transaction)
        keys = keys_of(rng.choice(["zarr", "zarr3"]), name, rng.choice([0, 1, 30, 200]))
        for key in [*keys, *(["orphan/0"] if rng.random() < 0.3 else [])]:
            writing[key] = rng.randbytes(rng.choice([3, 20]))
        transaction.commit_async().result()
    check(tmp_path)


def packed(body, *, is_compressed=True):
    data = zstandard.compress(body) if is_compressed else body
    head = NODE_MAGIC + (len(data) + 18).to_bytes(8, "little") + bytes([0, is_compressed])
    return head + data + google_crc32c.value(head + data).to_bytes(4, "little")


# one file "d/0"; the keys "a/.zarray" and "a/0"; an inline value and one in the file
BODY = b"\0" + b"\1\3\0d/0" + b"\2" + b"\2" + b"\x09\1" + b"a/.zarray0" + b"\2\x80\1" + b"\0\1" + b"\0" + b"\5" + b"{}"


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_node(is_compressed):
    height, node = read_node(packed(BODY, is_compressed=is_compressed), "part/")
    assert isinstance(node, Leaf)
    assert (height, list(node.keys(0, 2, b""))) == (0, [b"a/.zarray", b"a/0"])
    assert (node.value(0), node.value(1)) == (b"{}", ((("part/", "part/d/0")), 5, 128))


@pytest.mark.parametrize("seed", range(300))
def test_a_damaged_node_is_refused_or_read(seed):
    """With a checksum that fits: whatever it says, it is a node or an error about one."""
    rng = np.random.default_rng(seed)
    body = np.frombuffer(BODY, np.uint8).copy()
    body[rng.integers(len(body), size=2)] = rng.choice([0, 1, 2, 127, 128, 255], size=2)
    body = body.tobytes()[: len(body) - (seed % 3 == 0) * int(rng.integers(len(body)))]
    try:
        _, node = read_node(packed(body), "")
    except Damaged:
        return
    if isinstance(node, Leaf):
        assert len(list(node.keys(0, len(node), b""))) == len([node.value(row) for row in range(len(node))])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"vers" + packed(BODY)[4:], "what should be a node starts with 76 65 72 73"),
        (packed(BODY)[:-1], r"a node of \d+ bytes has \d+"),
        (packed(BODY)[:-9] + b"12345" + packed(BODY)[-4:], "checksum"),
        (packed(b"", is_compressed=False), "cut short"),
        (packed(BODY.replace(b"\1\3\0d/0\2", b"\1\3\0d/0\xff\xff\xff\1")), "entries"),
        (packed(BODY.replace(b"\2\x80\1", b"\2\x80" + b"\x80" * 10 + b"\1")), "a number is too long"),
        (packed(BODY.replace(b"\0\1\0\5{}", b"\0\1\1\5{}")), "unknown file"),
        (packed(BODY.replace(b"\0\1\0\5{}", b"\0\2\0\5{}")), "unknown kind"),
    ],
)
def test_what_is_wrong_with_a_node(data, message):
    with pytest.raises(Damaged, match=message):
        read_node(data, "")


@pytest.mark.parametrize("name", ["../0", "/d/0", "d/..", "d/\0"])
def test_files_that_lead_out_of_the_store(tmp_path, name):
    from orbaxkit.formats import ocdbt_writer

    node = BODY.replace(b"\3\0d/0", bytes([len(name), 0]) + name.encode())
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "n").write_bytes(packed(node))
    where = ocdbt_writer._Location("d/n", 0, len(packed(node)))
    root = ocdbt_writer._Node(b"a", 0, where, 2, where.length, 0)
    manifest = ocdbt_writer._envelope(ocdbt_writer.MANIFEST_MAGIC, ocdbt_writer._manifest(root, 0))
    (tmp_path / "manifest.ocdbt").write_bytes(manifest)
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        read_index(Folder(str(tmp_path)))
