"""The causes of generations' ends, the decision to start another, and the table of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tfcommx.launch.horovodrun import Launch
from tfcommx.launch.hosts import Host
from tfcommx.launch.rank_output import Failure, RankLines
from tfcommx.supervisor import goodput, supervisor
from tfcommx.supervisor.generation import Deaths, Ending, Generation, first_failure
from tfcommx.supervisor.goodput import price
from tfcommx.supervisor.hosts import SupervisorOptions
from tfcommx.supervisor.supervisor import StopSignal, Supervisor

HOSTS = (Host("node0", 1), Host("node1", 2))
LAUNCH = Launch(HOSTS, ("python", "train.py"))
SILENT = "rank 1 on n1 (no response for 20 s), rank 2 on n1 (no response for 20 s). Noticed by"
CUT_OFF = "rank 0 on n0 (no response for 20 s). No neighbour responds: it may have been cut off."
ENDED = "rank 0 on node0 (its process has ended). Start again from the last checkpoint.\n"


def generation(number: int, first: int, last: int, began: float = 0.0, rate: float = 10.0):
    """Return a generation that has taken steps at a rate, 5 s after its beginning."""
    one = Generation(number, HOSTS, began)
    source = "memory" if first else "start"
    said = {"from": source, "epoch": 0, "step": first, "total": first, "seconds": 1}
    one.hear({"connected": {"rank": 0}}, began + 4)
    one.hear({"resumed": said}, began + 4)
    for step in range(first + 1, last + 1):
        now = began + 5 + (step - first - 1) / rate
        assert one.hear({"steps": step}, now) == ("first step" if step == first + 1 else "")
    one.ended = began + 6 + (last - first) / rate
    return one


@pytest.mark.parametrize(
    "ending, said",
    [
        (Ending(Failure(1, 137)), "Rank 1 on node1 was killed by SIGKILL"),
        (Ending(Failure(0, 3)), "Rank 0 on node0 ended with status 3"),
        (Ending(Failure(2, 255)), "The connection to rank 2 on node1 was lost"),
        (Ending(None), "The launcher ended, and does not say which rank was the first"),
        (Ending(None, False, [ENDED]), "Rank 0 on node0 (its process has ended)"),
        (Ending(Failure(0, 75), asked=True), "All ranks have saved and paused"),
        (Ending(Failure(0, 75), asked=True, leaving=["node1"]), "node1 leaves (SIGTERM)"),
        # A program that ends so by itself
        (Ending(Failure(0, 75)), "Rank 0 on node0 ended with status 75"),
        (
            Ending(Failure(0, 1), False, [SILENT, CUT_OFF]),
            "No response from rank 1 on node1, rank 2 on node1: stopped, or cut off",
        ),
        (
            Ending(Failure(0, 1), False, [CUT_OFF, SILENT], dead=["node1"]),
            "node1 with ranks 1 to 2 does not answer",
        ),
    ],
)
def test_what_was_lost_is_said(ending: Ending, said: str) -> None:
    assert ending.what_was_lost(LAUNCH) == said


@pytest.mark.parametrize(
    "endings, rank",
    [
        ([(0.0, 1, 134), (0.2, 2, 137), (0.3, 0, 134)], 2),
        # A rank that horovodrun had to kill
        ([(0.0, 1, 134), (0.3, 0, 143), (5.2, 2, 137)], 1),
        ([(0.0, 1, 3), (0.2, 2, 137)], 1),
    ],
)
def test_a_rank_that_gloo_aborts_is_not_the_first(endings: list[tuple], rank: int) -> None:
    lines = RankLines()
    _, first, status = endings[0]
    lines.own = [f"Process name: {first}\nExit code: {status}\n"]
    lines.endings = [(when, Failure(one, status)) for when, one, status in endings]
    found = first_failure(lines)
    assert found is not None and found.rank == rank


def test_three_deaths_at_the_same_step_are_too_many() -> None:
    deaths = Deaths()
    assert [deaths.add(generation(n, 0, 57)) for n in range(3)] == [False, False, True]
    assert "3 generations have ended at step 57" in deaths.in_words(generation(2, 0, 57))


def test_a_run_that_gets_further_may_die_any_number_of_times() -> None:
    deaths = Deaths()
    assert not any(deaths.add(generation(n, 100 * n, 100 * n + 120)) for n in range(10))


def test_the_last_report_may_be_behind_the_step_at_which_a_program_dies() -> None:
    deaths = Deaths()
    assert [deaths.add(generation(0, 0, last)) for last in (55, 56, 57)] == [False, False, True]


def test_deaths_before_the_first_step_and_without_a_link_count() -> None:
    for linked, where in ((True, "before their first step"), (False, "within 60 s")):
        deaths, short = Deaths(), Generation(0, HOSTS, 0.0, linked=linked, ended=10.0)
        assert [deaths.add(short) for _ in range(3)] == [False, False, True]
        assert where in deaths.in_words(short)
    long = Generation(0, HOSTS, 0.0, ended=100.0)
    assert not any(Deaths().add(long) for _ in range(3))


def test_goodput_counts_repeated_steps_once(tmp_path: Path) -> None:
    runs = [generation(0, 0, 100), generation(1, 80, 200, began=20.0)]
    found = goodput.goodput(runs)
    assert (found.steps, found.steps_taken) == (200, 220)
    assert found.seconds == runs[1].ended
    assert found.training_seconds == pytest.approx(9.9 + 11.9)
    assert "200 of 220 steps count (90.9 %)" in found.in_words()
    lines = goodput.table(runs).splitlines()
    assert len(lines) == 3 and "memory, 80" in lines[2] and "node0:1,node1:2" in lines[2]
    path = tmp_path / "reports" / "generations.json"  # No folder is there yet
    goodput.write(runs, path)
    rows = json.loads(path.read_text())["generations"]
    assert [row["steps"] for row in rows] == [100, 200]


def test_growth_pays_after_the_restart_is_earned() -> None:
    """15 s of restart at 30 batches/s are 450 batches; 30 more a second earn them in 15 s."""
    runs = [generation(0, 0, 100), generation(1, 100, 200, began=24.9)]
    found = price(runs, 6)
    assert found is not None
    assert found.seconds == pytest.approx(15.0)
    assert (found.before, found.after) == (pytest.approx(30.0), pytest.approx(60.0))
    assert found.pays_after == pytest.approx(15.0)
    assert price([generation(0, 0, 3)], 6) is None


class Started:
    """A launch that ends after some tenths of a second."""

    def __init__(self, *how: Any) -> None:
        self.asked, self.times_asked = False, 0

    def terminate(self) -> None:
        self.asked, self.times_asked = True, self.times_asked + 1

    def wait(self, lines: RankLines) -> int:
        time.sleep(0.7)
        return 0


def supervised(
    monkeypatch: pytest.MonkeyPatch, stop: StopSignal, hosts: Any = None, **options: Any
) -> Supervisor:
    """Return a supervisor that looks for hosts often, and starts no process."""
    link = SimpleNamespace(variables={}, close=lambda: None)
    monkeypatch.setattr(supervisor, "RankZeroListener", lambda *arguments: link)
    monkeypatch.setattr(supervisor, "Running", Started)
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.01)
    return Supervisor(hosts, SupervisorOptions(**options), lambda hosts, number: LAUNCH, stop)


def test_hosts_are_looked_for_once_in_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first period the user's script ran every 5 s."""
    one = supervised(monkeypatch, StopSignal(), grow_every=0.2 / 60)
    looks: list[Generation] = []
    monkeypatch.setattr(one, "_why_to_grow", lambda generation: looks.append(generation) or "")
    start = time.monotonic()
    one._carry_out(Generation(0, HOSTS, start), LAUNCH, RankLines())
    assert 1 <= len(looks) <= (time.monotonic() - start) / 0.2 + 1


