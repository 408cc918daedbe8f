"""Claim: with TensorFlow and NCCL, ranks stay equal and no op copies a gradient to the host.

    scripts/verify/gpu_training.py --ranks 2
    scripts/verify/gpu_training.py --ranks 2 --tests tests/ranks
    scripts/cluster up --nodes 2 --slots 1 --rate 25gbit
    scripts/cluster run -- horovodrun -np 2 --gloo python scripts/verify/gpu_training.py \
        --rates 25gbit 10gbit 1gbit

Trains a ResNet-50 on one batch under several schemes, after a comparison of the kernels with the
CPU's. Prints one JSON object for each scheme: the median milliseconds of a step, the loss before
and after, whether all ranks have equal weights and, of one traced step, the bytes copied between
the GPU and the host, the largest such copies, and the kernels that took longest. Ends with status 1
if weights are not finite, or differ between ranks although they exchange. With `--tests` the ranks
run these tests in place of it. Requires `make setup TFCOMMX_SETUP=--gpu`.

Several ranks may share one GPU: a UTS namespace, which needs root, makes each a separate host for
NCCL and `init()`. Collectives then run over the loopback device, so their times are not a
cluster's. On the nodes of `scripts/cluster` they run over its links; with `--rates` each step is
timed at these rates, one after another, and nothing is traced. "auto" plans anew for each.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfcommx.collectives.comm import Comm

NEW_UTS_NAMESPACE = 0x04000000
SMALL_BYTES = 4096  # Copies of step counters, losses and rates
PLAIN = ("no exchange", "horovod", "horovod fp16")  # Without tfcommx
SCHEMES: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "asa bfloat16": {"route": "asa", "wire": "bfloat16"},
    "asa int4": {"route": "asa", "wire": "int4"},
    "torus": {"route": "torus"},
    "hitopk .01 elias/int4": {
        "route": "hitopk", "selection": "mstopk", "density": 0.01, "wire": "elias/int4",
    },
    "hitopk .001": {"route": "hitopk", "selection": "mstopk", "density": 0.001},
    "auto": {"route": "auto"},
}  # fmt: skip
LOW_BIT = ["LowBitSGD", "LowBitLARS"]  # Optimizers whose momenta travel in 2 bits


def become_host(rank: int) -> None:
    """Give this process a unique host name, which resolves to the loopback device."""
    libc, name = ctypes.CDLL(None, use_errno=True), f"node{rank}"
    try:
        socket.gethostbyname(name)
    except OSError:  # Gloo would crash without a message
        sys.exit(f"The name {name} must resolve: echo '127.0.0.1 {name}' >> /etc/hosts")
    if libc.unshare(NEW_UTS_NAMESPACE) or libc.sethostname(name.encode(), len(name)):
        raise OSError(ctypes.get_errno(), "Setting a host name needs root")


def copies_and_kernels(folder: Path) -> dict[str, Any]:
    """Read a trace: bytes copied between GPU and host, the largest copies, the longest kernels."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (file,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    copied: Counter[str] = Counter()
    large: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for plane in space.planes:
        names = {key: stat.name for key, stat in plane.stat_metadata.items()}
        # Other lines repeat the kernels by the ops that started them
        lines = [line for line in plane.lines if line.name.startswith("Stream")]
        for line in lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                stats = {names[stat.metadata_id]: stat for stat in event.stats}
                if "memcpy_details" not in stats:
                    kernels[name[:80]] += event.duration_ps
                    continue
                details = stats["memcpy_details"]
                text = details.str_value or names.get(details.ref_value, "")
                size = int(dict(word.split(":", 1) for word in text.split() if ":" in word)["size"])
                copied[name] += size
                if size > SMALL_BYTES and "D2D" not in name:
                    large[f"{name} {text}"] += 1
    shown = {name for name, _ in kernels.most_common(4)}
    return {
        "copied_bytes": dict(copied),
        "large_copies": dict(large.most_common(12)),
        "kernels_us": {
            name: round(picoseconds / 1e6)
            for name, picoseconds in kernels.most_common()
            if name in shown or "tfcommx" in name or "nccl" in name
        },
    }


def make_model(pixels: int, name: str) -> keras.Model:
    """Return a compiled ResNet-50 with this scheme, low-bit optimizer or plain Horovod."""
    import horovod.tensorflow as hvd
    import keras

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bench.peers import plain_optimizer

    import tfcommx as cx

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(
        weights=None, input_shape=(pixels, pixels, 3), classifier_activation=None
    )
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if name in LOW_BIT:
        optimizer = cx.DistributedOptimizer(getattr(cx.optimizers, name)(0.01))
    elif name in SCHEMES:
        optimizer = cx.DistributedOptimizer(optimizer, scheme=cx.Scheme(**SCHEMES[name]))
    elif name != "no exchange":
        kinds = hvd.Compression
        optimizer = plain_optimizer(optimizer, kinds.fp16 if name.endswith("fp16") else kinds.none)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


