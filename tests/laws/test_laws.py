"""The laws of DESIGN.md, once, over every route, rule, operation and topology, with p ranks as
threads of this process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from drawing import drawn, squares

from tfcommx import routes, selection
from tfcommx.comm.base import Comm
from tfcommx.comm.threads import ThreadComm
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.clipping import clip_before_accumulation
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies import Rebroadcast, Root, Strategy, Synchronous
from tfcommx.terms import Piece, Plan, PlanError, Scheme, Topology
from tfcommx.wire import codec

ONE_LEVEL = [Topology(1, 1), Topology(2, 1), Topology(1, 2), Topology(3, 1)]
TWO_LEVELS = [Topology(2, 2), Topology(4, 2), Topology(2, 4)]
TOPOLOGIES = ONE_LEVEL + TWO_LEVELS
UNLIKE = [Topology(2, 2), Topology(3, 1), Topology(1, 2)]
SYNCHRONOUS = Synchronous()
# no length that 2 or 4 divides
SHAPES = {"first/kernel": (37, 11), "first/bias": (11,), "last/kernel": (11, 53)}
SPARSE = [name for name, row in routes.ROUTES.items() if row.sparse]
DENSE = [name for name, row in routes.ROUTES.items() if not row.sparse]
RULES = [name for name in selection.RULES if name != "all"]


def scheme(route: str, rule: str = "all", density: float = 1.0, wire: str = "plain") -> Scheme:
    return Scheme(
        route, rule, density, dense_below=8, bucket_bytes=2000, wire=wire, block_bytes=600
    )


TORI = [
    dataclasses.replace(scheme("torus"), peer_route=name)
    for name, row in routes.ROUTES.items()
    if row.messages
]
SCHEMES = (
    [scheme(route) for route in routes.ROUTES]
    + TORI
    + [scheme(route, rule, 0.1) for route in SPARSE for rule in RULES]
)
# every wire format, where it is written; the plain ones are above
WIRED = [
    scheme(route, RULES[0], 0.1, wire) for route in SPARSE for wire in routes.get(route).wires[1:]
]
# on dense routes nothing keeps what rounding loses
LOSSY = [scheme(route, wire=wire) for route in DENSE for wire in routes.get(route).wires[1:]]


def name_of(value: Any) -> str:
    if isinstance(value, Topology):
        return f"{value.nodes}x{value.slots}"
    if isinstance(value, Scheme):
        peers = [value.peer_route] * (value.peer_route != "allreduce")
        return "-".join([value.route, value.selection, value.wire, *peers])
    return str(value)


every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=name_of)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES + WIRED + LOSSY, ids=name_of)


def with_topologies(schemes: list[Scheme]) -> pytest.MarkDecorator:
    """Give each scheme one topology of one level and one of two, in turn; all are exhaustive.

    Laws 1 and 4 hold every route, and every scheme, on every topology.
    """
    return pytest.mark.parametrize(
        ("scheme", "topology"), drawn(schemes, ONE_LEVEL, TWO_LEVELS), ids=name_of
    )


def gradients(rank: int, step: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Integers over 64: their sums are exact in float32 whatever the order."""
    numbers = np.random.default_rng([rank, step])
    return {
        path: (numbers.integers(-999, 1000, shape) / 64).astype(dtype)
        for path, shape in SHAPES.items()
    }


def plan_for(
    scheme: Scheme, topology: Topology, operation: str = "sum", dtype: str = "float32", **more: Any
) -> Plan:
    return make_plan(
        [Gradient(path, shape, dtype) for path, shape in SHAPES.items()],
        {"*": scheme},
        topology,
        operation,
        **more,
    )


def owed_by(running: PlanExecutor) -> dict[str, np.ndarray]:
    found = running.state().residuals_by_variable()
    return {
        path: found.get(path, np.zeros(np.prod(shape), np.float32))
        for path, shape in SHAPES.items()
    }


