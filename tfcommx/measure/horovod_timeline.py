"""Read Horovod's timeline of a run: its steps, their messages, and the waits of these.

A message carries the tensors that the engine fused. Rank 0, which writes the file, records

    last gradient seen     all ranks have it     its turn      sums exist
          | waits for other ranks | waits for the engine | on its way |
        ready                  agreed                  begin         end

Source: the file that HOROVOD_TIMELINE of Horovod 0.28.1 writes; each tensor is a process in it.

A recorded run becomes a profile, a plan and a timeline, which can be simulated and planned again.
Computing ends with the last gradient that the engine saw. A bucket is the tensors of one message.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from tfcommx.core import (
    DENSE_DTYPES,
    Bucket,
    DataError,
    MeasuredStep,
    Plan,
    Profile,
    Span,
    Timeline,
    Topology,
    VariableProfile,
    reading,
)
from tfcommx.core.profile import FORWARD_SHARE

NEGOTIATES = "NEGOTIATE_"
# Name of a collective outside of a graph that was given no name
UNNAMED = re.compile("Horovod[A-Z][a-z]+")
# Seconds within which the engine polls its queue after a message; its cycle is 1 ms or more
LOOKS_WITHIN_S = 0.01


class Tensor(NamedTuple):
    """The tensor of one name in one collective."""

    name: str
    # Horovod's name of the operation: ALLREDUCE, ALLGATHER, ...
    operation: str
    dtype: str
    shape: tuple[int, ...]
    # Seconds from the start of the file at which rank 0's engine sees the tensor, all ranks have
    # it, its turn begins, and its result exists.
    ready_s: float
    agreed_s: float
    begin_s: float
    end_s: float

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


class Message(NamedTuple):
    """Tensors that travel together; times are seconds from the start of the file."""

    tensors: tuple[Tensor, ...]
    # Start of its turn, not before the end of the previous message.
    begin_s: float

    @property
    def name(self) -> str:
        """Last part of the first tensor's name, without Horovod's prefix."""
        return re.sub(
            r"^Horovod\w+?_(gradient_tape_)?", "", self.tensors[0].name.rpartition("/")[2]
        )

    @property
    def entries(self) -> int:
        return sum(tensor.entries for tensor in self.tensors)

    @property
    def ready_s(self) -> float:
        """Time at which the engine of rank 0 has seen the last tensor."""
        return max(tensor.ready_s for tensor in self.tensors)

    @property
    def agreed_s(self) -> float:
        """Time at which all ranks have all tensors."""
        return max(self.ready_s, *(tensor.agreed_s for tensor in self.tensors))

    @property
    def end_s(self) -> float:
        """Time at which the last sum exists."""
        return max(tensor.end_s for tensor in self.tensors)


class Waits(NamedTuple):
    """Seconds of waiting, each >= 0, counted for the first of these causes that applies."""

    # Other messages were on the way.
    messages_s: float
    # Some ranks did not have the gradients yet.
    ranks_s: float
    # Everything else in the engine: its cycle, copies.
    engine_s: float


class RecordedStep(NamedTuple):
    """A step, from the end of the previous step's last message to the end of its last message."""

    # Seconds from the start of the file.
    start_s: float
    # Messages in the order of their turns, at least one.
    messages: tuple[Message, ...]

    @property
    def end_s(self) -> float:
        """Time at which the last sum exists."""
        return max(message.end_s for message in self.messages)

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def ready_s(self) -> float:
        """Time at which the engine of rank 0 has seen the last gradient."""
        return max(message.ready_s for message in self.messages)

    @property
    def exposed_s(self) -> float:
        """Seconds from the last gradient seen to the last sum, which no computing hides."""
        return self.end_s - self.ready_s

    @property
    def exposed_parts(self) -> Waits:
        """Causes of the exposed seconds."""
        return self._waits(
            self.ready_s, self.end_s, max(message.agreed_s for message in self.messages)
        )

    @property
    def saw_meanwhile(self) -> bool:
        """True if the engine saw a tensor while a message was on the way."""
        return any(
            on_the_way.begin_s < tensor.ready_s < on_the_way.end_s
            for on_the_way in self.messages
            for message in self.messages
            for tensor in message.tensors
        )

    def made_early(self, message: Message) -> Message:
        """Return a message with tensors ready at the start of the message before they were seen."""

        def early_s(seen_s: float) -> float:
            previous = [
                earlier for earlier in self.messages if 0 <= seen_s - earlier.end_s < LOOKS_WITHIN_S
            ]
            return max([earlier.begin_s for earlier in previous], default=seen_s)

        tensors = (tensor._replace(ready_s=early_s(tensor.ready_s)) for tensor in message.tensors)
        return message._replace(tensors=tuple(tensors))

    def waits_of(self, message: Message) -> Waits:
        """Return the waits of one of the messages, from its last gradient to its turn."""
        return self._waits(message.ready_s, message.begin_s, message.agreed_s)

    def _waits(self, start: float, stop: float, agreed: float) -> Waits:
        """Divide an interval, up to `agreed` of which the engine may have waited for ranks."""

        def at_work(end: float) -> float:
            parts = (
                min(end, message.end_s) - max(start, message.begin_s) for message in self.messages
            )
            return sum(max(0.0, part) for part in parts)

        # Messages on the way count first, because the engine records that all ranks have a tensor
        # only after it has ended the current message
        messages, ranks = at_work(stop), agreed - start - at_work(agreed)
        return Waits(messages, ranks, stop - start - messages - ranks)


