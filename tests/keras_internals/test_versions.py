"""Keras's private members are used with tested versions, or with others that have all of them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import keras
import pytest

from tfcommx.keras_internals import version
from tfcommx.keras_internals.version import PRIVATE_MEMBERS, TESTED, require_fit_keras

ROOM = Path(version.__file__).parent


def test_the_installed_keras_is_a_tested_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_fit_keras(keras.__version__)


@pytest.mark.parametrize("other", ["3.11.3", "3.16.0", "4.0"])
def test_another_keras_with_the_same_members_is_warned_of(other: str) -> None:
    with pytest.warns(UserWarning, match=rf"\b{other}\b.*'keras==3\.15"):
        require_fit_keras(other)


def test_a_keras_without_a_member_is_refused_and_the_member_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PRIVATE_MEMBERS, keras.layers.Layer, ("_flatten_layers", "_no_such_member"))
    with pytest.raises(ImportError, match=r"3\.16\.0 .*Layer\._no_such_member"):
        require_fit_keras("3.16.0")


def test_what_the_room_uses_is_listed() -> None:
    """Every `object._name` in the package that the package does not define itself is listed."""
    text = "".join(path.read_text() for path in ROOM.glob("*.py") if path.name != "version.py")
    used = set(
        re.findall(
            r"(?:super\(\)|\bself|\boptimizer|\bcopy|\bmodel|\blayer|\bcallback)\.(_[a-z]\w+)", text
        )
    )
    own = set(re.findall(r"(?:def |self\.)(_[a-z]\w+)(?:\(| =|: )", text))
    listed = {member for members in PRIVATE_MEMBERS.values() for member in members}
    assert used - own <= listed, used - own - listed


def test_what_is_installed_is_what_was_tested() -> None:
    requirements = Path(__file__).resolve().parents[2] / "requirements.txt"
    text = requirements.read_text()
    ((lower, upper),) = re.findall(r"^keras>=([\d.]+),<([\d.]+)", text, re.MULTILINE)
    assert lower == TESTED[0]
    assert upper == f"3.{int(TESTED[-1].split('.')[1]) + 1}"
