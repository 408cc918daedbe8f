"""Simulate a training step: the buckets of a plan on the resources of one node.

Gradients a, b, c become ready one after another; a and b are bucket 0, c is bucket 1:

    compute   | forward |  a  | b | select 0 |     c     | select 1 |           | update |
    between                              |   message 0   |          | message 1 |

A selection starts as soon as a gradient completes its bucket, on the compute stream or next to it.
Collectives are carried out in the order of their requests, at the prices of their routes. The
weights are updated after the last message, as in Algorithm 2 of Shi et al. (2020). Only the slowest
node is simulated, because all nodes have the same load, the others wait for it, and the prices
include how the slots of a node share its port.

Source: the timeline of Shi et al., "Communication-Efficient Distributed Deep Learning with Merged
Gradient Sparsification on GPUs" (2020), equations 5 to 9, with a port inside a node, the price of
any route, and the assumptions. Equation 9 lacks brackets: messages that are not hidden end after
tau_s(1) + t_s(1), so its last sign is a minus.

`buckets_ready` returns the time at which the backward pass completes each bucket, `stages_of` the
stages of a bucket after that. A route prices its messages on an idle network. This file adds the
engine's time per collective and the time of selections; `simulate` adds the waiting.
"""

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
    """Return the seconds from the start of the backward pass until each bucket is complete.

    **Raises:** PlanError if the plan and the profile have different variables.
    """
    rows = {row.name: row for row in profile.variables}
    entries: defaultdict[str, int] = defaultdict(int)
    ready = []
    for bucket in plan.buckets:
        paths = [Piece.of(name).path for name in bucket.variables]
        for path, size in zip(paths, bucket.sizes, strict=True):
            entries[path] += size
            if path not in rows:
                raise PlanError(
                    f"A profile of the plan's model is required. The profile of "
                    f"{profile.model!r} lacks {path!r}; it has {list(rows)[:3]}, ..."
                )
        ready.append(max((rows[path].ready_s for path in paths), default=0.0))
    for name, row in rows.items():
        if entries[name] != row.size:
            raise PlanError(
                f"A profile of the plan's model is required. {name!r} has {row.size} entries in "
                f"the profile of {profile.model!r} and {entries[name]} in the plan."
            )
    return ready


def backward_pieces(plan: Plan, profile: Profile) -> list[tuple[str, float, list[int]]]:
    """Cut the backward pass into pieces: (variable, seconds, numbers of the buckets it completes).

    **Raises:** PlanError, as `buckets_ready`.
    """
    complete: defaultdict[float, list[int]] = defaultdict(list)
    for number, seconds in enumerate(buckets_ready(plan, profile)):
        complete[seconds].append(number)
    names: dict[float, str] = {}
    for row in profile.variables:
        # Gradients that are ready at the same time share a piece
        names[row.ready_s] = row.name
    pieces, last_s = [], 0.0
    for seconds in sorted(names):
        pieces.append((names[seconds], seconds - last_s, complete.pop(seconds, [])))
        last_s = seconds
    if profile.backward_s > last_s:
        pieces.append(("rest of the backward pass", profile.backward_s - last_s, []))
    return pieces


def stages_of(
    bucket: Bucket, topology: Topology, links: Links, assumptions: Assumptions = IDEAL
) -> list[Stage]:
    """Return the stages of a bucket after its last gradient, in order, without waiting times.

    Collectives have the prices of the route plus the engine's time; a selection has the time of the
    assumptions.
    """
    stages = []
    own_s = links.engine_s if assumptions.engine_s is None else assumptions.engine_s
    for stage in routes.of(bucket).stages(bucket, topology, links):
        if stage.resource == SELECT:
            selects = selection_seconds(bucket, topology, links, assumptions)
            seconds = stage.seconds if bucket.compresses else selects
            stages.append(Stage(SELECT, seconds))
        elif stage.seconds > 0:  # A group of one rank has no collective
            engine_s = 0.0 if by_messages(bucket, stage.resource) else own_s
            stages.append(Stage(stage.resource, stage.seconds + engine_s))
    return stages


def by_messages(bucket: Bucket, resource: str) -> bool:
    """Return True if a stage consists of messages between two ranks, without the engine."""
    route = routes.get(bucket.route)
    # A torus with a peer route of messages uses them between nodes alone
    return route.messages or (route.needs_messages(bucket) and resource == "between")


def selection_seconds(
    bucket: Bucket, topology: Topology, links: Links, assumptions: Assumptions
) -> float:
    """Return the seconds that one rank needs to select from its part of a bucket."""
    start, stop = routes.get(bucket.route).shard(bucket, topology, 0)
    if assumptions.selection is not None:
        return assumptions.selection(stop - start)
    return (stop - start) * bucket.entry_bytes * links.inside.gamma_s_per_byte


