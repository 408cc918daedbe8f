"""Runs tests/ranks on real processes: the same files that pytest runs alone."""

from __future__ import annotations

import re

import pytest
from launching import horovodrun

OPTIMIZER, FIT, SHARDS, ROUTES, RESHUFFLE = (
    f"tests/ranks/{name}"
    for name in (
        "optimizer",
        "optimizer/test_identity_and_fit.py",
        "optimizer/test_sharding_in_fit.py",
        "test_routes.py",
        "test_reshuffle_on_ranks.py",
    )
)


def what_failed(output: str) -> str:
    """Return the lines of all ranks that name a failure, then the end of the output."""
    lines = output.splitlines()
    named = [line for line in lines if re.search(r"FAILED|: ?E  |Error|tfcommx: ", line)]
    return "\n".join([*named[:60], "...", *lines[-40:]])


# Two nodes of one rank under Gloo run all tests; one node of two and two nodes of two under MPI,
# which has all routes, run tests that depend on nodes or messages. (Four ranks under Gloo are in
# `make demo`, its test and the cluster's; checkpoints of four ranks in test_resize.py.)
@pytest.mark.long_wait
@pytest.mark.parametrize(
    ("ranks", "node_size", "launcher", "files"),
    [
        (2, "1", "gloo", ["tests/ranks"]),
        (2, "2", "mpi", [OPTIMIZER, RESHUFFLE]),
        (4, "2", "mpi", [FIT, SHARDS, RESHUFFLE, ROUTES]),
        (3, "1", "mpi", [ROUTES]),
        pytest.param(
            4, "2", "gloo", [FIT, SHARDS, RESHUFFLE, ROUTES], marks=pytest.mark.exhaustive
        ),
    ],
    ids=["2-gloo", "2-mpi", "4-mpi", "3-mpi", "4-gloo"],
)
def test_the_same_tests_on_several_ranks(
    ranks: int, node_size: str, launcher: str, files: list[str], request: pytest.FixtureRequest
) -> None:
    """Run tests marked `every_launch` in each launch, others on two ranks; all if exhaustive."""
    only = [] if files == ["tests/ranks"] else ["every_launch"]
    if "not exhaustive" in request.config.option.markexpr:
        marks = " and ".join([*only, "not exhaustive"])
    else:
        marks = ""
    ended = horovodrun(
        ranks,
        [
            "-m",
            "pytest",
            *files,
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--color=no",
            "-o",
            f"addopts=-v -m '{marks}'",
        ],
        launcher,
        seconds=1500,
        TFCOMMX_TEST_NODE_SIZE=node_size,
    )
    assert ended.status == 0, what_failed(ended.output)
    assert len(re.findall(r"=+ \d+ passed", ended.output)) == ranks, what_failed(ended.output)
