"""Read Horovod's timeline of a run: its steps, their messages, and what these waited for.

A message carries the tensors that the engine fused. Rank 0, which writes the file, sees of it

    last gradient seen     all ranks have it     its turn      sums are there
          | waits for other ranks | waits for the engine | on its way |
        ready                  agreed                  begin         end

Source: the file that HOROVOD_TIMELINE of Horovod 0.28.1 writes; each tensor is a process in it.

A recorded run becomes a profile, a plan and a timeline, which can be simulated and planned anew.
Computing is what lies before the last gradient that the engine saw; a bucket is what travelled
together.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from tfcommx.core import (
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
# A collective outside of a graph, without a name of its own
UNNAMED = re.compile("Horovod[A-Z][a-z]+")
# Seconds within which the engine looks for tensors after a message; its cycle takes 1 ms or more
LOOKS_WITHIN_S = 0.01


class Tensor(NamedTuple):
    """What one collective carries for one name."""

    name: str
    # As Horovod calls it: ALLREDUCE, ALLGATHER, ...
    operation: str
    dtype: str
    shape: tuple[int, ...]
    # Seconds from the start of the file: rank 0's engine sees it; all ranks have it; its turn
    # comes; it is there.
    ready_s: float
    agreed_s: float
    begin_s: float
    end_s: float

    @property
    def entries(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape)


class Message(NamedTuple):
    """Tensors that travel together. Times are in seconds from the start of the file."""

    tensors: tuple[Tensor, ...]
    # After the message before it has ended.
    begin_s: float

    @property
    def name(self) -> str:
        """The last part of the first tensor's name, without what Horovod puts before it."""
        return re.sub(
            r"^Horovod\w+?_(gradient_tape_)?", "", self.tensors[0].name.rpartition("/")[2]
        )

    @property
    def entries(self) -> int:
        """Of all its tensors."""
        return sum(one.entries for one in self.tensors)

    @property
    def ready_s(self) -> float:
        """When the engine of rank 0 has seen the last tensor."""
        return max(one.ready_s for one in self.tensors)

    @property
    def agreed_s(self) -> float:
        """When all ranks have all tensors."""
        return max(self.ready_s, *(one.agreed_s for one in self.tensors))

    @property
    def end_s(self) -> float:
        """When the last sum is there."""
        return max(one.end_s for one in self.tensors)


class Waits(NamedTuple):
    """Seconds of waiting, each >= 0, that the first of these explains which was at work."""

    # Messages were on the way.
    messages_s: float
    # Not all ranks had the gradients.
    ranks_s: float
    # The rest: its cycle, copies.
    engine_s: float


class RecordedStep(NamedTuple):
    """A step: from the end of the last message of the step before to that of its own."""

    # Seconds from the start of the file.
    start_s: float
    # At least one, in the order of their turns.
    messages: tuple[Message, ...]

    @property
    def end_s(self) -> float:
        """When the last sum is there."""
        return max(one.end_s for one in self.messages)

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.end_s - self.start_s

    @property
    def ready_s(self) -> float:
        """When the engine of rank 0 has seen the last gradient."""
        return max(one.ready_s for one in self.messages)

    @property
    def exposed_s(self) -> float:
        """Seconds from the last gradient seen to the last sum: no computing hides them."""
        return self.end_s - self.ready_s

    @property
    def exposed_parts(self) -> Waits:
        """What the exposed seconds went into."""
        return self._waits(self.ready_s, self.end_s, max(one.agreed_s for one in self.messages))

    @property
    def saw_meanwhile(self) -> bool:
        """Whether the engine saw a tensor while a message was on the way."""
        return any(
            message.begin_s < tensor.ready_s < message.end_s
            for message in self.messages
            for other in self.messages
            for tensor in other.tensors
        )

    def made_early(self, message: Message) -> Message:
        """Return a message whose tensors were ready when the one before they were seen began."""

        def early_s(seen_s: float) -> float:
            before = [o for o in self.messages if 0 <= seen_s - o.end_s < LOOKS_WITHIN_S]
            return max([o.begin_s for o in before], default=seen_s)

        tensors = (one._replace(ready_s=early_s(one.ready_s)) for one in message.tensors)
        return message._replace(tensors=tuple(tensors))

    def waits_of(self, message: Message) -> Waits:
        """Return what one of the messages waited for, from its last gradient to its turn."""
        return self._waits(message.ready_s, message.begin_s, message.agreed_s)

    def _waits(self, start: float, stop: float, agreed: float) -> Waits:
        """Divide a stretch of time, up to `agreed` of which ranks may have been waited for.

        The engine tells that all ranks have a tensor when it has ended what it was at: until then
        the message at work counts.
        """

        def at_work(end: float) -> float:
            parts = (min(end, one.end_s) - max(start, one.begin_s) for one in self.messages)
            return sum(max(0.0, part) for part in parts)

        messages, ranks = at_work(stop), agreed - start - at_work(agreed)
        return Waits(messages, ranks, stop - start - messages - ranks)


