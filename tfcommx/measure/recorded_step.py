"""Makes of a recorded run what can be simulated and planned anew: profile, plan and timeline.

Computing is what lies before the last gradient that the engine saw; a bucket is what travelled
together.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfcommx.measure.horovod_timeline import Message, RecordedStep, Recording, Tensor
from tfcommx.terms import (
    Bucket,
    MeasuredStep,
    Plan,
    PlanError,
    Profile,
    Span,
    Timeline,
    Topology,
    VariableProfile,
)
from tfcommx.terms.profile import FORWARD_SHARE

# Of sums that a simulated step can carry
DTYPES = ("float16", "float32", "float64")


def measured_step(recording: Recording, step: RecordedStep, topology: Topology) -> MeasuredStep:
    """Return a step of a recording, with its profile and its plan.

    A third of its computing, or less, counts as the forward pass.

    Args:
        recording: of a run whose gradients travelled as sums.
        step: of it.
        topology: of its ranks.

    **Raises:** PlanError if anything but sums of float gradients travelled, and for a topology of
    another number of ranks.
    """
    if topology.size != recording.ranks:
        raise PlanError(
            f"Nodes with as many slots are required for the run's {recording.ranks} ranks. "
            f"Received slots={topology.slots}. Set --slots to the ranks of a node."
        )
    tensors = [tensor for message in step.messages for tensor in message.tensors]
    for one in tensors:
        if one.operation != "ALLREDUCE" or one.dtype not in DTYPES:
            raise PlanError(
                "To simulate a recorded step, sums of gradients alone are required. Received "
                f"{one.operation} of {one.dtype}, {one.name!r}. Measure this run with "
                "`tfcommx profile --exchange`."
            )
    profile = _profile(step, tensors)
    plan = Plan(tuple(_bucket(message) for message in step.messages), topology)
    port = "between" if topology.nodes > 1 else "inside"
    timeline = Timeline(
        _spans(step, profile, port), step.step_s, profile.compute_s, 1, topology.size
    )
    return MeasuredStep(profile, plan, timeline)


def _profile(step: RecordedStep, tensors: Sequence[Tensor]) -> Profile:
    compute_s = step.ready_s - step.start_s
    ready = sorted(tensors, key=lambda one: one.ready_s)
    forward_s = max(0.0, min(FORWARD_SHARE * compute_s, ready[0].ready_s - step.start_s))
    rows = tuple(
        VariableProfile(
            one.name,
            one.shape,
            one.dtype,
            ready_s=max(0.0, one.ready_s - step.start_s - forward_s),
        )
        for one in ready
    )
    return Profile("a recorded run", rows, forward_s, compute_s - forward_s, batch=1, steps=1)


def _bucket(message: Message) -> Bucket:
    return Bucket(
        message.name,
        tuple(one.name for one in message.tensors),
        tuple(one.entries for one in message.tensors),
        message.tensors[0].dtype,
        "allreduce",
    )


def _spans(step: RecordedStep, profile: Profile, port: str) -> tuple[Span, ...]:
    before = profile.forward_s
    found = [Span("compute", "forward", "forward", 0.0, before)]
    for row in profile.variables:
        ready_s = profile.forward_s + row.ready_s
        found.append(Span("compute", "backward", row.name, before, ready_s))
        before = ready_s
    for number, message in enumerate(step.messages):
        start, stop = (time - step.start_s for time in (message.begin_s, message.end_s))
        found.append(Span(port, "message", message.name, start, stop, number))
    return tuple(sorted((s for s in found if s.end_s > s.start_s), key=lambda s: s.start_s))