class Recording(NamedTuple):
    """The steps of a timeline."""

    # Steps, at least one; without the first, whose start is not known.
    steps: tuple[RecordedStep, ...]
    # Number of ranks, >= 1.
    ranks: int

    @property
    def typical(self) -> RecordedStep:
        """Step of median length."""
        # The lower one of two, because a mean of them is no step
        middle = median_low(step.step_s for step in self.steps)
        return next(step for step in self.steps if step.step_s == middle)

    def earliest(self, step: RecordedStep) -> RecordedStep:
        """Return a step whose tensors are ready at their earliest possible times."""
        # On CPUs the engine's thread sees no tensor while it waits for its messages, so that one
        # that is seen right after a message may have been ready since that message began
        if any(recorded.saw_meanwhile for recorded in self.steps):
            return step
        return RecordedStep(step.start_s, tuple(map(step.made_early, step.messages)))


def is_timeline(path: Path) -> bool:
    """Return True if a JSON file is a timeline of Horovod, which is a list of events."""
    with path.open(errors="replace") as file:
        return file.read(64).lstrip().startswith("[")


def read_timeline(path: Path) -> Recording:
    """Read a file that Horovod wrote, even if a killed run has left it without an end.

    **Ranks:** none. **Cost:** about 3 s for 100 MB, which are a thousand steps of 160 tensors.
    **Raises:** DataError for a file that is damaged, or without two steps of the same tensors.
    """
    remedy = "Record it anew: `horovodrun --timeline-filename FILE`."
    with reading("A timeline of Horovod", path, remedy):
        events = _events(path)
        all_messages = _messages(events)
        often = _in_every_step(all_messages)
        steps, before = [], None
        for messages in _steps(all_messages, often):
            step = RecordedStep(0.0 if before is None else before, tuple(messages))
            # The end of the file may cut a step off
            if before is not None and {t.name for m in messages for t in m.tensors} == often:
                steps.append(step)
            before = step.end_s
        if not steps:
            raise DataError(
                f"A timeline of Horovod with two steps or more is required. Received {path}, with "
                f"{len(all_messages)} messages. Start the run with `horovodrun "
                "--timeline-filename FILE`."
            )
        # Rank 0 marks the arrival of each rank by an event of its number
        ranks = {str(event.get("name")) for event in events if event.get("ph") == "X"}
        return Recording(tuple(steps), max(1, len(ranks)))


def _events(path: Path) -> list[Mapping[str, Any]]:
    text = path.read_text(errors="replace")
    # A killed run has left the list without an end, perhaps in the middle of an event
    for candidate in (text, text[: text.rfind("},") + 1] + "]"):
        try:
            events = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(events, list) and all(isinstance(event, dict) for event in events):
            return events
    raise DataError(
        "A timeline of Horovod, a list of events in JSON, is required. Received "
        f"{path}: {text[:60]!r}."
    )


