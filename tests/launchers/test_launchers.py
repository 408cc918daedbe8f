"""One script, unchanged, under each launcher: the same weights, and no failure that hangs.

The nodes are those of the virtual cluster, with real links; Slurm and torchrun are real. Needs
root; a launcher that is not installed is skipped and says so.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import WORKERS
from starts import LAUNCHERS, LEAVES_A_LATE_RANK, PYTHON, SLURM, why_not
from virtual_cluster import Nodes, end, wait_until

PROGRAM = [PYTHON, str(WORKERS / "launched.py")]
REFERENCE = "horovodrun --gloo"
# Limits for a launch's training, and for its end after a fault; 8 processes may share 2 cores
START_SECONDS, END_SECONDS = 400.0, 60.0

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.long_wait,
]


class Launch:
    """The processes of one launch, and their output."""

    def __init__(self, nodes: Nodes, launcher: str, log: Path, *fault: str, **more: str) -> None:
        self.nodes, self.log = nodes, log
        self.processes = [
            nodes.start(start.node, start.words, log, **start.environment, **more)
            for start in LAUNCHERS[launcher]([*PROGRAM, *fault])
        ]

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def statuses(self, seconds: float, what: str) -> list[int]:
        """Wait for the end; return the exit statuses."""
        try:
            wait_until(self.ended, seconds, f"the end {what}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-6000:]}") from None
        return [process.returncode for process in self.processes]


@contextlib.contextmanager
def launched(
    nodes: Nodes, launcher: str, folder: Path, *fault: str, **more: str
) -> Iterator[Launch]:
    """Start a launch; afterwards nothing of it is left, nor a cable unplugged."""
    if reason := why_not(launcher):
        pytest.skip(reason)
    launch = Launch(nodes, launcher, folder / "log", *fault, **more)
    try:
        yield launch
    finally:
        nodes.end_ranks()
        for process in launch.processes:
            end(process)


@functools.cache
def weights(nodes: Nodes, launcher: str, folder: Path) -> dict[int, str]:
    """Return the hash of each rank's weights after a launch to its end."""
    with launched(nodes, launcher, folder) as launch:
        statuses = launch.statuses(START_SECONDS, "of the training")
        assert not any(statuses), launch.output[-6000:]
        # Launchers may join lines that two ranks print at once
        assert len(re.findall(r"rank \d 2 x 2", launch.output)) == 4, launch.output[-6000:]
        found = re.findall(r"rank (\d) weights ([0-9a-f]{16})", launch.output)
        return {int(rank): value for rank, value in found}


@pytest.fixture
def needed(launcher: str, request: pytest.FixtureRequest) -> None:
    """Request the fixtures that this launcher needs."""
    if launcher in SLURM:
        request.getfixturevalue("slurm")


@pytest.fixture(scope="session")
def reference(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The weights that all launches must end with."""
    found = weights(nodes, REFERENCE, tmp_path_factory.mktemp("reference"))
    assert sorted(found) == [0, 1, 2, 3] and len(set(found.values())) == 1
    return found


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != REFERENCE])
def test_the_same_script_ends_with_the_same_weights(
    nodes: Nodes, launcher: str, reference: dict[int, str], needed: None, tmp_path: Path
) -> None:
    assert weights(nodes, launcher, tmp_path) == reference


def none_left(launch: Launch, seconds: float) -> None:
    """Wait until no process of the ranks is left, their watchers included."""
    deadline = time.monotonic() + seconds
    while left := launch.nodes.ranks():
        assert time.monotonic() < deadline, f"{left}\n{launch.output[-6000:]}"
        time.sleep(0.2)


def under_way(launch: Launch) -> None:
    """Wait until all ranks train."""
    wait_until(
        lambda: "under way" in launch.output or launch.ended(), START_SECONDS, "the first steps"
    )
    assert "under way" in launch.output, launch.output[-6000:]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_is_killed_ends_all_and_is_named(
    nodes: Nodes, launcher: str, needed: None, tmp_path: Path
) -> None:
    with launched(nodes, launcher, tmp_path, "kill", "2") as launch:
        under_way(launch)
        assert any(launch.statuses(END_SECONDS, "after the kill"))
        none_left(launch, END_SECONDS)
        assert re.search(r"[Rr]ank 2\b|[Pp]rocess (name: )?2\b|task 2\b", launch.output), (
            launch.output[-6000:]
        )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_cable_that_is_cut_ends_all_ranks_on_both_sides(
    nodes: Nodes, launcher: str, needed: None, tmp_path: Path
) -> None:
    """The launcher may do anything: ssh and Slurm wait for the node's return."""
    with launched(nodes, launcher, tmp_path, "long", "2") as launch:
        under_way(launch)
        nodes.do("cut", 2)
        try:
            none_left(launch, END_SECONDS)
        finally:
            nodes.do("heal", 2)
        assert any(launch.statuses(2 * END_SECONDS, "after the cut"))
        assert re.search(r"rank [23] on node2 \(", launch.output), launch.output[-6000:]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_does_not_come_is_named_by_those_that_have_come(
    nodes: Nodes, launcher: str, needed: None, tmp_path: Path
) -> None:
    limit = {"TFCOMMX_RENDEZVOUS_SECONDS": "60"}
    with launched(nodes, launcher, tmp_path, "late", "3", **limit) as launch:
        began = time.monotonic()
        if launcher in LEAVES_A_LATE_RANK:
            wait_until(
                lambda: "Rank 3" in launch.output and len(nodes.ranks()) == 1,
                START_SECONDS,
                "the end of the ranks that came",
            )
        else:
            assert any(launch.statuses(START_SECONDS, "without rank 3"))
            none_left(launch, END_SECONDS)
        assert re.search(r"Rank 3\b", launch.output), launch.output[-6000:]
        assert time.monotonic() - began < START_SECONDS


def test_where_no_launcher_is_left_nothing_is_left(nodes: Nodes) -> None:
    """The last test of this file: all processes of the earlier ones have ended."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert names.count(f"tfcommx-{nodes.name}-") == 4 and not nodes.ranks()
