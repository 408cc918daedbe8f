"""Elastic averaging: the server's arithmetic, and ranks as threads, each at its own pace."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from elastic_servers import SERVERS, run_ranks

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, Plan, RankLostError, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies import ElasticAveraging, Update
from tfcommx.strategies.easgd.server import Centre
from tfcommx.strategies.easgd.strategy import ElasticRun

SHAPES = {"first/kernel": (7, 5), "last/kernel": (5, 9)}
ENTRIES = 80
RATE = 0.1


def plan_for(topology: Topology, scheme: Scheme | None = None, operation: str = "average") -> Plan:
    variables = [Gradient(path, shape, "float32") for path, shape in SHAPES.items()]
    return make_plan(variables, {"*": scheme or Scheme()}, topology, operation)


class Rank:
    """One rank that trains, step by step: weights w, gradient w - target of the rank."""

    def __init__(self, comm: Comm, strategy: ElasticAveraging, traced: bool = False) -> None:
        self.run = strategy.start(PlanExecutor(plan_for(comm.topology), comm))
        self.weights = {path: tf.Variable(tf.ones(shape)) for path, shape in SHAPES.items()}
        self.target = float(comm.rank)
        self.sgd: keras.optimizers.SGD | None = None
        # As in the optimizer's `apply`, which AutoGraph does not convert
        self.step = tf.function(self._step, autograph=False) if traced else self._step

    def _step(self) -> None:
        gradients = {path: one - self.target for path, one in self.weights.items()}
        gradients = self.run.exchange(gradients)

        def apply() -> None:
            if self.sgd is not None:
                self.sgd.apply(list(gradients.values()), list(self.weights.values()))
                return
            for path, gradient in gradients.items():
                self.weights[path].assign_sub(RATE * gradient)

        self.run.update(Update(apply, list(gradients.values()), self.weights))

    def flat(self) -> np.ndarray:
        return np.concatenate([one.numpy().ravel() for one in self.weights.values()])


class Log:
    """Records the messages that reach the centre, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.met: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        meet = Centre.meet

        def noted(centre: Centre, weights: np.ndarray) -> np.ndarray:
            force = meet(centre, weights)
            self.met.append((weights.copy(), force.copy(), centre.values.copy()))
            return force

        monkeypatch.setattr(Centre, "meet", noted)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_arithmetic_is_that_of_the_paper(dtype: str) -> None:
    """2,000 messages of 5 workers in random order, against Algorithm 1 in float64."""
    numbers = np.random.default_rng(3)
    alpha, exact = 0.18, numbers.normal(size=64)
    workers = numbers.normal(size=(5, 64))
    centre, near = Centre(exact.astype(dtype), alpha), workers.astype(dtype)
    total = near.sum(axis=0) + centre.values
    for _ in range(2000):
        i = numbers.integers(5)
        drift = 0.01 * numbers.normal(size=64)
        workers[i], near[i] = workers[i] + drift, near[i] + drift.astype(dtype)
        total += drift.astype(dtype)
        force = alpha * (workers[i] - exact)
        workers[i], exact = workers[i] - force, exact + force
        near[i] -= centre.meet(near[i])
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    assert centre.values.dtype == dtype
    np.testing.assert_allclose(centre.values, exact, rtol=0, atol=tolerance)
    np.testing.assert_allclose(near, workers, rtol=0, atol=tolerance)
    # The centre gains as much as the workers lose
    np.testing.assert_allclose(near.sum(axis=0) + centre.values, total, rtol=0, atol=50 * tolerance)


def test_weights_that_are_not_finite_stay_out_of_the_centre() -> None:
    centre = Centre(np.ones(3, "float32"), 0.5)
    for odd in (np.nan, np.inf):
        assert not centre.meet(np.array([2, odd, 3], "float32")).any()
    assert centre.values.tolist() == [1, 1, 1]


def radius(alpha: float, rate: float, delay: int) -> float:
    """Spectral radius of an exchange and `delay` gradient steps on a quadratic, one worker.

    A delayed force is that of the weights before the steps.
    """
    shrink = (1 - rate) ** delay
    return max(abs(np.linalg.eigvals([[shrink - alpha, alpha], [alpha, 1 - alpha]])))


