"""Runs tests/ranks on real processes: the same files that pytest runs alone."""

from __future__ import annotations

import re

import pytest
from launching import horovodrun

CALLBACKS, CHECKPOINTS, USERS = (
    f"--ignore=tests/ranks/test_{name}.py" for name in ("callbacks", "checkpoints", "users")
)


# Time is short: what does not depend on the launcher, or on nodes of several slots, runs on two
# ranks under Gloo. (Checkpoints of four ranks are in test_resize.py.)
@pytest.mark.parametrize(
    ("ranks", "node_size", "launcher", "what"),
    [
        (2, "1", "mpi", f"tests/ranks {CALLBACKS} {CHECKPOINTS}"),
        (2, "2", "gloo", "tests/ranks"),
        (4, "2", "gloo", f"tests/ranks {CALLBACKS} {CHECKPOINTS} {USERS}"),
        (4, "2", "mpi", "tests/ranks/test_routes.py"),
        (3, "1", "mpi", "tests/ranks/test_routes.py"),
    ],
)
def test_the_same_tests_on_several_ranks(
    ranks: int, node_size: str, launcher: str, what: str
) -> None:
    ended = horovodrun(
        ranks,
        [
            "-m",
            "pytest",
            *what.split(),
            "-x",
            "-p",
            "no:cacheprovider",
            "--color=no",
            "-o",
            "addopts=-v",
        ],
        launcher,
        seconds=600,
        TFCOMMX_TEST_NODE_SIZE=node_size,
    )
    assert ended.status == 0, ended.output[-8000:]
    assert len(re.findall(r"=+ \d+ passed", ended.output)) == ranks, ended.output[-8000:]
