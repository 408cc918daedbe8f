"""Time and verify an allreduce; `tfcommx doctor` starts this on several ranks."""

import json
import sys
import time

from tfcommx.cli.environment import load_tensorflow

# Begins rank 0's line with the result
MARK = "tfcommx exchange: "
ENTRIES, ROUNDS = 2**18, 5


def main() -> None:
    """Add a megabyte over all ranks; rank 0 prints the time and the ranks' devices."""
    load_tensorflow()
    import tensorflow as tf

    import tfcommx as cx
    from tfcommx.collectives.horovod import import_horovod
    from tfcommx.kernels import loader

    comm = cx.init()
    ranks = comm.topology.size
    values = tf.cast(tf.range(ENTRIES) % 256, tf.float32)  # Their sums are exact
    expected = ranks * values
    seconds = []
    for number in range(ROUNDS):
        # Ranks start together, because the first one would otherwise time its wait for the last
        comm.gather_objects("ready")
        start = time.perf_counter()
        total = comm.allreduce(values, "world", f"doctor{number}").numpy()
        seconds.append(time.perf_counter() - start)
        if not (total == expected.numpy()).all():
            sys.exit(f"tfcommx: rank {comm.rank}: the sum over {ranks} ranks is wrong.")
    result = {
        "ranks": ranks,
        # The best round, because other work only delays, on the slowest of the ranks
        "seconds": max(comm.gather_objects(min(seconds))),
        "gpus": min(comm.gather_objects(len(tf.config.list_physical_devices("GPU")))),
        "nccl": all(comm.gather_objects(bool(import_horovod()[0].nccl_built()))),
        "native": all(comm.gather_objects(loader.library() is not None)),
    }
    if comm.rank == 0:
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
