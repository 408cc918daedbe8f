"""Runs of losses.py on the virtual cluster, and the faults that they meet."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from bench import virtual_cluster

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
MEMORY = Path("/dev/shm")
# Of a run that is to meet the fault `full`: it has its own
MEMORY_BYTES = 64 << 20
# Between a full /dev/shm and the kill of a rank
FULL_STEPS = 40

FAULTS = ("kill", "node", "cut", "stop", "term", "memory", "full")
# After them as many ranks continue as before
SAME_RANKS = ("kill", "stop", "memory", "full")
# After them the node does not answer
AWAY = ("node", "cut")


class Setup(NamedTuple):
    """A training and its nodes."""

    # Of this folder, and the words behind those that all workers get
    worker: str
    words: tuple[str, ...] = ()
    nodes: int = 4
    slots: int = 1
    faults: tuple[str, ...] = ("kill", "cut")
    # Whether Horovod's own elastic mode trains it, in place of `tfcommx run`
    horovod: bool = False

    @property
    def ranks(self) -> int:
        """Return how many there are before a fault."""
        return self.nodes * self.slots


class Length(NamedTuple):
    """How long a run is."""

    epochs: int
    # Of each step, at least
    step_seconds: float = 0.1
    seed: int = 7


class Run:
    """One run: node0 of a virtual cluster has the supervisor, the others the ranks.

    Args:
        cluster: name of one that is up.
        folder: for the files of ranks and launcher.
        setup: defines the training and its nodes.
        length: of the run.
        own_memory: whether it gets a small private /dev/shm.
    """

    def __init__(
        self,
        cluster: str,
        folder: Path,
        setup: Setup,
        length: Length,
        own_memory: bool = False,
    ) -> None:
        self.cluster, self.folder, self.setup = cluster, folder, setup
        folder.mkdir(parents=True, exist_ok=True)
        worker = [*("python", str(FOLDER / setup.worker), str(folder)), *map(str, length)]
        start = virtual_cluster.command(cluster, "run", "--node", 0, "--")
        if own_memory:
            mount = f"mount -t tmpfs -o size={MEMORY_BYTES} tmpfs {MEMORY}"
            start = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *start]
        launch = self._horovodrun() if setup.horovod else self._supervisor()
        environment = {
            **os.environ,
            "PATH": f"/run/tfcommx-{cluster}:{Path(sys.executable).parent}:" + os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # A fresh cache, because measurements of earlier runs would decide for "auto"
            "TFCOMMX_CACHE": str(folder / "cache"),
        }
        self.began = time.time()
        self.process = subprocess.Popen(
            [*start, *launch, *worker, *setup.words],
            env=environment,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.memory = Path(f"/proc/{self.process.pid}/root/dev/shm") if own_memory else MEMORY
        # Times and texts of the supervisor's messages
        self.said: list[tuple[float, str]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _hosts(self) -> list[str]:
        return [f"node{node}:{self.setup.slots}" for node in range(1, self.setup.nodes + 1)]

    def _supervisor(self) -> list[str]:
        return [
            *("tfcommx", "run", "-H", ",".join(self._hosts()), "--min-np", "2"),
            # A node that is lost in a long run returns
            *("--network-interfaces", "eth0", "--blacklist-cooldown-range", "60", "60"),
            *("--generations", str(self.folder / "generations.json"), "--grow-every", "1", "--"),
        ]

    def _horovodrun(self) -> list[str]:
        """Return the words of an elastic run; its script names the hosts that there are."""
        (self.folder / "hosts").write_text("\n".join(self._hosts()) + "\n")
        script = self.folder / "discovery.sh"
        script.write_text(f"#!/bin/sh\ncat {self.folder / 'hosts'}\n")
        script.chmod(0o755)
        ranks = str(self.setup.ranks)
        return [
            *("horovodrun", "--gloo", "-np", ranks, "--min-np", "2", "--max-np", ranks),
            *("--host-discovery-script", str(script), "--network-interfaces", "eth0"),
        ]

    def _listen(self) -> None:
        assert self.process.stderr
        with (self.folder / "stderr").open("a") as log:
            for line in self.process.stderr:
                log.write(line)
                log.flush()
                if line.startswith("tfcommx: "):
                    self.said.append((time.time(), line.strip()))

    # --- its progress ----------------------------------------------------------------------

    def steps(self, generation: int) -> list[tuple[float, int, int]]:
        """Return when rank 0 of a generation has taken which step, on how many ranks."""
        path = self.folder / f"steps-{generation}"
        lines = path.read_text().splitlines() if path.exists() else []
        words = [line.split() for line in lines]
        return [(float(one[0]), int(one[1]), int(one[2])) for one in words if len(one) == 3]

    def newest_generation(self) -> int:
        """Return the last one that has taken a step; -1 if none has."""
        return max((int(path.name[6:]) for path in self.folder.glob("steps-*")), default=-1)

    def wait_for(self, generation: int, steps: int, seconds: float = 300) -> bool:
        """Wait until a generation has taken so many steps; return whether it has."""
        deadline = time.monotonic() + seconds
        while len(self.steps(generation)) < steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def noticed(self, since: float) -> float | None:
        """Return when the loss was noticed: the supervisor's first line, Horovod's error."""
        path = self.folder / "noticed"
        times = [when for when, _ in self.said]
        times += map(float, path.read_text().split()) if path.exists() else []
        return min((when for when in times if when >= since), default=None)

    def end(self, seconds: float = 600) -> int:
        """Wait for the end; return the exit status, 124 if it takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
            return 124

    def weights(self, ranks: int) -> str:
        """Return the hash of the weights; empty if the ranks differ."""
        files = [self.folder / f"weights-{rank}" for rank in range(ranks)]
        found = {file.read_text() if file.exists() else "" for file in files}
        return found.pop() if len(found) == 1 else ""

    # --- faults ----------------------------------------------------------------------------

    def rank_on(self, node: int) -> int:
        """Return the process of a rank on a node. **Raises:** ValueError if there is none."""
        space = virtual_cluster.space(self.cluster, node)
        shown = subprocess.run(["ip", "netns", "pids", space], text=True, capture_output=True)
        own = {int(path.read_text() or 0) for path in self.folder.glob("pid-*")}
        if not (found := own & set(map(int, shown.stdout.split()))):
            raise ValueError(f"no rank on node{node}")
        return max(found)

    def memory_of(self, node: int) -> list[Path]:
        """Return the folders of snapshots on a node."""
        names = [path.name.removeprefix("run-") for path in self.folder.glob("run-*")]
        found = [path for name in names for path in self.memory.glob(f"tfcommx-*-{name}-*")]
        return [path for path in found if path.name.endswith(f"-node{node}")]

    def meet(self, fault: str, node: int) -> float:
        """Cause a fault on a node; return the time. **Raises:** ValueError if it has no rank."""
        if fault == "full":
            fill(self.memory / "filler")
            self.wait_for(0, len(self.steps(0)) + FULL_STEPS)
        if fault == "memory":
            for folder in self.memory_of(node % self.setup.nodes + 1):
                newest = max(folder.rglob("residuals-*.npz"), key=lambda one: one.name)
                newest.write_bytes(newest.read_bytes()[:-100])
        when = time.time()
        if fault in AWAY:
            virtual_cluster.call(self.cluster, {"cut": "cut", "node": "kill"}[fault], node)
            for folder in self.memory_of(node) if fault == "node" else ():
                shutil.rmtree(folder)
            if self.setup.horovod:
                others = [host for host in self._hosts() if not host.startswith(f"node{node}:")]
                (self.folder / "hosts").write_text("\n".join(others) + "\n")
        else:
            kind = {"stop": signal.SIGSTOP, "term": signal.SIGTERM}.get(fault, signal.SIGKILL)
            os.kill(self.rank_on(node), kind)
        return when


def fill(path: Path) -> None:
    """Write a file until nothing is free where it lies."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:  # Full
                continue
