"""The two reading lanes give the same bits, on whole leaves and on any part of them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orbaxkit as ok
from orbaxkit.formats.detect import load, locate
from orbaxkit.formats.items import ItemSource

GOLDEN = Path(__file__).parent.parent / "golden"


def _items() -> list[tuple[str, ItemSource]]:
    found = []
    for case in sorted(path for path in GOLDEN.glob("*/*/ckpt*") if "k_interrupted" not in str(path)):
        layout = locate(case)
        for item in layout.items:
            source = load(layout, item)
            if isinstance(source, ItemSource) and source.store is not None:
                found.append((f"{case.parent.relative_to(GOLDEN)}/{item}", source))
    return found


ITEMS = dict(_items())


def _read_both(source: ItemSource, name: str, index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    place = source.places[name]
    if place.array is None:
        return None
    shape = tuple(s.stop - s.start for s in index)
    fast, slow = (np.empty(shape, place.array.dtype) for _ in range(2))
    started = source._decoder.read(name, place.name, place.array, index, fast)
    if started is None:
        return None
    started.result()
    source._reader.read(name, place.name, place.array, source._has_fill(place.array), index, slow).result()
    return fast, slow


@pytest.mark.parametrize("source", ITEMS.values(), ids=ITEMS.keys())
def test_whole_leaves(source):
    for name, spec in source.specs.items():
        both = _read_both(source, name, tuple(slice(0, size) for size in spec.data_shape))
        assert both is None or both[0].tobytes() == both[1].tobytes(), name


def test_the_fast_lane_reads_nearly_everything_that_orbax_writes():
    lanes = [
        _read_both(source, name, tuple(slice(0, size) for size in spec.data_shape)) is not None
        for source in ITEMS.values()
        for name, spec in source.specs.items()
        if source.places[name].array is not None and spec.size
    ]
    assert sum(lanes) > 0.9 * len(lanes)


@given(st.data())
@settings(max_examples=60)
def test_parts_of_leaves(data):
    label = data.draw(
        st.sampled_from([name for name in ITEMS if "g_sharded" in name or "x_ocdbt" in name or "j_kill" in name])
    )
    source = ITEMS[label]
    name = data.draw(st.sampled_from([name for name, place in source.places.items() if place.array is not None]))
    index = tuple(
        slice(start := data.draw(st.integers(0, size)), data.draw(st.integers(start, size)))
        for size in source.specs[name].data_shape
    )
    both = _read_both(source, name, index)
    assert both is None or both[0].tobytes() == both[1].tobytes()


@pytest.mark.parametrize("change", ["cut", "flip", "longer"])
def test_damaged_values_are_one_short_error(tmp_path, change):
    import jax.numpy as jnp
    from cases import save

    path = save(tmp_path / "c", {"w": jnp.arange(4096.0)}, use_ocdbt=False)
    chunk = path / "w" / "0"
    data = chunk.read_bytes()
    chunk.write_bytes({"cut": data[:-9], "flip": b"\0" + data[1:], "longer": data + data}[change])
    with pytest.raises(ok.CheckpointError, match="w: chunk 0 in w/0: ") as error:
        ok.restore(path)
    assert str(error.value).count("\n") <= 2
