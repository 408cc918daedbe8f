"""Predict a training step under a scheme: plan it, then simulate the plan.

A prediction has an interval, the 5-95 % range of steps with this prediction:

    predicted   |        compute        |     exposed exchange     |
    interval    |        compute        |  shortest  |  ...  longest  | ... compute takes longer |

A prediction is missed for two reasons. Messages take another time than their price, which
leaves effects out and varies between measurements; and a step takes longer than
its computing and its exchange together, where the exchange slows the computing that hides it. Both
were counted on published steps that nothing here was tuned to.

Source: `scripts/reproduce/intervals.py`; docs/laboratory/reproduction.md has the table.

`what_helps` predicts with one thing changed at a time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from tfcommx import routes
from tfcommx.core import (
    NO_COMPRESSION,
    PLAIN,
    Link,
    Links,
    Plan,
    Profile,
    Scheme,
    Timeline,
    Topology,
)
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.simulator.assumptions import IDEAL, Assumptions
from tfcommx.simulator.step import simulate


class Misses(NamedTuple):
    """How far published steps lie from predicted ones; 2.5 % of them lie beyond each number."""

    # Exposed exchange, published / predicted: at least, and at most.
    message_low: float
    message_high: float
    # A step whose exchange is hidden, published / predicted: at most.
    compute_high: float


# Misses of all sources of docs/laboratory/reproduction.md together.
MISSES = Misses(0.69, 1.6, 1.23)
# Standard deviations of a normal distribution beyond which 5 % lie.
NINETY = 1.645


class Interval(NamedTuple):
    """Seconds."""

    low: float
    high: float


def interval(
    compute_s: float, exposed_s: float, spread: float = 0.0, misses: Misses = MISSES
) -> Interval:
    """Return the interval of a predicted step.

    >>> interval(2.0, 1.0, misses=Misses(0.5, 1.5, 1.0))
    Interval(low=2.5, high=3.5)

    Args:
        compute_s: of the step without exchange, >= 0.
        exposed_s: by how much the exchange lengthens it, >= 0.
        spread: standard deviation / mean of the times of messages in the probe, >= 0.
    """
    varies = NINETY * spread
    # Squares are added, because prices and repeats miss independently
    shorter = math.hypot(1 - misses.message_low, varies)
    longer = math.hypot(misses.message_high - 1, varies)
    # Computing is not shortened: an exchange can slow the computing that hides it, and never speeds
    # it up
    return Interval(
        compute_s + exposed_s * max(1 - shorter, 0.0),
        compute_s * misses.compute_high + exposed_s * (1 + longer),
    )


# Quantiles of steps, if the rates of ports vary: the median, and the ends of the middle 80 %
QUANTILES = (0.5, 0.1, 0.9)
# Kinds of spans in which the slowest rank computes
COMPUTING = ("forward", "backward", "update")


class Setting(NamedTuple):
    """A model on a cluster, which with a scheme determines a predicted step."""

    # Profile of one rank, with times.
    profile: Profile
    topology: Topology
    links: Links
    assumptions: Assumptions = IDEAL

    def predict(self, scheme: Scheme) -> Prediction:
        """Return the step in which every gradient travels by `scheme`.

        **Raises:** PlanError for a scheme that the cluster cannot carry out.
        """
        rows = reversed(self.profile.variables)
        plan = make_plan(
            [Gradient(row.name, row.shape, row.dtype) for row in rows],
            {"*": scheme},
            self.topology,
            links=self.links,
            profile=self.profile,
            assumptions=self.assumptions,
        )
        predictions = [
            simulate(plan, self.profile, self.links, self.assumptions, quantile)
            for quantile in (QUANTILES if self.assumptions.jitter else QUANTILES[:1])
        ]
        # By their size, because a slower port may end a step earlier, if fewer messages wait for
        # the next poll of the queue, or more are fused
        steps_s = sorted(timeline.step_s for timeline in predictions)
        tenths = Interval(steps_s[0], steps_s[-1]) if self.assumptions.jitter else None
        return Prediction(scheme, plan, predictions[0], self.links.spread, tenths)


def bytes_between(plan: Plan) -> float:
    """Return the bytes that one rank sends to other nodes in a step, as the mean over the ranks."""
    topology = plan.topology
    return sum(routes.of(bucket).wire_bytes(bucket, topology).between for bucket in plan.buckets)


class Prediction(NamedTuple):
    """A scheme, its plan, and the step that is predicted under it."""

    scheme: Scheme
    plan: Plan
    timeline: Timeline
    # Standard deviation / mean of the times of messages in the probe
    spread: float = 0.0
    # One step in ten is shorter, and one longer, by the rates of ports; None: these don't vary
    tenths: Interval | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.timeline.step_s

    @property
    def interval(self) -> Interval:
        """5-95 % range of steps with this prediction, in seconds."""
        spans = (span for span in self.timeline.spans if span.kind in COMPUTING)
        slowest_s = sum(span.end_s - span.start_s for span in spans)
        return interval(slowest_s, self.step_s - slowest_s, self.spread)

    def may_beat(self, other: Prediction) -> bool:
        """Return True if this step may be the shorter one, given the errors of predictions."""
        # Only the exposed exchange counts, because both have the same computing
        least = interval(0.0, self.timeline.exposed_s, self.spread).low
        return least <= interval(0.0, other.timeline.exposed_s, other.spread).high

    @property
    def bytes_between(self) -> float:
        """Bytes that one rank sends to other nodes in a step, as the mean over the ranks."""
        return bytes_between(self.plan)

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residuals on rank 0: 4 for each entry that it selects from.

        Momentum correction keeps as many again.
        """
        total = 0
        for bucket in self.plan.buckets:
            if bucket.keeps_residual:
                start, stop = routes.get(bucket.route).shard(bucket, self.plan.topology, 0)
                total += 4 * (stop - start) * (2 if bucket.momentum else 1)
        return total

    def row(self) -> dict[str, Any]:
        """Return the columns of `tfcommx simulate`, for tables and for lines of JSON.

        Bytes of routes of messages are None: on 512 ranks counting takes longer than all else.
        """
        scheme, topology, timeline = self.scheme, self.plan.topology, self.timeline
        tenths = self.tenths or Interval(self.step_s, self.step_s)
        return {
            "scheme": scheme.route,
            "wire": scheme.wire,
            "merging": scheme.merging,
            "nodes": topology.nodes,
            "slots": topology.slots,
            "step_seconds": timeline.step_s,
            "step_seconds_low": self.interval.low,
            "step_seconds_high": self.interval.high,
            "step_seconds_p10": tenths.low,
            "step_seconds_p90": tenths.high,
            "compute_seconds": timeline.compute_s,
            "exposed_seconds": timeline.exposed_s,
            "throughput": timeline.throughput,
            "scaling_efficiency": timeline.scaling_efficiency,
            "bytes_between": None if routes.get(scheme.route).messages else self.bytes_between,
        }


