"""Metrics over ranks that looked right and were not.

Each epoch's results were averaged over the ranks, whatever they were: with 2,000 hard and 60 easy
samples to validate on, a loss of .628 was reported as .42, AUC and precision likewise; `Standard`
did not even do that, because Keras handed its parts a copy of the logs. horovod#444, #1095, #2897.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest
from launching import WORKERS, Ended, horovodrun

PROGRAM = WORKERS / "metrics_over_ranks.py"
CHECKS = [
    ast.unparse(item)
    for node in ast.parse(PROGRAM.read_text()).body
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CHECKS"
    for item in node.value.elts
]


@cache
def launched() -> Ended:
    return horovodrun(2, [str(PROGRAM)], seconds=240)


@pytest.mark.parametrize("check", CHECKS)
def test_metrics_over_ranks_are_those_of_one_process(check: str) -> None:
    """Run the check of this name on two ranks: see tests/workers/metrics_over_ranks.py."""
    ended = launched()
    assert ended.output.count(f"{check}: right") == 2, ended.output[-6000:]
    assert ended.status == 0
