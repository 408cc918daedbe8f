"""Horovod's settings where NCCL carries the collectives; devices and Horovod are made up."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tfcommx.collectives import horovod
from tfcommx.collectives.horovod import HorovodComm
from tfcommx.core import ConfigurationError, Topology
from tfcommx.launch.launcher import Launcher
from tfcommx.watch.progress import Progress

CYCLE, ASYNC = "HOROVOD_CYCLE_TIME", "HOROVOD_ENABLE_ASYNC_COMPLETION"
NAMES = (CYCLE, ASYNC, "HOROVOD_AUTOTUNE")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts a made-up Horovod.

    It returns the Comm, and the variables that Horovod has read.
    """
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def started(gpus: int, built: bool, **environment: str) -> tuple[Any, dict[str, str]]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [f"GPU:{gpus}"] * gpus)
        read: dict[str, str] = {}

        def init(**_: Any) -> None:
            read.update((name, os.environ[name]) for name in NAMES[:2] if name in os.environ)

        comm: Any = object.__new__(HorovodComm)
        comm.topology, comm.progress, comm.by_nccl = Topology(2, 1), Progress(), False
        comm._hvd = SimpleNamespace(
            init=init,
            is_initialized=lambda: False,
            nccl_built=lambda: 23200 if built else 0,
            rank=lambda: 0,
            size=lambda: 2,
            local_rank=lambda: 0,
            local_size=lambda: 1,
        )
        before = dict(os.environ)
        comm._start(Launcher("gloo", 0, 2, 0), [])
        # Launches that this process makes later must not inherit it
        assert dict(os.environ) == before
        return comm, read

    return started


def test_on_gpus_the_cycle_is_short(start: Any) -> None:
    comm, read = start(1, True)
    assert read == {CYCLE: "0.1"}
    assert comm.by_nccl and not comm.progress.ends_when_queued


@pytest.mark.parametrize(("gpus", "built"), [(0, True), (1, False), (0, False)])
def test_without_gpus_or_nccl_nothing_is_set(start: Any, gpus: int, built: bool) -> None:
    """Also if the user's variable is on: Horovod reads it for GPUs only."""
    comm, read = start(gpus, built)
    assert not read and not comm.by_nccl and not comm.progress.ends_when_queued
    comm, read = start(gpus, built, **{ASYNC: "1"})
    assert read == {ASYNC: "1"} and not comm.progress.ends_when_queued


@pytest.mark.parametrize(
    ("environment", "expected", "queued"),
    [
        ({CYCLE: "5"}, {CYCLE: "5"}, False),
        ({ASYNC: "0"}, {CYCLE: "0.1", ASYNC: "0"}, False),
        ({ASYNC: ""}, {CYCLE: "0.1", ASYNC: ""}, False),
        # Then a collective ends when it is queued, and the watch must know
        ({CYCLE: "1", ASYNC: "2"}, {CYCLE: "1", ASYNC: "2"}, True),
        # Autotune would not tune a cycle that was set
        ({"HOROVOD_AUTOTUNE": "1"}, {}, False),
    ],
)
def test_what_the_user_has_set_stays(
    start: Any, environment: dict[str, str], expected: dict[str, str], queued: bool
) -> None:
    comm, read = start(1, True, **environment)
    assert (read, comm.progress.ends_when_queued) == (expected, queued)


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), (" 2x", True), ("+1", True), ("0", False), ("-1", False), ("yes", False)],
)
def test_a_variable_is_on_as_horovod_reads_it(value: str, on: bool) -> None:
    assert horovod._is_on(value) == on


@pytest.mark.parametrize("value", ["64MB", ""])
def test_a_threshold_that_horovod_would_misread_is_refused(start: Any, value: str) -> None:
    """It read 64 MB as 64 bytes, and an empty value as 0: a collective for each variable."""
    start(0, False, HOROVOD_FUSION_THRESHOLD="67108864")
    with pytest.raises(ConfigurationError, match=f"FUSION_THRESHOLD.*{value!r}"):
        start(0, False, HOROVOD_FUSION_THRESHOLD=value)
