"""Processes of a node, for the tests: each serves epochs from a DataCache and reports as JSON.

This process imports TensorFlow once, and forks one process for each request on the socket whose
descriptor is its argument; see `Workers` in data_helpers.py. A request is a JSON object: folder,
memory, disk, rank, nodes, slots, epochs, batch, and options for the cache. `pause` seconds are
slept per batch; `hold` waits for a line on standard input before the result and one after it;
`touch` maps the whole slab after the first and waits for another.
"""
# ruff: noqa: E402

import json
import os
import socket
import sys
import time
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
from warm_server import End

end = End()
import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)

import tfcommx as cx
from tfcommx.data.sources.folder import Folder


def say(**message) -> None:
    print(json.dumps(message), flush=True)


def pss_bytes(path: Path) -> int:
    """Return this process's proportional share of the memory mapped from `path` (PSS), in bytes.

    The shares of all processes add up to the memory of the node. **Source:** proc(5), smaps.
    """
    facts = os.stat(path)  # not its name: the process that made the slab mapped it under another
    file = [f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}", str(facts.st_ino)]
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.split()[3:5] == file
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def serve_epochs(cache: cx.DataCache, asked: dict) -> list:
    """Serve all epochs; return the pixel and label of each sample, in order."""
    spec = cx.BatchSpec(asked["batch"], resolution=16, dtype="uint8", drop_remainder=False)
    served = []
    for epoch in range(asked.get("epochs", 1)):
        got = []
        for images, labels in cache.dataset(spec, epoch):
            # The generated pictures carry their number in their colours, see data_helpers.colour.
            pixels = images.numpy()[:, 8, 8].tolist()
            got += zip(pixels, labels.numpy().tolist(), strict=True)
            if asked.get("pause"):
                say(step=len(got))
                time.sleep(asked["pause"])
        served.append(got)
    return served


def work(asked: dict) -> None:
    cache = cx.DataCache(
        Folder(asked["folder"]),
        topology=cx.Topology(asked["nodes"], asked["slots"]),
        rank=asked["rank"],
        seed=3,
        store=asked.get("store"),
        memory=asked["memory"],
        disk=asked.get("disk"),
        **asked.get("options", {}),
    )
    say(ready=True, reclaimed=len(cache.reclaimed), created=cache.slab.created)
    served = serve_epochs(cache, asked)
    if asked.get("hold"):
        say(held=True)
        sys.stdin.readline()
    if asked.get("touch"):
        np.frombuffer(cache.slab._map, np.uint8)[: cache.slab.used_bytes : 512].sum()
        say(touched=True)
        sys.stdin.readline()
    say(
        served=served,
        report=[cache.report(epoch) for epoch in range(len(served))],
        pss=pss_bytes(cache.slab.path),
        used=cache.slab.used_bytes,
        filled=cache.slab.filled,
    )
    if asked.get("hold"):
        sys.stdin.readline()


def main() -> None:
    """Fork for each request; only a child returns, and ends as warm ranks do."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        text, files, _, _ = socket.recv_fds(requests, 65536, 2)
        if not text:
            os._exit(0)
        asked = json.loads(text)
        if "wait" in asked:
            status = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
            requests.sendall(f"{status}\n".encode())
        elif (child := os.fork()) == 0:
            requests.close()
            for standard, file in enumerate(files):
                os.dup2(file, standard)
                os.close(file)
            with end.recorded():
                return work(asked)
        else:
            for file in files:
                os.close(file)
            requests.sendall(f"{child}\n".encode())


main()
