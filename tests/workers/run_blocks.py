"""Runs Python blocks of the documents on every rank, in the folder: run_blocks.py BLOCKS.json HOW.

Each block runs in a separate namespace, with the names that the documents assume: keras, tf, cx, a
model and data. It stops at the first block that fails, with the name of the block.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcommx as cx

compile_as_asked = keras.Model.compile


def namespace(of_images: bool) -> dict[str, Any]:
    """Return the names that a block may use."""
    layers = keras.layers
    if of_images:
        model = keras.Sequential(
            [
                layers.Input((None, None, 3)),
                layers.Conv2D(4, 3, strides=8),
                layers.GlobalAveragePooling2D(),
                layers.Dense(2),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            cx.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss=loss, jit_compile=False
        )
        return {"keras": keras, "tf": tf, "cx": cx, "model": model}
    model = keras.Sequential(
        [layers.Input((8,)), layers.Dense(300), layers.Dense(300), layers.Dense(1)]
    )
    inputs = np.random.default_rng(cx.rank()).normal(size=(16, 8)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(1))).batch(16)
    return {"keras": keras, "tf": tf, "cx": cx, "model": model, "data": data}


def compile_eagerly(self: keras.Model, *arguments: Any, **options: Any) -> None:
    """Compile a model whose one step costs less than its trace."""
    compile_as_asked(self, *arguments, **{**options, "run_eagerly": True, "jit_compile": False})


def main() -> None:
    if sys.argv[2] == "eagerly":
        keras.Model.compile = compile_eagerly
    file = Path(sys.argv[1])
    os.chdir(file.parent)
    for name, code in json.loads(file.read_text()):
        cx.init()
        before = cx.collectives.current().traffic().inside
        try:
            exec(compile(code, name, "exec"), namespace("DataCache" in code))
        except Exception:
            print(f"{name} failed on rank {cx.rank()}:\n{traceback.format_exc()}", flush=True)
            sys.exit(1)
        sent = cx.collectives.current().traffic().inside > before
        print(f"{name}: sent {sent}", flush=True)


if __name__ == "__main__":
    main()
