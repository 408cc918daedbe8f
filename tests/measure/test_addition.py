"""Gamma is measured by the additions of the device that adds; a CPU stands in for a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import tensorflow as tf

from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Topology
from tfcommx.measure import links


def test_a_row_of_additions_less_a_single_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the time of a launch and the copy to the host, and neither a disturbed time."""
    made: list[tf.Variable] = []
    real = tf.Variable
    monkeypatch.setattr(tf, "Variable", lambda *of: made.append(real(*of)) or made[-1])
    row, single = [9.0, 1.0, 1.2, 5.0], [9.0, 0.2, 0.1, 0.2]  # Each first one is traced
    times = iter([time for seconds in row + single for time in (0.0, seconds)])
    found = links.on_device("/cpu:0", 4000, 3, lambda: next(times))
    assert found == pytest.approx((1.2 - 0.2) / (links.ADDITIONS * 4000))
    (total,) = made
    assert set(total.numpy()) == {4 * (2 + links.ADDITIONS)}


def test_a_real_clock_gives_seconds_of_this_machine() -> None:
    found = links.on_device("/cpu:0", 2**22, 3, time.perf_counter)
    assert 0 <= found < 1e-7


def test_on_the_cpu_the_hosts_fastest_addition_counts() -> None:
    times = iter([0.0, 5.0, 5.0, 7.0, 7.0, 11.0])
    found = links.seconds_per_byte("/cpu:0", 4000, 3, lambda: next(times))
    assert found == pytest.approx(2.0 / 4000)


def test_the_probe_adds_on_the_device_of_the_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's addition on the host stood for the GPU's, which takes a sixtieth of its time."""
    asked: list[Any] = []

    def on_device(device: str, size: int, repeats: int, clock: Any) -> float:
        asked.append((device, size, repeats))
        return 7e-13

    monkeypatch.setattr(links, "residual_device", lambda: "/gpu:0")
    monkeypatch.setattr(links, "on_device", on_device)

    def work(comm: ThreadComm) -> links.ProbeResult:
        return links.probe(comm, sizes=(1024, 65536), repeats=2, blocks=())

    found = ThreadComm.run(Topology(2, 2), work)[0].links
    assert found.inside.gamma_s_per_byte == found.between.gamma_s_per_byte == 7e-13
    # However short the messages are: a launch would hide the addition of 64 KiB
    assert asked == [("/gpu:0", links.BYTES_ON_GPU, 2)] * 4
