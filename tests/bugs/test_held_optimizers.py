"""Optimizers that a model holds elsewhere than in an attribute were never averaged.

A GAN with `self.optimizers = {"g": ..., "d": ...}` trained on with other weights on each rank under
weight averaging, without a word; nor was their state broadcast, or saved with its residuals.
keras-io#729.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest
from launching import WORKERS, Ended, horovodrun

PROGRAM = WORKERS / "held_optimizers.py"
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
def test_optimizers_are_found_wherever_a_model_holds_them(check: str) -> None:
    """Run the check of this name on two ranks: see tests/workers/held_optimizers.py."""
    ended = launched()
    assert ended.output.count(f"{check}: right") == 2, ended.output[-6000:]
    assert ended.status == 0
