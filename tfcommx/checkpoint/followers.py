"""The state of Keras's callbacks that follow a metric or swap weights, for a run that resumes.

EarlyStopping, ReduceLROnPlateau, and ModelCheckpoint with save_best_only begin each `fit` without a
best value. A resumed run would be as patient as at its beginning, and would replace the file of its
best model by its next model, even if that is worse. SwapEMAWeights with swap_on_epoch, if it stands
before Checkpoint, has put moving averages in the place of the weights: a resumed run would train
these.

    save       best values, waits, best weights  ---> file of rank 0
    restore    file of rank 0  ---> all ranks  ---> callbacks of the next `fit`, at its first epoch

A callback behind Checkpoint has not seen the epoch that is saved, so the logs of this are saved,
too, and the callback receives them when the run resumes.
"""

import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import keras
import numpy as np

from tfcommx.checkpoint.files import arrays_in
from tfcommx.checkpoint.state import wide
from tfcommx.core import replacing
from tfcommx.keras_internals.fit import averages_in_weights

# Callback of Keras -> its attributes that each `fit`, or a new object, sets anew
STATE: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
}
# Name of the array with everything but best weights, as JSON
INDEX = "followers"

# Class, metric, mode, and number among equal ones. Not the position, because rank 0 has callbacks
# that other ranks lack
Key = tuple[str, str, str, int]
# Attribute of a callback -> its value; "best_weights" -> arrays; "epoch" and "logs" that it lacks
State = dict[str, Any]


class SavedFollowers(NamedTuple):
    """The state of the callbacks in a save."""

    states: list[tuple[Key, State]]
    # True if the weights of the save are moving averages, and the moving averages weights
    swapped: bool
    # Epochs of the `fit` until the save, and metric -> its value in each of them
    history: tuple[list[int], dict[str, list[Any]]] = ([], {})


