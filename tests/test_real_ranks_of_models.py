"""Runs tests/ranks without its folder `optimizer` on two real ranks (test_real_ranks.py)."""

from __future__ import annotations

import pytest
from launching import run_tests


@pytest.mark.long_wait
def test_all_but_optimizers_on_two_ranks(request: pytest.FixtureRequest) -> None:
    chosen = "not exhaustive" in request.config.option.markexpr
    files = ["tests/ranks", "--ignore=tests/ranks/optimizer"]
    run_tests(2, "1", "gloo", files, "not exhaustive" if chosen else "")
