"""Public names that were renamed work until 1.0, with a warning."""

from __future__ import annotations

import pytest

import tfcommx as cx


def test_old_names_are_the_new_ones_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="called consolidate now"):
        assert cx.settle is cx.consolidate
    with pytest.warns(DeprecationWarning, match="called RestoreRankValues now"):
        assert cx.checkpoint.RestoreOwn is cx.checkpoint.RestoreRankValues
    with pytest.raises(AttributeError, match="'no_such_name'"):
        cx.checkpoint.no_such_name  # noqa: B018
