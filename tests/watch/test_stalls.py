"""Ranks that wait for others which live on: every rank says who waits for whom, and may end."""

from __future__ import annotations

import json
import os
import re

import keras
import pytest
import tensorflow as tf
from launching import WORKERS, horovodrun
from tensorflow.python.framework import op_def_library

from tfcommx.collectives import horovod
from tfcommx.collectives.init import init
from tfcommx.core import ConfigurationError
from tfcommx.launch import launcher
from tfcommx.watch import progress, stalls
from tfcommx.watch.stalls import (
    COMPUTES,
    ENDED,
    EXAMPLES,
    GROUPS,
    LEFT,
    OTHERS,
    PYTHON,
    UNKNOWN,
    WAITS,
    Group,
    StallWatch,
    describe,
    group_of,
    merge,
)


@pytest.mark.extended
@pytest.mark.long_wait
@pytest.mark.parametrize("engine", ["gloo", pytest.param("mpi", marks=pytest.mark.exhaustive)])
def test_ranks_that_wait_for_others_that_live_on_are_told_and_end(engine: str) -> None:
    ended = horovodrun(
        2,
        [str(WORKERS / "stalls.py")],
        engine,
        seconds=200,
        TFCOMMX_STALL_SECONDS="3",
        TFCOMMX_STALL_LIMIT_SECONDS="15",
        OMP_NUM_THREADS="1",
    )
    output = ended.output
    assert ended.status != 0 and "killed after" not in output, output[-4000:]
    waits = r"Rank 0 has waited \d+ s in the exchange of '[\w/]+'.* at step %d, and all ranks "
    waits += r"are alive\. Rank 1 has left `fit`, after step %d: stalls\.py:\d+ in <module> \(%s"
    for rank in (0, 1):
        # Unequal steps whose number Keras does not know
        assert re.search(f"Log of rank {rank}: " + waits % (5, 4, "Event.wait"), output), output
        assert f"rank {rank} has taken all steps" in output
        # EarlyStopping by a rank's own metric
        said = f"rank {rank} ends, because ranks wait for each other: " + waits % (11, 10, "")
        said = said.replace(r" \(", "")
        assert re.search(said + r".*AgreeOnStop.*The limit of 15 s has been reached", output)


@pytest.mark.exhaustive  # A group of each kind is in test_ranks_that_wait_for_each_other_end
def test_ranks_that_wait_for_each_other_end_without_a_limit() -> None:
    worker = [str(WORKERS / "stalls.py"), "mutual"]
    ended = horovodrun(2, worker, seconds=120, TFCOMMX_STALL_SECONDS="3", OMP_NUM_THREADS="1")
    assert ended.status != 0 and "killed after" not in ended.output, ended.output[-4000:]
    for rank in (0, 1):
        said = f"rank {rank} ends, because ranks wait for each other: .*None can continue"
        assert re.search(said, ended.output), ended.output


def test_every_kind_of_activity_is_described() -> None:
    kinds = {
        COMPUTES: "Rank 1 has begun a training step after step 7, and computes or waits for its",
        PYTHON: "Rank 1 has been in Python for 9 s after step 7: train.py:3.",
        LEFT: "Rank 1 has left `fit`, after step 7: train.py:3.",
        ENDED: "Rank 1 has ended the script.",
        UNKNOWN: "Rank 1 has told nothing yet.",
        WAITS: "Rank 1 has waited 9 s in train.py:3 at step 7.",
        OTHERS: "Rank 1 has done something else.",
    }
    waits = Group(8, WAITS, "bucket 2", 5, [0, 2, 3], 70.0)
    for doing, words in kinds.items():
        said = describe([Group(7, doing, "train.py:3", 1, [1], 9.0), waits])
        assert said.startswith("Ranks 0, 2, 3 and 2 more have waited 70 s in bucket 2 at step 8")
        assert words in said and stalls.CAUSES in said
    assert describe([waits]).endswith(stalls.SLOW)
    # A process that holds a centre delays no rank
    serves = group_of(5, 0, stalls.SERVES, "")
    assert describe(merge([waits, serves])) == describe([waits])


