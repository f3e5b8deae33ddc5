"""Write the golden TensorFlow checkpoints: `python write.py FOLDER`, with TensorFlow 2.21 (tensorflow-cpu) installed.

Beside each, `variables.json` gives the dtype, shape and SHA-256 of the bytes of every variable, from the arrays that
were saved; strings as hex.
"""

import hashlib
import json
import os
import sys

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
DRAW = np.random.RandomState(7)


def expected(folder, arrays):
    rows = {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype == object:
            texts = [text.hex() for text in array.reshape(-1).tolist()]
            rows[name] = {"dtype": "string", "shape": list(array.shape), "hex": texts}
            continue
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        rows[name] = {"dtype": array.dtype.name, "shape": list(array.shape), "sha256": digest}
    with open(f"{folder}/variables.json", "w") as file:
        json.dump(rows, file, indent=1)


def graph(folder, prefix, arrays, make, **options):
    """Save the variables that `make` builds of the arrays in a graph."""
    os.makedirs(folder, exist_ok=True)
    with tf.Graph().as_default():
        variables = make(arrays)
        saver = v1.train.Saver(variables, **options)
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 3})) as session:
            session.run(v1.global_variables_initializer())
            saver.save(session, f"{folder}/{prefix}", write_meta_graph=False)
    expected(folder, arrays)


def plain(arrays):
    return [v1.Variable(value, name=name, use_resource=False) for name, value in arrays.items()]


def on_three_devices(arrays):
    out = []
    for i, (name, value) in enumerate(arrays.items()):
        with tf.device(f"/cpu:{i % 3}"):
            out.append(v1.Variable(value, name=name, use_resource=False))
    return out


def partitioned(arrays):
    parts = {"rows": (4, 1), "columns": (1, 2), "long": (3,)}
    out = []
    for name, value in arrays.items():
        shape = list(value.shape)
        split = parts.get(name)
        out.append(
            v1.get_variable(
                name,
                shape,
                dtype=value.dtype,
                initializer=lambda s, dtype=None, partition_info=None, value=value: cut(value, s, partition_info),
                partitioner=None if split is None else (lambda shape, dtype, split=split: list(split)),
                use_resource=False,
            )
        )
    return out


def cut(value, shape, info):
    start = [0] * value.ndim if info is None else info.var_offset
    return tf.constant(value[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))])


def normal(*shape):
    return DRAW.randn(*shape).astype(np.float32)


def main(root):
    base = {"bert/pooler/dense/kernel": normal(8, 4), "bert/pooler/dense/bias": normal(4)}
    slots = {f"{name}/{slot}": np.abs(normal(*a.shape)) for name, a in base.items() for slot in ("adam_m", "adam_v")}
    graph(f"{root}/adam", "model.ckpt-20", {**base, **slots, "global_step": np.int64(20)}, plain)
    numbered = {f"layer_{i}/kernel": normal(5, 3) for i in range(6)}
    graph(f"{root}/sharded", "model.ckpt-7", numbered, on_three_devices, sharded=True)
    pieces = {
        "rows": normal(97, 8),
        "columns": normal(6, 5),
        "long": DRAW.randint(0, 255, 20_000).astype(np.uint8),
        "whole": normal(3),
    }
    graph(f"{root}/partitioned", "model.ckpt", pieces, partitioned)
    graph(f"{root}/v1", "old.ckpt", {"a/b": normal(3)}, plain, write_version=v1.train.SaverDef.V1)
    kernel = normal(2, 3)
    os.makedirs(f"{root}/object", exist_ok=True)
    saved = tf.train.Checkpoint(layer=tf.Module(), step=tf.Variable(3, dtype=tf.int64))
    saved.layer.kernel = tf.Variable(kernel)
    saved.save(f"{root}/object/obj")
    tail = "/.ATTRIBUTES/VARIABLE_VALUE"
    reader = tf.train.load_checkpoint(f"{root}/object/obj-1")
    graph_text = np.array(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"), object)
    expected(
        f"{root}/object",
        {
            f"layer/kernel{tail}": kernel,
            f"step{tail}": np.int64(3),
            f"save_counter{tail}": np.int64(1),
            "_CHECKPOINTABLE_OBJECT_GRAPH": graph_text,
        },
    )


main(sys.argv[1])
