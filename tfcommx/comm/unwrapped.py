"""Warn of Keras optimizers that take steps without an exchange in a launch of several ranks.

A model that is loaded, copied or unpickled has a plain optimizer, and trains on each rank alone if
nobody wraps it again. Keras calls nothing of tfcommx then, so a thread looks at the optimizers of
the process now and then: which of them have taken steps since the last look?
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
from typing import Any

log = logging.getLogger("tfcommx")

# Between the looks: most runs show it in the first minute, and a look costs some 50 ms
LOOK_AFTER_SECONDS = (20.0, 40.0, 240.0)


class UnwrappedOptimizers:
    """The plain optimizers of this process, and the steps that they have taken so far."""

    def __init__(self, rank: int) -> None:
        self.rank, self.warned = rank, False
        # By id of the optimizer
        self._steps: dict[int, int] = {}

    def look(self) -> None:
        """Warn, once, if a plain optimizer has taken steps since the last look."""
        if self.warned or "keras" not in sys.modules:
            return
        for optimizer in _plain_optimizers():
            try:
                steps = int(optimizer.iterations)
            except AttributeError:  # Another thread is just making it
                continue
            before = self._steps.setdefault(id(optimizer), steps)
            if steps > before:
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
        for seconds in LOOK_AFTER_SECONDS:
            self.look()
            pause.wait(seconds)
        self.look()


def _plain_optimizers() -> list[Any]:
    """Return the optimizers that are not wrapped, and are not inside of one that is."""
    import keras

    kinds = _with_subclasses(keras.optimizers.Optimizer)
    # Not gc.get_objects(): for a moment it holds every object of the process, and a tuple that
    # another thread is making can then not grow, which is a SystemError there
    found = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    inside = {id(getattr(one, "inner_optimizer", None)) for one in found}
    return [
        one
        for one in found
        if getattr(one, "exchanger", None) is None
        and getattr(getattr(one, "inner_optimizer", None), "exchanger", None) is None
        and id(one) not in inside
    ]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