def test_a_summary_stays_small_and_keeps_the_longest_wait_and_who_does_not_wait() -> None:
    found: list[Group] = []
    for rank in range(1000):
        one = Group(rank % 50, WAITS, f"bucket {rank % 7}", 1, [rank], rank / 10)
        found = merge([*found, one, group_of(rank, rank, LEFT, f"line {rank}")])
        assert len(found) <= GROUPS and all(len(group.ranks) <= EXAMPLES for group in found)
    assert sum(group.size for group in found) == 2000
    assert max(group.seconds for group in found) == 99.9
    assert any(group.doing == LEFT and group.ranks == [0] for group in found)
    assert len(json.dumps([one._replace(what="x" * progress.LONGEST) for one in found])) < 2000


def test_ranks_that_do_the_same_are_one_group_with_the_longest_time() -> None:
    ones = [Group(3, WAITS, "b", 2, [4, 9], 5.0), Group(3, WAITS, "b", 3, [1, 2, 3], 8.0)]
    assert merge([*ones, Group(3, WAITS, "b", 1, [7], 6.0)]) == [
        Group(3, WAITS, "b", 6, [1, 2, 3], 8.0)
    ]


def test_a_wait_is_reported_once_and_a_later_one_if_it_is_twice_as_long() -> None:
    watch = StallWatch(60.0, 500.0)
    waits = [0, 59, 61, 130, 300, 0, 61, 110, 121, 300, 499, 500]
    said = [watch.look([Group(3, WAITS, "b", 1, [0], float(seconds))])[0] for seconds in waits]
    assert said == ["", "", "stall", *[""] * 5, "stall", "", "", "end"]
    assert StallWatch(None, None).on is False


STEP, PYTHON_CALL = "the exchange of 'net/bias'", "a collective of AverageMetrics.on_epoch_end"


@pytest.mark.parametrize(
    ("second", "ends"),
    [
        (Group(4, WAITS, PYTHON_CALL, 1, [1], 301.0), True),
        # A long broadcast could still end: one rank has left it, and waits in the next step
        (Group(4, WAITS, PYTHON_CALL, 1, [1], 61.0), False),
        (Group(4, WAITS, PYTHON_CALL, 1, [1], 2.0), False),  # It has only just begun to wait
        (Group(4, PYTHON, "train.py:3", 1, [1], 301.0), False),
        (Group(4, LEFT, "train.py:3", 1, [1], 301.0), False),
        (Group(5, WAITS, "the exchange of 'net/kernel'", 1, [1], 301.0), False),
        # A network that is slow, or fails
        (Group(4, WAITS, STEP, 1, [1], 301.0), False),
        # The other has called more collectives, and waits for this one's evaluation
        (Group(6, WAITS, PYTHON_CALL, 1, [1], 301.0), False),
    ],
)
def test_ranks_that_wait_for_each_other_end(second: Group, ends: bool) -> None:
    """A rank that TerminateOnNaN has stopped waited at the epoch's end, the other in a step.

    Both waited forever if no limit was set.
    """
    groups = [Group(5, WAITS, STEP, 1, [0], 302.0), second]
    kind, text = StallWatch(60.0, None).look(groups)
    assert kind == ("end" if ends else "stall")
    assert ("None can continue" in text) == ends and "TerminateOnNaN" in text
    served = [*groups, group_of(9, 0, stalls.SERVES, "")]
    assert StallWatch(60.0, None).look(served)[0] == kind
    assert StallWatch(None, 500.0).look(groups) == ("", "")


def test_settings_come_from_the_environment_first(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TFCOMMX_STALL_SECONDS"
    assert launcher.seconds_from(name, 60.0, off=True) == 60.0
    for word, seconds in (("0", None), ("7.5", 7.5)):
        monkeypatch.setenv(name, word)
        assert launcher.seconds_from(name, 60.0, off=True) == seconds
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ConfigurationError, match=f"{name} .*'{wrong}'"):
            init()
    monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match="stall_limit_seconds"):
        init(stall_limit_seconds=0)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> progress.Progress:
    one = progress.Progress()
    one.watched = True
    return one


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("traced", [True, False])
def test_an_exchange_waits_in_the_first_part_that_has_not_ended(
    watched: progress.Progress, traced: bool, queued: bool
) -> None:
    watched.ends_when_queued = queued
    waits = watched.of_exchange(["bucket 0", "bucket 1", "bucket 2"])
    ended = tf.Variable([True, True, True])

    def step(value: tf.Tensor) -> None:
        number = waits.begin([value])
        for part in range(3):
            if traced:
                tf.cond(
                    ended[part],
                    lambda part=part: waits.end(part, [value], number),
                    lambda: None,
                )
            elif ended.numpy()[part]:
                waits.end(part, [value], number)

    take = tf.function(step, autograph=False) if traced else step
    take(tf.ones([3]))
    assert (waits.begun(), waits.waiting()) == (1, "")
    ended.assign([True, False, True])
    take(tf.ones([3]))
    assert (waits.begun(), waits.waiting()) == (2, "bucket 1")
    # A step that has failed is forgotten with the next one
    ended.assign([True, True, True])
    take(tf.ones([3]))
    assert (waits.begun(), waits.waiting()) == (3, "")


