"""Keras's private members are used with the versions that were tested."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import pytest

from tfcommx.optim.keras_internals.version import TESTED, require_tested_keras


def test_the_installed_keras_is_a_tested_one() -> None:
    require_tested_keras(keras.__version__)


@pytest.mark.parametrize("version", ["3.14.1", "3.16.0", "4.0"])
def test_another_keras_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(ImportError, match=rf"Received Keras {version}.*pip install 'keras==3\.15"):
        require_tested_keras(version)


def test_what_is_installed_is_what_was_tested() -> None:
    requirements = Path(__file__).resolve().parents[2] / "requirements.txt"
    (lower,) = re.findall(r"^keras>=([\d.]+),<", requirements.read_text(), re.MULTILINE)
    assert lower in TESTED
