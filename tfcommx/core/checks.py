"""Checks of names and numbers: a setting is refused before anything is sent."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from tfcommx.core.errors import ConfigurationError


def check_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known; refuse it otherwise, and name the nearest known one.

    >>> check_name("route", "torus", ["allreduce", "torus"])
    'torus'

    Args:
        what: what the name is of, for the message.
        name: as the user gave it.
        known: all names that are allowed.

    **Raises:** ConfigurationError.
    """
    names = sorted(known)
    if name in names:
        return name
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigurationError(f"Unknown {what} {name!r}. {hint}Known: {', '.join(names)}.")


def is_member(name: object) -> TypeGuard[str]:
    """Tell whether a name is "module:MEMBER": of somebody else's member of a family.

    >>> is_member("mine.rules:RULE"), is_member("mstopk")
    (True, False)
    """
    return isinstance(name, str) and ":" in name


# Names "module:MEMBER" that Schemes of this process have, which the user's own code or recipe made
_named_members: set[str] = set()


def name_members(*names: object) -> None:
    """Record the members that a user names; files may name these too. Others are ignored."""
    _named_members.update(name for name in names if is_member(name))


def require_named_members(source: str, *names: object) -> None:
    """Refuse members that only a file names, because to load one is to import its module.

    Args:
        source: of the names, for the message.
        names: those of the table of a family, and others.

    **Raises:** ConfigurationError.
    """
    for name in names:
        if is_member(name) and name not in _named_members:
            raise ConfigurationError(
                f"{source} may name a member of another package only if a Scheme of this process "
                f"names it, because its module is imported. Received {name!r}. If you trust it, "
                f"make that Scheme first, such as Scheme({name!r}) for a route."
            )


def load_member(what: str, name: str, *kinds: type) -> Any:
    """Return the object that "module:MEMBER" names.

    Args:
        what: the family, for messages.
        name: as the user gave it.
        kinds: the classes of which the object must be an instance of one; none: anything.

    **Raises:** ConfigurationError if there is none, or if it is something else.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"A {what} 'module:MEMBER' must be importable on every rank. Received {name!r}: "
            f"{error}. Install its package, or set PYTHONPATH."
        ) from error
    if kinds and not isinstance(found, kinds):
        allowed = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        raise ConfigurationError(
            f"A {what} must be an object of a class that derives from {allowed}. Received "
            f"{name!r}, which is {found!r}."
        )
    return found


def check_whole(what: str, value: Any, least: int | None = None) -> int:
    """Return a whole number, such as NumPy's or 1e9, as Python's own; refuse anything else.

    >>> check_whole("entries", 1e9, least=1)
    1000000000

    **Raises:** ConfigurationError, also for less than `least`.
    """
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole:
        raise ConfigurationError(f"`{what}` must be a whole number. Received {value!r}.")
    if least is not None and value < least:
        raise ConfigurationError(f"`{what}` must be >= {least}. Received {value!r}.")
    return int(value)


def python_number(value: Any) -> Any:
    """Return a number, such as NumPy's, as Python's own; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def require_equal(what: str, values: Sequence[Any]) -> None:
    """Check that all ranks were given the same value.

    >>> require_equal("Checkpoint's `keep`", [2, 2])

    Args:
        what: the value's name, for the message.
        values: of each rank.

    **Raises:** ConfigurationError that names the first rank whose value is another than rank 0's.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigurationError(
                f"All ranks must have the same {what}. Received {values[0]!r} on rank 0 and "
                f"{value!r} on rank {rank}. Do not make it from the time, a random number or the "
                "rank: let rank 0 decide, or give it as an argument of the command."
            )