def play(
    plan: Plan, steps: int, source: Callable[[int, int], dict] = gradients
) -> list[list[tuple[dict, dict, dict]]]:
    """Run steps on every rank; return, by rank and step, gradients, results and what is owed after
    it.
    """

    def work(comm: Comm) -> list[tuple[dict, dict, dict]]:
        running, log = PlanExecutor(plan, comm), []
        for step in range(steps):
            given = source(comm.rank, step)
            result = running.exchange({path: tf.constant(value) for path, value in given.items()})
            log.append(
                (
                    given,
                    {path: value.numpy() for path, value in result.items()},
                    owed_by(running),
                )
            )
        return log

    return ThreadComm.run(plan.topology, work)


@every_topology
@pytest.mark.parametrize("operation", ["average", "sum"])
@pytest.mark.parametrize("route", routes.ROUTES)
def test_law_1_identity(route: str, operation: str, topology: Topology) -> None:
    """Rule `all` gives what the plain sum gives, on every route."""
    for rank_log in play(plan_for(scheme(route), topology, operation), steps=2):
        for step, (_, result, owed) in enumerate(rank_log):
            for path in SHAPES:
                total = sum(
                    gradients(rank, step)[path].astype(np.float64) for rank in range(topology.size)
                )
                expected = total / topology.size if operation == "average" else total
                np.testing.assert_allclose(result[path], expected, rtol=2e-7, atol=0)
                assert not owed[path].any()


@with_topologies(SCHEMES + WIRED)
def test_law_2_conservation(scheme: Scheme, topology: Topology) -> None:
    """What was sent plus what stays equals what came plus what was there: entry by
    entry, exactly.
    """
    logs = play(plan_for(scheme, topology), steps=3)
    before = {path: np.zeros(np.prod(shape), np.float32) for path, shape in SHAPES.items()}
    for step in range(3):
        for path in SHAPES:
            came = sum(log[step][0][path].ravel() for log in logs)
            stays = sum(log[step][2][path] for log in logs)
            sent = logs[0][step][1][path].ravel()
            np.testing.assert_array_equal(sent + stays, came + before[path])
            before[path] = stays


@with_topologies(SCHEMES + WIRED + LOSSY)
def test_law_3_agreement(scheme: Scheme, topology: Topology) -> None:
    """All ranks get the same bits, also for numbers whose sum depends on the order."""

    def normal(rank: int, step: int) -> dict[str, np.ndarray]:
        numbers = np.random.default_rng([7, rank, step])
        return {
            path: numbers.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()
        }

    logs = play(plan_for(scheme, topology, "average"), steps=2, source=normal)
    for log in logs[1:]:
        for step in range(2):
            for path in SHAPES:
                assert log[step][1][path].tobytes() == logs[0][step][1][path].tobytes()


@every_topology
@every_scheme
def test_law_4_count(scheme: Scheme, topology: Topology) -> None:
    """Exactly k entries travel, and the bytes counted equal wire_bytes()."""
    plan = plan_for(scheme, topology)

    def work(comm: Comm) -> tuple:
        running, counted, sent = PlanExecutor(plan, comm), [], []
        for bucket, runner in zip(plan.buckets, running.runners, strict=True):
            selector = runner.selector
            select = (
                None
                if selector is None
                else lambda part, selector=selector: (
                    counted.append(selector.select(part, selector.seed(tf.constant(1, tf.int64))))
                    or counted[-1]
                )
            )
            start = comm.traffic()
            flat = tf.random.normal([bucket.padded])
            routes.get(bucket.route).run(flat, bucket, comm, codec, select)
            sent.append(np.subtract(comm.traffic(), start))
        return sent, [
            (bucket.k, sparse)
            for bucket, sparse in zip([b for b in plan.buckets if b.k], counted, strict=True)
        ]

    found = ThreadComm.run(topology, work)
    for place, bucket in enumerate(plan.buckets):
        by_rank = [sent[place] for sent, _ in found]
        expected = routes.get(bucket.route).wire_bytes(bucket, topology)
        np.testing.assert_allclose(np.mean(by_rank, axis=0), expected, rtol=1e-12)
        # collectives count the mean, on every rank
        if not routes.get(bucket.route).needs_messages(bucket):
            np.testing.assert_array_equal(by_rank, [by_rank[0]] * topology.size)
    for _, chosen in found:
        for k, sparse in chosen:
            indices = sparse.indices.numpy()
            assert len(indices) == len(set(indices.tolist())) == k == len(sparse.values)
            assert indices.min() >= 0 and indices.max() < sparse.size


