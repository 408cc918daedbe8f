"""The watchers' network: constant work for each however many there are, and an alarm reaches all.

Thousands of watchers are simulated by their decisions alone; 24 are real processes.
"""

from __future__ import annotations

import json
import random
import re
import select
import socket
import subprocess
import time

import psutil
import pytest
from drawing import case

from tfcommx.watch import liveness
from tfcommx.watch.protocol import (
    CAUSE_SECONDS,
    GATHER_SECONDS,
    NAMES,
    WatchProtocol,
    children,
    neighbours,
)

MANY = 4096
# A tree with 4 children, and a ring
LARGEST_DEGREE = 7
LIMIT = 20.0
BEAT = 2.0
# Up and down the tree of MANY is 12; the rest is for ways around dead ranks. A hop takes some
# milliseconds, and a rank is told after GATHER_SECONDS.
LARGEST_HOPS = 25


class Simulated:
    """Watchers that have no sockets: a line takes one hop, and hops take no time."""

    def __init__(self, size: int, **settings: float) -> None:
        self.now, self.sent, self.longest_line = 0.0, dict.fromkeys(range(size), 0), 0
        job = {"size": size, "host": "here", "limit": LIMIT}
        job |= {"stall_seconds": None, "stall_limit": None} | settings
        self.members = {
            rank: WatchProtocol({**job, "rank": rank, "hosts": ["there"] * degree(rank, size)}, 0.0)
            for rank in range(size)
        }
        for rank, member in self.members.items():
            for other in neighbours(rank, size):
                member.connected(other, 0.0)
        self.hops()
        self.sent = dict.fromkeys(range(size), 0)

    def hops(self, silent: frozenset[int] = frozenset()) -> int:
        """Deliver all lines, and those that follow from them; return after how many hops."""
        count = 0
        while lines := [
            (rank, other, line)
            for rank, member in self.members.items()
            if rank not in silent
            for other, line in self.taken(member)
        ]:
            count += 1
            for rank, other, line in lines:
                self.sent[rank] += 1
                self.longest_line = max(self.longest_line, len(line))
                if other in self.members and other not in silent:
                    self.members[other].received(rank, line, self.now)
        return count

    def taken(self, member: WatchProtocol) -> list[tuple[int, str]]:
        lines, member.outbox = member.outbox, []
        return lines

    def kill(self, ranks: list[int]) -> None:
        size = len(self.members)
        for rank in ranks:
            del self.members[rank]
        for rank in ranks:
            for other in neighbours(rank, size):
                if other in self.members:
                    self.members[other].broken(rank, "its process has ended", self.now)

    def beat(self, silent: frozenset[int] = frozenset(), seconds: float = BEAT) -> None:
        self.now += seconds
        for rank, member in self.members.items():
            if rank not in silent:
                member.beat(self.now)
        self.hops(silent)

    def told(self) -> dict[int, list[str]]:
        """Return the messages to each rank when the watchers have gathered."""
        for member in self.members.values():
            member.tell_if_due(self.now + GATHER_SECONDS)
        return {rank: member.to_rank for rank, member in self.members.items()}


def degree(rank: int, size: int) -> int:
    return len(neighbours(rank, size))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 21, 22, 64, MANY])
def test_the_network_is_connected_symmetric_and_of_constant_degree(size: int) -> None:
    found, edge = {0}, {0}
    while edge:
        edge = {other for rank in edge for other in neighbours(rank, size)} - found
        found |= edge
    assert found == set(range(size))
    for rank in range(size):
        assert 1 <= degree(rank, size) <= LARGEST_DEGREE
        assert all(rank in neighbours(other, size) for other in neighbours(rank, size))


