"""What a schedule of the learning rate is."""

from __future__ import annotations

from typing import Protocol


class Schedule(Protocol):
    """How the learning rate decays after the warm-up."""

    def factor(self, step: float, warm_up: float, steps: float, steps_per_epoch: float) -> float:
        """Return the learning rate over its peak, in [0, 1].

        Args:
            step: in [warm_up, steps); counted over the whole run.
            warm_up: steps of the warm-up, >= 0.
            steps: of the whole run.
            steps_per_epoch: >= 1.
        """


def done(step: float, warm_up: float, steps: float) -> float:
    """Return how much of the decay is done, in [0, 1)."""
    return (step - warm_up) / max(1.0, steps - warm_up)
