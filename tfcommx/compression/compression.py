"""Define the contract of a compression."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# A tf.Tensor; Any, because plans and prices do not load TensorFlow
Tensor = Any
Shape = tuple[int, ...]
# float32 [n] of this rank -> its sum over all ranks, with the same bits on each
Add = Callable[[Tensor], Tensor]


class CompressionResult(NamedTuple):
    """The result of one step of a compression."""

    # Sum over the ranks of the parts sent, by variable, in its shape; equal on all ranks
    totals: Sequence[Tensor]
    # Part that this rank sent, by variable, in its shape
    sent: Sequence[Tensor]
    # State for the next step: float32 [sum of `state_sizes`]; equal on all ranks
    state: Tensor


class Compression(abc.ABC):
    """Sends other, shorter vectors than the gradients, which a dense route sums.

    It has no access to residuals, routes or plans, because the runtime puts error feedback around
    it and any dense route adds its vectors.
    """

    @abc.abstractmethod
    def sums(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Count the entries of each vector that is summed in a step, in order.

        Returns:
            Static numbers, because the engine's cache must stay valid: as many entries travel in
            place of all. Empty if nothing is gained; then the bucket travels uncompressed.
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
        """Return the passes of a step over the gradients' bytes: its price without the sums."""
        return 4.0

    @abc.abstractmethod
    def run(self, gradients: Sequence[Tensor], state: Tensor, add: Add) -> CompressionResult:
        """Compress, sum, and decompress.

        Args:
            gradients: this rank's, plus its residuals: float32, in the shapes of the variables.
            state: float32 [sum of `state_sizes`].
            add: called once for each number of `sums`, in that order, with float32 of that length.

        **Ranks:** all; `totals` and `state` may depend on `state` and on the results of `add`, and
        on nothing else that differs between ranks.
        """
