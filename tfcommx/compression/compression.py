"""What a compression is."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

# Of TensorFlow, which plans and prices do not load
Tensor = Any
Shape = tuple[int, ...]
# float32 [n] of this rank -> its sum over all ranks, with the same bits on each
Add = Callable[[Tensor], Tensor]


class CompressionResult(NamedTuple):
    """What one step of a compression gives."""

    # The sum over the ranks of what each sent, by variable, in its shape; equal on all ranks
    totals: Sequence[Tensor]
    # What this rank sent, by variable, in its shape
    sent: Sequence[Tensor]
    # float32 [sum of `state_sizes`]: for the next step; equal on all ranks
    state: Tensor


class Compression(abc.ABC):
    """Sends other, shorter vectors than the gradients, which a dense route sums.

    It knows nothing of residuals, routes or plans: error feedback is put around it, and any dense
    route adds its vectors.
    """

    # It works on at most so many
    most_ranks: ClassVar[float] = math.inf

    @abc.abstractmethod
    def sums(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Count the entries of each vector that is summed in a step, in order.

        Args:
            shapes: of a bucket's variables.

        Returns:
            Static numbers, so that the engine's cache stays valid: their sum is what travels in
            place of all entries. Empty if nothing is gained: then the bucket travels as it is.
        """

    def state_sizes(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Count the entries of state for each variable, >= 0."""
        return (0,) * len(shapes)

    def first_state(self, shapes: Sequence[Shape]) -> np.ndarray:
        """Return the state before the first step: float32 [sum of `state_sizes`].

        **Ranks:** equal on all; it may depend on the shapes alone.
        """
        return np.zeros(sum(self.state_sizes(shapes)), np.float32)

    def passes(self) -> float:
        """Return how often a step goes through the gradients' bytes: its price beside the sums."""
        return 4.0

    @abc.abstractmethod
    def run(self, gradients: Sequence[Tensor], state: Tensor, add: Add) -> CompressionResult:
        """Compress, sum, and decompress.

        Args:
            gradients: this rank's, plus its residuals: float32, in the shapes of the variables.
            state: float32 [sum of `state_sizes`].
            add: called once for each number of `sums`, in that order, with float32 of that length.

        **Ranks:** all; `totals` and `state` may depend on `state` and on what `add` returned, and
        on nothing else that differs between ranks.
        """