@pytest.mark.parametrize("queued", [True, False])
def test_a_part_has_ended_when_its_result_is_there_not_when_it_is_queued(
    watched: progress.Progress, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous completion a rank that waited in NCCL had "ended" every exchange."""
    asked: list[int] = []

    def noted(number: tf.Tensor, tensors: list[tf.Tensor]) -> tf.Tensor:
        asked.append(len(tensors))
        return number

    monkeypatch.setattr(progress, "after", noted)
    watched.ends_when_queued = queued
    waits = watched.of_exchange(["bucket 0"])
    waits.end(0, [tf.ones([2]), tf.ones([3])], waits.begin([tf.ones([2])]))
    assert asked == [2] * queued and waits.waiting() == ""


def test_where_a_rank_is_in_python(watched: progress.Progress) -> None:
    waits = watched.of_exchange(["bucket 0"])
    waits.begin([])
    assert watched.look()[:2] == (1, COMPUTES)
    step, doing, what = watched.look()
    assert (step, doing) == (1, PYTHON)
    assert re.fullmatch(r"test_stalls\.py:\d+ in test_where_a_rank_is_in_python \(.*look\)", what)


def test_the_function_that_the_users_line_calls_is_named(watched: progress.Progress) -> None:
    """Not the innermost one: a rank in `evaluate` was told to be in TensorFlow's quick_execute."""
    library, calls = os.path.dirname(keras.__file__), {"look": watched.look}
    for file, function, inner in (
        ("data.py", "read", "look"),
        ("trainer.py", "evaluate", "read"),
        ("traceback_utils.py", "error_handler", "evaluate"),
    ):
        code = f"def {function}(): return {inner}()"
        exec(compile(code, os.path.join(library, file), "exec"), calls)
    watched.look()
    assert calls["error_handler"]()[2].endswith(" (evaluate)")


def test_a_collective_that_a_callback_calls_is_named(watched: progress.Progress) -> None:
    """As in AverageMetrics: not part of a traced step."""
    found = {"look": watched.look}
    library = horovod.__file__
    exec(compile("def gather(): return look()", library, "exec"), found)

    class Averages:
        def on_epoch_end(self) -> tuple[int, str, str]:
            return found["gather"]()

    watched.look()
    step, doing, what = Averages().on_epoch_end()
    assert (step, doing) == (0, WAITS)
    assert what.startswith("a collective of ") and what.endswith("Averages.on_epoch_end")


def test_a_rank_that_traces_a_collective_does_not_wait(watched: progress.Progress) -> None:
    """A starved rank that had traced for 25 s was taken for one that waits."""
    found = {"look": watched.look}
    exec(compile("def add(): return look()", op_def_library.__file__, "exec"), found)
    exec(compile("def gather(): return add()", horovod.__file__, "exec"), found)
    watched.look()
    assert found["gather"]()[1] != WAITS


def test_a_rank_that_has_been_in_fit_has_left_it(watched: progress.Progress) -> None:
    found = {"look": watched.look}
    place = os.path.join(os.path.dirname(keras.__file__), "trainer.py")
    exec(compile("def fit(): return look()", place, "exec"), found)
    watched.look()
    assert found["fit"]()[1] == PYTHON
    assert watched.look()[1] == LEFT


def test_nothing_is_added_to_a_step_that_nobody_watches() -> None:
    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        waits = progress.Progress().of_exchange(["bucket 0"])
        waits.end(0, [value], waits.begin([value]))
        return value

    graph = step.get_concrete_function(tf.TensorSpec([3])).graph
    assert {node.type for node in graph.get_operations()} <= {"Placeholder", "Identity"}
