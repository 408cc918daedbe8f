"""Fixtures of the tests of kernels."""

from __future__ import annotations

import pytest

from tfcommx.kernels import loader


@pytest.fixture(scope="module")
def library() -> None:
    """Refuse to test the definitions alone: the native library must be there."""
    assert loader.library() is not None, "set-up builds the native library: python scripts/setup"
