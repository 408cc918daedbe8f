"""Check the laws of a family for a member that is written outside of this package.

    >>> import tfcommx as cx
    >>> cx.testing.check_rule("tfcommx.selection.rules:EXACT")

Each check takes the name as a `Scheme` or `DistributedOptimizer` would, "module:MEMBER", runs steps
on ranks that are threads of this process, on one node and on several, and raises LawBroken with the
requirement, the value received and the configuration. A check that passes proves nothing about
speed. A fault that needs real processes, such as a rank whose processor rounds differently, shows
only on those.

    check_rule          a rule of selection, on every sparse route
    check_route         a route, in every format that it writes
    check_compression   a compression, on routes of one level and two
    check_wire          a wire format, on every sparse route
    check_strategy      a strategy, with an optimizer
"""

from tfcommx.testing.laws import LawBroken
from tfcommx.testing.members import (
    check_compression,
    check_route,
    check_rule,
    check_strategy,
    check_wire,
)

__all__ = [
    "LawBroken",
    "check_compression",
    "check_route",
    "check_rule",
    "check_strategy",
    "check_wire",
]
