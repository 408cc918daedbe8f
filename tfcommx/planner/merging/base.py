"""What a merging solver is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Merging(Protocol):
    """Decides which gradients travel together."""

    @property
    def name(self) -> str:
        """The name in the table."""

    def groups(self, sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
        """Group consecutive gradients: a pure function, so equal on every rank.

        Args:
            sizes_bytes: bytes of each gradient, >= 0, in the order in which they become ready.
            bucket_bytes: what the user asks for as the size of a bucket, >= 1.

        Returns:
            The positions of each group in ascending order; every position in exactly one group.
        """
