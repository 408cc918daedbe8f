"""Horovod's timeline: one that Horovod 0.28.1 wrote, and steps whose times are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tfcommx.core import DataError, Topology
from tfcommx.measure.horovod_timeline import Recording, is_timeline, measured_step, read_timeline

# Two ranks, 5 steps of hvd.DistributedGradientTape over Gloo; its end is missing, as after a kill
REAL = Path(__file__).with_name("horovod_timeline.json")


def begin(tensor: int, name: str, ms: float) -> dict[str, Any]:
    return {"ph": "B", "name": name, "ts": 1000 * ms, "pid": tensor}


def end(tensor: int, ms: float, **args: Any) -> dict[str, Any]:
    return {"ph": "E", "ts": 1000 * ms, "pid": tensor, **({"args": args} if args else {})}


def collective(tensors: Sequence[int], times: Sequence[float], name: str = "ALLREDUCE") -> list:
    """Events of tensors that travel together: seen, known by all, its turn, sums there, in ms."""
    seen, agreed, turn, there = times
    shape = {"dtype": "float32", "shape": "[2, 3]"}
    return [
        *(begin(tensor, f"NEGOTIATE_{name}", seen) for tensor in tensors),
        *(end(tensor, agreed) for tensor in tensors),
        *(begin(tensor, name, turn) for tensor in tensors),
        *(begin(tensor, f"GLOO_{name}", turn) for tensor in tensors),
        *(end(tensor, there) for tensor in tensors),
        *(end(tensor, there, **shape) for tensor in tensors),
    ]


def step(start: float, name: str = "ALLREDUCE") -> list[dict[str, Any]]:
    """A step of 20 ms.

    gradients     1 at 6, 2 and 3 at 8
    messages      | 1: 9 to 14 | 2 and 3: 16 to 20 |
    """
    first = collective([1], [start + 6, start + 8, start + 9, start + 14], name)
    seconds = [start + 8, start + 15, start + 16, start + 20]
    return [*first, *collective([2, 3], seconds, name)]


def written(folder: Path, *parts: Sequence[dict[str, Any]]) -> Path:
    names = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time": 1}},
        *(
            {"name": "process_name", "ph": "M", "pid": n, "args": {"name": f"scope/w{n}"}}
            for n in range(1, 5)
        ),
        {"name": "process_name", "ph": "M", "pid": 5, "args": {"name": "HorovodAllgather"}},
    ]
    ranks = [{"ph": "X", "name": str(rank), "ts": 0, "pid": 1, "dur": 0} for rank in range(4)]
    file = folder / "timeline.json"
    file.write_text(json.dumps([*names, *ranks, *(event for part in parts for event in part)]))
    return file


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return read_timeline(written(tmp_path, step(0), step(20)))


def in_ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 6) for one in seconds]


def test_what_messages_wait_for(recording: Recording) -> None:
    """The second is seen at 8; behind the first 9 to 14, for ranks 8 to 9 and 14 to 15."""
    found = recording.typical
    assert recording.ranks == 4 and in_ms([found.start_s, found.step_s]) == [20, 20]
    assert [message.name for message in found.messages] == ["w1", "w2"]
    assert [message.entries for message in found.messages] == [6, 12]
    first, second = map(found.waits_of, found.messages)
    assert in_ms(first) == [0, 2, 1] and in_ms(second) == [5, 2, 1]
    assert in_ms([found.exposed_s]) == [12]
    assert in_ms(found.exposed_parts) == [9, 2, 1]


def test_a_step_that_can_be_simulated(recording: Recording) -> None:
    """Computing up to 8 ms; a third of it is the forward pass."""
    found = measured_step(recording, recording.typical, Topology(2, 2))
    assert in_ms([found.profile.forward_s, found.profile.compute_s]) == [2.666667, 8]
    ready = {row.name: row.ready_s + found.profile.forward_s for row in found.profile.variables}
    assert in_ms(ready.values()) == [6, 8, 8] and next(iter(ready)) == "scope/w1"
    assert [bucket.variables for bucket in found.plan.buckets] == [
        ("scope/w1",),
        ("scope/w2", "scope/w3"),
    ]
    spans = [span for span in found.timeline.spans if span.kind == "message"]
    assert [(span.resource, *in_ms(span[3:5])) for span in spans] == [
        ("between", 9, 14),
        ("between", 16, 20),
    ]
    assert in_ms([found.timeline.exposed_s]) == [12]
    with pytest.raises(DataError, match=r"\b4\b.*slots=3\b"):
        measured_step(recording, recording.typical, Topology(1, 3))


def test_what_an_engine_saw_after_a_message_may_have_been_ready_before(tmp_path: Path) -> None:
    """The first message is under way 9 to 14; the second's tensors are seen at 15."""

    def late(start: float) -> list[dict[str, Any]]:
        first = collective([1], [start + 6, start + 8, start + 9, start + 14])
        return [*first, *collective([2, 3], [start + 15, start + 15, start + 16, start + 20])]

    found = read_timeline(written(tmp_path, late(0), late(20)))
    early = found.earliest(found.typical)
    assert in_ms([found.typical.exposed_s, early.exposed_s]) == [5, 11]
    assert in_ms([one.ready_s for one in early.messages]) == [26, 29]
    # One that sees tensors meanwhile saw them when they were ready
    meanwhile = [*collective([1], [46, 48, 49, 54]), *collective([2, 3], [50, 55, 56, 60])]
    found = read_timeline(written(tmp_path, late(0), late(20), meanwhile))
    assert found.earliest(found.steps[0]) == found.steps[0]


