"""Runs tests/ranks on real processes: the same files that pytest runs alone.

test_real_ranks_of_models.py runs the other half on two ranks, beside this file: the tests of one
file are run one after the other.
"""

from __future__ import annotations

import pytest
from drawing import case, extended
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


# Two nodes of one rank under Gloo run all tests, in two launches; one node of two and two nodes of
# two under MPI, which has all routes, run tests that depend on nodes or messages. (Four ranks under
# Gloo are in `make demo`, its test and the cluster's; checkpoints of four ranks in test_resize.py.)
@pytest.mark.long_wait
@pytest.mark.parametrize(
    ("ranks", "node_size", "launcher", "files", "marks"),
    [
        (2, "1", "gloo", [OPTIMIZER], "not extended"),
        extended(2, "1", "gloo", [OPTIMIZER], "extended"),
        (2, "2", "mpi", [OPTIMIZER], "every_launch"),
        extended(4, "2", "mpi", [SHARDS, RESHUFFLE, ROUTES], "every_launch"),
        (3, "1", "mpi", [ROUTES], "every_launch"),
        case(4, "2", "mpi", [FIT], "every_launch", kept=False),
        case(4, "2", "gloo", [FIT, SHARDS, RESHUFFLE, ROUTES], "every_launch", kept=False),
    ],
    ids=["2-gloo", "2-gloo-extended", "2-mpi", "4-mpi", "3-mpi", "4-mpi-fit", "4-gloo"],
)
def test_the_same_tests_on_several_ranks(
    ranks: int,
    node_size: str,
    launcher: str,
    files: list[str],
    marks: str,
    request: pytest.FixtureRequest,
) -> None:
    """Run tests with the marks, of which `make test-all` runs those of all launches in each."""
    if "not exhaustive" in request.config.option.markexpr:
        marks += " and not exhaustive"
    elif marks == "every_launch":
        marks = ""
    run_tests(ranks, node_size, launcher, files, marks)