class Followers:
    """The callbacks of one `fit` whose state is saved.

    Args:
        callbacks: of `fit`, in its order.
        saving: the one of these that saves the checkpoints.
    """

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], saving: keras.callbacks.Callback
    ) -> None:
        self.callbacks = list(callbacks)
        self.named: dict[Key, Any] = {}
        # Number and logs of the epoch that has ended; None once the next begins, because all
        # callbacks have then seen them
        self.ended: tuple[int, dict[str, Any]] | None = None
        counts: Counter[tuple[str, str, str]] = Counter()
        for callback in self.callbacks:
            # False of a ModelCheckpoint alone, which then has no best value
            best_only = getattr(callback, "save_best_only", True)
            if best_only and any(isinstance(callback, kind) for kind in STATE):
                name = (_kind(callback).__name__, str(callback.monitor), str(callback.mode))
                self.named[(*name, counts[name])] = callback
                counts[name] += 1
        kinds = (part for part in self.callbacks if isinstance(part, keras.callbacks.History))
        self.history: keras.callbacks.History | None = next(kinds, None)
        # Callbacks that are called behind `saving`; none if a loop of the user calls that
        listed = saving in self.callbacks
        self.behind = self.callbacks[self.callbacks.index(saving) + 1 :] if listed else []

    def end_epoch(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        """Record the logs of an epoch that is saved."""
        numbers = {name: _number(value) for name, value in (logs or {}).items()}
        self.ended = epoch, {k: number for k, number in numbers.items() if number is not None}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the state of all callbacks as arrays of a file."""
        arrays: dict[str, np.ndarray] = {}
        rows: list[Any] = []
        for number, (key, callback) in enumerate(self.named.items()):
            state = {name: _number(getattr(callback, name)) for name in STATE[_kind(callback)]}
            if callback in self.behind and self.ended is not None:
                state["epoch"], state["logs"] = self.ended
            weights = getattr(callback, "best_weights", None) or []
            names = [f"best{number}-{position}" for position in range(len(weights))]
            arrays |= {name: wide(weight) for name, weight in zip(names, weights, strict=True)}
            rows.append([*key, state, names])
        index = {
            "callbacks": rows,
            "swapped": any(map(averages_in_weights, self.callbacks)),
            "history": self._history_so_far(),
        }
        return {INDEX: np.array(json.dumps(index)), **arrays}

    def _history_so_far(self) -> tuple[list[int], dict[str, list[Any]]]:
        """Return the history with the epoch that has ended, which a History behind has not seen."""
        if self.history is None:
            return [], {}
        epochs = list(getattr(self.history, "epoch", ()))  # None before its `on_train_begin`
        values = {name: list(map(_number, row)) for name, row in self.history.history.items()}
        if self.ended is not None and self.ended[0] not in epochs:
            epochs.append(self.ended[0])
            for name, value in self.ended[1].items():
                values.setdefault(name, []).append(value)
        return epochs, values

    def resume(self, states: Sequence[tuple[Key, State]]) -> None:
        """Set each callback that has a state in the save; let it see the epoch that it lacks."""
        state_of: dict[int, State] = {}
        for key, state in states:
            if (callback := self.named.get(key)) is None:
                continue
            for name in STATE[_kind(callback)]:
                if state[name] is not None:
                    setattr(callback, name, state[name])
            if state["best_weights"] and getattr(callback, "restore_best_weights", False):
                callback.best_weights = state["best_weights"]
            state_of[id(callback)] = state
        epoch = next((state["epoch"] for _, state in states if "logs" in state), None)
        if epoch is None:
            return
        # With the weights that it would have seen
        swapping = [
            part
            for part in self.behind
            if isinstance(part, keras.callbacks.SwapEMAWeights) and part.swap_on_epoch
        ]
        for callback in self.behind:
            state = state_of.get(id(callback), {})
            if callback in swapping:
                callback.on_epoch_end(epoch)
            elif "logs" in state:
                callback.on_epoch_end(epoch, dict(state["logs"]))
        for callback in swapping:
            callback.on_epoch_begin(epoch + 1)

    def finish(self, states: Sequence[tuple[Key, State]]) -> None:
        """Set the callbacks in the end of a `fit` without epochs; end it again for those before."""
        self.resume(states)
        for callback in self.callbacks:
            if callback in self.named.values() and callback not in self.behind:
                callback.on_train_end()


# Model -> the callbacks of its `fit`; by a weak reference, because these refer to the model
_of_fit: WeakKeyDictionary[keras.Model, weakref.ref[Followers]] = WeakKeyDictionary()


def follow(model: keras.Model, followers: Followers) -> None:
    """Save the state of these callbacks with the model, as long as they exist."""
    _of_fit[model] = weakref.ref(followers)


def follower_arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """Return the state of the callbacks of a model's `fit` as arrays; none outside of a `fit`."""
    reference = _of_fit.get(model)
    followers = None if reference is None else reference()
    return {} if followers is None else followers.arrays()


def read_followers(path: Path) -> SavedFollowers:
    """Return the state of callbacks in the file of rank 0.

    **Raises:** CheckpointError for a damaged file.
    """
    with arrays_in(path, "Rank 0's file of a checkpoint") as stored:
        if INDEX not in stored:
            return SavedFollowers([], False)
        index = json.loads(str(stored[INDEX]))
        states = [
            (
                (kind, metric, mode, number),
                {**state, "best_weights": [stored[name] for name in names]},
            )
            for kind, metric, mode, number, state, names in index["callbacks"]
        ]
        epochs, values = index.get("history", ([], {}))
        return SavedFollowers(states, index["swapped"], (epochs, values))


def _kind(callback: keras.callbacks.Callback) -> type:
    return next(kind for kind in STATE if isinstance(callback, kind))


def _number(value: Any) -> Any:
    """Return a number as JSON has it; None for NaN, infinity and other values."""
    if value is None or isinstance(value, int):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None


def drop_rows(logger: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Remove the rows of the epochs from `epoch` on, which are trained again, from a log."""
    path, separator = Path(logger.filename), logger.sep.encode()
    with contextlib.suppress(OSError):  # Without a log, or on a full disk, where rows stay double
        lines = path.read_bytes().splitlines(keepends=True)
        numbers = [line.partition(separator)[0] for line in lines]
        rows = [
            line
            for line, number in zip(lines, numbers, strict=True)
            if not number.isdigit() or int(number) < epoch
        ]
        if len(rows) < len(lines):
            with replacing(path) as part:
                part.write_bytes(b"".join(rows))
