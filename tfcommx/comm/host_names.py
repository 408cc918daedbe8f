"""Which texts are names of hosts: one check, wherever names enter.

They come from the user, from schedulers, scripts and other ranks, and go into the command lines of
ssh, which horovodrun gives to a shell: `-Fconfig` would be an option that runs a program.
"""

from __future__ import annotations

import re

from tfcommx.terms import PlanError

# Of letters, digits and "._-", which horovodrun takes; longer ones no resolver takes
HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")


def is_host_name(name: object) -> bool:
    """Return True if this is the name or the IPv4 address of a host.

    >>> [is_host_name(name) for name in ("gpu-07.example.org", "10.0.0.2", "-Fconfig", "a;b", 7)]
    [True, True, False, False, False]
    """
    return isinstance(name, str) and HOST_NAME.fullmatch(name) is not None


def check_host_name(name: object, source: str) -> str:
    """Return the name of a host.

    Args:
        name: as it was received.
        source: where from, for the message.

    **Raises:** PlanError if it is none.
    """
    if not is_host_name(name):
        raise PlanError(
            "A host's name must be made of the letters A to Z, digits, `.`, `_` and `-`, begin "
            "with a letter, digit or `_`, and have at most 253 characters. Received "
            f"{name!r:.80} from {source}. Name the host by its address, or as ssh knows it."
        )
    return str(name)