@pytest.mark.parametrize(
    "killed",
    [
        [0],
        [MANY - 1],
        # A node of 8, with the root
        list(range(8)),
        # All that rank 7 is connected to
        neighbours(7, MANY),
        *(
            case(random.Random(seed).sample(range(MANY), 3 + 3 * seed), kept=False)
            for seed in range(2)
        ),
    ],
)
def test_an_alarm_reaches_all_survivors_in_few_hops(killed: list[int]) -> None:
    network = Simulated(MANY)
    network.kill(killed)
    assert network.hops() <= LARGEST_HOPS
    assert max(network.sent.values()) <= NAMES * LARGEST_DEGREE
    named = {rank: set(member.alarm.lost) for rank, member in network.members.items()}
    assert all(lost and lost <= set(killed) for lost in named.values())
    # Only a rank that is cut off from the rest does not hear of all
    assert sum(lost == set(killed) for lost in named.values()) >= len(named) - 1
    for lines in network.told().values():
        assert len(lines) == 1 and lines[0].startswith("lost rank ")
    # Ranks that end now do so because of the alarm: no second flood
    network.sent = dict.fromkeys(network.sent, 0)
    network.kill([rank for rank in (20, 21, 22) if rank in network.members])
    assert network.hops() == 0


def test_silent_ranks_are_named_after_the_limit_and_beats_cost_the_same_for_all() -> None:
    network, silent = Simulated(MANY), frozenset({3, 100, 4000})
    network.beat()
    assert max(network.sent.values()) <= LARGEST_DEGREE
    while not any(member.alarm.lost for member in network.members.values()):
        network.beat(silent)
        assert network.now <= LIMIT + 3 * BEAT
    assert network.now > LIMIT
    for rank, member in network.members.items():
        assert rank in silent or set(member.alarm.lost) == silent, (rank, member.alarm.lost)


def test_ranks_that_end_in_order_need_few_messages_and_none_is_missed() -> None:
    network, order = Simulated(MANY), random.Random(1).sample(range(MANY), MANY)
    for count, rank in enumerate(order):
        network.members[rank].rank_says("bye", network.now)
        network.members[rank].gone = True
        if count % 512 == 0 or count == MANY - 1:
            assert not network.members[rank].finished or count == MANY - 1
            network.hops()
    assert all(member.finished for member in network.members.values())
    assert not any(member.alarm.lost for member in network.members.values())
    # bye to all, ended to the parent, over to the children
    assert max(network.sent.values()) <= LARGEST_DEGREE + 1 + 4


def test_neighbours_name_a_rank_that_has_ended_in_order_to_theirs() -> None:
    """For the error of a rank that waits for it; it is no alarm."""
    network = Simulated(21)
    network.members[20].rank_says("bye", network.now)
    network.hops()
    told = {rank for rank, lines in network.told().items() if lines}
    assert told == set(neighbours(20, 21)) and not network.members[0].alarm.lost
    assert network.members[0].to_rank == ["early 20"]


def test_a_death_is_told_past_ranks_that_have_ended() -> None:
    network = Simulated(64)
    for rank in range(63):
        network.members[rank].rank_says("bye", 0.0)
        network.members[rank].gone = rank != 5
        network.hops()
    network.kill([63])
    network.hops()
    *ended, alarm = network.told()[5]
    assert all(line.startswith("early") for line in ended)
    assert alarm == "lost rank 63 on there (its process has ended). Noticed by rank 0."
    assert all(member.finished for rank, member in network.members.items() if rank != 5)


def test_watchers_that_are_killed_after_their_ranks_end_keep_nobody() -> None:
    """A launcher may kill the remaining processes of a host whose ranks have ended."""
    network = Simulated(64)
    for rank in range(64):
        network.members[rank].rank_says("bye", 0.0)
        network.members[rank].gone = True
        if rank == 40:
            network.hops()
            network.kill([1, 2, 9])
    network.hops()
    assert all(member.finished for member in network.members.values())
    assert not any(member.alarm.lost for member in network.members.values())