def test_the_condition_of_the_paper_is_where_a_delayed_exchange_becomes_unstable() -> None:
    for rate, delay in ((0.1, 1), (0.5, 3), (1.0, 1), (1.9, 1), (0.01, 100)):
        slower = 1 - (1 - rate) ** delay
        limit = (4 - 2 * slower) / (4 - slower)
        assert radius(0.999 * limit, rate, delay) < 1 < radius(1.001 * limit, rate, delay)
        assert rate > 1 or limit > 0.6666


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("traced", [True, False])
def test_ranks_follow_the_messages_that_they_have_sent(
    monkeypatch: pytest.MonkeyPatch, blocking: bool, traced: bool
) -> None:
    """The whole dynamics again in float64, from the order in which the centre has met the ranks."""
    log = Log(monkeypatch)
    strategy = ElasticAveraging(every=3, alpha=0.3, blocking=blocking)

    def work(comm: Comm) -> tuple[np.ndarray, np.ndarray, int]:
        rank = Rank(comm, strategy, traced)
        for _ in range(12):
            rank.step()
            if rank.run._worker.waits:
                futures.wait([rank.run._worker._under_way], 60)  # The force arrives within a step
        before = rank.flat()
        rank.run.end()
        return before, rank.flat(), int(rank.run.executor.steps)

    ended = ThreadComm.run(Topology(3, 1), work)
    assert len(log.met) == 3 * 4 and [steps for _, _, steps in ended] == [12] * 3
    centre = np.ones(ENTRIES)
    workers = {rank: np.ones(ENTRIES) for rank in range(3)}
    # Who it was: the weights of rank r tend to r
    for number, (weights, force, after) in enumerate(log.met):
        rank = min(workers, key=lambda one: _distance(workers[one], one, weights))
        exact = _after(workers[rank], 3, rank)
        np.testing.assert_allclose(weights, exact, rtol=0, atol=1e-5, err_msg=str(number))
        pull = 0.3 * (exact - centre)
        np.testing.assert_allclose(force, pull, rtol=0, atol=1e-5)
        centre = centre + pull
        np.testing.assert_allclose(after, centre, rtol=0, atol=1e-5)
        # A force that is delayed is applied after the next step: that shrinks it less
        workers[rank] = exact - pull if blocking else exact - pull / (1 - RATE)
    for _, last, _ in ended:
        np.testing.assert_allclose(last, centre, rtol=0, atol=1e-5)
        assert last.tobytes() == ended[0][1].tobytes()
    # Not each of them: the weights of rank 1 may be near the centre
    assert max(np.abs(before - last).max() for before, last, _ in ended) > 0.01


@pytest.mark.parametrize(
    ("options", "alpha"), [({}, 0.9 / 4), ({"beta": 0.6}, 0.15), ({"alpha": 0.5}, 0.5)], ids=str
)
def test_four_workers_meet_a_centre_that_begins_with_the_weights_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float], alpha: float
) -> None:
    """tau = 2: a worker exchanges after its steps 2, 4 and 6; alpha = beta / p unless given."""
    log = Log(monkeypatch)

    def work(comm: Comm) -> np.ndarray:
        rank = Rank(comm, ElasticAveraging(every=2, blocking=True, **options))
        for one in rank.weights.values():
            one.assign_add(tf.fill(one.shape, 0.5 * comm.rank))  # Ranks begin apart
        for _ in range(7):
            rank.step()
        rank.run.end()
        return rank.flat()

    ended = ThreadComm.run(Topology(4, 1), work)
    assert len(log.met) == 4 * 3
    centre = np.ones(ENTRIES)
    for weights, force, after in log.met:
        np.testing.assert_allclose(force, alpha * (weights - centre), rtol=0, atol=1e-5)
        centre = centre + alpha * (weights - centre)
        np.testing.assert_allclose(after, centre, rtol=0, atol=1e-5)
    # The first snapshot of rank r: its start, two steps nearer to its target
    first = [_after(np.full(ENTRIES, 1 + 0.5 * rank), 2, rank) for rank in range(4)]
    seen = [weights for weights, _, _ in log.met]
    assert all(min(np.abs(weights - one).max() for weights in seen) < 1e-5 for one in first)
    for last in ended:
        np.testing.assert_allclose(last, centre, rtol=0, atol=1e-5)


def _after(weights: np.ndarray, steps: int, target: float) -> np.ndarray:
    return target + (weights - target) * (1 - RATE) ** steps


def _distance(weights: np.ndarray, target: int, seen: np.ndarray) -> float:
    return float(np.abs(_after(weights, 3, target) - seen).max())


