"""Simulate a training step: the buckets of a plan on the resources of one node.

Gradients a, b, c become ready one after another; a and b are bucket 0, c is bucket 1:

    compute   | forward |  a  | b | select 0 |     c     | select 1 |           | update |
    between                              |   message 0   |          | message 1 |

A selection follows the gradient that completes its bucket at once, on the compute stream or beside
it. Collectives take their turn in the order in which they are asked for, at the prices of their
routes. The weights are updated when the last message has come, as Algorithm 2 of Shi et al. (2020)
does. All nodes are loaded alike, and the prices count how the slots of a node share its port, so
one node is simulated however many there are: the slowest one, for which the others wait.

Source: the timeline of Shi et al., "Communication-Efficient Distributed Deep Learning with Merged
Gradient Sparsification on GPUs" (2020), equations 5 to 9, with a port inside a node, the price of
any route, and the assumptions.

`buckets_ready` says when the backward pass completes each bucket, `stages_of` what the bucket does
then, stage by stage. A route prices its messages on an idle network. What the engine adds to each
collective, and what a selection takes, is added here and nowhere else; the waiting is `simulate`'s.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from tfcommx import routes
from tfcommx.core import (
    RESOURCES,
    Bucket,
    Links,
    Piece,
    Plan,
    PlanError,
    Profile,
    Span,
    Timeline,
    Topology,
)
from tfcommx.routes.route import SELECT, Stage
from tfcommx.simulator.assumptions import IDEAL, Assumptions, disturbed_links
from tfcommx.wire import formats


def buckets_ready(plan: Plan, profile: Profile) -> list[float]:
    """Return when the last gradient of each bucket is ready, from the start of the backward pass.

    **Raises:** PlanError if the plan and the profile have different variables.
    """
    known = {row.name: row for row in profile.variables}
    entries: defaultdict[str, int] = defaultdict(int)
    found = []
    for bucket in plan.buckets:
        paths = [Piece.of(name).path for name in bucket.variables]
        for path, size in zip(paths, bucket.sizes, strict=True):
            entries[path] += size
            if path not in known:
                raise PlanError(
                    f"A profile of the plan's model is required. The profile of "
                    f"{profile.model!r} lacks {path!r}; it has {list(known)[:3]}, ..."
                )
        found.append(max((known[path].ready_s for path in paths), default=0.0))
    for name, row in known.items():
        if entries[name] != row.size:
            raise PlanError(
                f"A profile of the plan's model is required. {name!r} has {row.size} entries in "
                f"the profile of {profile.model!r} and {entries[name]} in the plan."
            )
    return found


def backward_pieces(plan: Plan, profile: Profile) -> list[tuple[str, float, list[int]]]:
    """Cut the backward pass into pieces: (variable, seconds, numbers of the buckets it completes).

    **Raises:** as `buckets_ready`.
    """
    complete: defaultdict[float, list[int]] = defaultdict(list)
    for number, seconds in enumerate(buckets_ready(plan, profile)):
        complete[seconds].append(number)
    names: dict[float, str] = {}
    for row in profile.variables:
        names[row.ready_s] = row.name
    found, before = [], 0.0
    for seconds in sorted(names):
        found.append((names[seconds], seconds - before, complete.pop(seconds, [])))
        before = seconds
    if profile.backward_s > before:
        found.append(("rest of the backward pass", profile.backward_s - before, []))
    return found


def stages_of(
    bucket: Bucket, topology: Topology, links: Links, assumptions: Assumptions = IDEAL
) -> list[Stage]:
    """Return what a bucket does after its last gradient, one after another, without waiting.

    The prices are the route's own; the selection takes what the assumptions say; each collective
    takes the engine's time besides.
    """
    found = []
    engine_s = links.engine_s if assumptions.engine_s is None else assumptions.engine_s
    for stage in routes.of(bucket).stages(bucket, topology, links):
        if stage.resource == SELECT:
            selects = selection_seconds(bucket, topology, links, assumptions)
            seconds = stage.seconds if bucket.compresses else selects
            found.append(Stage(SELECT, seconds))
        elif stage.seconds > 0:  # A group of one rank has no collective
            found.append(Stage(stage.resource, stage.seconds + engine_s))
    return found


def selection_seconds(
    bucket: Bucket, topology: Topology, links: Links, assumptions: Assumptions
) -> float:
    """Return what one rank needs to select from its part of a bucket."""
    start, stop = routes.get(bucket.route).shard(bucket, topology, 0)
    if assumptions.selection is not None:
        return assumptions.selection(stop - start)
    return (stop - start) * bucket.entry_bytes * links.inside.gamma_s_per_byte


# Priorities on the compute stream; the lower one is served first.
SELECT_FIRST, BACKWARD = 0, 1


def simulate(
    plan: Plan,
    profile: Profile,
    links: Links,
    assumptions: Assumptions = IDEAL,
    quantile: float = 0.5,
) -> Timeline:
    """Return the timeline of a step.

    Args:
        plan: of the ranks of its topology.
        profile: of the same model, on one rank.
        links: what messages cost.
        assumptions: what else is assumed.
        quantile: of steps between which the rates of ports vary, in [0, 1]: 0.5 is the median one,
            and one in ten is longer than that at 0.9.

    **Cost:** about 10 microseconds for each variable and bucket, however many nodes there are.
    **Raises:** PlanError for a plan and a profile of different models, naming a variable.
    """
    links = disturbed_links(links, plan.topology, assumptions, quantile)
    return _Step(plan, profile, links, assumptions).run()


# What happens when something has ended, at a time.
_After = Callable[[float], None]


class _Task(NamedTuple):
    """What waits for a resource, or has it; the first by priority, then by number, is served."""

    priority: int
    # In the order in which tasks ask.
    number: int
    seconds: float
    # Without its times.
    span: Span
    # What happens when it has ended.
    after: _After


class _Running(NamedTuple):
    """A task that has its resource."""

    start: float
    task: _Task


class _Step:
    """Carries out the events of a step in the order of their times."""

    def __init__(
        self, plan: Plan, profile: Profile, links: Links, assumptions: Assumptions
    ) -> None:
        self.plan, self.profile, self.links = plan, profile, links
        self.assumptions = assumptions.on(links)
        self.contention = self.assumptions.contention or 0.0
        self.slowest = assumptions.slowest_on(plan.topology)
        # Of each bucket, from the next one on.
        self.stages = [
            stages_of(bucket, plan.topology, links, assumptions) for bucket in plan.buckets
        ]
        self.pieces = backward_pieces(plan, profile)
        self.spans: list[Span] = []
        # (seconds, number of the event, what happens), a heap.
        self.events: list[tuple[float, int, _After]] = []
        self.number = itertools.count()
        # By resource, each a heap.
        self.waiting: defaultdict[str, list[_Task]] = defaultdict(list)
        self.running: dict[str, _Running] = {}
        # Numbers of messages that were negotiated together with one before.
        self.negotiated: set[int] = set()
        # By resource, when the engine looked at what waits, the last time.
        self.looked: defaultdict[str, float] = defaultdict(float)
        self.is_backward = True
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
        update = self.profile.update_s * self.assumptions.slow_node
        end = self.end
        if update:
            self._note(Span("compute", "update", "update", end, end + update))
        return Timeline(
            tuple(sorted(self.spans, key=_place)),
            max(end + update, self.assumptions.loading_s),
            self.profile.compute_s,
            self.profile.batch,
            self.plan.topology.size,
        )

    def _backward(self, place: int, now: float) -> None:
        """Ask for the next piece of the backward pass, up to a gradient that completes buckets."""
        if place == len(self.pieces):
            self.is_backward = False
            self.end = max(self.end, now)
            for resource in list(self.running):
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
        if not self.stages[number]:
            self.end = max(self.end, now)
            return
        stage, name = self.stages[number].pop(0), self.plan.buckets[number].name
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
        task = _Task(priority, next(self.number), seconds, span, after)
        heapq.heappush(self.waiting[resource], task)
        if resource not in self.running:
            self._serve_later(resource, self._next_look(resource, span.kind, now))

    def _serve(self, resource: str, now: float) -> None:
        if resource in self.running or not self.waiting[resource]:
            return
        task = heapq.heappop(self.waiting[resource])
        is_message = task.span.kind == "message"
        self.looked[resource] = now
        if is_message and self.assumptions.fuses:
            task = self._negotiated(resource, self._fused(resource, task))
        slow = 1.0 + self.contention if is_message and self.is_backward else 1.0
        self._start(resource, _Running(now, task), now + task.seconds * slow)

    def _negotiated(self, resource: str, task: _Task) -> _Task:
        """Negotiate for a message and all that wait; one of these does not pay for it again."""
        if task.number in self.negotiated:
            return task._replace(seconds=task.seconds - (self.assumptions.engine_s or 0.0))
        self.negotiated |= {one.number for one in self.waiting[resource]}
        return task

    def _fused(self, resource: str, task: _Task) -> _Task:
        """Take the other allreduces of this dtype that wait, and price all as one.

        Those that do not fit the engine's buffer beside the ones before them wait.
        """
        kind = self._fuses_as(task)
        if kind is None:
            return task
        room = self.links.engine.fusion_bytes - self._dense_bytes(task)
        joined: list[_Task] = []
        for one in sorted(self.waiting[resource]):
            if self._fuses_as(one) == kind and self._dense_bytes(one) <= room:
                joined.append(one)
                room -= self._dense_bytes(one)
        if not joined:
            return task
        numbers = {one.number for one in joined}
        rest = [one for one in self.waiting[resource] if one.number not in numbers]
        self.waiting[resource] = rest
        heapq.heapify(rest)
        buckets = [self.plan.buckets[one.span.bucket] for one in (task, *joined)]
        whole = dataclasses.replace(
            buckets[0],
            variables=(),
            sizes=tuple(size for bucket in buckets for size in bucket.sizes),
            padding=sum(bucket.padding for bucket in buckets),
        )
        (stage,) = stages_of(whole, self.plan.topology, self.links, self.assumptions)

        def after(end: float) -> None:
            for one in (task, *joined):
                one.after(end)

        return task._replace(seconds=stage.seconds, after=after)

    def _dense_bytes(self, task: _Task) -> float:
        return formats.dense_bytes(self.plan.buckets[task.span.bucket])

    def _fuses_as(self, task: _Task) -> tuple[object, ...] | None:
        """Return what fused messages have in common; None for one that the engine never fuses."""
        bucket = self.plan.buckets[task.span.bucket]
        # The vectors of a compression wait for each other; those of several buckets are not fused
        is_allreduce = bucket.route == "allreduce" and not bucket.compresses
        return (formats.dense_dtype(bucket), bucket.options) if is_allreduce else None

    def _start(self, resource: str, running: _Running, end: float) -> None:
        self.running[resource] = running
        self._at(end, lambda now: self._finish(resource, running, now))

    def _speed_up(self, resource: str, now: float) -> None:
        """Let a message go on at full speed when the backward pass has ended."""
        found = self.running[resource]
        if found.task.span.kind == "message" and self.contention:
            done = (now - found.start) / (1 + self.contention)
            # A new object: the end that was foreseen for the old one no longer counts.
            self._start(resource, _Running(*found), now + found.task.seconds - done)

    def _finish(self, resource: str, running: _Running, now: float) -> None:
        if self.running.get(resource) is not running:
            return  # It went on faster, and has ended already or will at another time
        del self.running[resource]
        self._note(running.task.span._replace(start_s=running.start, end_s=now))
        running.task.after(now)
        if running.task.span.kind == "message":
            # After work that took longer than a cycle the engine does not sleep
            now = max(now, self.looked[resource] + self.links.engine.cycle_s)
            self.looked[resource] = now
        if self.waiting[resource]:
            self._serve_later(resource, now)

    def _next_look(self, resource: str, kind: str, now: float) -> float:
        """Return when an idle engine looks next: a whole number of cycles after the last time."""
        cycle, last = self.links.engine.cycle_s, self.looked[resource]
        if kind != "message" or not cycle:
            return now
        return last + max(0, math.ceil((now - last) / cycle)) * cycle

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