@pytest.mark.extended
def test_all_are_told_of_a_stall_and_what_is_sent_for_it_stays_small() -> None:
    network = Simulated(MANY, stall_seconds=60.0, stall_limit=66.0)
    waits = f"at {json.dumps([118, 'waits', 'the exchange of bucket 2'])}"
    for rank, member in network.members.items():
        # Each at a different line
        left = f"at {json.dumps([117, 'left', f'train.py:{rank} in main'])}"
        member.rank_says(left if rank in (77, 3000) else waits, network.now)
    while not network.members[0].to_rank:
        network.sent = dict.fromkeys(network.sent, 0)
        network.beat(seconds=6.0)
        assert network.now <= 70
    assert network.now >= 60
    # Messages to the parent and the children
    assert max(network.sent.values()) <= LARGEST_DEGREE + 1 + 4
    assert network.longest_line < 2000
    for member in network.members.values():
        (said,) = member.to_rank
        assert said.startswith("stall Ranks 0, 1, 2 and 4091 more have waited 6")
        assert "Ranks 77, 3000 have left `fit`, after step 117: train.py:77 in main." in said
    while len(network.members[0].to_rank) == 1:
        network.beat(seconds=6.0)
        assert network.now <= 78
    for member in network.members.values():
        assert len(member.to_rank) == 2 and member.to_rank[1].startswith("end Ranks 0, 1, 2 and")
        assert member.alarm.kill_at is not None


@pytest.mark.extended
def test_24_watchers_have_few_connections_and_an_alarm_reaches_all() -> None:
    """Real processes; the ranks are processes that sleep."""
    size, killed = 24, [0, 7, 8, 17]
    ranks = [subprocess.Popen(["sleep", "300"]) for _ in range(size)]
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in ranks]
    told = [
        {
            "addresses": ["127.0.0.1"],
            "port": one.getsockname()[1],
            "host": f"host{rank}",
            "token": "t",
            "limit": 120.0,
            "stall_seconds": None,
            "stall_limit": None,
        }
        for rank, one in enumerate(listening)
    ]
    before = set(psutil.Process().children())
    ends = [
        liveness.start_watcher(listening[rank], liveness.make_job(rank, process.pid, told))
        for rank, process in enumerate(ranks)
    ]
    watchers = set(psutil.Process().children()) - before
    edges = sum(degree(rank, size) for rank in range(size))
    try:
        deadline = time.monotonic() + 110
        while sum(counts := [connections(one) for one in watchers]) < edges:
            assert time.monotonic() < deadline, counts
            time.sleep(0.5)
        assert sum(counts) == edges and max(counts) <= LARGEST_DEGREE
        start = time.monotonic()
        for rank in killed:
            ranks[rank].kill()
            ends[rank].close()
        waiting = {ends[rank]: rank for rank in range(size) if rank not in killed}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], 60)
            assert ready, f"ranks {sorted(waiting.values())} have heard nothing"
            for end in ready:
                line = end.recv(4096).decode()
                assert line.startswith("lost ") and waiting.pop(end) not in killed
                # All of them, unless this machine is too busy to end them within GATHER_SECONDS
                named = re.findall(r"rank (\d+) on host\1 \(", line)
                assert named and set(map(int, named)) <= set(killed), line
        assert time.monotonic() - start < 60
    finally:
        for process, end in zip(ranks, ends, strict=True):
            process.kill()
            process.wait()
            end.close()
        _, alive = psutil.wait_procs(watchers, timeout=60)
        assert not alive


def connections(process: psutil.Process) -> int:
    return sum(one.status == "ESTABLISHED" for one in process.net_connections("tcp"))


def test_every_rank_below_is_reached_by_the_tree_alone() -> None:
    """Ranks' activities are sent up the tree: each rank has one parent, and there is no cycle."""
    found = [0]
    for rank in found:
        found += children(rank, 300)
    assert sorted(found) == list(range(300))


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_of_two_is_missing_though_its_watcher_speaks(stopped: int) -> None:
    """Its watcher still reports the ranks' activity, which is no sign of life of the rank."""
    two = Simulated(2, stall_seconds=60.0)
    two.members[stopped].stopped = True
    for _ in range(int(LIMIT / BEAT) + 3):
        two.beat()
    (said,) = two.told()[1 - stopped]
    assert said.startswith("lost") and f"rank {stopped} on there (no response" in said


