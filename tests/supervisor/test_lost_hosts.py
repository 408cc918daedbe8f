"""Hosts of a virtual cluster that are cut off, lose power, or stop a rank: the run continues."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_ranks
from launching import QUICK, WORKERS
from virtual_cluster import Nodes, end, needs_cluster, wait_until

PYTHON_PROGRAM = str(WORKERS / "elastic_train.py")
pytestmark = [
    pytest.mark.long_wait,
    needs_cluster,
]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes("lost")
    nodes.up()
    yield nodes
    nodes.end_ranks()
    nodes.down()


def test_a_cut_cable_costs_the_host_only(nodes: Nodes, tmp_path: Path) -> None:
    """The rank that is left continues from the snapshot in its memory."""
    log, table, now = tmp_path / "log", tmp_path / "generations.json", tmp_path / "now"
    log.touch()
    # Rank 0 says when: 5 s of silence, then the rest
    told = {"faults": {"0": [0, 17, f"hosts {now} now"]}, "step_seconds": 0.2}
    program = [
        "python",
        str(WORKERS / "supervised_fit.py"),
        str(tmp_path / "run"),
        json.dumps(told),
    ]
    options = ["-H", "node1:1,node2:1", "--min-np", "1", "--generations", str(table)]
    command = ["tfcommx", "run", *options, "--network-interfaces", "eth0", "--", *program]
    process = nodes.start(0, command, log, PYTHONPATH=QUICK, **warm_ranks.environment())
    try:
        wait_until(lambda: now.exists() or process.poll() is not None, 120, "the step")
        nodes.do("cut", 2)
        wait_until(lambda: process.poll() is not None, 180, "the end of the run")
    finally:
        end(process)
    said = log.read_text()
    assert process.returncode == 0, said
    assert "tfcommx: node2 with rank 1 does not answer" in said
    before, after = json.loads(table.read_text())["generations"]
    assert (before["ranks"], after["ranks"]) == (2, 1)
    assert after["resumed"]["source"] == "memory" and after["steps"] == 36
    # One every 5 steps; the newest may have been on its way
    assert before["steps"] - after["resumed"]["total"] <= 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["cut", "kill", "stop"])
def test_a_lost_host_is_left_out_and_the_others_go_on(
    nodes: Nodes, tmp_path: Path, fault: str
) -> None:
    log = tmp_path / "log"
    log.touch()
    options = ["-H", "node0:1,node1:1,node2:1", "--min-np", "2", "--reset-limit", "1"]
    command = ["tfcommx", "run", *options, "--network-interfaces", "eth0", "--"]
    process = nodes.start(
        0, [*command, "python", PYTHON_PROGRAM, str(tmp_path / "run"), "slow"], log
    )
    try:
        begun = tmp_path / "run" / "checkpoint.json"
        wait_until(begun.exists, 120, "the first checkpoint")
        if fault == "stop":
            # Node1 has one rank, its watcher, and the process that relays its output
            ranks = [one for one in nodes.ranks() if one.cmdline()[1:2] == [PYTHON_PROGRAM]]
            ranks[0].send_signal(signal.SIGSTOP)
        else:
            nodes.do(fault, 2)
        wait_until(lambda: process.poll() is not None, 180, "the end of the run")
    finally:
        end(process)
    said = log.read_text()
    assert process.returncode == 0, said
    if fault == "stop":
        assert re.search(r"tfcommx: No response from rank \d on node\d: stopped, or cut off", said)
        assert "tfcommx: Generation 1 starts on 3 ranks: node0:1,node1:1,node2:1." in said
    else:
        assert "tfcommx: node2 with rank 2 does not answer" in said, said
        assert "tfcommx: node2 is left out for 60 s." in said
        assert "tfcommx: Generation 1 starts on 2 ranks: node0:1,node1:1." in said
    found = re.findall(r"rank \d begins with epoch (\d+)", said)
    assert int(found[-1]) > 0
    assert len(set(re.findall(r"rank \d ends after epoch 60 with weights (\w+)", said))) == 1


@pytest.mark.exhaustive
def test_ranks_on_other_hosts_that_do_not_watch_each_other_are_ended(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Rank 1 waits for rank 2 for ever; ssh does not end it. Later node1 says that it leaves."""
    log, run = tmp_path / "log", tmp_path / "run"
    run.mkdir()
    options = ["-H", "node0:1,node1:1,node2:1", "--min-np", "2", "--network-interfaces", "eth0"]
    faults = ["0:2:15:SIGKILL", "1:0:25:leaving node1"]
    program = ["python", str(WORKERS / "elastic_rank.py"), str(run), "40", *faults]
    ended = nodes.run(["tfcommx", "run", *options, "--", *program], log, 90)
    assert ended.status == 0, ended.output
    assert "tfcommx: Rank 2 on node2 was killed by SIGKILL, at step 15." in ended.output
    assert "tfcommx: node1 leaves (SIGTERM), at step 25." in ended.output
    assert "tfcommx: Generation 2 starts on 2 ranks: node0:1,node2:1." in ended.output
    assert not nodes.ranks()
