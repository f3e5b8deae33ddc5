"""TensorFlow V2 checkpoints, against what TensorFlow 2.21 wrote; damaged and hostile ones too."""

import contextlib
import hashlib
import json
import shutil
import struct
import warnings
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbaxkit as ok
from orbaxkit.formats.files import Folder
from orbaxkit.formats.leveldb_table import MAGIC, mask
from orbaxkit.formats.snappy import decompress
from orbaxkit.formats.tf_bundle import open_bundle

GOLDEN = Path(__file__).parent.parent / "worlds/tf_bundle"
PREFIXES = {
    "a_params": "bert_model.ckpt",
    "b_adam": "model.ckpt-20",
    "f_dtypes": "all.ckpt",
    "part": "part.ckpt",
    "part_sharded": "part_sharded.ckpt",
}


def names_of(checkpoint: ok.Checkpoint) -> dict[str, str]:
    """TensorFlow's names to ours."""
    return {"/".join(map(str, path)): name for name, path in checkpoint.specs.paths.items()}


def whole(source, name: str) -> np.ndarray:
    spec = source.specs[name]
    out = np.empty(spec.shape, spec.dtype)
    source.read(name, tuple(slice(0, size) for size in spec.shape), out).result()
    return out


@pytest.mark.parametrize("case", PREFIXES)
def test_every_tensor_is_the_one_that_tensorflow_wrote(case: str):
    expected = json.loads((GOLDEN / case / "expected.json").read_text())
    checkpoint = ok.open(GOLDEN / case / PREFIXES[case])
    names = names_of(checkpoint)
    assert set(names) == set(expected)
    for name, told in expected.items():
        spec = checkpoint.specs[names[name]]
        assert list(spec.shape) == told["shape"]
        if "bytes_hex" in told:
            texts = np.asarray(checkpoint.source.value(names[name]), object).reshape(-1)
            raw = [text.encode() if isinstance(text, str) else text for text in texts]
            assert [text.hex() for text in raw] == told["bytes_hex"]
        else:
            assert spec.dtype_name == told["dtype"]
            assert hashlib.sha256(whole(checkpoint.source, names[name]).tobytes()).hexdigest() == told["sha256"], name