class Clock:
    """Times steps: `steps` at each rate of the cluster's links, of which the last may be traced."""

    def __init__(self, rates: list[str], steps: int, trace: Path | None) -> None:
        self.rates, self.steps, self.trace = rates, steps, trace
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def begin(self, batch: int) -> None:
        """Begin a step, at the first of a rate with that rate."""
        import tensorflow as tf

        if batch % self.steps == 0:
            set_rate(self.rates[batch // self.steps])
        if self.trace and batch == len(self.rates) * self.steps - 1:
            tf.profiler.experimental.start(str(self.trace))
        self.start = time.perf_counter()

    def end(self, loss: Any) -> None:
        """End a step, for which reading its loss waits."""
        import tensorflow as tf

        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - self.start)
        if self.trace and len(self.losses) == len(self.rates) * self.steps:
            tf.profiler.experimental.stop()

    def medians(self) -> dict[str, float]:
        """Return the median milliseconds of a step at each rate: of the last two thirds but one."""
        n = self.steps
        return {
            rate or "loopback": round(
                1000 * statistics.median(self.seconds[i * n + n // 3 : (i + 1) * n - 1]), 1
            )
            for i, rate in enumerate(self.rates)
        }


def set_rate(rate: str) -> None:
    """Give the links of the virtual cluster this rate, unless it is empty. Rank 0 does it."""
    if rate and os.environ["HOROVOD_RANK"] == "0":
        cluster = Path(__file__).resolve().parents[1] / "cluster"
        subprocess.run([sys.executable, str(cluster), "rate", rate], check=True)


def fit(model: keras.Model, data: tf.data.Dataset, clock: Clock, exchanges: bool) -> None:
    """Train for all steps of the clock."""
    import keras

    import tfcommx as cx

    timed = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: clock.begin(batch),
        on_train_batch_end=lambda batch, logs: clock.end(logs["loss"]),
    )
    callbacks = [*([cx.callbacks.BroadcastState()] if exchanges else []), timed]
    with cx.allow_plain_optimizers():
        steps = len(clock.rates) * clock.steps
        model.fit(data, steps_per_epoch=steps, callbacks=callbacks, verbose=0)


def train(comm: Comm, options: argparse.Namespace) -> bool:
    """Train under each scheme, and print the results; return True if all are right.

    **Ranks:** all.
    """
    import numpy as np
    import tensorflow as tf

    from tfcommx.kernels import device

    def tell(**row: Any) -> None:
        if comm.rank == 0:
            print(json.dumps(row), flush=True)

    start = time.perf_counter()
    residuals_on = device.residual_device()
    on_gpu = residuals_on != "/cpu:0"
    tell(
        residuals_on=residuals_on,
        by_nccl=comm.by_nccl,
        comparison_seconds=round(time.perf_counter() - start, 3),
        ranks=comm.topology.size,
        tensorflow=tf.__version__,
    )
    numbers = np.random.default_rng(comm.rank)
    shape = [options.batch, options.pixels, options.pixels, 3]
    batch = numbers.standard_normal(shape, np.float32), numbers.integers(0, 1000, options.batch)
    data = tf.data.Dataset.from_tensors(batch).cache().repeat()
    traced = comm.rank == 0 and on_gpu and not options.rates
    rates, right = options.rates or [""], True
    for name in options.schemes or [*PLAIN, *SCHEMES, *LOW_BIT]:
        for together in [[rate] for rate in rates] if name == "auto" else [rates]:
            set_rate(together[0])  # Before "auto" measures the links
            with tempfile.TemporaryDirectory() as folder:
                clock = Clock(together, options.steps, Path(folder) if traced else None)
                model = make_model(options.pixels, name)
                fit(model, data, clock, name not in PLAIN)
                row = results(comm, model, clock)
            tell(scheme=name, **row)
            right &= row["finite"] and row["equal"] == (name != "no exchange")
    return right


def results(comm: Comm, model: keras.Model, clock: Clock) -> dict[str, Any]:
    """Return the columns of a training's row. **Ranks:** all."""
    import numpy as np

    weights = [variable.numpy() for variable in model.trainable_variables]
    sums = comm.gather_objects([float(np.abs(w).sum(dtype=np.float64)) for w in weights])
    return {
        "step_ms": clock.medians(),
        "loss": [round(clock.losses[0], 3), round(clock.losses[-1], 3)],
        "equal": all(theirs == sums[0] for theirs in sums),
        "finite": all(np.isfinite(w).all() for w in weights),
        **(copies_and_kernels(clock.trace) if clock.trace else {}),
    }


class FailuresAtOnce:
    """Prints why a test fails at once: pytest waits for its end, which a hang never reaches."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(f"\n{report.longreprtext}", flush=True)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--ranks", type=int, default=2)
    found.add_argument("--steps", type=int, default=30)
    found.add_argument("--batch", type=int, default=32, help="of one rank")
    found.add_argument("--pixels", type=int, default=224)
    found.add_argument("--schemes", nargs="+", choices=[*PLAIN, *SCHEMES, *LOW_BIT])
    found.add_argument(
        "--rates", nargs="+", default=[], help="of the links, on nodes of scripts/cluster"
    )
    found.add_argument(
        "--tests",
        nargs=argparse.REMAINDER,
        help="train nothing; run pytest with these",
    )
    return found


def main() -> None:
    options = parser().parse_args()
    rank = os.environ.get("HOROVOD_RANK")
    if rank is None:
        hosts = f"localhost:{options.ranks}"
        command = ["horovodrun", "-np", str(options.ranks), "-H", hosts, "--gloo"]
        own = {"NCCL_SOCKET_IFNAME": "lo", "TFCOMMX_TEST_NODE_SIZE": "1"}
        ended = subprocess.run([*command, sys.executable, *sys.argv], env={**os.environ, **own})
        sys.exit(ended.returncode)
    if options.rates:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "eth0")
    else:
        become_host(int(rank))
    if options.tests:
        import pytest

        arguments = ["-v", "-p", "no:cacheprovider", "-p", "no:xdist", *options.tests]
        sys.exit(pytest.main(arguments, [FailuresAtOnce()]))
    import tfcommx as cx

    sys.exit(not train(cx.init(node_size=1), options))


if __name__ == "__main__":
    main()
