"""MeasuredStep: the timeline of a measured step, with the profile and the plan to simulate it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tfcommx.terms.files import local_path, reading
from tfcommx.terms.plan import Plan
from tfcommx.terms.profile import Profile
from tfcommx.terms.timeline import Span, Timeline


class MeasuredStep(NamedTuple):
    """A step with its exchange, and the profile and the plan of the same run."""

    profile: Profile
    plan: Plan
    timeline: Timeline

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
    def read(path: str | Path, read_plan: Callable[[str], Plan]) -> MeasuredStep:
        """Read a file that `to_json` wrote.

        Args:
            path: of the file.
            read_plan: reads a plan with the options of every route: `routes.read_plan`.

        **Raises:** PlanError if it is missing or says something else.
        """
        remedy = "Make it anew: `tfcommx profile --exchange`, or `MeasuredStep.to_json`."
        with reading("A measured step", path, remedy):
            found = json.loads(local_path("path", path).read_text())
            spans = tuple(Span(*span) for span in found["timeline"]["spans"])
            return MeasuredStep(
                Profile.from_json(json.dumps(found["profile"])),
                read_plan(json.dumps(found["plan"])),
                Timeline(**{**found["timeline"], "spans": spans}),
            )
