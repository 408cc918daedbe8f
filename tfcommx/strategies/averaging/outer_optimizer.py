"""The outer optimizer of weight averaging: it moves the start weights of a round.

    start weights --every steps, each rank--> current weights
         |                                        |
         +---- start - current, averaged over the ranks: the outer gradient
         v
    outer optimizer moves the start weights; all ranks continue from there

Each variable has a separate optimizer, because its state must follow the variable into other
fragments, another plan and a checkpoint.

**Source:** Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(2023), algorithm 1; there the outer optimizer is SGD with a learning rate of 0.7 and Nesterov
momentum of 0.9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.unwrapped import allow_plain_optimizers
from tfcommx.core import ConfigurationError, log
from tfcommx.kernels.traced import untraced

# Options that combine variables or rounds, or select variables by name
UNFIT = ("global_clipnorm", "use_ema", "gradient_accumulation_steps", "weight_decay")
# An optimizer's state of one variable, by its number in the optimizer's file
State = dict[str, np.ndarray]
# Key of the class's name, as bytes, in such a state
KIND = "kind"


@dataclass(frozen=True)
class OuterOptimizer:
    """A Keras optimizer's class and configuration, compared by value.

    >>> OuterOptimizer.of(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
    SGD(learning_rate=0.7, momentum=0.9, nesterov=True)
    """

    kind: type[keras.optimizers.Optimizer]
    # The result of `get_config`, as JSON
    config: str

    @staticmethod
    def of(outer: Any) -> OuterOptimizer:
        """Read class and configuration of a user's Keras optimizer, which stays unchanged.

        **Raises:** ConfigurationError if it is no plain Keras optimizer, or combines variables or
        steps.
        """
        if isinstance(outer, OuterOptimizer):
            return outer
        plain = isinstance(outer, keras.optimizers.Optimizer) and not hasattr(outer, "exchanger")
        if not plain or isinstance(outer, keras.optimizers.LossScaleOptimizer):
            raise ConfigurationError(
                "`outer` needs a plain Keras optimizer, such as keras.optimizers.SGD(0.7, "
                f"momentum=0.9, nesterov=True). Received {outer!r}."
            )
        for option in UNFIT:
            if getattr(outer, option):
                raise ConfigurationError(
                    "`outer` takes one step a round, for each variable by itself. Received an "
                    f"optimizer with {option}={getattr(outer, option)!r}. Leave it out, or give "
                    "it to the optimizer that is wrapped."
                )
        try:
            # Sorted, because optimizers with equal settings must be equal
            config = json.dumps(outer.get_config(), sort_keys=True)
        except TypeError as error:
            raise ConfigurationError(
                "`outer` needs an optimizer whose get_config() JSON can hold. Received "
                f"{outer!r}: {error}. Give its parts a get_config(), or take one of Keras's."
            ) from error
        return OuterOptimizer(type(outer), config)

    def make(self) -> keras.optimizers.Optimizer:
        """Make a new optimizer of this class and configuration."""
        return self.kind.from_config(json.loads(self.config))

    def __repr__(self) -> str:
        # Without the name, because its number may differ between ranks, and without `ema_momentum`,
        # because it has no effect without `use_ema`
        shown = {
            # Keras turns a learning rate of 0.7 into 0.699999988
            name: str(np.float32(value)) if isinstance(value, float) else repr(value)
            for name, value in json.loads(self.config).items()
            if value and name not in ("name", "ema_momentum")
        }
        words = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{self.kind.__name__}({words})"


class StartWeights:
    """The start weights of a round, each with the outer optimizer that moves it, if any.

    `kept` has states of some of these variables from an earlier run or a checkpoint. Local; also in
    traced code. **Cost:** memory for one copy of the weights, and for the optimizer's state.
    """

    def __init__(
        self,
        weights: Mapping[str, tf.Variable],
        outer: OuterOptimizer | None,
        kept: Mapping[str, State],
    ) -> None:
        self._start: dict[str, keras.Variable] = {}
        self._optimizers: dict[str, keras.optimizers.Optimizer] = {}
        other_kinds: set[str] = set()
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
                    other_kinds |= _load(optimizer, kept[path])
        if outer is not None and other_kinds:
            log.warning(
                "The outer optimizer was %s and is now %s: its state begins anew.",
                " or ".join(sorted(other_kinds)),
                outer.kind.__name__,
            )

    def __getitem__(self, path: str) -> tf.Tensor:
        return tf.convert_to_tensor(self._start[path].value)

    def set(self, weights: Mapping[str, tf.Variable | tf.Tensor]) -> None:
        """Begin a round of these variables at their weights."""
        for path, weight in weights.items():
            self._start[path].value.assign(weight)

    def move(self, path: str, update: tf.Tensor) -> tf.Tensor:
        """Move a variable's start weights by a round's update, and return them.

        Args:
            update: current weights - start weights, averaged over the ranks; equal on all ranks.
        """
        if path in self._optimizers:
            with allow_plain_optimizers():  # The update is the average over the ranks
                self._optimizers[path].apply([-update], [self._start[path]])
        else:
            self.set({path: self[path] + update})
        return self[path]

    def state(self) -> dict[str, State]:
        """Return the outer optimizers' states, by variable. Outside of traced code."""
        states: dict[str, State] = {}
        for path, optimizer in self._optimizers.items():
            store: dict[str, Any] = {}
            optimizer.save_own_variables(store)
            states[path] = {key: np.array(value) for key, value in store.items()}
            # Bytes, because a checkpoint holds arrays of numbers
            states[path][KIND] = np.frombuffer(type(optimizer).__name__.encode(), np.uint8)
        return states


def _load(optimizer: keras.optimizers.Optimizer, kept: State) -> set[str]:
    """Load a state, except the learning rate, which is the user's current choice.

    Returns:
        The class name in the state, if it is another class, so that nothing was loaded; else empty.
    """
    state = dict(kept)
    kind = state.pop(KIND).tobytes().decode()
    if kind != type(optimizer).__name__:
        return {kind}
    rate = optimizer.get_config()["learning_rate"]
    optimizer.load_own_variables(state)
    if isinstance(rate, float):  # A schedule follows the restored number of rounds
        optimizer.learning_rate = rate
    return set()
