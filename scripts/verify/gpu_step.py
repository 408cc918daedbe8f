"""Claim: on a GPU, the kernels take a small part of a step that NCCL's exchange takes.

The exchange of a training step by hand, in PyTorch, with the kernels that scripts/gpu_day built as
a C library: flatten the gradients, select with a residual, round, encode, all-gather by NCCL,
decode, merge. Beside it NCCL's dense allreduce of the same gradients in 32 and 16 bits.

    scripts/verify/gpu_step.py --library build/libtfcommx_cuda.so --ranks 2

Several ranks share one GPU: each process names a host of its own to NCCL (NCCL_HOSTID), which
then connects them by sockets, as between nodes. So the bytes are those of a cluster, and the times
of the collectives those of the loopback device and of processes that take turns on the GPU. Every
rank compares its result bit by bit with a sum that PyTorch makes of the gathered entries. Prints
one JSON object a row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

MSTOPK, FLOAT32, INT4, ELIAS = 1, 0, 4, 2
# A network of 25.6 million weights in 160 variables
VARIABLES, EACH = 160, 160_000
SIZE = VARIABLES * EACH


class Kernels:
    """The C library, called with tensors."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def number(self, name: str, *arguments: int) -> int:
        """Call a function that returns a number."""
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64
        return int(function(*map(ctypes.c_int64, arguments)))

    def __call__(self, name: str, *arguments: Any) -> None:
        """Queue a kernel on PyTorch's current stream."""
        import torch

        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        words = [
            ctypes.c_void_p(one.data_ptr())
            if isinstance(one, torch.Tensor)
            else ctypes.c_float(one)
            if isinstance(one, float)
            else ctypes.c_int64(one)
            if isinstance(one, int)
            else ctypes.c_void_p(None)
            for one in arguments
        ]
        error = function(*words, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if error:
            raise RuntimeError(f"{name} must start its kernels. CUDA says: {error.decode()}")


class Exchange:
    """One rank's sparse exchange; `steps` are its parts in their order."""

    def __init__(self, kernels: Kernels, gradients: list[Any], density: float, ranks: int) -> None:
        import torch

        def empty(size: int, dtype: Any) -> Any:
            return torch.empty(size, dtype=dtype, device="cuda")

        self.kernels, self.gradients, self.ranks = kernels, gradients, ranks
        self.k = k = int(SIZE * density)
        self.words = kernels.number("tfcommx_wire_words", k, SIZE, INT4, ELIAS)
        floats, ints = torch.float32, torch.int32
        self.flat, self.dense = empty(SIZE, floats), empty(SIZE, floats)
        self.residual = torch.zeros(SIZE, device="cuda")
        self.values, self.written, self.errors = (empty(k, floats) for _ in range(3))
        self.indices, self.buffer = empty(k, ints), empty(self.words, ints)
        self.gathered = empty(ranks * self.words, ints)
        self.all_indices, self.all_values = empty(ranks * k, ints), empty(ranks * k, floats)
        self.workspace = empty(kernels.number("tfcommx_select_workspace", SIZE, k), torch.uint8)
        self.starts = empty(kernels.number("tfcommx_merge_workspace", ranks * k, k, SIZE), ints)
        self.steps: dict[str, Callable[[], Any]] = {
            "flatten": lambda: torch.cat(gradients, out=self.flat),
            "select": self.select,
            "round_and_keep": self.round_and_keep,
            "encode": lambda: kernels(
                "tfcommx_wire_encode", self.indices, self.written, k, SIZE, INT4, ELIAS, self.buffer
            ),
            "all_gather": self.all_gather,
            "decode": lambda: kernels(
                "tfcommx_wire_decode", self.gathered, ranks, 1, k, SIZE, INT4, ELIAS,
                self.all_indices, self.all_values,
            ),
            "merge": lambda: kernels(
                "tfcommx_merge", self.all_indices, self.all_values, ranks * k, k, self.dense, SIZE,
                self.starts,
            ),
        }  # fmt: skip

    def select(self) -> None:
        self.kernels(
            "tfcommx_select", self.flat, FLOAT32, self.residual, None, 0.0, SIZE, self.k, 1, MSTOPK,
            self.indices, self.values, self.workspace,
        )  # fmt: skip

    def round_and_keep(self) -> None:
        self.kernels("tfcommx_wire_round", self.values, self.k, INT4, self.written, self.errors)
        self.kernels(
            "tfcommx_keep", self.indices, self.values, self.errors, self.k, self.residual, SIZE
        )

    def all_gather(self) -> None:
        import torch.distributed as dist

        dist.all_gather_into_tensor(self.gathered, self.buffer)

    def verify(self) -> bool:
        """Compare the result with PyTorch's sum of what all ranks selected, added in rank order."""
        import torch
        import torch.distributed as dist

        before = self.residual.clone()
        for step in self.steps.values():
            step()
        indices = torch.empty(self.ranks * self.k, dtype=torch.int32, device="cuda")
        written = torch.empty(self.ranks * self.k, device="cuda")
        dist.all_gather_into_tensor(indices, self.indices)
        dist.all_gather_into_tensor(written, self.written)
        right = torch.zeros(SIZE, device="cuda")
        for places, values in zip(indices.long().split(self.k), written.split(self.k), strict=True):
            right[places] += values
        sent = torch.zeros(SIZE, device="cuda")
        sent[self.indices.long()] = self.written
        # Nothing is lost: what was sent and what stays are the sum, to one rounding
        whole = before + torch.cat(self.gradients)
        lost = (sent + self.residual - whole).abs().max() / whole.abs().max()
        return bool(torch.equal(right, self.dense)) and float(lost) < 1e-6


def measure(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each step, queued in their order without waiting."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        events[0].record()
        for event, step in zip(events[1:], steps.values(), strict=True):
            step()
            event.record()
        torch.cuda.synchronize()
        if turn >= 3:
            for name, begin, end in zip(steps, events[:-1], events[1:], strict=True):
                times[name].append(begin.elapsed_time(end) * 1e-3)
    return {name: statistics.median(found) for name, found in times.items()}


def rank_main(options: argparse.Namespace, rank: int) -> None:
    """Measure as one rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "nccl", f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=options.ranks
    )
    torch.manual_seed(rank)
    gradients = [torch.randn(EACH, device="cuda") for _ in range(VARIABLES)]
    flat = torch.empty(SIZE, device="cuda")
    half = torch.empty(SIZE, dtype=torch.float16, device="cuda")
    kernels = Kernels(options.library)
    rows: list[tuple[str, float | None, int, dict[str, float], bool]] = []
    for density in options.densities:
        exchange = Exchange(kernels, gradients, density, options.ranks)
        right = exchange.verify()
        seconds = measure(exchange.steps, options.rounds)
        rows.append(("elias/int4", density, 4 * exchange.words, seconds, right))
        del exchange
    dense = {
        "flatten": lambda: torch.cat(gradients, out=flat),
        "allreduce": lambda: dist.all_reduce(flat),
    }
    rows.append(("dense float32", None, 4 * SIZE, measure(dense, options.rounds), True))
    dense = {
        "flatten": lambda: half.copy_(torch.cat(gradients, out=flat)),
        "allreduce": lambda: dist.all_reduce(half),
    }
    rows.append(("dense float16", None, 2 * SIZE, measure(dense, options.rounds), True))
    for name, density, sent, seconds, right in rows:
        verified = torch.tensor(float(right), device="cuda")
        dist.all_reduce(verified, op=dist.ReduceOp.MIN)
        row = {
            "name": name,
            "device": torch.cuda.get_device_name(),
            "ranks": options.ranks,
            "density": density,
            "bytes": sent,
            "seconds": {step: round(taken, 7) for step, taken in seconds.items()},
            "verified": bool(verified),
        }
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libtfcommx_cuda.so")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.01])
    parser.add_argument("--port", type=int, default=29517, help="of 127.0.0.1, for the start")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.library = os.path.abspath(options.library)
    if options.rank is not None:
        rank_main(options, options.rank)
        return
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)],
            env=os.environ | {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"},
        )
        for rank in range(options.ranks)
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit(f"Every rank must end with status 0. Received {statuses}.")


if __name__ == "__main__":
    main()
