"""A measured step beside what the simulator says of it: one file holds what both need."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from tfcommx import routes
from tfcommx.simulator.conditions import Conditions, measured_in
from tfcommx.simulator.step import simulate
from tfcommx.terms import Links, Plan, PlanError, Profile, Span, Timeline


class MeasuredStep(NamedTuple):
    """A step with its exchange, and the profile and the plan of the same run."""

    profile: Profile
    plan: Plan
    timeline: Timeline

    def simulated(self, links: Links, conditions: Conditions | None = None) -> Timeline:
        """Return the timeline that the simulator predicts for this plan and profile."""
        return simulate(
            self.plan, self.profile, links, conditions or Conditions(measured_in(self.profile))
        )

    def to_json(self) -> str:
        """Write all as JSON."""
        timeline = dataclasses.asdict(self.timeline)
        return json.dumps(
            {
                "profile": json.loads(self.profile.to_json()),
                "plan": json.loads(self.plan.to_json()),
                "timeline": {**timeline, "spans": [list(span) for span in self.timeline.spans]},
            }
        )

    @staticmethod
    def read(path: str | Path) -> MeasuredStep:
        """Read a file that `to_json` wrote.

        **Raises:** PlanError if it is missing or says something else.
        """
        try:
            found = json.loads(Path(path).read_text())
            spans = tuple(Span(*span) for span in found["timeline"]["spans"])
            return MeasuredStep(
                Profile.from_json(json.dumps(found["profile"])),
                routes.read_plan(json.dumps(found["plan"])),
                Timeline(**{**found["timeline"], "spans": spans}),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                "A file of a measured step, as `MeasuredStep.to_json` writes it, is required. "
                f"Received {path}: {type(error).__name__}: {error}."
            ) from error
