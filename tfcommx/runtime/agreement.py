"""Check that all ranks have the same plan."""

from __future__ import annotations

from tfcommx.comm.base import Comm
from tfcommx.routes import read_plan
from tfcommx.terms import Plan, PlanError, first_difference


def agree_on_plan(plan: Plan, comm: Comm) -> None:
    """Refuse, on every rank, plans that differ between ranks.

    **Ranks:** all. **Cost:** one small exchange on the host, before training.
    **Raises:** PlanError that names the first difference and the rank.
    """
    texts = comm.gather_objects(plan.to_json())
    for rank, text in enumerate(texts):
        if text != texts[0]:
            found = first_difference(read_plan(texts[0]), read_plan(text))
            raise PlanError(
                f"The plan must be the same on every rank. Rank 0 and rank {rank} differ first "
                f"in {found}. "
                "Build the same model and scheme on every rank; load it on every rank, or none, "
                "or add BroadcastState."
            )