@pytest.mark.parametrize(
    ("scheme", "topology", "bad"),
    squares(
        SCHEMES + WIRED + LOSSY,
        [Topology(1, 1), Topology(2, 2), Topology(3, 1)],
        [np.nan, np.inf, -np.inf],
    ),
    ids=name_of,
)
def test_law_5_non_finite(scheme: Scheme, topology: Topology, bad: float) -> None:
    """A NaN or Inf of one rank reaches all ranks in the same step, and never enters a residual."""

    def poisoned(rank: int, step: int) -> dict[str, np.ndarray]:
        given = gradients(rank, step)
        if step == 1 and rank == topology.size - 1:
            for path in given:
                given[path].flat[given[path].size // 2] = bad
        return given

    for log in play(plan_for(scheme, topology), steps=3, source=poisoned):
        for path in SHAPES:
            assert np.isfinite(log[0][1][path]).all() and not np.isfinite(log[1][1][path]).all()
            assert all(np.isfinite(log[step][2][path]).all() for step in range(3))
            if scheme.selection != "all" or not routes.get(scheme.route).sparse:
                assert np.isfinite(log[2][1][path]).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("route", routes.ROUTES)
def test_dtypes_come_back(route: str, dtype: str) -> None:
    for log in play(
        plan_for(scheme(route), Topology(2, 2), "sum", dtype),
        steps=1,
        source=lambda rank, step: gradients(rank, step, dtype),
    ):
        assert {str(value.dtype) for value in log[0][1].values()} == {dtype}


@pytest.mark.parametrize(("after", "topology"), drawn(SCHEMES, UNLIKE), ids=name_of)
@pytest.mark.parametrize("before", [scheme(route, RULES[0], 0.1) for route in SPARSE], ids=name_of)
def test_a_switch_loses_nothing(before: Scheme, after: Scheme, topology: Topology) -> None:
    """What is owed under one plan is sent under the next: the sums over all ranks and steps are
    equal, exactly.
    """

    def work(comm: Comm) -> tuple[dict, dict]:
        sent = {path: 0 for path in SHAPES}
        owed: dict = {}
        for part, scheme in enumerate((before, after)):
            running = PlanExecutor(plan_for(scheme, topology), comm)
            running.import_residuals(owed)
            for step in range(2):
                result = running.exchange(
                    {
                        path: tf.constant(value)
                        for path, value in gradients(comm.rank, 2 * part + step).items()
                    }
                )
                sent = {path: sent[path] + value.numpy() for path, value in result.items()}
            owed = owed_by(running)
        return sent, owed

    ends = ThreadComm.run(topology, work)
    for path in SHAPES:
        came = sum(
            gradients(rank, step)[path] for rank in range(topology.size) for step in range(4)
        )
        owed = sum(owed[path] for _, owed in ends)
        np.testing.assert_array_equal(ends[0][0][path].ravel() + owed, came.ravel())
        if not routes.get(after.route).sparse:
            assert not owed.any()


def train(
    plan: Plan, steps: int, drift: int = -1, strategy: Strategy = SYNCHRONOUS
) -> list[list[dict[str, np.ndarray]]]:
    """Steps of momentum on every rank; return the weights by rank and step. After step `drift` each
    rank's move away by its number.
    """

    def work(comm: Comm) -> list[dict[str, np.ndarray]]:
        run, log = strategy.start(PlanExecutor(plan, comm)), []
        weights = {path: tf.Variable(tf.ones(shape)) for path, shape in SHAPES.items()}
        momentum = {path: tf.zeros(shape) for path, shape in SHAPES.items()}
        for step in range(steps):
            result = run.exchange(
                {path: tf.constant(value) for path, value in gradients(comm.rank, step).items()}
            )

            def apply(result: dict[str, tf.Tensor] = result) -> None:
                for path in SHAPES:
                    momentum[path] = 0.5 * momentum[path] + result[path]
                    weights[path].assign_sub(0.1 * momentum[path])

            run.update(apply, list(result.values()), weights)
            for path in SHAPES if step == drift else ():
                weights[path].assign_add(tf.fill(SHAPES[path], float(comm.rank)))
            log.append({path: variable.numpy() for path, variable in weights.items()})
        return log

    return ThreadComm.run(plan.topology, work)


@with_topologies(SCHEMES)
def test_a_root_that_updates_alone_gives_all_ranks_the_same_weights(
    scheme: Scheme, topology: Topology
) -> None:
    """Algorithm 2: bit for bit the weights of an update on all ranks, also after ranks have moved
    away.
    """
    plain = train(plan_for(scheme, topology), steps=3)
    plan = plan_for(scheme, topology, reduce_to_root=True)
    for log in train(plan, steps=3, drift=1, strategy=Root()):
        for step in (0, 2):
            for path in SHAPES:
                assert log[step][path].tobytes() == plain[0][step][path].tobytes()


@with_topologies(SCHEMES)
def test_weights_that_moved_apart_come_together_at_the_next_broadcast(
    scheme: Scheme, topology: Topology
) -> None:
    """Algorithm 3 with a broadcast every 2 steps: apart after step 1, together again
    after step 3.
    """
    plain = train(plan_for(scheme, topology), steps=5)
    for rank, log in enumerate(
        train(plan_for(scheme, topology), steps=5, drift=1, strategy=Rebroadcast(every=2))
    ):
        for path in SHAPES:
            assert log[0][path].tobytes() == plain[0][0][path].tobytes()
            np.testing.assert_allclose(log[2][path], plain[0][2][path] + rank, rtol=1e-5, atol=1e-4)
            assert log[3][path].tobytes() == plain[0][3][path].tobytes()
            assert log[4][path].tobytes() == plain[0][4][path].tobytes()


@every_topology
@pytest.mark.parametrize("route", routes.ROUTES)
def test_bytes_of_a_step_that_the_root_updates(route: str, topology: Topology) -> None:
    plan = plan_for(scheme(route), topology, reduce_to_root=True)

    def work(comm: Comm) -> Any:
        run = Root().start(PlanExecutor(plan, comm))
        result = run.exchange(
            {path: tf.constant(value) for path, value in gradients(comm.rank, 0).items()}
        )
        weights = {path: tf.Variable(tf.ones(shape)) for path, shape in SHAPES.items()}
        run.update(lambda: None, list(result.values()), weights)
        return comm.traffic()

    expected = np.zeros(2)
    for bucket in plan.buckets:
        chosen = routes.get(bucket.route)
        expected += chosen.wire_bytes(bucket, topology)
        expected += chosen.broadcast_bytes(bucket, topology)
    np.testing.assert_allclose(
        np.mean(ThreadComm.run(topology, work), axis=0), expected, rtol=1e-12
    )


MOVING = [
    Scheme(route, rule, 0.1, dense_below=8, bucket_bytes=2000, momentum=0.5)
    for route in SPARSE
    for rule in ("exact", "dgc")
]


def velocities(running: PlanExecutor) -> dict[str, np.ndarray]:
    found = running.state().velocities_by_variable()
    return {
        path: found.get(path, np.zeros(np.prod(shape), np.float32))
        for path, shape in SHAPES.items()
    }


@pytest.mark.parametrize("operation", ["average", "sum"])
@pytest.mark.parametrize("scheme", MOVING, ids=name_of)
def test_momentum_of_dense_variables_is_the_optimizers(scheme: Scheme, operation: str) -> None:
    """Biases travel dense: they get the momentum that SGD would have given them, on every rank the
    same.
    """
    for log in play(plan_for(scheme, Topology(2, 2), operation), steps=3):
        expected: Any = 0
        for step, (_, result, _) in enumerate(log):
            total = sum(gradients(rank, step)["first/bias"] for rank in range(4))
            expected = 0.5 * expected + (total / 4 if operation == "average" else total)
            np.testing.assert_allclose(result["first/bias"], expected, rtol=1e-6)


@pytest.mark.parametrize("scheme", MOVING, ids=name_of)
def test_with_momentum_nothing_that_was_accumulated_is_lost(scheme: Scheme) -> None:
    """A step sends and keeps what was kept plus the velocity that it moved by; what was sent has no
    velocity left.
    """
    path = "last/kernel"

    def work(comm: Comm) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        running, log = PlanExecutor(plan_for(scheme, comm.topology), comm), []
        for step in range(3):
            result = running.exchange(
                {name: tf.constant(value) for name, value in gradients(comm.rank, step).items()}
            )
            log.append(
                (
                    result[path].numpy().ravel(),
                    owed_by(running)[path],
                    velocities(running)[path],
                )
            )
        return log

    logs = ThreadComm.run(Topology(2, 2), work)
    kept = moving = np.zeros(np.prod(SHAPES[path]), np.float32)
    for step in range(3):
        moved = 0.5 * moving + sum(gradients(rank, step)[path].ravel() for rank in range(4))
        now = sum(log[step][1] for log in logs)
        np.testing.assert_array_equal(logs[0][step][0] + now, kept + moved)
        kept, moving = now, sum(log[step][2] for log in logs)
        assert (moving != moved).any()


@pytest.mark.parametrize("topology", UNLIKE, ids=name_of)
@pytest.mark.parametrize("after", MOVING, ids=name_of)
@pytest.mark.parametrize("before", MOVING, ids=name_of)
def test_a_switch_keeps_the_sum_of_velocities(
    before: Scheme, after: Scheme, topology: Topology
) -> None:
    """Also where another density makes other buckets, and where a variable goes from sparse to
    dense.
    """
    after = dataclasses.replace(after, density=0.3, dense_below=500)

    def work(comm: Comm) -> tuple[dict, dict]:
        first = PlanExecutor(plan_for(before, topology), comm)
        first.exchange(
            {path: tf.constant(value) for path, value in gradients(comm.rank, 0).items()}
        )
        second, had = PlanExecutor(plan_for(after, topology), comm), velocities(first)
        second.import_residuals(owed_by(first), had)
        return had, velocities(second)

    ends = ThreadComm.run(topology, work)
    for path in SHAPES:
        had = sum(had[path] for had, _ in ends)
        assert had.any()
        np.testing.assert_allclose(sum(has[path] for _, has in ends), had, rtol=1e-6)


@pytest.mark.parametrize("operation", ["average", "sum"])
def test_gradients_are_clipped_on_each_rank_by_their_joint_norm(operation: str) -> None:
    scheme = Scheme("allgather", "exact", 0.1, dense_below=8, bucket_bytes=2000, clip_norm=3.0)
    for log in play(plan_for(scheme, Topology(2, 2), operation), steps=1):
        given, _, owed = log[0]
        norm = np.sqrt(sum(np.square(value).sum(dtype=np.float64) for value in given.values()))
        limit = 3.0 * 2 if operation == "average" else 3.0 / 2
        kept = owed["last/kernel"]
        rest = np.flatnonzero(kept)
        assert rest.size
        np.testing.assert_allclose(
            kept[rest], given["last/kernel"].ravel()[rest] * limit / norm, rtol=1e-5
        )


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(3, 1)], ids=name_of)
@pytest.mark.parametrize("route", SPARSE)
def test_variables_too_long_for_one_bucket_travel_in_pieces(route: str, topology: Topology) -> None:
    """The limit is 2^30 entries; here it is 100: nothing is lost, shapes come back, each piece
    sends its share.
    """
    given = [Gradient(path, shape, "float32") for path, shape in SHAPES.items()]
    plan = make_plan(given, {"*": scheme(route, "exact", 0.1)}, topology, "sum", largest=100)
    names = [name for bucket in plan.buckets for name in bucket.variables]
    assert (
        len(names) == 5 + 6 + 1
        and "first/kernel[0:81]" in names
        and routes.read_plan(plan.to_json()) == plan
    )
    assert all(bucket.size < 200 and bucket.k for bucket in plan.buckets if bucket.route == route)

    def work(comm: Comm) -> tuple[dict, list]:
        running = PlanExecutor(plan, comm)
        result = running.exchange(
            {path: tf.constant(value) for path, value in gradients(comm.rank, 0).items()}
        )
        kept = running.state().residuals_by_variable()
        again = PlanExecutor(plan, comm)
        again.import_residuals(kept)
        same = again.state().residuals_by_variable()
        return {path: value.numpy() for path, value in result.items()}, [kept, same]

    ends = ThreadComm.run(topology, work)
    for kind in (0, 1):  # what stayed, and what an equal plan took over
        for path, shape in SHAPES.items():
            stays = np.zeros(shape, np.float32).ravel()
            for _, kept in ends:
                for name, part in kept[kind].items():
                    piece = Piece.of(name)
                    if piece.path == path:
                        stays[piece.start : piece.stop] += part
            came = sum(gradients(rank, 0)[path] for rank in range(topology.size))
            assert ends[0][0][path].shape == shape
            np.testing.assert_array_equal(ends[0][0][path].ravel() + stays, came.ravel())


