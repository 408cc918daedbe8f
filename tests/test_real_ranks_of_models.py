"""Runs tests/ranks without its folder `optimizer` on two real ranks (test_real_ranks.py)."""

from __future__ import annotations

import pytest
from drawing import extended
from launching import run_tests


@pytest.mark.long_wait
@pytest.mark.parametrize("marks", ["not extended", extended("extended")])
def test_all_but_optimizers_on_two_ranks(marks: str, request: pytest.FixtureRequest) -> None:
    if "not exhaustive" in request.config.option.markexpr:
        marks += " and not exhaustive"
    run_tests(2, "1", "gloo", ["tests/ranks", "--ignore=tests/ranks/optimizer"], marks)