@given(st.data())
@settings(max_examples=60)
def test_any_region_of_a_partitioned_variable_is_that_of_the_whole(data):
    source = ok.open(GOLDEN / "part_sharded/part_sharded.ckpt").source
    name = data.draw(st.sampled_from(["m/w", "n/k"]))
    array = whole(source, name)
    spans = [tuple(sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in array.shape]
    index = tuple(slice(*span) for span in spans)
    out = np.empty(array[index].shape, array.dtype)
    source.read(name, index, out).result()
    np.testing.assert_array_equal(out, array[index])


@pytest.mark.parametrize("end", ["", ".index", ".data-00000-of-00001"])
def test_every_file_of_a_bundle_opens_it(end: str):
    assert len(ok.open(GOLDEN / f"a_params/bert_model.ckpt{end}").specs) == 62


def test_a_folder_of_numbered_bundles_is_a_run(tmp_path: Path):
    for step in (20, 100):
        for file in (GOLDEN / "b_adam").glob("model.ckpt-20.*"):
            shutil.copy(file, tmp_path / file.name.replace("-20.", f"-{step}."))
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-20"\n')
    assert ok.open(tmp_path).layout.step == 100
    assert ok.open(tmp_path, step=20).layout.step == 20
    with pytest.raises(ok.CheckpointError, match=r"there is no step 3(.|\n)*steps here: 100, 20"):
        ok.open(tmp_path, step=3)


def test_several_bundles_without_numbers_are_listed(tmp_path: Path):
    for case in ("part", "part_sharded"):
        for file in (GOLDEN / case).glob("*.ckpt.*"):
            shutil.copy(file, tmp_path)
    with pytest.raises(ok.CheckpointError, match="several TensorFlow checkpoints") as error:
        ok.open(tmp_path)
    assert [name for name, _ in error.value.leaves] == ["part.ckpt", "part_sharded.ckpt"]


def test_a_slot_is_a_key_beside_its_variable(tmp_path: Path):
    tree = ok.restore(GOLDEN / "b_adam", ok.select("bert/pooler/**"), as_numpy=True)["bert"]["pooler"]["dense"]
    assert list(tree) == ["bias", "bias/adam_m", "bias/adam_v", "kernel", "kernel/adam_m", "kernel/adam_v"]
    plan = ok.plan(GOLDEN / "b_adam", ok.drop("**/*adam_m", "**/*adam_v", "global_step"))
    assert len(plan.outputs) == 62


def test_it_converts_to_orbax_and_is_the_same_there(tmp_path: Path):
    ok.convert(GOLDEN / "b_adam", tmp_path / "orbax")
    found = ok.diff(GOLDEN / "b_adam", tmp_path / "orbax", values=True)
    assert not found, str(found)
    assert ok.verify(GOLDEN / "b_adam")


# Damage


def copied(tmp_path: Path, case: str = "a_params") -> Path:
    return Path(shutil.copytree(GOLDEN / case, tmp_path / case)) / PREFIXES[case]


def test_a_flipped_bit_is_named_and_nothing_else_is_lost(tmp_path: Path):
    prefix = copied(tmp_path)
    shard = Path(f"{prefix}.data-00000-of-00001")
    raw = bytearray(shard.read_bytes())
    raw[1000] ^= 4
    shard.write_bytes(raw)
    damaged = [name for name, _ in ok.verify(prefix).problems]
    assert len(damaged) == 1
    with pytest.raises(ok.CheckpointError, match="do not have the CRC of the index") as error:
        ok.restore(prefix, as_numpy=True)
    assert [name for name, _ in error.value.leaves] == damaged
    assert len(ok.plan(prefix, ok.drop(*damaged)).outputs) == 61
    ok.restore(prefix, ok.drop(*damaged), as_numpy=True)


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.sampled_from(["index", "data"]))
@settings(max_examples=80)
def test_no_flipped_bit_anywhere_reads_back_silently_wrong(tmp_path_factory, at, bit, file):
    prefix = copied(tmp_path_factory.mktemp("flip"), "part")
    path = Path(f"{prefix}.index" if file == "index" else f"{prefix}.data-00000-of-00001")
    raw = bytearray(path.read_bytes())
    raw[int(at * len(raw))] ^= 1 << bit
    path.write_bytes(raw)
    expected = json.loads((GOLDEN / "part/expected.json").read_text())
    try:
        source = ok.open(prefix).source
        for name in source.specs:
            assert hashlib.sha256(whole(source, name).tobytes()).hexdigest() == expected[name]["sha256"]
    except ok.CheckpointError:
        pass


def test_a_shard_that_is_cut_or_gone_is_named_before_anything_is_read(tmp_path: Path):
    prefix = copied(tmp_path)
    shard = Path(f"{prefix}.data-00000-of-00001")
    with shard.open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(ok.CheckpointError, match="has 100,000 bytes"):
        ok.restore(prefix, as_numpy=True)
    assert ok.restore(prefix, ok.select("bert/embeddings/**"), as_numpy=True)
    shard.unlink()
    with pytest.raises(ok.CheckpointError, match="data-00000-of-00001 is missing"):
        ok.restore(prefix, as_numpy=True)


@pytest.mark.parametrize("content", [b"", b"short", b"version https://git-lfs.github.com/spec/v1\n", bytes(100)])
def test_an_index_that_is_none_is_one_clear_error(tmp_path: Path, content: bytes):
    prefix = copied(tmp_path)
    Path(f"{prefix}.index").write_bytes(content)
    with pytest.raises(ok.CheckpointError, match=r"index|LFS|empty"):
        ok.open(prefix).specs  # noqa: B018


# By hand: indexes that no writer makes


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def entry(dtype=1, shape=(2,), shard=0, offset=0, size=8, crc=0) -> bytes:
    dims = b"".join(field(2, field(1, n & (1 << 64) - 1)) for n in shape)
    numbers = field(3, shard) + field(4, offset) + field(5, size)
    return field(1, dtype) + field(2, dims) + numbers + varint(6 << 3 | 5) + struct.pack("<I", crc)


