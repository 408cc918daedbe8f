"""The hosts of a supervised run are those of a Ray cluster: one joins, and the run grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import ROOT, WORKERS
from starts import PYTHON, ray_node, why_not
from virtual_cluster import Nodes, end, wait_until

SCRIPT = ROOT / "scripts" / "examples" / "discovery" / "ray_nodes.py"

REASON = why_not("tfcommx.ray")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.long_wait,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]


def test_a_node_that_joins_ray_joins_the_run(nodes: Nodes, tmp_path: Path) -> None:
    """The supervisor's own host is the only one at first; the run ends soon after it has grown."""
    log = tmp_path / "log"
    log.touch()
    command = ["tfcommx", "run", "--min-np", "1", "--slots", "1", "--network-interfaces", "eth0"]
    command += ["--host-discovery-script", f"{PYTHON} {SCRIPT}", "--", "python"]
    # Rank 0 says when it trains
    now = tmp_path / "now"
    told = {"faults": {"0": [0, 12, f"hosts {now} now"]}, "step_seconds": 0.1}
    told |= {"epochs": 1000, "last_generation": 1}
    command += [str(WORKERS / "supervised_fit.py"), str(tmp_path / "run"), json.dumps(told)]
    head, joins = ray_node(1, "lead", "node1", *command), ray_node(2, "join", "node1")
    started = [nodes.start(head.node, head.words, log)]
    try:
        wait_until(lambda: now.exists() or started[0].poll() is not None, 300, "the step")
        started.append(nodes.start(joins.node, joins.words, log))
        wait_until(lambda: started[0].poll() is not None, 300, "the end of the run")
        wait_until(lambda: started[1].poll() is not None, 60, "the end of Ray on node2")
    finally:
        for process in started:
            end(process)
        nodes.end_ranks()
    said = log.read_text()
    assert started[0].returncode == 0, said
    both = "10.200.0.2:1,10.200.0.3:1"
    assert f"tfcommx: 2 ranks can run in place of 1, on {both}." in said, said
    assert f"tfcommx: Generation 1 starts on 2 ranks: {both}." in said, said
