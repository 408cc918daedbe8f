"""The hosts of a supervised run are those of a Ray cluster: one joins, and the run grows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import ROOT, WORKERS
from starts import PYTHON, ray_node, why_not
from virtual_cluster import Nodes, end, wait_until

SCRIPT = ROOT / "scripts" / "examples" / "discovery" / "ray_nodes.py"

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.long_wait,
    pytest.mark.xdist_group("launchers"),
    pytest.mark.skipif(bool(why_not("tfcommx.ray")), reason=why_not("tfcommx.ray")),
]


def test_a_node_that_joins_ray_joins_the_run(nodes: Nodes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    command = ["tfcommx", "run", "--min-np", "1", "--slots", "1", "--network-interfaces", "eth0"]
    command += ["--host-discovery-script", f"{PYTHON} {SCRIPT}", "--", "python"]
    command += [str(WORKERS / "elastic_train.py"), str(tmp_path / "run"), "slow"]
    head, joins = ray_node(1, "lead", "node1", *command), ray_node(2, "join", "node1")
    started = [nodes.start(head.node, head.words, log)]
    try:
        begun = "rank 0 begins with epoch 0"
        wait_until(lambda: begun in log.read_text() or started[0].poll() is not None, 300, begun)
        started.append(nodes.start(joins.node, joins.words, log))
        wait_until(lambda: started[0].poll() is not None, 300, "the end of the run")
        wait_until(lambda: started[1].poll() is not None, 60, "the end of Ray on node2")
    finally:
        for process in started:
            end(process)
        nodes.end_ranks()
    said = log.read_text()
    assert started[0].returncode == 0, said
    assert "tfcommx: Generation 0 starts on 1 rank: 10.200.0.2:1." in said, said
    assert "2 ranks can run in place of 1, on 10.200.0.2:1,10.200.0.3:1." in said, said
    (first,) = re.findall(r"rank 1 begins with epoch (\d+)", said)
    assert int(first) > 0
    weights = re.findall(r"rank \d ends after epoch 60 with weights (\w+)", said)
    assert len(weights) == 2 and len(set(weights)) == 1
