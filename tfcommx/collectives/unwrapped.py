"""Warn of Keras optimizers that take steps without an exchange in a launch of several ranks.

A model that is loaded, copied or unpickled has a plain optimizer, and trains on each rank alone if
the user does not wrap it again. Therefore the calls that take Keras's steps are recorded.
"""

import atexit
import contextlib
import contextvars
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfcommx.core import log

# Steps before a warning. The first may only make the optimizer's state, to restore a checkpoint.
STEPS = 2
# Seconds between two polls of the counts of traced steps
LOOK_SECONDS = 0.5

_allowed = contextvars.ContextVar("tfcommx_allowed", default=False)


@contextlib.contextmanager
def allow_plain_optimizers() -> Iterator[None]:
    """Allow steps of optimizers that are not wrapped in this block, without a warning.

    Use it for a model that one rank trains alone, or whose gradients the script itself exchanges.
    Wrapped optimizers exchange in the block as elsewhere.

    >>> import keras
    >>> import numpy as np
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> probe = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    >>> probe.compile(keras.optimizers.SGD(0.1), loss="mse")
    >>> if cx.is_chief():
    ...     with cx.allow_plain_optimizers():
    ...         _ = probe.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)

    **Ranks:** any; nothing is exchanged. It applies to this thread, and to step functions whose
    first call is in the block.
    """
    before = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(before)


@dataclasses.dataclass
class _Call:
    """The current outermost call of an optimizer, and its inner calls."""

    plain: list[Any] = dataclasses.field(default_factory=list)
    exchanges: bool = False
    calls: int = 0


_call: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("tfcommx_call", default=None)


class UnwrappedOptimizers:
    """The plain optimizers that take steps in this process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Optimizers that were reported, and number of eager steps by optimizer
        self._named: weakref.WeakSet[Any] = weakref.WeakSet()
        self._eager: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Traced optimizers that were not reported: id -> name, optimizer, its count, first count.
        # The count may outlive its optimizer, until the end of the process.
        self._traced: dict[int, tuple[str, weakref.ref[Any], Any, int]] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Record steps from now on, also of optimizers that were made before."""
        # The thread does not find optimizers by the garbage collector's lists (gc.get_objects,
        # gc.get_referrers), because these include unfinished objects of other threads, which ended
        # ranks by a SystemError and by a segmentation fault
        from tfcommx.keras_internals.step import surround_steps

        global _watching
        _watching = self
        surround_steps(_noted)
        atexit.register(self.end)

    def note(self, optimizer: Any) -> None:
        """Record one step of a plain optimizer, or the tracing of its steps."""
        if optimizer in self._named:
            return
        if tf.executing_eagerly():
            self._eager[optimizer] = self._eager.get(optimizer, 0) + 1
            if self._eager[optimizer] >= STEPS:
                self._warn(optimizer.name, optimizer)
            return
        with self._lock, tf.init_scope():
            _, traced, *_ = self._traced.get(id(optimizer), ("", lambda: None))
            if traced() is optimizer:
                return
            try:
                by_name = {variable.name: variable for variable in optimizer.variables}
                count = by_name.get("iteration")
            except TypeError:  # In Horovod's wrapper it is a method, as in Keras 2
                count = optimizer.iterations
            if count is None:  # A class that keeps its steps elsewhere
                return
            row = optimizer.name, weakref.ref(optimizer), count, int(count)
            self._traced[id(optimizer)] = row
        # A traced step calls this only once, while it is traced. The thread polls the optimizer's
        # count of steps, often enough for short runs, and once more at the end of the process
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_often, name="tfcommx-unwrapped", daemon=True
            )
            self._thread.start()

    def look(self) -> None:
        """Warn of the optimizers whose traced steps have been taken."""
        with self._lock:
            for key, (name, optimizer, count, first) in list(self._traced.items()):
                if int(count) - first >= STEPS:
                    del self._traced[key]
                    self._warn(name, optimizer())

    def end(self) -> None:
        """Stop the thread, and look for the last time."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        self.look()

    def _look_often(self) -> None:
        while not self._ends.wait(LOOK_SECONDS):
            self.look()

    def _warn(self, name: str, optimizer: Any | None) -> None:
        if optimizer is not None:
            self._named.add(optimizer)
        log.warning(
            "Rank %d: the optimizer %r is not wrapped and takes steps: its ranks train alone. "
            "Loading and copying a model gives it a plain optimizer: compile it again with "
            "tfcommx.DistributedOptimizer(optimizer), and add BroadcastState. If it is meant to "
            "be plain, train in a block `with tfcommx.allow_plain_optimizers():`.",
            self.rank,
            name,
        )


_watching: UnwrappedOptimizers | None = None


@contextlib.contextmanager
def _noted(optimizer: Any) -> Iterator[None]:
    """Record the optimizer that takes the step in this block, unless one of them exchanges."""
    outer = _call.get()
    call = outer or _Call()
    call.calls += 1
    call.exchanges |= getattr(optimizer, "exchanger", None) is not None
    number, before = call.calls, _call.set(call)
    try:
        yield
    finally:
        _call.reset(before)
    # The innermost one, because optimizers call others, as LossScaleOptimizer does
    if call.calls == number and not _allowed.get():
        call.plain.append(optimizer)
    if outer is None and not call.exchanges and _watching is not None:
        for plain in call.plain:
            _watching.note(plain)
