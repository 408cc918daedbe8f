#!/usr/bin/env python3
"""Hosts for `tfcommx run --host-discovery-script`: the nodes of a Ray cluster that are alive.

A node has a slot for each of its GPUs; without GPUs it has `--slots` of `tfcommx run`.
"""

import ray

if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    for node in ray.nodes():
        if node["Alive"]:
            gpus = int(node["Resources"].get("GPU", 0))
            print(node["NodeManagerAddress"] + (f":{gpus}" if gpus else ""))
