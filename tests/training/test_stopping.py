"""The position at which a run continues, and the reasons to stop: without ranks."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
from children import default_effect, signal_that_ends_child
from hypothesis import given
from hypothesis import strategies as st

from tfcommx.training.steps import FitCall, Position, StepCounter, fit_calls
from tfcommx.training.stop_requests import SIGNALS, StopRequests


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data(), st.booleans())
def test_pieces_are_what_is_left(phases: list[int], data: st.DataObject, one_by_one: bool) -> None:
    """Each remaining epoch is trained once, in order, in its phase; the first may be shortened."""
    epoch = data.draw(st.integers(0, sum(phases) - 1))
    start = Position(epoch, data.draw(st.integers(0, 3)))
    found = fit_calls(phases, start, one_by_one)
    assert [one for call in found for one in call.epochs] == list(range(epoch, sum(phases)))
    of_epoch = [number for number, epochs in enumerate(phases) for _ in range(epochs)]
    for call in found:
        assert {of_epoch[one] for one in call.epochs} == {call.phase}
        assert call.step == (start.step if call.epochs.start == epoch else 0)
        assert len(call.epochs) == 1 or not (call.step or one_by_one)


def test_the_counter_counts_over_the_whole_run() -> None:
    counter = StepCounter()
    counter.begin(FitCall(1, range(3, 4), step=5), steps=8)
    counter.on_epoch_begin(3)
    for batch in range(2):
        counter.on_train_batch_begin(batch)
        counter.on_train_batch_end(batch)
    assert counter.position == Position(3, 6) and counter.after == Position(3, 7)
    assert (counter.measured, counter.phase, counter.steps) == (2, 1, 8)
    counter.begin(FitCall(1, range(4, 6)), steps=8)
    counter.on_epoch_begin(4)
    assert counter.position == Position(4, 0) and counter.measured == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_does_what_it_did(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda got, frame: seen.append(got))
    try:
        with StopRequests(None) as requests:
            assert not requests.asked()
            os.kill(os.getpid(), number)
            assert requests.asked() and requests.reason == number.name and not seen
            os.kill(os.getpid(), number)
            assert seen == [number]
        with StopRequests(None):
            pass
        os.kill(os.getpid(), number)
        assert seen == [number, number]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    """Ctrl-C to `tail -f` in a shell's script stopped the training in its background, too."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequests(None) as requests:
            os.kill(os.getpid(), number)
            assert not requests.asked()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_forked_child_ends_at_its_first_signal() -> None:
    """A pool of processes that reads samples waited for workers that ignored their end."""
    with default_effect(signal.SIGTERM), StopRequests(None) as requests:
        assert signal_that_ends_child(signal.SIGTERM) == signal.SIGTERM
    assert not requests.asked()


def test_a_file_asks_too_and_is_gone_afterwards(tmp_path: Path) -> None:
    with StopRequests(tmp_path) as requests, StopRequests(None) as other:
        assert not requests.asked()
        (tmp_path / "stop").touch()
        assert requests.asked() and str(tmp_path / "stop") in requests.reason
        assert not (tmp_path / "stop").exists() and requests.asked() and not other.asked()
        (tmp_path / "stop").touch()  # Also a request after another reason to stop
        assert requests.asked() and not (tmp_path / "stop").exists()


def test_a_folder_that_cannot_be_looked_into_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ESTALE of a network file system, asked twice a second, ended a training of days."""
    stat = os.stat

    def refuse(path: object, **options: object) -> os.stat_result:
        if str(path).endswith("stop"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with StopRequests(tmp_path) as requests:
        assert not requests.asked()
