"""Schedules of messages equal the drawings above them.

They carry out broadcast, reduce and allreduce for any p, root and length.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.messages import Messages
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, PlanError, Topology
from tfcommx.routes import bidirectional, messages, pipeline, tree
from tfcommx.routes.messages import MessageRoute, Transfer

ROUTES = [name for name, route in routes.ROUTES.items() if isinstance(route, MessageRoute)]
BY_ROUND = [name for name in ROUTES if routes.get(name).run_transfers is messages.run_by_round]
WHEN_READY = [name for name in ROUTES if routes.get(name).run_transfers is messages.run_when_ready]
every_route = pytest.mark.parametrize("route", ROUTES)
every_operation = pytest.mark.parametrize("operation", messages.OPERATIONS)


def test_the_pipeline_is_as_drawn() -> None:
    """Read the drawing in the source, and compare the schedule with it."""
    drawn = {}
    for source, target, line in re.findall(
        r"^ +(\d) -> (\d)  (.*)$", pipeline.__doc__, re.MULTILINE
    ):
        for round_, letter in enumerate(line[2::3]):
            if letter != " ":
                drawn[round_, int(source), int(target)] = letter
    found = {
        (transfer.round, transfer.source, transfer.target): "abcdef"[transfer.start]
        if transfer.add
        else "ABCDEF"[transfer.start]
        for transfer in pipeline.schedule("allreduce", positions=3, entries=6, block=1)
    }
    assert found == drawn and len(drawn) == 24


def test_the_tree_is_as_drawn() -> None:
    drawn = {
        (int(round_), int(source), int(target))
        for round_, line in re.findall(r"round (\d) (.*)", tree.__doc__)
        for source, target in re.findall(r"(\d) -> (\d)", line)
    }
    assert {
        (transfer.round, transfer.source, transfer.target)
        for transfer in tree.schedule("broadcast", 5, 10)
    } == drawn and len(drawn) == 4


def test_the_bidirectional_exchange_is_as_drawn() -> None:
    """Play the sums of four parts, and compare them with the drawing."""
    drawn = re.findall(
        r"round \d +([abcd-]{4}) +([abcd-]{4}) +([abcd-]{4}) +([abcd-]{4})", bidirectional.__doc__
    )
    holds = [set("abcd") for _ in range(4)]
    for round_, expected in enumerate(drawn):
        now = [
            transfer
            for transfer in bidirectional.schedule("allreduce", 4, 4, 4)
            if transfer.round == round_
        ]
        for transfer in now:
            parts = set("abcd"[transfer.start : transfer.stop])
            holds[transfer.source] -= parts if transfer.add else set()
            holds[transfer.target] |= parts
        assert [
            "".join(part if part in held else "-" for part in "abcd") for held in holds
        ] == list(expected)
    assert len(drawn) == 4


@pytest.mark.parametrize(
    ("operation", "rounds"), [("broadcast", 5), ("reduce", 5), ("allreduce", 6)]
)
def test_rounds_of_the_pipeline_by_hand(operation: str, rounds: int) -> None:
    """3 positions, 4 blocks.

    The paper's chain takes 9 rounds for the allreduce (section 3), reduce then broadcast 10.
    """
    assert 1 + max(transfer.round for transfer in pipeline.schedule(operation, 3, 4, 1)) == rounds


@pytest.mark.parametrize("positions", [2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("groups", [1, 3])
def test_rounds_messages_and_entries_of_the_papers_algorithms(positions: int, groups: int) -> None:
    """Of blocks of 5 entries, `groups` times as many as positions; p positions.

    Pipeline: the first block needs p - 1 hops, then one arrives per round. Tree: ceil(log2 p)
    rounds of whole vectors. Bidirectional exchange, p a power of two: halves, quarters, ...
    """
    p, blocks = positions, positions * groups
    entries, steps = 5 * blocks, (positions - 1).bit_length()

    def counts(route: str, operation: str) -> tuple[int, int, int]:
        """Return the rounds, the messages, and the entries that the busiest position sends."""
        found = routes.get(route).schedule(operation, p, entries, 5)
        sent = Counter[int]()
        for transfer in found:
            sent[transfer.source] += transfer.stop - transfer.start
        return found[-1].round + 1, len(found), max(sent.values())

    for operation in ("broadcast", "reduce"):
        assert counts("pipeline", operation) == (p - 2 + blocks, (p - 1) * blocks, entries)
        assert counts("tree", operation)[:2] == (steps, p - 1)
    hops = max(p - 1, 2)  # Two positions send both ways on one link
    share = 2 * (p - 1) * entries // p
    assert counts("pipeline", "allreduce") == (
        (groups - 1) * hops + 2 * (p - 1),
        2 * (p - 1) * blocks,
        share,
    )
    assert counts("tree", "allreduce") == (2 * steps, 2 * (p - 1), steps * entries)
    if p == 2**steps:
        assert counts("bidirectional", "allreduce")[::2] == (2 * steps, share)
        assert counts("bidirectional", "broadcast")[0] == 2 * steps
        assert counts("bidirectional", "reduce")[0] == 2 * steps


@every_route
@every_operation
@pytest.mark.parametrize("positions", [1, 2, 3, 4, 5, 7, 8, 16])
def test_nothing_meets_on_a_link(route: str, operation: str, positions: int) -> None:
    """One message per round and port.

    In the bidirectional exchange these are all blocks of one part or more to one position; in the
    pipeline's allreduce there is one per round and direction of a link, where its two ways cross.
    """
    found: list[Transfer] = routes.get(route).schedule(operation, positions, 40, 3)
    crossing = route == "pipeline" and operation == "allreduce"
    for port in ("source", "target"):
        used = [
            (
                transfer.round,
                getattr(transfer, port),
                crossing and (transfer.source, transfer.target),
            )
            for transfer in found
        ]
        if route == "bidirectional":
            used = [
                key
                for key, _ in {
                    (key, (transfer.source, transfer.target))
                    for key, transfer in zip(used, found, strict=True)
                }
            ]
        assert len(used) == len(set(used))
    rounds = [transfer.round for transfer in found]
    assert rounds == sorted(rounds) and (positions == 1 or rounds[0] == 0)
    assert all(
        0 <= transfer.start < transfer.stop <= 40 and transfer.source != transfer.target
        for transfer in found
    )


@pytest.mark.parametrize("route", BY_ROUND)
@every_operation
@pytest.mark.parametrize("positions", [2, 3, 4, 7, 8])
def test_no_position_sends_in_a_round_what_it_receives_in_it(
    route: str, operation: str, positions: int
) -> None:
    """As `run_by_round` needs it: it changes the vector while it sends."""
    found: list[Transfer] = routes.get(route).schedule(operation, positions, 40, 3)
    assert not [
        (sent, came)
        for sent in found
        for came in found
        if (sent.round, sent.source) == (came.round, came.target)
        and sent.start < came.stop
        and came.start < sent.stop
    ]


@pytest.mark.parametrize("route", WHEN_READY)
@every_operation
@pytest.mark.parametrize("positions", [2, 3, 4, 7, 8])
def test_all_moves_cut_the_vector_in_the_same_blocks(
    route: str, operation: str, positions: int
) -> None:
    """As `run_when_ready` needs it: it knows blocks by where they start."""
    found: list[Transfer] = routes.get(route).schedule(operation, positions, 40, 3)
    blocks = sorted({(transfer.start, transfer.stop) for transfer in found})
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(blocks))


def test_what_comes_early_is_added_in_its_turn() -> None:
    """Sums must not depend on who is faster.

    The last position's block comes first here, and is added last, as its round says.
    """

    class PointToPoint:
        def receive(self, buffer: np.ndarray, source: int, tag: int) -> int:
            buffer[:] = {1: 1e8, 2: -1e8, 3: 1}[source]
            return source

        def wait_any(self, requests: list[int]) -> int:
            return requests.index(max(requests))

    vector = np.zeros(1, np.float32)
    messages.run_when_ready(
        [Transfer(round_, round_ + 1, 0, 0, 1, True) for round_ in range(3)],
        vector,
        messages.Participants(range(4), 0, 0, PointToPoint()),
    )
    assert vector[0] == 1  # the other way around the 1 is lost beside 1e8


@pytest.mark.parametrize("run_transfers", [messages.run_by_round, messages.run_when_ready])
def test_a_direction_has_a_bounded_number_of_messages_under_way(
    run_transfers: messages.RunTransfers,
) -> None:
    """Neither one alone, whose latency would not be hidden, nor all of a round."""
    under_way, counts = [], []

    class PointToPoint:
        def send(self, buffer: np.ndarray, target: int, tag: int) -> None:
            under_way.append(buffer)
            counts.append(len(under_way))

        def wait_any(self, requests: list[None]) -> int:
            under_way.pop()
            return 0

    run_transfers(
        [Transfer(0, 0, 1, entry, entry + 1, False) for entry in range(20)],
        np.zeros(20),
        messages.Participants(range(2), 0, 0, PointToPoint()),
    )
    assert len(counts) == 20 and max(counts) == messages.WINDOW


@every_route
@every_operation
def test_no_message_is_longer_than_a_block(route: str, operation: str) -> None:
    """Cutting leaves out nothing and doubles nothing."""
    schedule = routes.get(route).schedule
    for position in range(5):
        whole = [
            (transfer, entry)
            for transfer in schedule(operation, 5, 40, 7)
            if position in transfer[1:3]
            for entry in range(*transfer[3:5])
        ]
        cut = [
            (transfer, entry)
            for transfer in messages.own_transfers(schedule, operation, 5, 40, 7, position)
            for entry in range(*transfer[3:5])
        ]
        assert [(*transfer[:3], transfer.add, entry) for transfer, entry in whole] == [
            (*transfer[:3], transfer.add, entry) for transfer, entry in cut
        ]
        assert max(transfer.stop - transfer.start for transfer, _ in cut) == 7


@every_route
@every_operation
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(0, 70), st.integers(1, 20), st.data())
def test_any_number_of_ranks_root_and_length(
    route: str, operation: str, ranks: int, entries: int, block: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, ranks - 1))
    given_ = [
        np.random.default_rng([4, rank]).normal(size=entries).astype(np.float32)
        for rank in range(ranks)
    ]

    def work(comm: Comm) -> np.ndarray:
        # An entry has 4 bytes, and a block at least 8
        blocks = {"root": root, "block_bytes": 4 * block + 4}
        return routes.get(route).carry_out(operation, given_[comm.rank], comm, **blocks)

    before = [vector.copy() for vector in given_]
    results = ThreadComm.run(Topology(ranks, 1), work)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(given_[rank], before[rank])
        if operation == "broadcast":
            np.testing.assert_array_equal(result, given_[root])
        elif operation == "reduce" and rank != root:
            np.testing.assert_array_equal(result, given_[rank])
        else:
            np.testing.assert_allclose(result, np.sum(given_, axis=0), rtol=1e-5, atol=1e-5)
            assert result.tobytes() == results[root].tobytes()


@every_route
def test_arrays_keep_their_shape_and_dtype(route: str) -> None:
    """Also those whose entries are longer than a block, and views that skip entries."""

    def work(comm: Comm) -> list[np.ndarray]:
        arrays = [
            np.full((3, 2), comm.rank, np.float16),
            np.arange(12.0).reshape(3, 4)[:, ::2],
            np.full(5, comm.rank + 1j),
        ]
        collective = routes.get(route).carry_out
        return [collective("allreduce", array, comm, block_bytes=8) for array in arrays]

    for whole, view, wide in ThreadComm.run(Topology(3, 1), work):
        assert whole.dtype == np.float16 and whole.tolist() == [[3, 3]] * 3
        assert view.tolist() == [[0, 6], [12, 18], [24, 30]]
        assert wide.tolist() == [3 + 3j] * 5


def test_a_collective_that_cannot_be_carried_out_is_refused() -> None:
    def work(comm: Comm) -> None:
        collective = routes.get("pipeline").carry_out
        with pytest.raises(PlanError, match=r"root=2, ranks=\[0, 1\]"):
            collective("broadcast", np.zeros(3), comm, root=2)
        with pytest.raises(ConfigurationError, match=r"`block_bytes`.*\b7\b"):
            collective("broadcast", np.zeros(3), comm, block_bytes=7)
        comm.messages = Messages(comm.rank, comm.topology)  # As under Gloo
        with pytest.raises(ConfigurationError, match=r"horovodrun --mpi"):
            collective("broadcast", np.zeros(3), comm)

    ThreadComm.run(Topology(2, 1), work)
    alone = lambda comm: routes.get("tree").carry_out("reduce", np.ones(3), comm)  # noqa: E731
    assert ThreadComm.run(Topology(1, 1), alone)[0].tolist() == [1, 1, 1]


def test_a_root_that_does_not_take_part_is_refused() -> None:
    with pytest.raises(PlanError, match=r"root=5, ranks=\[0, 1\] \(rank 1\)"):
        outsider = messages.Participants([0, 1], 1, 5, None)
        messages.carry_out("reduce", np.zeros(3), outsider, tree.schedule, messages.run_by_round)


def test_an_unknown_operation_is_refused() -> None:
    alone = messages.Participants([0], 0, 0, None)
    with pytest.raises(ConfigurationError, match=r"'reduc'.*'reduce'"):
        messages.carry_out("reduc", np.zeros(3), alone, tree.schedule, messages.run_by_round)


@pytest.mark.parametrize(
    "inside",
    [lambda work: work(), lambda work: tf.cond(tf.random.uniform([]) < 2, work, work)],
    ids=["bare", "cond"],
)
def test_messages_in_a_graph_follow_each_other_in_the_order_of_the_plan(inside: Callable) -> None:
    """Without the order, the threads of two ranks could wait in different buckets forever.

    Two optimizers that accumulate, or whose loss is scaled, have theirs in a cond each: there one
    took the other's messages.
    """
    seen = []
    comm = ThreadComm.run(Topology(1, 1), lambda comm: comm)[0]
    steps = {name: tf.Variable(0) for name in ("first", "second")}

    def send(name: str, tensor: tf.Tensor) -> tf.Tensor:
        # Of its own: TensorFlow itself orders only those that change nothing or the same
        steps[name].assign_add(1)
        return comm.messages.run(lambda array, post: seen.append(name) or array, tensor, "b0")

    @tf.function
    def step(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        late = tf.cumsum(tf.random.normal([300_000])) * 0 + a  # ready long after b
        return inside(lambda: send("first", late)), inside(lambda: send("second", b))

    for _ in range(20):
        step(tf.zeros([300_000]), tf.zeros([1]))
    assert seen == ["first", "second"] * 20
