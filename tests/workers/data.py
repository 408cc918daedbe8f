"""One process of a node, for the tests: serves some epochs from a DataCache and prints as JSON what
it served.

Arguments, as JSON: folder, memory, disk, rank, nodes, slots, epochs, batch, and options for the
cache. `pause` seconds are slept per batch; `hold` waits for a line on standard input before the
result and one after it; `touch` maps the whole slab after the first and waits for another.
"""
# ruff: noqa: E402

import json
import os
import sys
import time

os.environ["CUDA_VISIBLE_DEVICES"] = ""
import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)

from tfcommx.data.cache.batches import Phase
from tfcommx.data.cache.cache import DataCache
from tfcommx.data.cache.options import Options
from tfcommx.data.cache.slab import pss_bytes
from tfcommx.data.sources.folder import Folder
from tfcommx.terms import Topology


def main() -> None:
    asked = json.loads(sys.argv[1])
    options = Options(
        seed=3,
        store=asked.get("store"),
        memory=asked["memory"],
        disk=asked.get("disk"),
        **asked.get("options", {}),
    )
    source = Folder(asked["folder"])
    cache = DataCache(source, Topology(asked["nodes"], asked["slots"]), asked["rank"], options)
    phase = Phase(batch=asked["batch"], resolution=16, dtype="uint8", drop_remainder=False)
    print(
        json.dumps(
            {"ready": True, "reclaimed": len(cache.reclaimed), "created": cache.slab.created}
        ),
        flush=True,
    )
    served = []
    for epoch in range(asked.get("epochs", 1)):
        got = []
        for images, labels in cache.dataset(phase, epoch):
            # the generated pictures carry their number in their colours, see colour() in
            # test_data_cache.py
            for pixel, label in zip(
                images.numpy()[:, 8, 8].astype(int), labels.numpy(), strict=True
            ):
                got.append((pixel.tolist(), int(label)))
            if asked.get("pause"):
                print(json.dumps({"step": len(got)}), flush=True)
                time.sleep(asked["pause"])
        served.append(got)
    if asked.get("hold"):
        print(json.dumps({"held": True}), flush=True)
        sys.stdin.readline()
    if asked.get("touch"):
        np.frombuffer(cache.slab._map, np.uint8)[: cache.slab.used_bytes : 512].sum()
        print(json.dumps({"touched": True}), flush=True)
        sys.stdin.readline()
    result = {
        "served": served,
        "report": [cache.report(epoch) for epoch in range(len(served))],
        "pss": pss_bytes(cache.slab.path),
        "used": cache.slab.used_bytes,
        "filled": cache.slab.filled,
    }
    print(json.dumps(result), flush=True)
    if asked.get("hold"):
        sys.stdin.readline()


main()