def _messages(events: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Group the tensors that travelled together into messages, in the order of their turns."""
    parts: defaultdict[int, list[Tensor]] = defaultdict(list)
    for number, tensor in _collectives(events):
        parts[number].append(tensor)
    messages, before = [], 0.0
    for _, tensors in sorted(parts.items()):
        end_s = max(tensor.end_s for tensor in tensors)
        begin_s = max(before, *(tensor.begin_s for tensor in tensors))
        messages.append(Message(tuple(tensors), min(begin_s, end_s)))
        before = end_s
    return messages


def _collectives(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensor of each name in each collective, with the number of its message.

    Fused tensors begin together, before any activity of one of them.
    """
    names: dict[int, str] = {}
    # By process, which is a tensor: its open activities, outermost first; its times
    begun: defaultdict[int, list[str]] = defaultdict(list)
    times: dict[int, dict[str, Any]] = {}
    number, is_open = 0, False
    numbers: dict[int, int] = {}
    for event in events:
        kind = event.get("ph")
        tensor: int = event.get("pid", -1)
        if kind == "M" and event["name"] == "process_name":
            names[tensor] = event["args"].get("name", "")
        if kind not in ("B", "E") or tensor not in names:
            continue
        stack, seconds = begun[tensor], 1e-6 * event["ts"]
        if kind == "B":
            if not stack and event["name"].startswith(NEGOTIATES):
                times[tensor] = {"ready_s": seconds, "agreed_s": seconds}
            elif not stack:
                number, is_open = (number if is_open else number + 1), True
                numbers[tensor] = number
                row = times.setdefault(tensor, {"ready_s": seconds, "agreed_s": seconds})
                row |= {"operation": event["name"], "begin_s": seconds}
            else:
                is_open = False
            stack.append(event["name"])
        elif stack:  # Otherwise the file begins within the activity
            ended = stack.pop()
            if ended.startswith(NEGOTIATES):
                times[tensor]["agreed_s"] = seconds
            elif not stack:
                is_open = False
                args = event.get("args", {})
                yield (
                    numbers[tensor],
                    Tensor(
                        names[tensor],
                        dtype=args.get("dtype", ""),
                        shape=tuple(json.loads(args.get("shape", "[]"))),
                        end_s=seconds,
                        **times.pop(tensor),
                    ),
                )


def _in_every_step(messages: Sequence[Message]) -> set[str]:
    """Return the names of the tensors that are exchanged in every step."""
    counts = Counter(
        tensor.name
        for message in messages
        for tensor in message.tensors
        if not UNNAMED.fullmatch(tensor.name)
    )
    # Most collectives share one count: averages of metrics, broadcasts and checks are less frequent
    total: Counter[int] = Counter()
    for times in counts.values():
        total[times] += times
    most = max(total, key=lambda times: total[times], default=0)
    # Counts may differ by one, because the last step may be incomplete
    return {name for name, times in counts.items() if abs(times - most) <= 1}


def _steps(messages: Sequence[Message], often: set[str]) -> Iterator[list[Message]]:
    """Split the messages into steps at each repeated tensor."""
    step: list[Message] = []
    seen: set[str] = set()
    for message in messages:
        tensors = tuple(tensor for tensor in message.tensors if tensor.name in often)
        names = {tensor.name for tensor in tensors}
        if names & seen:
            yield step
            step, seen = [], set()
        if tensors:
            step.append(message._replace(tensors=tensors))
            seen |= names
    if step:
        yield step


def measured_step(recording: Recording, step: RecordedStep, topology: Topology) -> MeasuredStep:
    """Return a step of a recording, with its profile and its plan.

    The forward pass is assumed to be a third of its computing, or less.

    Args:
        recording: recording of a run whose gradients travelled as sums.

    **Raises:** DataError if anything but sums of float gradients travelled, and for a topology of
    another number of ranks.
    """
    if topology.size != recording.ranks:
        raise DataError(
            f"Nodes with as many slots are required for the run's {recording.ranks} ranks. "
            f"Received slots={topology.slots}. Set --slots to the ranks of a node."
        )
    tensors = [tensor for message in step.messages for tensor in message.tensors]
    for tensor in tensors:
        if tensor.operation != "ALLREDUCE" or tensor.dtype not in DENSE_DTYPES:
            raise DataError(
                "To simulate a recorded step, sums of gradients alone are required. Received "
                f"{tensor.operation} of {tensor.dtype}, {tensor.name!r}. Measure this run with "
                "`tfcommx profile --exchange`."
            )
    profile = _profile(step, tensors)
    buckets = [
        Bucket(
            message.name,
            tuple(tensor.name for tensor in message.tensors),
            tuple(tensor.entries for tensor in message.tensors),
            message.tensors[0].dtype,
            "allreduce",
        )
        for message in step.messages
    ]
    plan = Plan(tuple(buckets), topology)
    port = "between" if topology.nodes > 1 else "inside"
    timeline = Timeline(
        _spans(step, profile, port), step.step_s, profile.compute_s, 1, topology.size
    )
    return MeasuredStep(profile, plan, timeline)


def _profile(step: RecordedStep, tensors: Sequence[Tensor]) -> Profile:
    compute_s = step.ready_s - step.start_s
    ready = sorted(tensors, key=lambda tensor: tensor.ready_s)
    forward_s = max(0.0, min(FORWARD_SHARE * compute_s, ready[0].ready_s - step.start_s))
    rows = tuple(
        VariableProfile(
            tensor.name,
            tensor.shape,
            tensor.dtype,
            ready_s=max(0.0, tensor.ready_s - step.start_s - forward_s),
        )
        for tensor in ready
    )
    return Profile("a recorded run", rows, forward_s, compute_s - forward_s, batch=1, steps=1)


def _spans(step: RecordedStep, profile: Profile, port: str) -> tuple[Span, ...]:
    before = profile.forward_s
    spans = [Span("compute", "forward", "forward", 0.0, before)]
    for row in profile.variables:
        ready_s = profile.forward_s + row.ready_s
        spans.append(Span("compute", "backward", row.name, before, ready_s))
        before = ready_s
    for number, message in enumerate(step.messages):
        start, stop = (time - step.start_s for time in (message.begin_s, message.end_s))
        spans.append(Span(port, "message", message.name, start, stop, number))
    return tuple(
        sorted((span for span in spans if span.end_s > span.start_s), key=lambda span: span.start_s)
    )
