"""Checks of names and numbers, and the error that refuses a setting before anything is sent."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


class PlanError(ValueError):
    """A scheme, plan or topology that cannot be carried out; nothing has been sent yet."""


def check_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known; refuse it otherwise, and name the nearest known one.

    >>> check_name("route", "torus", ["allreduce", "torus"])
    'torus'

    Args:
        what: what the name is of, for the message.
        name: as the user gave it.
        known: all names that are allowed.

    **Raises:** PlanError.
    """
    names = sorted(known)
    if name in names:
        return name
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise PlanError(f"Unknown {what} {name!r}. {hint}Known: {', '.join(names)}.")


def check_whole(what: str, value: Any, least: int | None = None) -> int:
    """Return a whole number, such as NumPy's or 1e9, as Python's own; refuse anything else.

    >>> check_whole("entries", 1e9, least=1)
    1000000000

    **Raises:** PlanError, also for less than `least`.
    """
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole:
        raise PlanError(f"`{what}` must be a whole number. Received {value!r}.")
    if least is not None and value < least:
        raise PlanError(f"`{what}` must be >= {least}. Received {value!r}.")
    return int(value)


def python_number(value: Any) -> Any:
    """Return a number, such as NumPy's, as Python's own; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