def test_who_was_aborted_because_of_another_is_spoken_for_by_its_watcher() -> None:
    """Gloo aborted ranks before they could report the missing rank; no launcher reported it."""
    network = Simulated(3)
    network.members[2].rank_is_gone(1.0)
    network.hops()
    for rank in (0, 1):
        network.members[rank].rank_is_gone(1.05)
    network.hops()
    for member in network.members.values():
        member.tell_if_due(1.1 + GATHER_SECONDS)
        assert member.finished
    assert network.members[2].last_words == ""
    for rank in (0, 1):
        assert "rank 2 on here (its process has ended)" in network.members[rank].last_words
        assert f"rank {rank} " not in network.members[rank].last_words


def test_who_was_aborted_names_the_cause_though_its_watcher_hears_of_it_later() -> None:
    """On a busy machine rank 1's abort was seen before rank 2's death, and no rank was named."""
    network = Simulated(3)
    network.members[1].rank_says("aborted", 1.0)
    network.members[1].rank_is_gone(1.0)
    network.hops()
    for member in network.members.values():
        member.tell_if_due(1.0 + 2 * GATHER_SECONDS)
        assert not member.alarm.told
    network.members[2].rank_is_gone(2.0)
    network.hops()
    for member in network.members.values():
        member.tell_if_due(2.0 + GATHER_SECONDS)
    said = network.members[1].last_words
    assert said.startswith("rank 2 on here (its process has ended)") and "rank 1 " not in said
    assert network.members[2].last_words == ""
    assert "rank 2 on here (its process" in network.members[0].to_rank[0]


def test_a_cause_is_named_though_many_were_aborted_before_it_is_known() -> None:
    """8 aborted ranks took all places of an alarm, and the rank that had died got none."""
    network = Simulated(32)
    for rank in range(8, 8 + 2 * NAMES):
        network.members[rank].rank_says("aborted", 1.0)
        network.members[rank].rank_is_gone(1.0)
    network.hops()
    network.members[2].rank_is_gone(1.1)
    network.hops()
    for member in network.members.values():
        member.tell_if_due(1.1 + GATHER_SECONDS)
        assert len(member.alarm.lost) == NAMES
        assert "rank 2 on here (its process has ended)" in member.to_rank[0]


def test_who_was_aborted_while_nobody_is_known_to_be_missing_still_says_so() -> None:
    network = Simulated(2)
    network.members[1].rank_says("aborted", 1.0)
    network.members[1].rank_is_gone(1.0)
    network.members[1].tell_if_due(1.0 + CAUSE_SECONDS)
    assert network.members[1].finished
    assert network.members[1].last_words == "which, no watcher has said."


@pytest.mark.parametrize(
    "line",
    [
        "lost",
        "lost [",
        "lost 5",
        "lost []",
        'lost {"1": 5}',
        'lost {"1": ["there", "gone"]}',
        'lost {"1": ["there", 5, 2]}',
        'lost {"9": ["there", "gone", 2]}',
        'lost {"1": ["there", "gone", 2.5]}',
        'lost {"x": ["there", "gone", 2]}',
        "left x",
        "left -1",
        "left 3",
        "at 5",
        "at [[1]]",
        'at [[1, "flies", "", 1, [1], 0.0]]',
        'at [[1, "waits", "", 1, [], 0.0]]',
        'at [["1", "waits", "", 1, [1], 0.0]]',
        'at [[1, "waits", 5, 1, [1], 0.0]]',
        'at [[1, "waits", "", 1, ["1"], 0.0]]',
        "stall 5",
        "end {}",
        "end",
        ". 5",
        "at " + "[" * 50_000,
        "GET / HTTP/1.1",
        "\x00\ufffd",
        "",
    ],
)
def test_a_line_that_no_watcher_writes_does_not_end_one(line: str) -> None:
    """The watcher ended with an exception, and its rank with it."""
    network = Simulated(3, stall_seconds=60.0)
    network.members[0].received(1, line, 1.0)
    network.hops()
    network.beat()
    network.beat()
    told = network.told()
    assert not any(told.values()) and not any(one.alarm.lost for one in network.members.values())