def test_different_plans_are_refused_on_every_rank_and_named() -> None:
    def work(comm: Comm) -> str:
        density = 0.1 if comm.rank < 3 else 0.2
        with pytest.raises(PlanError) as caught:
            PlanExecutor(plan_for(scheme("hitopk", RULES[0], density), comm.topology), comm)
        return str(caught.value)

    messages = ThreadComm.run(Topology(2, 2), work)
    assert len(messages) == 4
    assert all(
        "Rank 0 and rank 3 differ first in plan.buckets[0].k" in message for message in messages
    )


def test_ranks_in_different_collectives_are_an_error_and_not_a_hang() -> None:
    with pytest.raises(RuntimeError, match="different collectives"):
        ThreadComm.run(
            Topology(2, 1), lambda comm: comm.allreduce(tf.ones([2]), "world", f"name{comm.rank}")
        )


def test_a_buffer_of_unknown_shape_is_refused_where_it_would_be_sent() -> None:
    """Its bytes are counted while tracing. A rank that is alone sends nothing."""

    def traced(comm: Comm) -> tf.Tensor:
        gather = tf.function(
            lambda entries: comm.all_gather(entries, "world", "pairs"),
            [tf.TensorSpec([None])],
            autograph=False,
        )
        return gather(tf.ones([3]))

    with pytest.raises(
        PlanError,
        match=r"shape is known while tracing.*Received shape \(None,\) on rank "
        r"\d.*tf\.ensure_shape",
    ):
        ThreadComm.run(Topology(2, 1), traced)
    assert ThreadComm.run(Topology(1, 1), traced)[0].shape == (3,)


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 fails")
        comm.allreduce(tf.ones([2]), "world", "sum")

    with pytest.raises((ValueError, RuntimeError), match="rank 1 fails"):
        ThreadComm.run(Topology(3, 1), work)


