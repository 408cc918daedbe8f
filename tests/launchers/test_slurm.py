"""On a real Slurm: batch jobs, allocations, the time limit, and jobs that are requeued.

The batch files are those of docs/how-to/slurm.md.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from launching import ROOT, WORKERS
from saved import left
from slurm import Slurm
from starts import PYTHON
from virtual_cluster import Nodes, wait_until

FILES = ROOT / "scripts" / "examples" / "slurm"
DISCOVERY = ROOT / "scripts" / "examples" / "discovery" / "slurm.sh"
PAGE = ROOT / "docs" / "how-to" / "slurm.md"
PROGRAM = [PYTHON, str(WORKERS / "launched.py")]
RECIPE = "paced.yaml"
SECONDS = 240.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

on_slurm = [
    pytest.mark.exhaustive,
    pytest.mark.long_wait,
]


def marked(test: object) -> object:
    """Mark a test of a real Slurm."""
    for mark in on_slurm:
        test = mark(test)
    return test


@pytest.mark.parametrize("path", sorted(FILES.glob("*.sh")), ids=lambda path: path.name)
def test_the_page_shows_the_batch_files_that_are_run(path: Path) -> None:
    assert f"```bash\n{path.read_text()}```\n" in PAGE.read_text(), f"{path} differs from {PAGE}"


def job_output(slurm: Slurm, job: int) -> str:
    """Return the output of a job that was submitted in the test's folder."""
    return (slurm.folder / f"slurm-{job}.out").read_text(errors="replace")


def weights(output: str) -> dict[str, str]:
    return dict(re.findall(r"rank (\d) weights ([0-9a-f]{16})", output))


@marked
@pytest.mark.parametrize("name", ["srun.sh", "run.sh"])
def test_a_batch_job_trains_on_its_allocation(slurm: Slurm, name: str) -> None:
    job = slurm.submit(FILES / name, *PROGRAM)
    found = slurm.wait_for(job, ENDED, SECONDS)
    output = job_output(slurm, job)
    assert found["JobState"] == "COMPLETED", output[-6000:]
    assert len(re.findall(r"rank \d 2 x 2", output)) == 4, output[-6000:]
    assert len(weights(output)) == 4 and len(set(weights(output).values())) == 1


