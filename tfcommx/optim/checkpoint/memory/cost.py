"""What the snapshots of one process have cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class SnapshotCost:
    """Sums over the snapshots of this rank, in this process."""

    # Snapshots that are whole on all ranks
    count: int = 0
    # Copied while the steps wait; written and mirrored beside them
    copy_seconds: float = 0.0
    write_seconds: float = 0.0
    # That this rank wrote last, its mirror not counted
    bytes: int = 0

    def add(self, copy_seconds: float, write_seconds: float, size: int) -> None:
        """Add a snapshot.

        Args:
            copy_seconds: that the step waited.
            write_seconds: that a thread has worked.
            size: bytes that it wrote.
        """
        self.count += 1
        self.copy_seconds += copy_seconds
        self.write_seconds += write_seconds
        self.bytes = size

    def summary(self) -> dict[str, Any]:
        """Return it for a summary: seconds are those of one snapshot in the mean."""
        count = self.count or 1
        return {
            "count": self.count,
            "copy_seconds": round(self.copy_seconds / count, 6),
            "write_seconds": round(self.write_seconds / count, 6),
            "bytes": self.bytes,
        }
