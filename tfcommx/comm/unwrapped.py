"""Warn of Keras optimizers that take steps without an exchange in a launch of several ranks.

A model that is loaded, copied or unpickled has a plain optimizer, and trains on each rank alone if
nobody wraps it again. Keras calls nothing of tfcommx then, so a thread looks at the optimizers of
the process now and then: which of them have taken steps since the last look?
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import threading
import weakref
from typing import Any

log = logging.getLogger("tfcommx")

# Between the first looks, and between all others: most runs show it in the first minute
LOOK_AFTER_SECONDS, THEN_SECONDS = (20.0, 40.0), 240.0
# Every optimizer that was made since the first watch, while it lives
_made: list[weakref.ref[Any]] = []


class UnwrappedOptimizers:
    """The plain optimizers of this process, and the steps that they have taken so far."""

    def __init__(self, rank: int) -> None:
        self.rank, self.warned = rank, False
        # Optimizer, by its id, which another may have after its end -> its steps
        self._steps: dict[int, tuple[weakref.ref[Any], int]] = {}
        _note_optimizers()

    def look(self) -> None:
        """Warn, once, if a plain optimizer has taken steps since the last look."""
        if self.warned:
            return
        for optimizer in _plain_optimizers():
            try:
                steps = int(optimizer.iterations)
            except AttributeError:  # Another thread is just making it
                continue
            seen, before = self._steps.get(id(optimizer), (None, 0))
            if seen is None or seen() is not optimizer:
                self._steps[id(optimizer)] = weakref.ref(optimizer), steps
            elif steps > before:
                self.warned = True
                log.warning(
                    "Rank %d: the optimizer %r is not wrapped and takes steps: its ranks train "
                    "alone. Loading and copying a model gives it a plain optimizer: compile it "
                    "again with tfcommx.DistributedOptimizer(optimizer), and add BroadcastState.",
                    self.rank,
                    optimizer.name,
                )
                return

    def watch(self) -> None:
        """Look now and then, in a thread, and at the end of the process."""
        threading.Thread(target=self._look_often, name="tfcommx-unwrapped", daemon=True).start()
        atexit.register(self.look)

    def _look_often(self) -> None:
        pause = threading.Event()
        for seconds in itertools.chain(LOOK_AFTER_SECONDS, itertools.repeat(THEN_SECONDS)):
            if self.warned:
                return
            self.look()
            pause.wait(seconds)


@functools.cache
def _note_optimizers() -> None:
    """Note from now on which optimizers are made.

    Not found by the garbage collector's lists (gc.get_objects, gc.get_referrers), from a thread:
    they show what other threads are only just making, which ended ranks by a SystemError, and by a
    segmentation fault.
    """
    import keras

    make = keras.optimizers.Optimizer.__init__

    @functools.wraps(make)
    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        _made.append(weakref.ref(self, _made.remove))
        make(self, *arguments, **options)

    keras.optimizers.Optimizer.__init__ = noted


def _plain_optimizers() -> list[Any]:
    """Return the optimizers that are not wrapped, and are not inside of one that is."""
    found = [one for one in (reference() for reference in list(_made)) if one is not None]
    inside = {id(getattr(one, "inner_optimizer", None)) for one in found}
    return [
        one
        for one in found
        if getattr(one, "exchanger", None) is None
        and getattr(getattr(one, "inner_optimizer", None), "exchanger", None) is None
        and id(one) not in inside
    ]
