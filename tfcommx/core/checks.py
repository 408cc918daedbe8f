"""Checks of names and numbers, which refuse a setting before anything is sent."""

import difflib
import math
import pkgutil
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

from tfcommx.core.errors import ConfigurationError


def check_name(kind: str, name: str, allowed: Iterable[str], where: str = "") -> str:
    """Return `name` if it is allowed; refuse it otherwise, and name the nearest allowed one.

    Args:
        where: place of the name, for the message, such as "in options.yaml".

    >>> check_name("route", "torus", ["allreduce", "torus"])
    'torus'

    **Raises:** ConfigurationError.
    """
    # A list, because a generator would be empty at its second use
    names = sorted(allowed)
    if name in names:
        return name
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    # SEED has no letter of `seed`
    near = [known for known in names if known.lower() == str(name).lower()] or near
    hint = f"Did you mean {near[0]!r}? " if near else ""
    place = f" {where}" if where else ""
    known = ", ".join(names)
    raise ConfigurationError(f"Unknown {kind} {name!r}{place}. {hint}Known: {known}.")


def told_apart(names: Iterable[str]) -> str:
    """Return a sentence on two names that look alike, with escapes; "" without any.

    Names look alike if they differ only by case, spaces around them, or the form of Unicode.

    >>> told_apart(["cat", "dog", "Cat"]), told_apart(["cat", "dog"])
    (" Names look alike and differ: 'cat' and 'Cat'.", '')
    """
    first: dict[str, str] = {}
    for name in names:
        # NFKC, because a Mac decomposes the letters of names that a copy then keeps
        other = first.setdefault(unicodedata.normalize("NFKC", name).casefold().strip(), name)
        if other != name:
            return f" Names look alike and differ: {other!a} and {name!a}."
    return ""


def is_member(name: object) -> TypeGuard[str]:
    """Return True if a name is "module:MEMBER", which names a member outside of tfcommx.

    >>> is_member("mine.rules:RULE"), is_member("mstopk")
    (True, False)
    """
    return isinstance(name, str) and ":" in name


# Names "module:MEMBER" in Schemes that the user's code or recipe made in this process
_named_members: set[str] = set()


def name_members(*names: object) -> None:
    """Record the members that a user names; files may name these, too. Ignore other names."""
    _named_members.update(name for name in names if is_member(name))


def require_named_members(source: str, *names: object) -> None:
    """Refuse members that only a file names, because loading a member imports its module.

    Args:
        names: names of members, and any others, which are ignored.

    **Raises:** ConfigurationError.
    """
    for name in names:
        if is_member(name) and name not in _named_members:
            raise ConfigurationError(
                f"{source} may name a member of another package only if a Scheme of this process "
                f"names it, because its module is imported. Received {name!r}. If you trust it, "
                f"make that Scheme first, such as Scheme({name!r}) for a route."
            )


def load_member(family: str, name: str, *kinds: type) -> Any:
    """Return the object that "module:MEMBER" names.

    Args:
        kinds: allowed classes of the object; none: any class.

    **Raises:** ConfigurationError if the object does not exist, or is of another class.
    """
    try:
        member = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"A {family} 'module:MEMBER' must be importable on every rank. Received {name!r}: "
            f"{error}. Install its package, or set PYTHONPATH."
        ) from error
    if kinds and not isinstance(member, kinds):
        allowed = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
        raise ConfigurationError(
            f"A {family} must be an object of a class that derives from {allowed}. Received "
            f"{name!r}, which is {member!r}."
        )
    return member


def check_whole(
    name: str, value: Any, least: int | None = None, error: type[Exception] = ConfigurationError
) -> int:
    """Return a whole number, such as NumPy's or 1e9, as Python's own; refuse anything else.

    >>> check_whole("entries", 1e9, least=1)
    1000000000

    **Raises:** `error`, also for less than `least`.
    """
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    # Python counts True as 1, so `every=True` would pass
    if isinstance(value, bool) or not is_whole:
        raise error(f"`{name}` must be a whole number. Received {value!r}.")
    if least is not None and value < least:
        raise error(f"`{name}` must be >= {least}. Received {value!r}.")
    return int(value)


# Range in words -> True if a number is in it. NaN is in none, because its comparisons are false
RANGES: dict[str, Callable[[float], bool]] = {
    "> 0": lambda number: 0 < number < math.inf,
    ">= 0": lambda number: 0 <= number < math.inf,
    "in (0, 1]": lambda number: 0 < number <= 1,
    "in [0, 1)": lambda number: 0 <= number < 1,
    "in [0, 1]": lambda number: 0 <= number <= 1,
}


def check_number(
    name: str, value: Any, wanted: str, error: type[Exception] = ConfigurationError
) -> float:
    """Return a number, such as NumPy's, as a float, if it is in a range of RANGES.

    >>> check_number("momentum", 0.9, "in [0, 1)")
    0.9

    **Raises:** `error`.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not RANGES[wanted](value):
        raise error(f"`{name}` must be a number {wanted}. Received {value!r}.")
    return float(value)


def require_equal(name: str, values: Sequence[Any]) -> None:
    """Check that all ranks were given the same value.

    >>> require_equal("Checkpoint's `keep`", [2, 2])

    **Raises:** ConfigurationError that names the first rank whose value differs from rank 0's.
    """
    for rank, value in enumerate(values):
        are_nan = value != value and values[0] != values[0]
        if value != values[0] and not are_nan:
            raise ConfigurationError(
                f"All ranks must have the same {name}. Received {values[0]!r} on rank 0 and "
                f"{value!r} on rank {rank}. Do not make it from the time, a random number or the "
                "rank: let rank 0 decide, or give it as an argument of the command."
            )
