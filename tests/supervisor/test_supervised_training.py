"""Trainings under a supervisor lose ranks and hosts, continue, and end with the same bits.

Two names of this host stand for two hosts: each has its own folder of shared memory, and that of
the host that is lost is deleted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import warm_ranks
from launching import QUICK, ROOT, WORKERS

from tfcommx.supervisor.sweep import MEMORY

TWO_HOSTS = ("-H", "localhost:1,127.0.0.1:1")
SPARSE = {"route": "hitopk", "selection": "mstopk", "density": 0.05}


class Trained:
    """A run that has ended: its generations, and the weights of its ranks at the end."""

    def __init__(self, folder: Path, words: tuple[str, ...], program: str, options: dict) -> None:
        table = folder / "generations.json"
        command = [str(WORKERS / program), str(folder / "run"), json.dumps(options)]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tfcommx.cli.main", "run", *words),
                *("--min-np", "1", "--generations", str(table), "--", "python", *command),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment()},
            text=True,
            capture_output=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.errors = done.stderr
        self.generations = json.loads(table.read_text())["generations"]
        found = re.findall(r"rank (\d+) of (\w+) weights (\w+)", done.stdout)
        assert len({rank for rank, _, _ in found}) == self.generations[-1]["ranks"]
        ((run, self.weights),) = {(run, weights) for _, run, weights in found}
        # Nothing of its memory stays
        assert not list(MEMORY.glob(f"tfcommx-{os.getuid()}-{run}-*"))

    @property
    def sources(self) -> list[str]:
        return [one["resumed"]["source"] for one in self.generations]


@pytest.mark.extended
@pytest.mark.long_wait
def test_a_host_is_lost_and_the_weights_are_the_same_bits(tmp_path: Path) -> None:
    """Rank 1 is killed, and its host's memory is lost: the mirror has its snapshot.

    Three steps later the other host's is, too, which had the only copy of rank 1's snapshot. Then
    rank 0 is killed, and its host's newest files are damaged: the other host's are used. The log of
    the epochs, which each generation had begun anew, is whole.
    """
    options = {"optimizer": "SGD", "scheme": SPARSE, "logs": True}
    undisturbed = Trained(tmp_path, TWO_HOSTS, "supervised_fit.py", options)
    # Four steps after a snapshot, so long that it is whole on a busy machine, too
    faults = {"0": [1, 19, "kill with memory"], "1": [0, 18, "kill with memory"]}
    faults["2"] = [0, 29, "kill with damaged memory"]
    options |= {"faults": faults, "step_seconds": 0.3}
    disturbed = Trained(tmp_path / "disturbed", TWO_HOSTS, "supervised_fit.py", options)
    assert disturbed.sources == ["start", "memory", "memory", "memory"], disturbed.errors
    assert [one["resumed"]["total"] for one in disturbed.generations[1:]] == [15, 16, 25]
    assert "Rank 1 on 127.0.0.1 was killed by SIGKILL" in disturbed.errors
    assert disturbed.weights == undisturbed.weights
    logs = [folder / "run.csv" for folder in (tmp_path, tmp_path / "disturbed")]
    assert logs[0].read_text() == logs[1].read_text() and logs[0].read_text().count("\n") == 4


@pytest.mark.exhaustive  # test_supervised_runs.py has both, without TensorFlow
def test_a_host_joins_and_leaves_again(tmp_path: Path) -> None:
    """From two ranks to three, and back by SIGTERM: the ranks save first, no step is repeated.

    They join when it pays: on a busy machine, where a start takes long, after many steps.
    """
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    options = {
        "scheme": SPARSE | {"route": "allgather"},  # One level: the hosts become unequal
        "faults": {
            "0": [0, 13, f"hosts {hosts} localhost:2 127.0.0.1:1"],
            "1": [2, 20, "term"],
        },
        "relative": True,
        "step_seconds": 0.1,
        "last_generation": 2,
        "epochs": 1000,
    }
    words = ("--host-discovery-script", f"cat {hosts}")
    run = Trained(tmp_path, words, "supervised_fit.py", options)
    assert [one["ranks"] for one in run.generations] == [2, 3, 2], run.errors
    assert run.sources == ["start", "memory", "memory"]
    for before, after in pairwise(run.generations):
        assert after["resumed"]["total"] >= before["steps"]
    assert "127.0.0.1 leaves (SIGTERM)" in run.errors and "it pays after" in run.errors


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict], str]:
    """Return the weights of a run without a fault, which is trained once for all its faults."""
    known: dict[str, str] = {}

    def weights(options: dict) -> str:
        key = json.dumps(options)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[key] = Trained(folder, TWO_HOSTS, "supervised_fit.py", options).weights
        return known[key]

    return weights


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["kill", "kill with memory", "kill with damaged memory", "term", "stop"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "SGD", "scheme": SPARSE},
        {"strategy": "sharded", "scheme": {"route": "allreduce"}},
        {"strategy": "rebroadcast", "scheme": {"route": "allreduce"}},
    ],
    ids=["hitopk", "sharded", "rebroadcast"],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_every_fault_of_every_training(
    victim: int,
    options: dict,
    kind: str,
    undisturbed: Callable[[dict], str],
    tmp_path: Path,
) -> None:
    # Half a second after the snapshot, so that a host that leaves hears of it in time
    faulty = options | {"faults": {"0": [victim, 17, kind]}, "step_seconds": 0.1}
    # A host that leaves may be used again at once: two ranks are the fewest
    words = (*TWO_HOSTS, "--blacklist-cooldown-range", "0.1", "0.1", "-np", "2")
    disturbed = Trained(tmp_path, words, "supervised_fit.py", faulty)
    assert disturbed.sources[:2] == ["start", "memory"]
    if kind != "term":
        assert disturbed.weights == undisturbed(options)


@pytest.mark.exhaustive
def test_a_loop_with_two_optimizers(tmp_path: Path) -> None:
    undisturbed = Trained(tmp_path, TWO_HOSTS, "supervised_loop.py", {})
    faults = {"faults": {"0": [1, 17, "kill"], "1": [0, 31, "kill"]}}
    disturbed = Trained(tmp_path / "disturbed", TWO_HOSTS, "supervised_loop.py", faults)
    assert disturbed.sources == ["start", "memory", "memory"], disturbed.errors
    assert disturbed.weights == undisturbed.weights


@pytest.mark.exhaustive
def test_without_memory_the_last_file_counts(tmp_path: Path) -> None:
    """Both hosts lose their memory."""
    options = {"faults": {"0": [1, 17, "kill with all memory"]}}
    run = Trained(tmp_path, TWO_HOSTS, "supervised_fit.py", options)
    assert run.sources == ["start", "file"] and run.generations[1]["resumed"]["total"] == 12
    undisturbed = Trained(tmp_path / "undisturbed", TWO_HOSTS, "supervised_fit.py", {})
    assert run.weights == undisturbed.weights