class Recording(NamedTuple):
    """The steps that a timeline holds."""

    # At least one; without the first, whose start is not known.
    steps: tuple[RecordedStep, ...]
    # How many ranks took part, >= 1.
    ranks: int

    @property
    def typical(self) -> RecordedStep:
        """The step of median length."""
        middle = median_low(step.step_s for step in self.steps)
        return next(step for step in self.steps if step.step_s == middle)

    def earliest(self, step: RecordedStep) -> RecordedStep:
        """Return a step with its tensors ready as early as they may have been.

        Where the engine's thread waits for its messages, as on CPUs, it sees no tensor meanwhile:
        what it sees right after a message may have been ready since that message began.
        """
        if any(one.saw_meanwhile for one in self.steps):
            return step
        return RecordedStep(step.start_s, tuple(map(step.made_early, step.messages)))


def is_timeline(path: Path) -> bool:
    """Tell a timeline of Horovod, which is a list of events, from other JSON files."""
    with path.open(errors="replace") as file:
        return file.read(64).lstrip().startswith("[")


def read_timeline(path: Path) -> Recording:
    """Read a file that Horovod wrote, also one that a killed run has left without an end.

    **Ranks:** none. **Cost:** some 3 s for 100 MB, which are a thousand steps of 160 tensors.
    **Raises:** DataError for a file that is damaged, or without two steps of the same tensors.
    """
    remedy = "Record it anew: `horovodrun --timeline-filename FILE`."
    with reading("A timeline of Horovod", path, remedy):
        return _recording(path)


def _recording(path: Path) -> Recording:
    events = _events(path)
    found = _messages(events)
    often = _in_every_step(found)
    steps, before = [], None
    for messages in _steps(found, often):
        step = RecordedStep(0.0 if before is None else before, tuple(messages))
        if before is not None and {t.name for m in messages for t in m.tensors} == often:
            steps.append(step)
        before = step.end_s
    if not steps:
        raise DataError(
            f"A timeline of Horovod with two steps or more is required. Received {path}, with "
            f"{len(found)} messages. Start the run with `horovodrun --timeline-filename FILE`."
        )
    ranks = {str(event.get("name")) for event in events if event.get("ph") == "X"}
    return Recording(tuple(steps), max(1, len(ranks)))


def _events(path: Path) -> list[Mapping[str, Any]]:
    text = path.read_text(errors="replace")
    for whole in (text, text[: text.rfind("},") + 1] + "]"):
        try:
            found = json.loads(whole)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, list) and all(isinstance(event, dict) for event in found):
            return found
    raise DataError(
        "A timeline of Horovod, a list of events in JSON, is required. Received "
        f"{path}: {text[:60]!r}."
    )


def _messages(events: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Put together what travelled together, in the order of its turns."""
    parts: defaultdict[int, list[Tensor]] = defaultdict(list)
    for number, tensor in _collectives(events):
        parts[number].append(tensor)
    found, before = [], 0.0
    for _, tensors in sorted(parts.items()):
        end_s = max(one.end_s for one in tensors)
        begin_s = max(before, *(one.begin_s for one in tensors))
        found.append(Message(tuple(tensors), min(begin_s, end_s)))
        before = end_s
    return found


def _collectives(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    """Yield what each collective carried for each name, with the number of its message.

    Tensors that are fused begin together, before anything is done with one of them.
    """
    names: dict[int, str] = {}
    # By process, which is a tensor: what has begun in it, from the outside; its times
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
        elif stack:  # Else the file begins in the middle of it
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
    """Return the names of the tensors that most collectives are of, as often as each other.

    Averages of metrics, broadcasts and checks come less often, and what is exchanged outside of a
    graph, by whatever part of the program, has one name for all. The last step may have been cut.
    """
    counts = Counter(
        tensor.name
        for message in messages
        for tensor in message.tensors
        if not UNNAMED.fullmatch(tensor.name)
    )
    total: Counter[int] = Counter()
    for times in counts.values():
        total[times] += times
    most = max(total, key=lambda times: total[times], default=0)
    return {name for name, times in counts.items() if abs(times - most) <= 1}


def _steps(messages: Sequence[Message], often: set[str]) -> Iterator[list[Message]]:
    """Cut where a tensor comes again."""
    step: list[Message] = []
    seen: set[str] = set()
    for message in messages:
        tensors = tuple(one for one in message.tensors if one.name in often)
        names = {one.name for one in tensors}
        if names & seen:
            yield step
            step, seen = [], set()
        if tensors:
            step.append(message._replace(tensors=tensors))
            seen |= names
    if step:
        yield step


# Of sums that a simulated step can carry
DTYPES = ("float16", "float32", "float64")


def measured_step(recording: Recording, step: RecordedStep, topology: Topology) -> MeasuredStep:
    """Return a step of a recording, with its profile and its plan.

    A third of its computing, or less, counts as the forward pass.

    Args:
        recording: of a run whose gradients travelled as sums.
        step: of it.
        topology: of its ranks.

    **Raises:** DataError if anything but sums of float gradients travelled, and for a topology of
    another number of ranks.
    """
    if topology.size != recording.ranks:
        raise DataError(
            f"Nodes with as many slots are required for the run's {recording.ranks} ranks. "
            f"Received slots={topology.slots}. Set --slots to the ranks of a node."
        )
    tensors = [tensor for message in step.messages for tensor in message.tensors]
    for one in tensors:
        if one.operation != "ALLREDUCE" or one.dtype not in DTYPES:
            raise DataError(
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
