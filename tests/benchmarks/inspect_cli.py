"""`orbaxkit inspect` against a process that calls Orbax's metadata(), and how it grows up to 100,000 leaves.

python tests/benchmarks/inspect_cli.py [ROUNDS]
"""

import sys
import tempfile
from pathlib import Path

import measure

ORBAX_METADATA = """
import sys
import orbax.checkpoint as ocp
tree = ocp.PyTreeCheckpointer().metadata(sys.argv[1]).item_metadata.tree
print(len(tree["params"]))
"""


def write_with_orbax(folder: str, leaves: int) -> None:
    """A checkpoint of many small arrays in four levels, as Orbax writes it."""
    import numpy as np
    import orbax.checkpoint as ocp

    layers = {
        f"layer_{i}": {
            part: {"kernel": np.ones((8, 4), np.float32), "bias": np.zeros(4, np.float32)}
            for part in ("attention", "mlp")
        }
        for i in range(leaves // 4)
    }
    ocp.PyTreeCheckpointer().save(folder, {"params": layers})


def write_by_hand(folder: str, leaves: int) -> None:
    """The same layout for very many leaves, which Orbax would take minutes to write: `_METADATA` and an OCDBT store."""
    import json

    import numpy as np
    import tensorstore as ts

    array = {
        "chunks": [8],
        "compressor": None,
        "dimension_separator": ".",
        "dtype": "<f4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": [8],
        "zarr_format": 2,
    }
    header, chunk = json.dumps(array).encode(), np.ones(8, np.float32).tobytes()
    tree, transaction = {}, ts.Transaction(atomic=True)
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result().with_transaction(transaction)
    for i in range(leaves):
        path = ("params", f"layer_{i // 4}", ("attention", "mlp")[i % 2], ("kernel", "bias")[i // 2 % 2])
        keys = [{"key": key, "key_type": 2} for key in path]
        tree[str(path)] = {
            "key_metadata": keys,
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        store[f"{'.'.join(path)}/.zarray"], store[f"{'.'.join(path)}/0"] = header, chunk
    transaction.commit_async().result()
    metadata = {
        "tree_metadata": tree,
        "use_zarr3": False,
        "use_ocdbt": True,
        "store_array_data_equal_to_fill_value": True,
    }
    Path(folder, "_METADATA").write_text(json.dumps(metadata))


def main(rounds: int) -> None:
    orbaxkit = str(Path(sys.executable).with_name("orbaxkit"))
    with tempfile.TemporaryDirectory() as folder:
        thousand = f"{folder}/thousand"
        measure.python(__file__, "write_with_orbax", thousand, "1000")
        ways = {
            "orbaxkit inspect": lambda: measure.run(orbaxkit, "inspect", thousand),
            "Orbax metadata()": lambda: measure.run(sys.executable, "-c", ORBAX_METADATA, thousand),
        }
        runs = measure.interleaved(ways, rounds)
        best = {name: (min(r.seconds for r in some), min(r.peak_bytes for r in some)) for name, some in runs.items()}
        print(
            measure.table(
                [{"1,000 leaves": name, "seconds": s, "peak MB": b / measure.MB} for name, (s, b) in best.items()]
            )
        )
        growth = {}
        for leaves in (10_000, 100_000):
            path = f"{folder}/{leaves}"
            measure.python(__file__, "write_by_hand", path, str(leaves))
            growth[leaves] = min(measure.run(orbaxkit, "inspect", path).seconds for _ in range(2))
        (ours, ours_bytes), (theirs, theirs_bytes) = best.values()
        print()
        print(
            measure.table(
                [
                    measure.verdict("time against Orbax", ours / theirs, 0.3),
                    measure.verdict("peak memory against Orbax", ours_bytes / theirs_bytes, 0.4),
                    measure.verdict("seconds for 100,000 leaves", growth[100_000], 10.0),
                    measure.verdict("100,000 against 10,000 leaves", growth[100_000] / growth[10_000], 11.0),
                ]
            )
        )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("write"):
        globals()[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 5)