def test_with_nesterov_momentum_it_is_the_papers_second_algorithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EAMSGD in float64, from the order of the messages: velocities feel the force by x alone."""
    log = Log(monkeypatch)
    delta, eta, alpha, every = 0.8, 0.05, 0.3, 3

    def work(comm: Comm) -> np.ndarray:
        rank = Rank(comm, ElasticAveraging(every=every, alpha=alpha, blocking=True))
        rank.sgd = keras.optimizers.SGD(eta, momentum=delta, nesterov=True)
        for _ in range(15):
            rank.step()
        rank.run.end()
        return rank.flat()

    ended = ThreadComm.run(Topology(3, 1), work)
    assert len(log.met) == 3 * 15 // every
    centre = np.ones(ENTRIES)
    # Algorithm 2's x and v; Keras's weights are x + delta v, where the gradient is taken
    workers = {rank: (np.ones(ENTRIES), np.zeros(ENTRIES)) for rank in range(3)}

    def after(rank: int) -> tuple[np.ndarray, np.ndarray]:
        x, v = workers[rank]
        for _ in range(every):
            v = delta * v - eta * (x + delta * v - rank)
            x = x + v
        return x, v

    for weights, force, centre_after in log.met:
        found = {rank: after(rank) for rank in workers}
        seen = {rank: x + delta * v for rank, (x, v) in found.items()}
        rank = min(workers, key=lambda one: float(np.abs(seen[one] - weights).max()))
        np.testing.assert_allclose(weights, seen[rank], rtol=0, atol=1e-5)
        pull = alpha * (seen[rank] - centre)
        np.testing.assert_allclose(force, pull, rtol=0, atol=1e-5)
        centre = centre + pull
        np.testing.assert_allclose(centre_after, centre, rtol=0, atol=1e-5)
        x, v = found[rank]
        workers[rank] = x - pull, v
    for last in ended:
        np.testing.assert_allclose(last, centre, rtol=0, atol=1e-5)
    # The momentum matters: plain SGD is elsewhere by now
    assert np.abs(workers[0][1]).max() > 0.01


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("seed", [case(seed, kept=seed < 4) for seed in range(20)])
def test_no_timing_of_messages_hangs(
    monkeypatch: pytest.MonkeyPatch, seed: int, server: str
) -> None:
    """Messages wait, ranks wait, at random; ranks take unequal steps; all end with the centre."""
    numbers = np.random.default_rng(seed)
    blocking, every = bool(seed % 2), int(numbers.integers(1, 4))
    meet = Centre.meet

    def late(centre: Centre, weights: np.ndarray) -> np.ndarray:
        time.sleep(numbers.exponential(0.003))
        return meet(centre, weights)

    monkeypatch.setattr(Centre, "meet", late)

    def work(comm: Comm) -> tuple[np.ndarray, list[np.ndarray]]:
        own = np.random.default_rng([seed, comm.rank])
        strategy = ElasticAveraging(every=every, blocking=blocking, server=server)
        rank = Rank(comm, strategy, traced=seed % 4 > 1)
        rank.step()
        for again in range(2):  # as two calls of fit
            for _ in range(own.integers(0, 12)):
                rank.step()
                time.sleep(own.exponential(0.002) if own.random() < 0.5 else 0)
            average = rank.run.end(np.array([float(comm.rank), 1.0]))
            if not again:
                rank.run.begin()
        return average, rank.flat()

    for average, last in (ended := run_ranks(server, Topology(2, 2), work)):
        assert average.tolist() == [1.5, 1]
        assert last.tobytes() == ended[0][1].tobytes() and np.isfinite(last).all()


def test_a_slow_rank_does_not_slow_the_others() -> None:
    """While rank 2 takes one step, the others take all of theirs."""
    others = threading.Barrier(3, timeout=60)

    def work(comm: Comm) -> None:
        rank = Rank(comm, ElasticAveraging(every=1, blocking=True))
        rank.step()
        if comm.rank == 2:
            others.wait()
            rank.step()
        else:
            for _ in range(20):
                rank.step()
            others.wait()
        rank.run.end()

    ThreadComm.run(Topology(3, 1), work)


def test_a_rank_that_has_left_is_not_missed_and_a_server_that_has_left_is_named() -> None:
    left = threading.Event()

    def work(comm: Comm) -> Any:
        rank = Rank(comm, ElasticAveraging(every=1))
        for _ in range(5):
            rank.step()
        if comm.rank == 2:
            left.set()
            return None
        left.wait(60)
        comm.membership.mark_gone(2, "on there: its process has ended", False)
        for _ in range(5):
            rank.step()
        average = rank.run.end(np.array([float(comm.rank)]))
        with pytest.raises(RankLostError, match=r"rank 2\b.*\bthere\b"):
            comm.allreduce(tf.ones(1), "world", "never")
        if comm.rank == 1:  # Its server's thread has ended with the training
            comm.membership.mark_gone(0, "it has ended", True)
            with pytest.raises(RuntimeError, match=r"[Rr]ank 0\b.*\bcentre\b"):
                rank.run.end()
        return average.tolist()

    assert ThreadComm.run(Topology(3, 1), work)[:2] == [[0.5], [0.5]]


def test_a_training_that_begins_anew_takes_no_force_of_the_one_before() -> None:
    """An error had ended it while a force was in transit, which pulled to the old centre."""

    def work(comm: Comm) -> tuple[bool, np.ndarray]:
        rank = Rank(comm, ElasticAveraging(every=1))
        rank.step()
        for one in rank.weights.values():
            one.assign(tf.fill(one.shape, 7.0))
        rank.run.begin()
        waits = rank.run._worker.waits
        rank.run.end()
        return waits, rank.flat()

    for waits, last in ThreadComm.run(Topology(2, 1), work):
        assert not waits
        np.testing.assert_array_equal(last, np.full(ENTRIES, 7.0))


def test_one_rank_trains_as_if_alone() -> None:
    def work(comm: Comm) -> np.ndarray:
        rank = Rank(comm, ElasticAveraging(every=1))
        for _ in range(3):
            rank.step()
        assert rank.run.end(np.array([7.0])).tolist() == [7]
        return rank.flat()

    (weights,) = ThreadComm.run(Topology(1, 1), work)
    np.testing.assert_allclose(weights, np.full(ENTRIES, 0.9**3), rtol=1e-6)


def test_bytes_are_those_of_the_weights_both_ways() -> None:
    def work(comm: Comm) -> float:
        rank = Rank(comm, ElasticAveraging(every=2, blocking=True))
        for _ in range(6):
            rank.step()
        rank.run.end()
        return comm.traffic().between

    # 3 exchanges: each sends a float32 per entry; rank 0 answers the two others, at the end too
    expected = [2 * (3 + 1) * 4.0 * ENTRIES, *[3 * 4.0 * ENTRIES] * 2]
    assert ThreadComm.run(Topology(3, 1), work) == expected


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"every": 0}, r"`every`.*\b0\b"),
        ({"every": 2.5}, r"`every`.*\b2\.5\b"),
        ({"beta": 0.0}, r"`beta`.*\b0\.0\b"),
        ({"alpha": float("nan")}, r"`alpha`.*\bnan\b"),
        ({"statistics": "mean"}, "'mean'"),
        ({"server": "shard"}, "'shard'.*'sharded'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], received: str) -> None:
    with pytest.raises(ConfigurationError, match=received):
        ElasticAveraging(**options)


@pytest.mark.parametrize(
    ("scheme", "operation", "received"),
    [
        (Scheme("allgather", "exact", 0.5, dense_below=0), "average", "selection='exact'"),
        (Scheme("torus"), "average", "route='torus'"),
        (Scheme(compression="powersgd/1", dense_below=0), "average", "='powersgd/1'"),
        (None, "sum", "op='sum'"),
    ],
)
def test_plans_that_exchange_gradients_are_refused(
    scheme: Scheme | None, operation: str, received: str
) -> None:
    with pytest.raises(ConfigurationError, match=received):
        ElasticAveraging().check(plan_for(Topology(2, 1), scheme, operation))


@pytest.mark.parametrize(
    ("strategy", "ranks", "warns"),
    [
        (ElasticAveraging(), 2, False),
        (ElasticAveraging(alpha=0.7), 2, True),
        (ElasticAveraging(alpha=0.7, blocking=True), 2, False),
        (ElasticAveraging(alpha=1.1, blocking=True), 2, True),
        (ElasticAveraging(beta=3.0), 8, False),
    ],
    ids=str,
)
def test_a_moving_rate_that_may_be_unstable_is_warned_of(
    strategy: ElasticAveraging, ranks: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: Comm) -> ElasticRun:
        return strategy.start(PlanExecutor(plan_for(comm.topology), comm))

    ThreadComm.run(Topology(ranks, 1), work)
    assert ("exchange is stable" in caplog.text) == warns


def test_without_messages_the_launch_line_is_named() -> None:
    def work(comm: Comm) -> None:
        comm.messages._make = None
        executor = PlanExecutor(plan_for(comm.topology), comm)
        with pytest.raises(ConfigurationError, match=r"horovodrun.*--mpi-args=--enable-recovery"):
            ElasticAveraging().start(executor)

    ThreadComm.run(Topology(2, 1), work)
