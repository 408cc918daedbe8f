"""Runs tests/ranks on real processes: the same files that pytest runs alone.

test_real_ranks_of_models.py runs the other half on two ranks, beside this file: the tests of one
file are run one after the other.
"""

from __future__ import annotations

import pytest
from launching import run_tests

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


# Two nodes of one rank under Gloo run all tests; one node of two and two nodes of two under MPI,
# which has all routes, run tests that depend on nodes or messages. (Four ranks under Gloo are in
# `make demo`, its test and the cluster's; checkpoints of four ranks in test_resize.py.)
@pytest.mark.long_wait
@pytest.mark.parametrize(
    ("ranks", "node_size", "launcher", "files"),
    [
        (2, "1", "gloo", [OPTIMIZER]),
        (2, "2", "mpi", [OPTIMIZER]),
        (4, "2", "mpi", [SHARDS, RESHUFFLE, ROUTES]),
        (3, "1", "mpi", [ROUTES]),
        pytest.param(4, "2", "mpi", [FIT], marks=pytest.mark.exhaustive),
        pytest.param(
            4, "2", "gloo", [FIT, SHARDS, RESHUFFLE, ROUTES], marks=pytest.mark.exhaustive
        ),
    ],
    ids=["2-gloo-optimizer", "2-mpi", "4-mpi", "3-mpi", "4-mpi-fit", "4-gloo"],
)
def test_the_same_tests_on_several_ranks(
    ranks: int, node_size: str, launcher: str, files: list[str], request: pytest.FixtureRequest
) -> None:
    """Run tests marked `every_launch` in each launch, others on two ranks; all if exhaustive."""
    only = [] if (ranks, launcher) == (2, "gloo") else ["every_launch"]
    if "not exhaustive" in request.config.option.markexpr:
        marks = " and ".join([*only, "not exhaustive"])
    else:
        marks = ""
    run_tests(ranks, node_size, launcher, files, marks)