def test_what_comes_less_often_is_no_part_of_a_step(tmp_path: Path) -> None:
    """An average of a metric after the second step, and an exchange of settings before the first.

    The settings travel in many collectives, all of one name.
    """
    metric = collective([4], [141, 142, 143, 144])
    settings = (collective([5], [ms, ms, ms, ms + 1], "ALLGATHER") for ms in range(40))
    parts = (*settings, step(100), step(120), metric, step(145), step(165))
    found = read_timeline(written(tmp_path, *parts))
    assert [len(one.messages) for one in found.steps] == [2, 2, 2]
    assert in_ms([one.step_s for one in found.steps]) == [20, 25, 20]


def test_what_travels_in_other_ways_is_not_simulated(tmp_path: Path) -> None:
    found = read_timeline(written(tmp_path, step(0, "ALLGATHER"), step(20, "ALLGATHER")))
    assert in_ms([found.typical.exposed_s]) == [12]
    with pytest.raises(DataError, match=r"ALLGATHER .*float32.*'scope/w1'"):
        measured_step(found, found.typical, Topology(4, 1))


def test_a_file_of_horovod_itself() -> None:
    assert is_timeline(REAL)
    found = read_timeline(REAL)
    assert found.ranks == 2 and len(found.steps) == 4
    # The fused tensors differ from step to step; 8 gradients of a small network are in each
    for one in found.steps:
        assert sum(len(message.tensors) for message in one.messages) == 8
        assert sum(message.entries for message in one.messages) == 6_443_338
        times = [time for m in one.messages for time in (m.begin_s, m.end_s)]
        assert times == sorted(times) and one.exposed_s == pytest.approx(sum(one.exposed_parts))
    step = measured_step(found, found.typical, Topology(1, 2))
    assert step.timeline.step_s == pytest.approx(0.106, abs=1e-4)
    assert sum(bucket.size for bucket in step.plan.buckets) == 6_443_338


@pytest.mark.parametrize(
    ("text", "received"),
    [
        ("[1, 2]", r"'\[1, 2\]'"),
        ("[nothing", r"'\[nothing'"),
        ("[]", r"other\.json.*\b0\b.*--timeline-filename"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, received: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(DataError, match=received):
        read_timeline(tmp_path / "other.json")