@pytest.mark.parametrize("signalled", [False, True])
def test_a_generation_ends_after_its_look_for_hosts(
    monkeypatch: pytest.MonkeyPatch, signalled: bool
) -> None:
    """The thread of one generation used the hosts while the next one was placed on them."""
    stop, looks = StopSignal(), []
    one = supervised(monkeypatch, stop, grow_every=0.2 / 60)

    def look(generation: Generation) -> str:
        looks.append(time.monotonic())
        time.sleep(1.5)
        if signalled:
            stop.number = 15
            time.sleep(3)
        looks.append(time.monotonic())
        return ""

    monkeypatch.setattr(one, "_why_to_grow", look)
    one._carry_out(Generation(0, HOSTS, time.monotonic()), LAUNCH, RankLines())
    assert len(looks) == (1 if signalled else 2)


def test_hosts_are_not_looked_for_before_the_speed_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = supervised(monkeypatch, StopSignal(), SimpleNamespace(offered=lambda: 1 / 0))
    assert one._why_to_grow(Generation(0, HOSTS, time.monotonic())) == ""


def test_a_signal_during_the_start_ends_the_ranks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was passed on twice, and the second SIGTERM to a launch is SIGKILL."""

    class Early(StopSignal):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "running" and value:
                self.ask(15, None)

    one = supervised(monkeypatch, Early())
    running, _ = one._carry_out(Generation(0, HOSTS, 0.0), LAUNCH, RankLines())
    assert running.times_asked == 1


def test_repeated_steps_are_counted_from_the_last_generation_with_steps() -> None:
    """Behind a generation that was lost before its first step, none seemed to be repeated."""
    ran, lost, now = generation(0, 0, 40), Generation(1, HOSTS, 20.0), generation(2, 30, 31, 40.0)
    line = Supervisor._first_step_line(SimpleNamespace(generations=[ran, lost, now]), now)
    assert "of step 30; 10 steps are repeated. Its first step came 36.1 s after" in line


def test_a_second_fit_of_a_script_is_no_beginning() -> None:
    """Its Checkpoint said that it begins at step 0; the steps of the first `fit` were forgotten."""
    one = generation(0, 0, 36)
    one.hear({"resumed": {"from": "file", "epoch": 0, "step": 0, "total": 36, "seconds": 1}}, 9.0)
    one.hear({"steps": 40}, 10.0)
    assert (one.began_at_step, one.steps_taken) == (0, 40)


@pytest.mark.parametrize("message", [{"steps": "x"}, {"resumed": {}}, {"snapshot": 3}])
def test_a_message_that_rank_0_does_not_send_is_refused(message: dict) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Generation(0, HOSTS, 0.0).hear(message, 1.0)
