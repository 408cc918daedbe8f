"""Simulates a training step: the plan's buckets on the resources of one node.

Gradients a, b, c become ready one after another; a and b are bucket 0, c is bucket 1:

    compute   | forward |  a  | b | select 0 |     c     | select 1 |           | update |
    between                              |   message 0   |          | message 1 |

A selection follows the gradient that completes its bucket at once, on the compute stream or beside
it. Collectives take their turn in the order in which they are asked for, at the prices of their
routes. The weights are updated when the last message has come, as Algorithm 2 of Shi et al. (2020)
does. All nodes are loaded alike, and the prices count how the slots of a node share its port, so
one node is simulated however many there are.

Source: the timeline of Shi et al., "Communication-Efficient Distributed Deep Learning with Merged
Gradient Sparsification on GPUs" (2020), equations 5 to 9, with a port inside a node, the price of
any route, and the assumptions.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from tfcommx.routes.base import SELECT
from tfcommx.simulator.assumptions import IDEAL, Assumptions
from tfcommx.simulator.backward_pass import backward_pieces
from tfcommx.simulator.stages import stages_of
from tfcommx.terms import RESOURCES, Links, Plan, Profile, Span, Timeline
from tfcommx.wire import formats

# On the compute stream what is first is served first.
SELECT_FIRST, BACKWARD = 0, 1


def simulate(
    plan: Plan, profile: Profile, links: Links, assumptions: Assumptions = IDEAL
) -> Timeline:
    """Return the timeline of a step.

    Args:
        plan: of the ranks of its topology.
        profile: of the same model, on one rank.
        links: what messages cost.
        assumptions: what else is assumed.

    **Cost:** about 10 microseconds for each variable and bucket, however many nodes there are.
    **Raises:** PlanError for a plan and a profile of different models, naming a variable.
    """
    return _Step(plan, profile, links, assumptions).run()


# What happens when something has ended, at a time.
_After = Callable[[float], None]


class _Running(NamedTuple):
    """What a resource is doing."""

    start: float
    seconds: float
    # Without its end.
    span: Span
    after: _After


class _Step:
    """Carries out the events of a step in the order of their times."""

    def __init__(
        self, plan: Plan, profile: Profile, links: Links, assumptions: Assumptions
    ) -> None:
        self.profile, self.assumptions, self.topology = (
            profile,
            assumptions.on(links),
            plan.topology,
        )
        self.links, self.contention = links, self.assumptions.contention or 0.0
        self.buckets = plan.buckets
        self.slowest = assumptions.slowest(plan.topology.size)
        self.remaining = [
            stages_of(bucket, plan.topology, links, assumptions) for bucket in plan.buckets
        ]
        self.pieces = backward_pieces(plan, profile)
        self.spans: list[Span] = []
        # (seconds, number of the event, what happens)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.number = itertools.count()
        # Waiting for a resource: (priority, number, seconds, span without times, what comes after)
        self.waiting: defaultdict[str, list[tuple[int, int, float, Span, _After]]] = defaultdict(
            list
        )
        self.busy: dict[str, _Running] = {}
        # Numbers of messages that were negotiated together with one before
        self.negotiated: set[int] = set()
        self.backward_ends: float | None = None
        self.end = 0.0

    def run(self) -> Timeline:
        forward = self.profile.forward_s * self.slowest
        if self.assumptions.loading_s:
            self._note(Span("host", "load", "batch", 0.0, self.assumptions.loading_s))
        self._note(Span("compute", "forward", "forward", 0.0, forward))
        self._at(forward, lambda now: self._backward(0, now))
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
        update = self.profile.update_s
        end = self.end
        if update:
            self._note(Span("compute", "update", "update", end, end + update))
        return Timeline(
            tuple(sorted(self.spans, key=_place)),
            max(end + update, self.assumptions.loading_s),
            self.profile.compute_s,
            self.profile.batch,
            self.topology.size,
        )

    def _backward(self, place: int, now: float) -> None:
        """Ask for the next piece of the backward pass, up to a gradient that completes buckets."""
        if place == len(self.pieces):
            self.backward_ends = now
            self.end = max(self.end, now)
            for resource in list(self.busy):
                self._speed_up(resource, now)
            return
        name, seconds, complete = self.pieces[place]

        def after(end: float) -> None:
            for bucket in complete:
                self._next_stage(bucket, end)
            self._backward(place + 1, end)

        span = Span("compute", "backward", name, now, now)
        self._ask("compute", BACKWARD, seconds * self.slowest, span, after, now)

    def _next_stage(self, number: int, now: float) -> None:
        """Let a bucket ask for the resource that it needs next."""
        if not self.remaining[number]:
            self.end = max(self.end, now)
            return
        stage = self.remaining[number].pop(0)
        name = self.buckets[number].name
        after: _After = lambda end: self._next_stage(number, end)  # noqa: E731
        if stage.resource == SELECT:
            lane = self.assumptions.selection_on
            span = Span(lane, "select", name, now, now, number)
            self._ask(lane, SELECT_FIRST, stage.seconds * self.slowest, span, after, now)
            return
        engine = stage.resource if self.assumptions.ports_together else "engine"
        span = Span(stage.resource, "message", name, now, now, number)
        self._ask(engine, 0, stage.seconds, span, after, now)

    def _ask(
        self,
        resource: str,
        priority: int,
        seconds: float,
        span: Span,
        after: _After,
        now: float,
    ) -> None:
        heapq.heappush(self.waiting[resource], (priority, next(self.number), seconds, span, after))
        if resource not in self.busy:
            self._serve_later(resource, now)

    def _serve(self, resource: str, now: float) -> None:
        if resource in self.busy or not self.waiting[resource]:
            return
        _, number, seconds, span, after = heapq.heappop(self.waiting[resource])
        if self.assumptions.fuses and span.kind == "message":
            seconds, after = self._fused(resource, seconds, span, after)
            if number in self.negotiated:
                seconds -= self.assumptions.engine_s or 0.0
            else:  # Whatever waits is negotiated with it
                self.negotiated |= {one[1] for one in self.waiting[resource]}
        slow = 1.0
        if span.kind == "message" and self.backward_ends is None:
            slow += self.contention
        running = _Running(now, seconds, span, after)
        self.busy[resource] = running
        self._at(now + seconds * slow, lambda end: self._finish(resource, running, end))

    def _fused(
        self, resource: str, seconds: float, span: Span, after: _After
    ) -> tuple[float, _After]:
        """Take the other allreduces of this dtype that wait, and price all as one."""
        first = self.buckets[span.bucket]
        joined, others, rest = [first], [after], []
        fused = (first.route, formats.dense_dtype(first), first.options)
        for one in self.waiting[resource]:
            bucket = self.buckets[one[3].bucket]
            kind = (bucket.route, formats.dense_dtype(bucket), bucket.options)
            if first.route != "allreduce" or kind != fused:
                rest.append(one)
                continue
            joined.append(bucket)
            others.append(one[4])
        if len(joined) == 1:
            return seconds, after
        self.waiting[resource] = rest
        heapq.heapify(rest)
        whole = dataclasses.replace(
            first,
            variables=(),
            sizes=tuple(size for bucket in joined for size in bucket.sizes),
            padding=sum(bucket.padding for bucket in joined),
        )
        (stage,) = stages_of(whole, self.topology, self.links, self.assumptions)

        def all_of_them(end: float) -> None:
            for one in others:
                one(end)

        return stage.seconds, all_of_them

    def _speed_up(self, resource: str, now: float) -> None:
        """Let a message go on at full speed when the backward pass has ended."""
        found = self.busy[resource]
        if found.span.kind != "message" or not self.contention:
            return
        done = (now - found.start) / (1 + self.contention)
        # Another one, so that the end that was foreseen before finds it gone.
        running = self.busy[resource] = found._replace()
        self._at(now + found.seconds - done, lambda end: self._finish(resource, running, end))

    def _finish(self, resource: str, running: _Running, now: float) -> None:
        if self.busy.get(resource) is not running:
            return  # It went on faster, and has ended already or will at another time
        del self.busy[resource]
        resource_shown, kind, name, _, _, bucket = running.span
        self._note(Span(resource_shown, kind, name, running.start, now, bucket))
        running.after(now)
        if self.waiting[resource]:
            self._serve_later(resource, now)

    def _serve_later(self, resource: str, now: float) -> None:
        """Serve who is first when all have asked that ask at this time."""
        self._at(now, lambda later: self._serve(resource, later))

    def _note(self, span: Span) -> None:
        if span.end_s > span.start_s:
            self.spans.append(span)

    def _at(self, seconds: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (seconds, next(self.number), happen))


def _place(span: Span) -> tuple[float, int]:
    """Order spans by their start, and by the lanes of a drawing."""
    return span.start_s, RESOURCES.index(span.resource)