def test_a_residual_that_momentum_made_is_not_moved_again() -> None:
    """100 entries of gradient 1, momentum 0.9: one sparse step, then dense ones without a gradient.
    What is owed comes once.
    """
    given = [Gradient("a", (10, 10), "float32")]
    topology, zeros = Topology(2, 1), {"a": tf.zeros([10, 10])}

    def work(comm: Comm) -> float:
        sparse = Scheme("allgather", "exact", 0.1, dense_below=0, momentum=0.9)
        first = PlanExecutor(make_plan(given, {"*": sparse}, topology, "sum"), comm)
        sent = float(tf.reduce_sum(first.exchange({"a": tf.ones([10, 10])})["a"]))
        plan = make_plan(
            given, {"*": dataclasses.replace(sparse, dense_below=10**6)}, topology, "sum"
        )
        second = PlanExecutor(plan, comm)
        kept = first.state()
        second.import_residuals(kept.residuals_by_variable(), kept.velocities_by_variable())
        return sent + sum(float(tf.reduce_sum(second.exchange(zeros)["a"])) for _ in range(200))

    for total in ThreadComm.run(topology, work):
        # as the sparse kernel has it: what was sent has lost its velocity, what was not sent goes
        # on moving
        np.testing.assert_allclose(total, 2 * (10 + 90 * 10), rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_a_dense_step_cannot_carry_stays_owed(dtype: str) -> None:
    """A NaN where something is owed, and digits that float16 has no room for."""
    plan = make_plan([Gradient("a", (4,), dtype)], {"*": Scheme()}, Topology(2, 1), "sum")
    owed = np.array([0.024, 0.0001, 3.0, 0.0], np.float32)

    def work(comm: Comm) -> tuple[np.ndarray, np.ndarray]:
        running = PlanExecutor(plan, comm)
        running.import_residuals({"a": owed} if comm.rank == 0 else {})
        result = (
            running.exchange({"a": tf.cast([512.0, 512.0, np.nan, 1.0], dtype)})["a"]
            .numpy()
            .astype(np.float32)
        )
        return result, running.state().residuals_by_variable().get("a", np.zeros(4))

    (sent, one), (_, other) = ThreadComm.run(Topology(2, 1), work)
    assert np.isnan(sent[2]) and (one + other)[2] == 3 and sent[3] == 2
    np.testing.assert_allclose(
        sent[:2].astype(np.float64) + (one + other)[:2],
        1024 + owed[:2],
        atol=1e-4 if dtype == "float32" else 1e-6,
    )


def test_pieces_go_on_whole_and_the_other_way_around() -> None:
    given, topology = [Gradient("long", (25, 20), "float32")], Topology(2, 1)
    cut, whole = (
        make_plan(
            given,
            {"*": Scheme("allgather", "exact", 0.1, dense_below=0)},
            topology,
            "sum",
            largest=largest,
        )
        for largest in (100, 10**6)
    )
    dense = make_plan(given, {"*": Scheme()}, topology, "sum")
    assert len(cut.buckets) == 5

    def work(comm: Comm) -> float:
        value = tf.constant(
            np.random.default_rng(comm.rank).integers(1, 99, (25, 20)).astype(np.float32)
        )
        sent, owed = 0.0, {}
        for plan in (cut, whole, cut, dense):
            running = PlanExecutor(plan, comm)
            running.import_residuals(owed)
            sent += float(tf.reduce_sum(running.exchange({"long": value})["long"]))
            owed = running.state().residuals_by_variable()
        assert not owed
        return sent

    total = 4 * sum(
        np.random.default_rng(rank).integers(1, 99, (25, 20)).sum() for rank in range(2)
    )
    assert ThreadComm.run(topology, work) == [total, total]


def test_any_seed_and_a_scale_that_float16_cannot_hold() -> None:
    play(plan_for(Scheme("allgather", "random", 0.1, seed=2**62), Topology(2, 1)), 1)
    (clipped,) = clip_before_accumulation([tf.fill([4096], tf.constant(6e4, tf.float16))], 0.1, 64)
    assert np.linalg.norm(clipped.numpy().astype(np.float32)) == pytest.approx(0.0125, rel=0.01)
