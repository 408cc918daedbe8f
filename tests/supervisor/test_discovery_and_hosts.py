"""Which hosts there are, which are left out for a while, and how many ranks run on which."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT

from tfcommx.cli.restart_options import RestartOptions
from tfcommx.core import ConfigurationError, LaunchError
from tfcommx.launch.commands import RemoteHosts, is_local
from tfcommx.launch.hosts import Host, slots_of
from tfcommx.supervisor.hosts import (
    LEAVING_SECONDS,
    Cooldown,
    Hosts,
    HostSource,
    SupervisorOptions,
    hosts_of_script,
    place,
)

A, B, C = Host("a", 2), Host("b", 2), Host("c", 2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- discovery -------------------------------------------------------------------------------


def test_a_script_prints_hosts_with_or_without_a_number() -> None:
    script = "echo node1:4; echo; echo node2"
    assert hosts_of_script(script, slots=3) == [Host("node1", 4), Host("node2", 3)]
    assert hosts_of_script("true") == []


@pytest.mark.parametrize(
    "script, said",
    [
        ("echo node2", "--slots"),
        ("echo node2:0", "'node2:0'"),
        ("echo absent >&2; exit 3", "status 3 absent"),
    ],
)
def test_a_script_that_fails_is_named_with_what_it_said(script: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"`{script}`")) as refused:
        hosts_of_script(script)
    assert script in str(refused.value) and said in str(refused.value)


def test_the_script_for_slurm_prints_nodes_that_are_not_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = "n1 allocated\nn2 down*\nn3 mixed\nn3 mixed\nn4 idle*\nn5 draining\n"
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\necho $3 >{tmp_path}/nodes\nprintf '{states}'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-5]")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x5)")
    script = ROOT / "scripts" / "examples" / "discovery" / "slurm.sh"
    hosts = hosts_of_script(str(script))
    assert hosts == [Host("n1", 4), Host("n3", 4), Host("n5", 4)]
    assert (tmp_path / "nodes").read_text() == "--nodes=n[1-5]\n"


# --- hosts that are left out -----------------------------------------------------------------


def test_a_host_is_left_out_twice_as_long_each_time_within_the_range() -> None:
    clock = Clock()
    cooldown = Cooldown(10.0, 35.0, clock)
    assert [cooldown.leave_out("a") for _ in range(4)] == [10.0, 20.0, 35.0, 35.0]
    assert cooldown.allowed(["a", "b"]) == {"b"}
    clock.now += 34.9
    assert cooldown.allowed(["a", "b"]) == {"b"}
    clock.now += 0.2
    assert cooldown.allowed(["a", "b"]) == {"a", "b"}
    assert cooldown.leave_out("b", at_least=300.0) == 300.0


def test_a_host_that_discovery_names_anew_may_be_used_at_once() -> None:
    cooldown = Cooldown(10.0, 35.0, Clock())
    cooldown.leave_out("a")
    assert cooldown.allowed(["a"]) == set()
    assert cooldown.allowed([]) == set()
    assert cooldown.allowed(["a"]) == {"a"}


# --- where ranks run -------------------------------------------------------------------------

names = st.lists(st.sampled_from("abcdef"), unique=True)
counts = st.integers(min_value=1, max_value=4)


@given(names, names, counts, st.none() | st.integers(min_value=1, max_value=12))
def test_as_many_ranks_as_allowed_on_hosts_that_are_offered(
    offered: list[str], before: list[str], slots: int, most: int | None
) -> None:
    hosts = [Host(name, slots) for name in offered]
    placed = place(hosts, [Host(name, 1) for name in before], most)
    every = slots * len(offered)
    assert slots_of(placed) == (every if most is None else min(every, most))
    assert {host.name for host in placed} <= set(offered)
    # Survivors keep their order and come first
    ranks = [before.index(host.name) for host in placed if host.name in before]
    assert ranks == sorted(ranks)
    assert [host.name in before for host in placed] == sorted(
        (host.name in before for host in placed), reverse=True
    )


# --- all of it -------------------------------------------------------------------------------


class Answers(RemoteHosts):
    """Hosts that answer, without ssh."""

    alive: ClassVar[set[str]] = set()

    def run(self, hosts, command):
        return {host: "" for host in hosts if host in self.alive}


def choose(tmp_path: Path, alive: str, **options) -> tuple[Hosts, list[str], Path]:
    """Return the chooser of hosts that a file names, its messages, and the file."""
    said: list[str] = []
    named = tmp_path / "hosts"
    remote = Answers()
    Answers.alive = set(alive)
    options = {"timeout": 0.0, "cooldown": (60.0, 60.0), **options}
    source = HostSource("cat", functools.partial(hosts_of_script, f"cat {named}"))
    return Hosts(source, SupervisorOptions(**options), remote, said.append), said, named


def test_hosts_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    hosts, said, named = choose(tmp_path, "bc", fewest=2)
    named.write_text("a:2\nb:2\nc:2\n")
    assert hosts.wait(2, [], (), lambda: False) == [B, C]
    assert said == ["a does not answer ssh.", "a is left out for 60 s."]
    # One that has answered just now is not asked again
    assert hosts.wait(2, [C], "bc", lambda: False) == [C, B]


def test_too_few_hosts_end_the_wait_with_what_was_found(tmp_path: Path) -> None:
    hosts, _, named = choose(tmp_path, "a", fewest=3)
    named.write_text("a:2\n")
    with pytest.raises(LaunchError, match=r"\b3\b.*\b2\b.*\(a:2\).*--min-np"):
        hosts.wait(3, [], (), lambda: False)


def test_a_host_that_leaves_is_used_only_if_there_are_too_few_others(tmp_path: Path) -> None:
    hosts, _, named = choose(tmp_path, "abc", fewest=2)
    named.write_text("a:2\nb:2\n")
    assert hosts.offered() == [A, B]
    hosts.let_leave("a")
    assert hosts.offered() == [B]
    named.write_text("a:2\n")
    assert hosts.offered() == [A]
    assert LEAVING_SECONDS > 120


def test_a_script_that_fails_later_leaves_the_hosts_found_before(tmp_path: Path) -> None:
    hosts, said, named = choose(tmp_path, "a")
    with pytest.raises(ConfigurationError):
        hosts.offered()
    named.write_text("a:2\n")
    assert hosts.offered() == [A]
    named.unlink()
    assert [hosts.offered() for _ in range(3)] == [[A]] * 3
    assert len(said) == 1 and said[0].endswith("The hosts found before stay.")


def test_fixed_hosts_stay_and_this_host_is_local() -> None:
    source = RestartOptions(min_np=1).source([A, B], "-H", None)
    source.hosts().clear()
    assert source.hosts() == [A, B]
    assert is_local("localhost") and not is_local("no-such-host.invalid")
    assert not is_local("a" * 64)  # A UnicodeError of Python's resolver


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--max-np 2\b.*--min-np 3\b"):
        SupervisorOptions(fewest=3, most=2)
    # The hosts were waited for until --elastic-timeout
    with pytest.raises(ConfigurationError, match=r"--max-np 4\b.* -np 8\b"):
        RestartOptions(max_np=4).options(8, ())
    with pytest.raises(ConfigurationError, match=r"`--grow-every`.*\b0\b"):
        SupervisorOptions(grow_every=0.0)
    with pytest.raises(ConfigurationError, match=r"--blacklist-cooldown-range.*\b5\b.*\b4\b"):
        SupervisorOptions(cooldown=(5.0, 4.0))
