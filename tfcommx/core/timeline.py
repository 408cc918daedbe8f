"""Timeline: the activities of a node's resources in a training step, simulated or measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tfcommx.core.files import local_path, reading
from tfcommx.core.plan import Plan
from tfcommx.core.profile import Profile

# Lanes of a drawing, from the top: input pipeline, accelerator, a second stream or the cores next
# to it, the port inside the node, the port to the other nodes.
RESOURCES = ("host", "compute", "beside", "inside", "between")


class Span(NamedTuple):
    """An interval in which a resource has one activity."""

    # One of RESOURCES.
    resource: str
    # "load", "forward", "backward", "select", "message" or "update".
    kind: str
    # Name of the variable or bucket.
    name: str
    # Seconds from the start of the step.
    start_s: float
    end_s: float
    # Number of the bucket in its plan; -1: no bucket.
    bucket: int = -1


@dataclass(frozen=True)
class Timeline:
    """A step of the slowest rank; all nodes of a cluster have the same load.

    >>> spans = (Span("compute", "backward", "w", 0, 2), Span("between", "message", "w", 2, 3))
    >>> timeline = Timeline(spans, step_s=3.0, compute_s=2.0, batch=8, ranks=4)
    >>> timeline.exposed_s, timeline.throughput, round(timeline.scaling_efficiency, 3)
    (1.0, 10.666666666666666, 0.667)
    """

    # Spans, ordered by start.
    spans: tuple[Span, ...]
    # Seconds of the whole step.
    step_s: float
    # Seconds of one rank without exchange: forward pass, backward pass, update.
    compute_s: float
    # Samples of one rank.
    batch: int
    ranks: int

    @property
    def exposed_s(self) -> float:
        """Seconds, >= 0, that the exchange adds to the step: messages, selection, waiting."""
        exposed = self.step_s - self.compute_s
        # The two are sums in different orders, so they may differ in the last bits
        return exposed if exposed > 1e-12 * self.step_s else 0.0

    @property
    def throughput(self) -> float:
        """Samples per second of all ranks together."""
        return self.ranks * self.batch / self.step_s

    @property
    def scaling_efficiency(self) -> float:
        """Throughput divided by that of the same ranks without exchange, in (0, 1]."""
        return self.compute_s / self.step_s


class MeasuredStep(NamedTuple):
    """A step with its exchange, and the profile and the plan of the same run."""

    profile: Profile
    plan: Plan
    timeline: Timeline

    def to_json(self) -> str:
        """Return the step as JSON."""
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

        **Raises:** DataError if the file is missing or invalid.
        """
        remedy = "Make it anew: `tfcommx profile --exchange`, or `MeasuredStep.to_json`."
        with reading("A measured step", path, remedy):
            content = json.loads(local_path("path", path).read_text())
            spans = tuple(Span(*span) for span in content["timeline"]["spans"])
            return MeasuredStep(
                Profile.from_json(json.dumps(content["profile"])),
                read_plan(json.dumps(content["plan"])),
                Timeline(**{**content["timeline"], "spans": spans}),
            )
