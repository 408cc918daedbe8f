"""Of several plans under trial on one rank: which one is measured now."""

from __future__ import annotations

import weakref
from typing import Any

# Times that others go on; after so many a member that does not is not waited for
IDLE = 8


class TrialQueue:
    """Members in the order in which they came; those that do not go on are passed over.

    >>> class Trial:
    ...     pass
    >>> queue, first, second = TrialQueue(), Trial(), Trial()
    >>> queue.is_first(first), queue.is_first(second), queue.is_first(first)
    (True, False, True)
    >>> [queue.is_first(second) for _ in range(IDLE)].index(True)
    7
    >>> queue.leave(first)
    >>> queue.is_first(second)
    True
    """

    def __init__(self) -> None:
        # Member -> when it went on last, in the order in which they came
        self._last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._now = 0

    def is_first(self, member: Any) -> bool:
        """Note that a member, perhaps a new one, goes on; tell whether it is the first of these."""
        self._now += 1
        self._last[member] = self._now
        return member is next(one for one, last in self._last.items() if self._now - last < IDLE)

    def leave(self, member: Any) -> None:
        """Forget a member."""
        self._last.pop(member, None)
