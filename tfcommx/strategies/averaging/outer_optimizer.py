"""The outer optimizer of weight averaging: it moves the start weights of a round.

    start weights --every steps, each rank--> weights now
         |                                        |
         +---- start - now, averaged over the ranks: the outer gradient
         v
    outer optimizer moves the start weights; all ranks continue from there

Each variable has an optimizer of its own, so that its state goes where the variable goes: into
other fragments, another plan, a checkpoint.

**Source:** Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(2023), algorithm 1; there the outer optimizer is SGD with a learning rate of 0.7 and Nesterov
momentum of 0.9.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.unwrapped import allow_plain_optimizers
from tfcommx.core import ConfigurationError
from tfcommx.kernels.traced import untraced

log = logging.getLogger("tfcommx")

# Options that join variables or rounds, or name variables
UNFIT = ("global_clipnorm", "use_ema", "gradient_accumulation_steps", "weight_decay")
# What an optimizer keeps of one variable, by its number in the optimizer's file
State = dict[str, np.ndarray]
# In such a state: letters of the class's name
KIND = "kind"


@dataclass(frozen=True)
class OuterOptimizer:
    """A Keras optimizer's class and configuration: equal on ranks that have the same.

    >>> OuterOptimizer.of(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
    SGD(learning_rate=0.7, momentum=0.9, nesterov=True)
    """

    kind: type[keras.optimizers.Optimizer]
    # As `get_config` returns it, in JSON
    config: str

    @staticmethod
    def of(asked: Any) -> OuterOptimizer:
        """Read what a user gives: a Keras optimizer, which is not changed.

        **Raises:** ConfigurationError for what is none, and for one that joins variables or steps.
        """
        if isinstance(asked, OuterOptimizer):
            return asked
        plain = isinstance(asked, keras.optimizers.Optimizer) and not hasattr(asked, "exchanger")
        if not plain or isinstance(asked, keras.optimizers.LossScaleOptimizer):
            raise ConfigurationError(
                "`outer` needs a plain Keras optimizer, such as keras.optimizers.SGD(0.7, "
                f"momentum=0.9, nesterov=True). Received {asked!r}."
            )
        for option in UNFIT:
            if getattr(asked, option):
                raise ConfigurationError(
                    "`outer` takes one step a round, for each variable by itself. Received an "
                    f"optimizer with {option}={getattr(asked, option)!r}. Leave it out, or give "
                    "it to the optimizer that is wrapped."
                )
        try:
            config = json.dumps(asked.get_config(), sort_keys=True)
        except TypeError as error:
            raise ConfigurationError(
                "`outer` needs an optimizer whose get_config() JSON can hold. Received "
                f"{asked!r}: {error}. Give its parts a get_config(), or take one of Keras's."
            ) from error
        return OuterOptimizer(type(asked), config)

    def make(self) -> keras.optimizers.Optimizer:
        """Make a new optimizer of this class and configuration."""
        return self.kind.from_config(json.loads(self.config))

    def __repr__(self) -> str:
        # Its name has a number, which may differ between ranks; averages need `use_ema`
        shown = {
            name: value
            for name, value in json.loads(self.config).items()
            if value and name not in ("name", "ema_momentum")
        }
        words = ", ".join(f"{name}={_in_words(value)}" for name, value in shown.items())
        return f"{self.kind.__name__}({words})"


def _in_words(value: Any) -> str:
    """Return a value of a configuration; Keras makes 0.699999988 of a learning rate of 0.7."""
    return str(np.float32(value)) if isinstance(value, float) else repr(value)


class StartWeights:
    """The start weights of a round, each with the outer optimizer that moves it, if there is one.

    Args:
        weights: variable path -> variable.
        outer: None: a round sets them.
        kept: what an earlier run or a checkpoint kept of some of these variables.

    Local; in traced code, too. **Cost:** memory for one copy of the weights, and for the
    optimizer's state; both equal on all ranks.
    """

    def __init__(
        self,
        weights: Mapping[str, tf.Variable],
        outer: OuterOptimizer | None,
        kept: Mapping[str, State],
    ) -> None:
        self._start: dict[str, keras.Variable] = {}
        self._optimizers: dict[str, keras.optimizers.Optimizer] = {}
        others: set[str] = set()
        with untraced():
            for path, weight in weights.items():
                zeros = tf.zeros_like(weight)
                dtype = weight.dtype.name
                self._start[path] = keras.Variable(zeros, dtype=dtype, name="tfcommx_start")
                if outer is None:
                    continue
                optimizer = self._optimizers[path] = outer.make()
                optimizer.build([self._start[path]])
                if path in kept:
                    others |= _load(optimizer, kept[path])
        if outer is not None and others:
            log.warning(
                "The outer optimizer was %s and is now %s: its state begins anew.",
                " or ".join(sorted(others)),
                outer.kind.__name__,
            )

    def __getitem__(self, path: str) -> tf.Tensor:
        return tf.convert_to_tensor(self._start[path].value)

    def set(self, weights: Mapping[str, tf.Variable | tf.Tensor]) -> None:
        """Begin a round of these variables at their weights."""
        for path, weight in weights.items():
            self._start[path].value.assign(weight)

    def move(self, path: str, update: tf.Tensor) -> tf.Tensor:
        """Return where the next round of a variable starts.

        Args:
            path: of the variable.
            update: weights now - start weights, averaged over the ranks, as all ranks have it.
        """
        if path in self._optimizers:
            with allow_plain_optimizers():  # The update is the average over the ranks
                self._optimizers[path].apply([-update], [self._start[path]])
        else:
            self.set({path: self[path] + update})
        return self[path]

    def state(self) -> dict[str, State]:
        """Return what the outer optimizers keep, by variable. Outside of traced code."""
        found: dict[str, State] = {}
        for path, optimizer in self._optimizers.items():
            optimizer.save_own_variables(found.setdefault(path, {}))
        return {
            path: {key: np.array(value) for key, value in state.items()}
            | {KIND: _kind(self._optimizers[path])}
            for path, state in found.items()
        }


def _kind(optimizer: keras.optimizers.Optimizer) -> np.ndarray:
    """Return the name of an optimizer's class, as a checkpoint holds it."""
    return np.frombuffer(type(optimizer).__name__.encode(), np.uint8)


def _load(optimizer: keras.optimizers.Optimizer, kept: State) -> set[str]:
    """Load what an optimizer of the same class kept, except its learning rate, which is asked.

    Returns:
        The name of the class that kept it, if it is another one and nothing was loaded.
    """
    state = dict(kept)
    # Earlier checkpoints have none
    kind = state.pop(KIND, _kind(optimizer)).tobytes().decode()
    if kind != type(optimizer).__name__:
        return {kind}
    rate = optimizer.get_config()["learning_rate"]
    optimizer.load_own_variables(state)
    if isinstance(rate, float):  # Others follow the number of rounds
        optimizer.learning_rate = rate
    return set()
