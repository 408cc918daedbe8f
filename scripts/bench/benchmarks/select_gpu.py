"""Claim: on a GPU, selection costs at most 1.25 times a copy that moves 16 bytes an entry.

With error feedback; and less than others.

    python3 scripts/bench select_gpu                  # n = 25,600,000 and 128,000,000,
                                                      # k = 0.001 n and 0.01 n
    python3 scripts/bench select_gpu --json gpu.jsonl # the rows go to a file, too
    python3 scripts/bench select_gpu --on-cpu -n 100000
                                                      # without a GPU: the same is checked, but
                                                      # the times tell nothing

Peers: scripts/check_cuda times our kernels (mstopk, exact), the bare addition, the copy and, if the
CUDA headers have it, CUB's DeviceTopK. Here those join that can be imported: PyTorch's topk,
Algorithm 1 as printed (in PyTorch), CuPy's argpartition. Each adds the gradient to a residual of
its own (except algorithm1, which is timed on the sum) and zeroes there what it chose. Each is
verified in its first round; then rounds are queued one after another, as in training, and their
mean counts.

Needs nvcc, g++ and NumPy, no TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench import options
from bench.checks import selected_right

SIZES = (25_600_000, 128_000_000)
CHECK = Path(__file__).resolve().parents[2] / "check_cuda"
SEARCHES = 30  # thresholds that Algorithm 1 tries


class Opponent(NamedTuple):
    name: str
    # -> indices, values
    run: Callable[[], tuple[Any, Any]]
    # None: chooses from the sum, keeps nothing
    residual: Any | None
    # Until all that was queued is done
    wait: Callable[[], None]
    host: Callable[[Any], np.ndarray]


def in_torch(gradient: np.ndarray, start: np.ndarray, k: int, device: str) -> Iterator[Opponent]:
    import torch

    residual, new = torch.from_numpy(start.copy()).to(device), torch.from_numpy(gradient).to(device)
    summed = residual + new

    def topk() -> tuple[Any, Any]:
        residual.add_(new)
        indices = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0
        return indices, values

    def algorithm1() -> tuple[Any, Any]:
        size = summed.abs()
        mean, largest = size.mean(), size.max()
        left, right, fewest, most = 0.0, 1.0, 0, size.numel()
        upper, lower = float("inf"), 0.0
        for _ in range(SEARCHES):
            ratio = left + (right - left) / 2
            threshold = mean + ratio * (largest - mean)
            reached = int((size >= threshold).count_nonzero())
            if reached <= k:
                right = ratio
                if reached > fewest:
                    fewest, upper = reached, threshold
            else:
                left = ratio
                if reached < most:
                    most, lower = reached, threshold
        above = torch.nonzero(size >= upper)[:, 0]
        inside = torch.nonzero((size < upper) & (size >= lower))[:, 0]
        need = k - above.numel()
        offset = int(torch.randint(inside.numel() - need + 1, []))
        indices = torch.cat([above, inside[offset : offset + need]])
        return indices, summed[indices]

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    yield Opponent("torch_topk", topk, residual, wait, lambda tensor: tensor.cpu().numpy())
    yield Opponent("algorithm1", algorithm1, None, wait, lambda tensor: tensor.cpu().numpy())


def in_cupy(gradient: np.ndarray, start: np.ndarray, k: int) -> Iterator[Opponent]:
    import cupy

    residual, new = cupy.asarray(start), cupy.asarray(gradient)

    def argpartition() -> tuple[Any, Any]:
        cupy.add(residual, new, out=residual)
        indices = cupy.argpartition(cupy.abs(residual), start.size - k)[start.size - k :]
        values = residual[indices]
        residual[indices] = 0
        return indices, values

    yield Opponent(
        "cupy_argpartition",
        argpartition,
        residual,
        cupy.cuda.runtime.deviceSynchronize,
        cupy.asnumpy,
    )


def opponents(gradient: np.ndarray, start: np.ndarray, k: int, on_cpu: bool) -> Iterator[Opponent]:
    """Yield those whose library is there, and name on stderr what is not."""
    found = {
        "PyTorch": lambda: in_torch(gradient, start, k, "cpu" if on_cpu else "cuda"),
        "CuPy": lambda: in_cupy(gradient, start, k),
    }
    if on_cpu:
        del found["CuPy"]
    for library, make in found.items():
        try:
            yield from make()
        except ImportError as missing:
            print(f"{library} takes no part: {missing}", file=sys.stderr)


def rows_of(n: int, rounds: int, on_cpu: bool) -> Iterator[dict]:
    """Yield the rows of scripts/check_cuda for both of its densities, with the opponents'."""
    words = [*["--on-cpu"] * on_cpu, "--cases", "0", "--n", str(n), "--rounds", str(rounds)]
    done = subprocess.run([CHECK, *words], stdout=subprocess.PIPE, text=True)
    kernels = [row for row in map(json.loads, done.stdout.splitlines()) if row["name"] != "check"]
    if not kernels:
        raise SystemExit(
            f"{CHECK} must time the kernels. It ended with {done.returncode}: its own words are "
            "above."
        )
    random = np.random.default_rng(1)
    gradient, start = random.standard_normal([2, n], np.float32)
    for k in sorted({row["k"] for row in kernels}):
        ours = [row for row in kernels if row["k"] == k]
        yield from map(with_shared_columns, ours)
        for opponent in opponents(gradient, start, k, on_cpu):
            indices, values = map(opponent.host, opponent.run())
            kept = None if opponent.residual is None else opponent.host(opponent.residual)
            good = selected_right(indices, values, kept, start + gradient, k)
            opponent.wait()
            begin = time.perf_counter()
            for _ in range(rounds):
                opponent.run()
            opponent.wait()
            seconds = (time.perf_counter() - begin) / rounds
            theirs = {"name": opponent.name, "seconds": seconds, "verified": good}
            yield with_shared_columns(ours[0] | theirs)


def with_shared_columns(row: dict) -> dict:
    """Put the columns that all benchmarks share before those of check_cuda."""
    limit = row.get("limit_seconds")
    shared = options.row(
        row["name"], row["n"], row["seconds"], row["verified"], row["k"] / row["n"], limit
    )
    return shared | {name: value for name, value in row.items() if name not in shared}


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, sizes=SIZES, repeats=51)
    found.add_argument("--on-cpu", action="store_true", help="check everything without a GPU")
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time our kernels and those whose library is there, on each size."""
    for n in chosen.sizes:
        found = list(rows_of(n, chosen.repeats, chosen.on_cpu))
        for k in sorted({row["k"] for row in found}):
            rows = [row for row in found if row["k"] == k]
            yield options.Table(f"n = {n:,}, k = {k:,}", rows)
