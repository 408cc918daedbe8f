"""The nodes and the Slurm that the tests of launchers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import Slurm
from slurm import why_not as why_no_slurm
from virtual_cluster import Nodes, why_not


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """node0 with the user's commands, node1 and node2 for the ranks."""
    if reason := why_not():
        pytest.skip(reason)
    made = Nodes("l")
    made.up()
    yield made
    made.down()


@pytest.fixture(scope="session")
def slurm(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm on these nodes."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    made = Slurm(nodes, Path(tmp_path_factory.mktemp("slurm")))
    try:
        made.start()
        yield made
    finally:
        made.stop()
