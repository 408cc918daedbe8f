"""The watch while ranks may leave: only needed ones are missed, and all hear of the rest."""

from __future__ import annotations

import json
import time

import pytest
from test_watch_network import BEAT, LIMIT, Simulated

from tfcommx.core import RankLostError
from tfcommx.watch import membership as module
from tfcommx.watch.membership import Membership
from tfcommx.watch.protocol import neighbours

DIED = "on there: its process has ended"


def may_leave(size: int) -> Simulated:
    network = Simulated(size)
    for member in network.members.values():
        member.rank_says("needs [0]", 0.0)
    return network


def gone(network: Simulated) -> dict[int, list[list]]:
    """Return the departures reported to each rank; check that no rank gets an alarm."""
    told = network.told()
    assert not any(line.startswith("lost") for lines in told.values() for line in lines)
    return {
        rank: [json.loads(line.removeprefix("gone ")) for line in lines]
        for rank, lines in told.items()
    }


@pytest.mark.parametrize("size", [3, 64])
def test_a_rank_that_dies_is_told_to_all_once_and_ends_nobody(size: int) -> None:
    network = may_leave(size)
    network.kill([2])
    network.hops()
    for _ in range(20):
        network.beat()
    assert set(map(str, gone(network).values())) == {str([[2, DIED, False]])}
    # When all are needed again, the one that has left is not missed, and another one is
    for member in network.members.values():
        member.rank_says("needs all", network.now)
    network.beat()
    assert not any(member.alarm.lost for member in network.members.values())
    network.members[0].broken(1, "its process has ended", network.now)
    network.hops()
    for rank, lines in network.told().items():
        assert lines[-1].startswith("lost rank 1 on there (its process has ended)."), rank


def test_the_rank_that_is_needed_ends_all_others() -> None:
    network = may_leave(64)
    network.kill([0, 2])
    network.hops()
    for lines in network.told().values():
        assert lines[-1].startswith("lost rank 0 on there (its process has ended).")


def test_a_rank_that_ends_in_order_is_told_to_all() -> None:
    network = may_leave(64)
    network.members[3].rank_says("bye", 0.0)
    network.hops()
    for _ in range(20):
        network.beat()
    told = gone(network)
    assert all(told[rank] == [[3, "it has ended", True]] for rank in told if rank != 3)


def test_a_rank_that_the_others_have_given_up_does_not_come_back() -> None:
    network = may_leave(3)
    network.beat()
    stopped = network.members[2]
    stopped.stopped = True
    while not network.members[0].left:
        # Its watcher runs, receives the others' messages, and does not report the rank as alive
        network.beat()
        assert network.now <= LIMIT + 3 * BEAT
    network.hops()
    stopped.tell_if_due(network.now + 1)
    assert stopped.to_rank[0].startswith("lost rank 2") and stopped.alarm.kill_at == network.now + 1
    del network.members[2]
    assert [row[0] for rows in gone(network).values() for row in rows] == [2, 2]


def test_watchers_of_the_others_end_although_one_has_died() -> None:
    network = may_leave(64)
    network.kill([1, 9])
    network.hops()
    for member in network.members.values():
        member.rank_says("bye", 0.0)
        member.gone = True
    network.hops()
    assert all(member.finished for member in network.members.values())
    assert 5 in neighbours(1, 64)


def test_a_collective_after_a_death_is_refused_and_after_an_end_in_order_is_not() -> None:
    membership, said = Membership(), []
    membership.report_to(said.append)
    membership.allow_leaving({0})
    membership.forbid_leaving()
    assert said == [b"needs [0]\n", b"needs all\n"]
    membership.mark_gone(3, "it has ended", True)
    membership.require_all()
    assert membership.gone() == {3} and not membership.any_died()
    membership.mark_gone(2, DIED, False)
    assert membership.gone() == {2, 3} and membership.any_died()
    with pytest.raises(RankLostError, match=rf"rank 2\b.*{DIED}"):
        membership.require_all()


def test_a_rank_whose_end_nobody_tells_is_found_after_a_while_of_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link that is down for a moment is no end, and no rank asks before the first departure."""
    monkeypatch.setattr(module, "FIND_SECONDS", 0.01)
    membership, asked, silent = Membership(), [], {3}

    def responds(rank: int) -> bool:
        asked.append(rank)
        return rank not in silent

    def look(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            membership.find_dead()
            time.sleep(0.002)

    look(0.05)  # There is no watch
    membership.probe_with(responds, {0, 1, 3}, 0.5)
    look(0.05)
    assert asked == []
    membership.mark_gone(1, "it has ended", True)
    look(0.2)
    assert set(asked) == {0, 3} and membership.gone() == {1}
    silent.clear()
    look(0.1)
    silent.add(3)
    look(0.4)
    assert membership.gone() == {1}
    look(0.4)
    assert membership.gone() == {1, 3} and membership.any_died()
    with pytest.raises(RankLostError, match=r"rank 3\b.*\b1 s\b"):
        membership.require_all()
