"""ExpectedRun: how many steps are expected to follow, for the choice of a plan."""

from __future__ import annotations

from typing import NamedTuple

from tfcommx.runtime.trial_rounds import STEPS

# A trial takes at most this share of the steps that follow
SHARE = 0.02
# In fewer steps than these nothing is measured, predicted or tried
FEW = 50


class ExpectedRun(NamedTuple):
    """What is known of the steps that follow; None where it is not.

    >>> [ExpectedRun(steps).trial_steps for steps in (500, 10**6, None)]
    [10, 18, 18]
    """

    # That the optimizer will take, >= 0
    steps: int | None = None
    # Of an epoch, likewise
    steps_of_epoch: int | None = None
    # Samples of a rank in a step, as told for the whole run, or as the traced step says it
    batch: int | None = None
    # Told for the whole run, which a fit is a part of
    whole_run: bool = False
    # Whether a choice that is measured is kept for other runs
    keeps_choice: bool = True

    @property
    def trial_steps(self) -> int:
        """The steps that a trial may take."""
        return STEPS if self.steps is None else min(STEPS, int(SHARE * self.steps))

    @property
    def is_short(self) -> bool:
        """Are there too few steps to spend anything on a choice?"""
        return self.steps is not None and self.steps < FEW

    def key(self, batch: int | None) -> dict[str, int | None]:
        """Return what a choice that is kept depends on.

        Where nobody knows the batch, the steps of an epoch, which change with it, stand for it.

        >>> ExpectedRun(100, 10, 32).key(None), ExpectedRun(100, 10).key(None), ExpectedRun().key(8)
        ({'batch': 32}, {'batch': None, 'steps_of_epoch': 10}, {'batch': 8})

        Args:
            batch: of a profile, which counts more.
        """
        found = self.batch if batch is None else batch
        return {"batch": found} | ({"steps_of_epoch": self.steps_of_epoch} if found is None else {})
