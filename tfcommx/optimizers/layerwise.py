"""Common parts: trust ratios, of LARS and LAMB; the variables whose momenta are sent."""

import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcommx.core import ConfigurationError, check_name, check_number
from tfcommx.keras_internals.momenta import SendsMomentum
from tfcommx.keras_internals.names import path_of
from tfcommx.keras_internals.step import UpdatesTogether, compiled_by_xla
from tfcommx.kernels.lars import squared_norms, squared_norms_definition
from tfcommx.optimizers.parallel_operator import MODES, parallel_operator
from tfcommx.strategies.synchronous import Synchronous

# Biases, and the scales and offsets of normalisation: few, near 0 or 1, and not scale-free
EXCLUDED = ("*bias", "*gamma", "*beta", "*scale")
# (norms of weights, norms of updates, weight decay of each) -> ratios
Formula = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


class LayerwiseOptimizer(UpdatesTogether, keras.optimizers.Optimizer):
    """A Keras optimizer whose learning rate has a trust ratio for each variable.

    Args:
        learning_rate: as for Keras's optimizers.
        weight_decay: >= 0; None: none.
        exclude: patterns of variable paths, as in file names: such variables have the ratio 1 and
            no weight decay. Keras's `exclude_from_weight_decay` excludes from the decay alone.
        norms: how ranks compute the norms. "local": every rank all. "parallel": a share each, by
            `parallel_operator`; "auto": the faster of the two. Both need a wrapped optimizer on
            several ranks whose weights stay equal and which all update (not strategy="root");
            otherwise they are local.
        keras_options: the other arguments of every Keras optimizer.

    **Raises:** ConfigurationError for numbers out of range, or an `exclude` that is no list of
    patterns.
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float | None,
        exclude: Sequence[str],
        norms: str,
        **keras_options: Any,
    ) -> None:
        check_name("norms", norms, MODES)
        patterns = check_patterns(exclude)
        check_number("weight_decay", weight_decay or 0.0, ">= 0")
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **keras_options)
        self.exclude, self.norms = patterns, norms

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the state for these variables."""
        super().build(variables)
        # For each variable: True if it has its own ratio; True if it decays
        self.adapted = tuple(not matches_any(path_of(part), self.exclude) for part in variables)
        self.decays = tuple(
            adapted and self.uses_weight_decay(variable)
            for adapted, variable in zip(self.adapted, variables, strict=True)
        )

    def decay_of(self, position: int) -> float:
        """Return the weight decay of a variable: 0 if `exclude` or Keras excludes it."""
        return (self.weight_decay or 0.0) if self.decays[position] else 0.0

    def ratios(
        self,
        positions: Sequence[int],
        variables: Sequence[tf.Variable],
        updates: Sequence[tf.Tensor],
        formula: Formula,
    ) -> tf.Tensor:
        """Return the trust ratio of each variable, float32 [variables].

        Args:
            positions: of the variables, among those that the optimizer was built for.
            variables: the weights.
            updates: the tensors whose norms enter the ratio, of the same shapes.
            formula: (norms of the weights, norms of the updates, weight decay of each) -> the
                ratios if both norms are above 0; otherwise the ratio is 1.

        **Cost:** one pass over the weights and updates that are not excluded.
        """
        included = [i for i, position in enumerate(positions) if self.adapted[position]]
        if not included:
            return tf.ones([len(positions)])
        weights = {i: tf.convert_to_tensor(variables[i]) for i in included}
        pairs = [(_for_norms(weights[i]), _for_norms(updates[i])) for i in included]
        if self.norms == "local" or not self._shares_norms():
            squares = _squares(pairs)
        else:
            squares = tf.stack(parallel_operator(_rows_of_squares, pairs, self.norms))
        weight_norms, update_norms = tf.unstack(tf.sqrt(squares), axis=1)
        nonzero = (weight_norms > 0) & (update_norms > 0)
        decays = tf.constant([self.decay_of(positions[i]) for i in included], tf.float32)
        # The formula may divide 0 by 0 where a norm is 0
        ratios = tf.where(nonzero, formula(weight_norms, update_norms, decays), 1.0)
        # In the order of `positions`; the appended 1 is the ratio of excluded variables
        order = [
            included.index(i) if i in included else len(included) for i in range(len(positions))
        ]
        return tf.gather(tf.concat([ratios, [1.0]], axis=0), order)

    def _shares_norms(self) -> bool:
        exchanger = getattr(self, "exchanger", None)
        if exchanger is None or exchanger.ranks == 1:
            return False
        # Ranks with other weights would get each other's norms, and one that updates alone would
        # wait for the others
        return isinstance(exchanger.settings.strategy, Synchronous)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "exclude": list(self.exclude), "norms": self.norms}


class SendsLargeMatrices(SendsMomentum):
    """Mixed into an optimizer that sends the momenta of its large matrices, and other gradients.

    They are few or sensitive. Its constructor sets both attributes.
    """

    # Patterns of the paths of variables that send gradients
    exclude: tuple[str, ...]
    # Entries; smaller variables also send gradients
    dense_below: int

    def sends_momentum(self, variable: keras.Variable | tf.Variable) -> bool:
        """Return True if this variable's momentum is sent instead of its gradient."""
        shape = tuple(variable.shape)
        large = len(shape) > 1 and math.prod(shape) >= self.dense_below
        return large and not matches_any(path_of(variable), self.exclude)

    def get_config(self) -> dict[str, Any]:
        options = {"exclude": list(self.exclude), "dense_below": self.dense_below}
        return {**super().get_config(), **options}


def check_patterns(exclude: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of `exclude`. **Raises:** ConfigurationError if it is no list."""
    # Once, because a generator yields its patterns only once
    patterns = tuple(exclude)
    if isinstance(exclude, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigurationError(
            "`exclude` must be a list of patterns of variable paths, such as "
            f"{list(EXCLUDED)}. Received {exclude!r}."
        )
    return patterns


def matches_any(path: str, patterns: Sequence[str]) -> bool:
    """Return True if a variable's path matches any of the patterns."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _squares(pairs: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
    """Return the squared norms of pairs, float32 [pairs, 2]."""
    tensors = [tensor for pair in pairs for tensor in pair]
    squares = (squared_norms_definition if compiled_by_xla() else squared_norms)(tensors)
    return tf.reshape(squares, [len(pairs), 2])


# No lambda, because parallel_operator keeps its choice by function
def _rows_of_squares(pairs: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
    return list(tf.unstack(_squares(pairs)))


def _for_norms(tensor: tf.Tensor) -> tf.Tensor:
    supported = (tf.float32, tf.float16, tf.bfloat16)
    return tensor if tensor.dtype in supported else tf.cast(tensor, tf.float32)