def describe(scheme: Scheme) -> str:
    """Return a scheme in a few words, as far as it differs from plain Horovod's.

    >>> describe(Scheme("torus", peer_route="pipeline", wire="int8", merging="single"))
    'torus (pipeline), int8, single'
    >>> describe(Scheme("hitopk", "mstopk", 0.01, dense_route="torus"))
    'hitopk mstopk 0.01 + torus, threshold'
    """
    name = scheme.route
    if scheme.peer_route != "allreduce":
        name += f" ({scheme.peer_route})"
    if scheme.selection != "all":
        name += f" {scheme.selection} {scheme.density:g} + {scheme.dense_route}"
    if scheme.dense_wire != PLAIN:
        name += f" {scheme.dense_wire}"
    forms = [x for x in (scheme.wire, scheme.compression) if x not in (PLAIN, NO_COMPRESSION)]
    return ", ".join([name, *forms, scheme.merging])


def what_helps(scheme: Scheme, setting: Setting) -> dict[str, Prediction]:
    """Predict the step as it is, then with faster links, fewer slots, half the density, ..."""
    topology, links = setting.topology, setting.links
    changed = {"as it is": (scheme, setting)}

    def change(change_name: str, **fields: Any) -> None:
        changed[change_name] = (scheme, setting._replace(**fields))

    if topology.nodes > 1:
        faster = _twice_the_rate(links.between)
        change("twice the rate between nodes", links=links._replace(between=faster))
        sooner = dataclasses.replace(links.between, alpha_s=links.between.alpha_s / 2)
        change("half the latency between nodes", links=links._replace(between=sooner))
    if topology.slots > 1:
        faster = _twice_the_rate(links.inside)
        change("twice the rate inside nodes", links=links._replace(inside=faster))
    if topology.slots % 2 == 0 and not topology.uneven:
        change("half the slots a node", topology=Topology(topology.nodes, topology.slots // 2))
    if scheme.selection != "all":
        thinner = dataclasses.replace(scheme, density=scheme.density / 2)
        changed["half the density"] = (thinner, setting)
    profile = setting.profile
    twice = dataclasses.replace(profile.scaled(2, update_factor=1), batch=2 * profile.batch)
    change("twice the batch", profile=twice)
    return {change_name: under.predict(how) for change_name, (how, under) in changed.items()}


def _twice_the_rate(link: Link) -> Link:
    return dataclasses.replace(link, beta_s_per_byte=link.beta_s_per_byte / 2)