# Priorities on the compute stream; the lower one is served first
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
        quantile: quantile of the step times under varying rates of ports, in [0, 1]: 0.5 is the
            median; one step in ten is longer than the one at 0.9.

    **Cost:** about 10 microseconds for each variable and bucket, for any number of nodes.
    **Raises:** PlanError for a plan and a profile of different models, naming a variable.
    """
    links = disturbed_links(links, plan.topology, assumptions, quantile)
    return _Step(plan, profile, links, assumptions).run()


# Callback after an event, called with its time in seconds
_After = Callable[[float], None]


class _Task(NamedTuple):
    """A request for a resource; requests are served by priority, then by number."""

    priority: int
    # Position in the order of requests
    number: int
    seconds: float
    # Description of the work; its times are set at the end
    span: Span
    # Callback at the end of the task
    after: _After


class _Running(NamedTuple):
    start: float
    task: _Task


class _Step:
    """Processes the events of a step in the order of their times."""

    def __init__(
        self, plan: Plan, profile: Profile, links: Links, assumptions: Assumptions
    ) -> None:
        self.plan, self.profile, self.links = plan, profile, links
        self.assumptions = assumptions.on(links)
        self.contention = self.assumptions.contention or 0.0
        self.slowest = assumptions.slowest_on(plan.topology)
        # Remaining stages of each bucket
        self.stages = [
            stages_of(bucket, plan.topology, links, assumptions) for bucket in plan.buckets
        ]
        self.pieces = backward_pieces(plan, profile)
        self.spans: list[Span] = []
        # (seconds, number of the event, callback), a heap. The number decides between events of one
        # time, because callbacks cannot be compared
        self.events: list[tuple[float, int, _After]] = []
        self.number = itertools.count()
        # Resource -> waiting tasks, each list a heap
        self.waiting: defaultdict[str, list[_Task]] = defaultdict(list)
        self.running: dict[str, _Running] = {}
        # Numbers of messages that were negotiated together with an earlier one
        self.negotiated: set[int] = set()
        # Resource -> time at which the engine last checked its waiting tasks
        self.looked: defaultdict[str, float] = defaultdict(float)
        self.is_backward = True
        self.end = 0.0

    def run(self) -> Timeline:
        forward = self.profile.forward_s * self.slowest
        if self.assumptions.loading_s:
            self._note(Span("host", "load", "batch", 0.0, self.assumptions.loading_s))
        self._note(Span("compute", "forward", "forward", 0.0, forward))
        self._at(forward, lambda now_s: self._backward(0, now_s))
        while self.events:
            now_s, _, happen = heapq.heappop(self.events)
            happen(now_s)
        update = self.profile.update_s * self.assumptions.slow_node
        end = self.end
        if update:
            self._note(Span("compute", "update", "update", end, end + update))
        return Timeline(
            tuple(sorted(self.spans, key=lambda s: (s.start_s, RESOURCES.index(s.resource)))),
            # The next batch is loaded during the step, which cannot be shorter
            max(end + update, self.assumptions.loading_s),
            self.profile.compute_s,
            self.profile.batch,
            self.plan.topology.size,
        )

    def _backward(self, position: int, now_s: float) -> None:
        """Request the compute stream for a piece of the backward pass."""
        if position == len(self.pieces):
            self.is_backward = False
            self.end = max(self.end, now_s)
            for resource in list(self.running):
                self._speed_up(resource, now_s)
            return
        name, seconds, complete = self.pieces[position]

        def after(end: float) -> None:
            for bucket in complete:
                self._next_stage(bucket, end)
            self._backward(position + 1, end)

        span = Span("compute", "backward", name, now_s, now_s)
        self._ask("compute", BACKWARD, seconds * self.slowest, span, after, now_s)

    def _next_stage(self, number: int, now_s: float) -> None:
        """Request the resource that a bucket needs next."""
        if not self.stages[number]:
            self.end = max(self.end, now_s)
            return
        stage, name = self.stages[number].pop(0), self.plan.buckets[number].name
        after: _After = lambda end: self._next_stage(number, end)  # noqa: E731
        if stage.resource == SELECT:
            lane = self.assumptions.selection_on
            span = Span(lane, "select", name, now_s, now_s, number)
            self._ask(lane, SELECT_FIRST, stage.seconds * self.slowest, span, after, now_s)
            return
        span = Span(stage.resource, "message", name, now_s, now_s, number)
        # Horovod's engine carries out one collective after the other, on whichever port
        self._ask("engine", 0, stage.seconds, span, after, now_s)

    def _ask(
        self, resource: str, priority: int, seconds: float, span: Span, after: _After, now_s: float
    ) -> None:
        task = _Task(priority, next(self.number), seconds, span, after)
        heapq.heappush(self.waiting[resource], task)
        if resource not in self.running:
            self._serve_later(resource, self._next_look(resource, span, now_s))

    def _serve(self, resource: str, now_s: float) -> None:
        if resource in self.running or not self.waiting[resource]:
            return
        task = heapq.heappop(self.waiting[resource])
        is_message, is_collective = task.span.kind == "message", self._is_collective(task.span)
        if is_collective and task.number not in self.negotiated:
            self.looked[resource] = now_s
        if is_collective and self.assumptions.fuses:
            task = self._negotiated(resource, self._fused(resource, task))
        # Messages are slower while the ranks compute; `_speed_up` ends that with the backward pass
        slow = 1.0 + self.contention if is_message and self.is_backward else 1.0
        self._start(resource, _Running(now_s, task), now_s + task.seconds * slow)

    def _negotiated(self, resource: str, task: _Task) -> _Task:
        """Negotiate for a collective and all waiting ones, which then skip the engine's time."""
        if task.number in self.negotiated:
            return task._replace(seconds=task.seconds - (self.assumptions.engine_s or 0.0))
        waiting = self.waiting[resource]
        self.negotiated |= {other.number for other in waiting if self._is_collective(other.span)}
        return task

    def _fused(self, resource: str, task: _Task) -> _Task:
        """Fuse a message with the waiting allreduces of the same kind, and price them as one."""
        kind = self._fuses_as(task)
        if kind is None:
            return task
        room = self.links.engine.fusion_bytes - self._dense_bytes(task)
        joined: list[_Task] = []
        # The list is a heap, of which only the first entry is in its place
        waiting = sorted(self.waiting[resource])
        if task.number in self.negotiated:  # With an earlier message
            waiting = [message for message in waiting if message.number in self.negotiated]
        for message in waiting:
            if self._fuses_as(message) == kind and self._dense_bytes(message) <= room:
                joined.append(message)
                room -= self._dense_bytes(message)
        if not joined:
            return task
        numbers = {message.number for message in joined}
        remaining = [message for message in self.waiting[resource] if message.number not in numbers]
        self.waiting[resource] = remaining
        heapq.heapify(remaining)
        buckets = [self.plan.buckets[message.span.bucket] for message in (task, *joined)]
        fused = dataclasses.replace(
            buckets[0],
            variables=(),
            sizes=tuple(size for bucket in buckets for size in bucket.sizes),
            padding=sum(bucket.padding for bucket in buckets),
        )
        # Only flat allreduces are fused, which have one stage
        (stage,) = stages_of(fused, self.plan.topology, self.links, self.assumptions)

        def after(end: float) -> None:
            for message in (task, *joined):
                message.after(end)

        return task._replace(seconds=stage.seconds, after=after)

    def _dense_bytes(self, task: _Task) -> float:
        return formats.dense_bytes(self.plan.buckets[task.span.bucket])

    def _fuses_as(self, task: _Task) -> tuple[object, ...] | None:
        """Return the key that fusible messages share; None for a message that is never fused."""
        bucket = self.plan.buckets[task.span.bucket]
        # A bucket with a compression is never fused, because its vectors wait for each other
        is_allreduce = bucket.route == "allreduce" and not bucket.compresses
        return (formats.dense_dtype(bucket), bucket.options) if is_allreduce else None

    def _start(self, resource: str, running: _Running, end: float) -> None:
        self.running[resource] = running
        self._at(end, lambda now_s: self._finish(resource, running, now_s))

    def _speed_up(self, resource: str, now_s: float) -> None:
        """Continue a message at full speed after the end of the backward pass."""
        running = self.running[resource]
        if running.task.span.kind == "message" and self.contention:
            done = (now_s - running.start) / (1 + self.contention)
            # A new object, because `_finish` ignores the end that was scheduled for the old one
            self._start(resource, _Running(*running), now_s + running.task.seconds - done)

    def _finish(self, resource: str, running: _Running, now_s: float) -> None:
        if self.running.get(resource) is not running:
            return  # `_speed_up` has scheduled another end for this task
        del self.running[resource]
        self._note(running.task.span._replace(start_s=running.start, end_s=now_s))
        running.task.after(now_s)
        negotiated = any(task.number in self.negotiated for task in self.waiting[resource])
        if self._is_collective(running.task.span) and not negotiated:
            # The engine sleeps for the rest of its cycle when all that it has negotiated is sent
            now_s = max(now_s, self.looked[resource] + self.links.engine.cycle_s)
            self.looked[resource] = now_s
        if self.waiting[resource]:
            self._serve_later(resource, now_s)

    def _is_collective(self, span: Span) -> bool:
        """Return True if the engine carries it out."""
        # Other spans have no bucket
        return span.kind == "message" and not by_messages(
            self.plan.buckets[span.bucket], span.resource
        )

    def _next_look(self, resource: str, span: Span, now_s: float) -> float:
        """Return the time of an idle engine's next check: whole cycles after the last one."""
        cycle, last = self.links.engine.cycle_s, self.looked[resource]
        if not cycle or not self._is_collective(span):
            return now_s
        return last + max(0, math.ceil((now_s - last) / cycle)) * cycle

    def _serve_later(self, resource: str, now_s: float) -> None:
        """Serve the first task after all requests of this time have been made."""
        self._at(now_s, lambda later: self._serve(resource, later))

    def _note(self, span: Span) -> None:
        if span.end_s > span.start_s:
            self.spans.append(span)

    def _at(self, seconds: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (seconds, next(self.number), happen))
