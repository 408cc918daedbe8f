"""What a wire format of another package is: `Scheme(wire="module:MEMBER")` on a sparse route."""

from __future__ import annotations

import abc
from typing import Any

from tfcommx.terms import Sparse, is_member, load_member

# Of TensorFlow, which plans and prices do not load
Tensor = Any


class WireFormat(abc.ABC):
    """Writes k selected entries of a vector as int32 words, and reads them.

    It knows nothing of residuals, routes or ranks: what `rounded` loses stays in the residual.
    """

    @abc.abstractmethod
    def words(self, k: int, size: int) -> int:
        """Count the int32 words of a buffer.

        Args:
            k: entries, >= 0.
            size: length of the vector that they were selected from, >= 0. Prices may ask for less
                than k.

        Returns:
            A number that depends on k and size alone, so that the engine's cache stays valid: what
            does not fit into fewer bits must be rounded away.
        """

    def rounded(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Round values to what the format can write.

        Args:
            values: float32 [k].

        Returns:
            What is written, float32 [k], and the rest, float32 [k]: exactly the difference, and 0
            where a value is not finite, which must stay so. None if the format writes float32.
        """
        return values, None

    @abc.abstractmethod
    def encode(self, sparse: Sparse) -> Tensor:
        """Write k entries.

        Args:
            sparse: indices int32 [k] in [0, size), ascending; values float32 [k], as `rounded`
                returned them, which must be written without further loss; size, an int.

        Returns:
            int32 [words(k, size)], its length known while tracing.

        **Ranks:** local.
        """

    @abc.abstractmethod
    def decode(self, words: Tensor, k: int, size: int) -> tuple[Tensor, Tensor]:
        """Read the entries of several buffers.

        Args:
            words: int32 [p, words(k, size)], what p ranks encoded.
            k: entries in each buffer.
            size: length of the vector.

        Returns:
            indices int32 [p, k], ascending in each buffer, and values float32 [p, k].

        **Ranks:** local; the same words must give the same bits on every rank.
        """


def of_others(wire: str) -> WireFormat | None:
    """Return the format that "module:MEMBER" names; None for a name that has no colon.

    **Raises:** PlanError if there is none, or if it is something else.
    """
    if not is_member(wire):
        return None
    found: WireFormat = load_member("wire format", wire, WireFormat)
    return found