def table(pairs: dict[bytes, bytes], compress=lambda block: (0, block)) -> bytes:
    def block(entries):
        body = b"".join(varint(0) + varint(len(k)) + varint(len(v)) + k + v for k, v in entries)
        kind, body = compress(body + struct.pack("<II", 0, 1))
        return body, body + bytes([kind]) + struct.pack("<I", mask(google_crc32c.value(body + bytes([kind]))))

    body, data = block(sorted(pairs.items()))
    index_body, index = block([(b"\xff", varint(0) + varint(len(body)))])
    footer = varint(0) + varint(0) + varint(len(data)) + varint(len(index_body))
    return data + index + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def written(folder: Path, pairs: dict[bytes, bytes], data: bytes = bytes(8), **options) -> Path:
    (folder / "x.index").write_bytes(table({b"": field(1, 1), **pairs}, **options))
    (folder / "x.data-00000-of-00001").write_bytes(data)
    return folder / "x"


GOOD = np.arange(2, dtype=np.float32).tobytes()
GOOD_ENTRY = entry(crc=mask(google_crc32c.value(GOOD)))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (entry(dtype=99), "dtype 99"),
        (entry(shape=(-1,)), "negative"),
        (entry(shape=(1 << 62, 1 << 62)), "shape"),
        (entry(shape=(1 << 40,), size=8), "does not take"),
        (entry(shape=(1 << 40,), size=1 << 42), "are needed"),
        (entry(offset=1 << 60), "are needed"),
        (entry(shard=7), "shard 7 of 1"),
        (entry(dtype=7, shape=(1 << 40,)), "do not fit"),
        (entry() + b"\x0a\xff", "cut short|entry"),
        (b"\x07", "protobuf|entry"),
        (b"\x80" * 20, "number"),
        (field(1, 1) + field(2, field(3, 1)), "shape is not known"),
        (entry() + field(7, field(1, field(1, 0) + field(2, 9))), "outside"),
        (entry() + field(7, field(1, field(2, 1))), "not in the index"),
    ],
)
def test_a_senseless_entry_costs_that_tensor_and_no_memory(tmp_path: Path, bad: bytes, says: str):
    checkpoint = ok.open(written(tmp_path, {b"good": GOOD_ENTRY, b"bad": bad}, GOOD))
    np.testing.assert_array_equal(ok.restore(checkpoint, ok.select("good"), as_numpy=True)["good"], [0, 1])
    with pytest.raises(ok.CheckpointError, match=says):
        ok.restore(checkpoint, as_numpy=True)


def test_blocks_may_be_compressed_with_snappy(tmp_path: Path):
    def snappy(block: bytes) -> tuple[int, bytes]:
        literals = b"".join(
            bytes([60 << 2, len(part) - 1]) + part for part in (block[i : i + 200] for i in range(0, len(block), 200))
        )
        return 1, varint(len(block)) + literals

    path = written(tmp_path, {b"w": GOOD_ENTRY}, GOOD, compress=snappy)
    np.testing.assert_array_equal(ok.restore(path, as_numpy=True)["w"], [0, 1])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x0b\x28hello world", b"hello world"),  # 0x28 is a literal of 11
        (b"\x08\x04ab\x09\x02", b"abababab"),  # then a copy of 6, 2 back: tag 1
        (b"\x06\x04ab\x0e\x02\x00", b"ababab"),  # and of 4, with a two-byte offset: tag 2
    ],
)
def test_snappy(data: bytes, expected: bytes):
    assert decompress(data) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_no_crash_for_snappy(data: bytes):
    with contextlib.suppress(ValueError, IndexError):
        assert len(decompress(data)) <= 64 << 20


@given(st.dictionaries(st.binary(max_size=12), st.binary(max_size=40), max_size=5))
@settings(max_examples=60)
def test_any_entries_are_no_crash(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("any")
    path = written(folder, {k: v for k, v in pairs.items() if k})
    try:
        source = open_bundle(Folder(str(path.parent)), path.name)
        for name in source.specs:
            source.problems([name])
    except ok.CheckpointError:
        pass


def test_v1_checkpoints_are_told_by_name(tmp_path: Path):
    (tmp_path / "old.ckpt").write_bytes(table({b"w": b"x" * 80}))
    with pytest.raises(ok.CheckpointError, match="old V1 format"):
        ok.open(tmp_path / "old.ckpt")


def test_inspect_shows_strings_and_names_with_spaces(capsys):
    from orbaxkit.cli import main

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["inspect", str(GOLDEN / "f_dtypes")]) == 0
    assert "tf_bundle" in capsys.readouterr().out