@marked
def test_a_supervised_job_goes_on_without_a_rank_that_was_killed(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hosts come from the discovery script; the second start trains to the end."""
    monkeypatch.setitem(slurm.nodes.environment, "DISCOVERY", str(DISCOVERY))
    once = slurm.folder / "once.sh"
    once.write_text('[ "$TFCOMMX_GENERATION" = 0 ] && exec "$@" kill 3\nexec "$@"\n')
    job = slurm.submit(FILES / "elastic.sh", "bash", once, *PROGRAM)
    found = slurm.wait_for(job, ENDED, SECONDS)
    output = job_output(slurm, job)
    assert found["JobState"] == "COMPLETED", output[-6000:]
    assert "tfcommx: Rank 3 on node2 was killed by SIGKILL" in output
    assert "tfcommx: Generation 1 starts on 4 ranks: node1:2,node2:2." in output
    assert len(weights(output)) == 4 and len(set(weights(output).values())) == 1


@marked
@pytest.mark.parametrize(
    "words", [["mpirun", "--bind-to", "none"], ["tfcommx", "run", "--mpi", "--"]], ids=" ".join
)
def test_mpi_reads_the_allocation_of_salloc(
    nodes: Nodes, slurm: Slurm, words: list[str], tmp_path: Path
) -> None:
    command = ["salloc", "-N2", "--ntasks-per-node=2", *words, *PROGRAM]
    ended = nodes.run(command, tmp_path / "log", SECONDS)
    assert ended.status == 0, ended.output[-6000:]
    assert len(re.findall(r"rank \d 2 x 2", ended.output)) == 4, ended.output[-6000:]


ORDERS = {
    # Words of srun -> ranks of node1
    ("-n4", "--distribution=arbitrary"): {2, 3},
    ("-n4", "-N2", "--distribution=plane=2"): {0, 1},
    ("-wnode2", "-n2", ":", "-wnode1", "-n2"): {2, 3},
}


@marked
@pytest.mark.parametrize("words", ORDERS, ids=" ".join)
def test_srun_places_ranks_in_any_order_of_nodes(
    nodes: Nodes, slurm: Slurm, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Rank 0 was looked for on the first node of a sorted list, for 300 s."""
    order = tmp_path / "order"
    order.write_text("node2\nnode2\nnode1\nnode1\n")
    say = (
        "import os, time, tfcommx as cx; start = time.monotonic(); cx.init(); "
        "print('rank', cx.rank(), cx.size(), os.uname()[1], time.monotonic() - start)"
    )
    hostfile = {"SLURM_HOSTFILE": str(order)} if words[1] == "--distribution=arbitrary" else {}
    parts = " ".join(words).split(" : ")
    command = [word for part in parts for word in (*part.split(), PYTHON, "-c", say, ":")][:-1]
    ended = nodes.run(["srun", *command], tmp_path / "log", SECONDS, **hostfile)
    assert ended.status == 0, ended.output[-6000:]
    ranks = re.findall(r"rank (\d) 4 (node\d) ([\d.]+)", ended.output)
    on_node1 = {int(rank) for rank, node, _ in ranks if node == "node1"}
    assert len(ranks) == 4 and on_node1 == ORDERS[words]
    # Without the time that the job waits for its nodes
    assert max(float(seconds) for *_, seconds in ranks) < 60


@marked
def test_ranks_that_srun_places_in_turns_are_refused(
    nodes: Nodes, slurm: Slurm, tmp_path: Path
) -> None:
    command = ["srun", "-n4", "-N2", "--distribution=cyclic", *PROGRAM]
    ended = nodes.run(command, tmp_path / "log", SECONDS, TFCOMMX_RENDEZVOUS_SECONDS="100")
    assert ended.status != 0 and "100 s" not in ended.output
    # On each rank: rank 0 ended with its rendezvous before others had read the hosts
    assert ended.output.count("PlanError: Rank 0: Consecutive ranks are required on each") == 3


@marked
def test_a_batch_script_without_srun_is_one_process(slurm: Slurm, tmp_path: Path) -> None:
    """The job has several tasks; a process that its script starts directly is none of them."""
    script = tmp_path / "one.sh"
    say = "from tfcommx.launch.launcher import launcher; print(launcher())"
    script.write_text(f'#!/bin/bash\n#SBATCH -N2 -n4\n{PYTHON} -c "{say}"\n')
    job = slurm.submit(script)
    slurm.wait_for(job, ENDED, SECONDS)
    assert "kind='none', rank=0, size=1" in job_output(slurm, job), job_output(slurm, job)


# --- jobs that are requeued -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(slurm: Slurm) -> dict[str, bytes]:
    """The last checkpoint of an uninterrupted run."""
    for name in (RECIPE, "paced.py"):  # Jobs start in this folder
        shutil.copy(WORKERS / name, slurm.folder)
    folder = slurm.folder / "whole"
    words = ["tfcommx", "train", RECIPE, "--output", folder]
    job = slurm.submit("--export=ALL,PACED_SECONDS=0", FILES / "srun.sh", *words)
    found = slurm.wait_for(job, ENDED, SECONDS)
    assert found["JobState"] == "COMPLETED", job_output(slurm, job)[-6000:]
    return left(folder)


def requeued(slurm: Slurm, job: int, whole: dict[str, bytes]) -> None:
    """Wait until a job has run again, and compare its last checkpoint."""
    wait_until(lambda: slurm.state(job)["Restarts"] == "1", SECONDS, f"job {job}'s second start")
    first = job_output(slurm, job)
    assert "and saved" in first, first[-6000:]
    found = slurm.wait_for(job, ENDED, SECONDS)
    output = job_output(slurm, job)
    assert found["JobState"] == "COMPLETED", output[-6000:]
    folder = slurm.folder / "runs" / f"train-{job}"
    assert "stopped" not in json.loads((folder / "summary.json").read_text())
    assert left(folder) == whole


@marked
def test_a_signal_to_the_job_saves_requeues_and_goes_on(
    slurm: Slurm, whole: dict[str, bytes]
) -> None:
    job = slurm.submit(FILES / "requeue.sh", RECIPE)
    folder = slurm.folder / "runs" / f"train-{job}"
    wait_until((folder / "checkpoint" / "checkpoint.json").exists, SECONDS, "the first epoch")
    slurm.do("scancel", "--signal=TERM", "--batch", job)
    requeued(slurm, job, whole)


@marked
def test_a_signal_to_the_ranks_does_the_same(slurm: Slurm, whole: dict[str, bytes]) -> None:
    """As Slurm sends it before it takes the nodes for another job."""
    job = slurm.submit(FILES / "requeue.sh", RECIPE)
    folder = slurm.folder / "runs" / f"train-{job}"
    wait_until((folder / "checkpoint" / "checkpoint.json").exists, SECONDS, "the first epoch")
    slurm.do("scancel", "--signal=TERM", job)
    requeued(slurm, job, whole)


@marked
def test_the_time_limit_saves_requeues_and_goes_on(slurm: Slurm, whole: dict[str, bytes]) -> None:
    """Slurm may send the signal up to 60 s earlier than asked."""
    job = slurm.submit("--time=4", "--signal=B:TERM@120", FILES / "requeue.sh", RECIPE)
    requeued(slurm, job, whole)
