"""The examples in the docstrings of kernels and wire formats return the values shown."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from tfcommx.core import wire_formats
from tfcommx.kernels import (
    augment,
    build,
    crc32c,
    draws,
    loader,
    low_bits,
    select,
    sparse,
    wire,
    wire_codes,
)


@pytest.mark.parametrize("with_library", [True, False], ids=["native", "definition"])
@pytest.mark.parametrize(
    "module",
    [
        augment,
        wire_codes,
        crc32c,
        draws,
        build,
        low_bits,
        sparse,
        select,
        wire,
        wire_codes,
        wire_formats,
    ],
    ids=lambda m: m.__name__,
)
def test_examples(module: ModuleType, with_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_library:
        monkeypatch.setattr(loader, "library", lambda: None)
    tried = doctest.testmod(module)
    assert tried.attempted > 0 and tried.failed == 0
