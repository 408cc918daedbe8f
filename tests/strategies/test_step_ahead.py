"""StepAhead: agreed weights, nodes that are ahead of them, and Adam without one node's noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import drawn
from threaded_optimizers import DENSE, SHAPES, gradients, new_weights, train, wrap

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, PlanError, Scheme, Topology
from tfcommx.keras_internals.adam_noise import noise_factors
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.step_boundary import consolidate
from tfcommx.runtime.gradient_state import GradientState
from tfcommx.runtime.replica_guard import ReplicaError
from tfcommx.strategies import StepAhead

K = keras.optimizers
TWO_OF_TWO, THREE = Topology(2, 2), Topology(3, 1)
BY_NODE = Scheme("hitopk", "exact", 0.2, dense_below=0)
BY_RANK = Scheme("allgather", "exact", 0.2, dense_below=0)
CODED = Scheme("hitopk", "mstopk", 0.3, "torus", 16, wire="elias/int4", dense_wire="float16")


def agreed(exchanger: Exchanger) -> list[np.ndarray]:
    """Return the weights that all ranks agree on."""
    (run,) = exchanger.runs.values()
    return [one.numpy() for one in run._agreed.values()]


def whole_residuals(exchanger: Exchanger, comm: Comm, by_node: bool) -> list[np.ndarray]:
    """Return the residuals of this rank's node, as the mean over its ranks."""
    everyone = comm.gather_objects(exchanger.export().residuals)
    members = comm.members("node") if by_node else (comm.rank,)
    found = []
    for path, shape in SHAPES.items():
        name = path.replace("/", "_")
        parts = [everyone[rank].get(name, np.zeros(np.prod(shape), "float32")) for rank in members]
        found.append(np.reshape(sum(parts), shape) / np.float32(len(members)))
    return found


@pytest.mark.parametrize(
    ("topology", "route"),
    drawn([TWO_OF_TWO, THREE, Topology(1, 3)], ["hitopk", "allgather"]),
    ids=str,
)
def test_sending_everything_by_sgd_is_synchronous_training(topology: Topology, route: str) -> None:
    everything = Scheme(route, "exact", 1.0, dense_below=0)

    def make() -> K.Optimizer:
        return K.SGD(0.1, momentum=0.9, weight_decay=0.01)

    ahead = train(make, StepAhead(), topology, everything)
    plain = train(make, "synchronous", topology)
    for mine, expected in zip(ahead, plain, strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("topology", "scheme"),
    [(TWO_OF_TWO, BY_NODE), (TWO_OF_TWO, CODED), (THREE, BY_RANK)],
    ids=["by-node", "coded", "by-rank"],
)
def test_nothing_is_lost(topology: Topology, scheme: Scheme) -> None:
    """Agreed weights plus the mean residual are the start plus all updates, of any rate."""
    rising = keras.optimizers.schedules.PolynomialDecay(0.05, 4, 0.4)

    def after(optimizer: Any, _: object) -> tuple[list[np.ndarray], Any]:
        return agreed(optimizer.exchanger), optimizer.exchanger.export().residuals

    ranks = train(lambda: K.SGD(rising), StepAhead(), topology, scheme, after=after)
    dense = train(lambda: K.SGD(rising), "synchronous", topology)[0]
    for place, (path, shape) in enumerate(SHAPES.items()):
        parts = [kept.get(path.replace("/", "_"), np.zeros(shape)) for _, kept in ranks]
        unsent = np.reshape(sum(part.reshape(shape) for part in parts), shape) / len(ranks)
        if len(shape) == 2:
            assert np.abs(unsent).max() > 1e-2
        # Sums in 16 bits lose the engine's rounding errors
        rounds = scheme is CODED and len(shape) == 1
        close = 1e-3 if rounds else 2e-6
        np.testing.assert_allclose(ranks[0][0][place] + unsent, dense[place], atol=close)


OPTIMIZERS: dict[str, Callable[[], K.Optimizer]] = {
    "adam": lambda: K.Adam(0.05),
    "adamw": lambda: K.AdamW(0.05, weight_decay=0.1),
    "clipped": lambda: K.SGD(0.1, global_clipnorm=0.5),
    "accumulating": lambda: K.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize(("name", "how"), drawn(list(OPTIMIZERS), ["by node", "coded", "by rank"]))
def test_weights_are_the_agreed_ones_plus_the_residual(name: str, how: str) -> None:
    """To the bit after each step: equal within a node, and apart between nodes."""
    scheme = {"by node": BY_NODE, "coded": CODED, "by rank": BY_RANK}[how]
    by_node, coefficient = how != "by rank", 0.5 if how == "coded" else 1.0

    def work(comm: Comm) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
        strategy, weights, log = StepAhead(coefficient), new_weights(), []
        optimizer = wrap(OPTIMIZERS[name](), comm, strategy, scheme, "average")
        for step in range(4):
            optimizer.apply(gradients(comm.rank, step), weights)
            if name == "accumulating" and step % 2 == 0:
                continue
            sent = agreed(optimizer.exchanger)
            unsent = whole_residuals(optimizer.exchanger, comm, by_node)
            for weight, one, part in zip(weights, sent, unsent, strict=True):
                ahead = np.float32(coefficient) * part if len(one.shape) == 2 else 0 * part
                np.testing.assert_array_equal(weight.numpy(), one + ahead)
            log.append((sent, [weight.numpy() for weight in weights]))
        return log

    first, second, third, _ = ThreadComm.run(TWO_OF_TWO, work)
    for mine, other, far in zip(first, second, third, strict=True):
        for place, shape in enumerate(SHAPES.values()):
            np.testing.assert_array_equal(mine[0][place], far[0][place])
            same = np.array_equal(mine[1][place], other[1][place])
            assert same == (by_node or len(shape) == 1)
            assert np.array_equal(mine[1][place], far[1][place]) == (len(shape) == 1)


@pytest.mark.extended
def test_adam_of_two_nodes_is_its_definition() -> None:
    """Ten steps whose gradients see the weights, against NumPy in float64."""
    shape, steps, rate, decay, epsilon = (6, 6), 10, 0.05, 0.02, 1e-6
    numbers = np.random.default_rng(8)
    start, slopes = numbers.normal(size=shape), numbers.normal(size=(4, *shape)) * 0.3 + 1
    noise = numbers.normal(size=(4, steps, *shape))

    def gradient(rank: int, step: int, weights: Any) -> Any:
        return slopes[rank] * (weights - 0.5) + noise[rank, step]

    def work(comm: Comm) -> tuple[np.ndarray, np.ndarray]:
        plain = K.AdamW(rate, weight_decay=decay, beta_1=0.8, beta_2=0.9, epsilon=epsilon)
        optimizer = wrap(plain, comm, StepAhead(0.75), BY_NODE, "average")
        weight = keras.Variable(start.astype("float32"), name="w")
        for step in range(steps):
            found = gradient(comm.rank, step, weight.numpy())
            optimizer.apply([tf.constant(found, tf.float32)], [weight])
        ahead = weight.numpy()
        consolidate(optimizer)
        return weight.numpy(), ahead

    sent, k = start.copy(), 4  # 20 % of a slot's 18 entries, rounded up
    nodes = np.stack([start, start])
    m, v, unsent = np.zeros((3, 2, *shape))
    for step in range(steps):
        selected = np.zeros((2, *shape))
        for node in range(2):
            means = [gradient(2 * node + slot, step, nodes[node]) for slot in range(2)]
            g = (means[0] + means[1]) / 2
            m[node] = 0.8 * m[node] + 0.2 * g
            v[node] = 0.9 * v[node] + 0.1 * g**2
            big_m, big_v = m[node] / (1 - 0.8 ** (step + 1)), v[node] / (1 - 0.9 ** (step + 1))
            s = np.minimum(big_m**2, big_v)
            # Keras adds epsilon to the root of v, bias included
            bias = np.sqrt(1 - 0.9 ** (step + 1))
            root = np.sqrt(s + (big_v - s) / 2) + epsilon / bias
            unsent[node] -= rate * big_m / root + rate * decay * nodes[node]
            for shard in range(2):
                part = unsent[node].reshape(2, -1)[shard]
                largest = np.argsort(-np.abs(part))[:k]
                selected[node].reshape(2, -1)[shard][largest] = part[largest]
                part[largest] = 0
        sent += selected.mean(axis=0)
        nodes = sent + 0.75 * unsent
    for rank, (mine, ahead) in enumerate(ThreadComm.run(TWO_OF_TWO, work)):
        np.testing.assert_allclose(mine, sent, atol=3e-6)
        np.testing.assert_allclose(ahead, nodes[rank // 2], atol=3e-6)


def test_noise_is_corrected_where_the_update_is_that_of_adam() -> None:
    class Other(K.Adam):
        def update_step(self, *arguments: Any) -> None:
            super().update_step(*arguments)

    weights, gradient = new_weights()[:1], gradients(0, 0)[:1]
    for optimizer, corrects in (
        (K.Adam(), True),
        (K.AdamW(), True),
        (K.Adam(gradient_accumulation_steps=2), True),
        (K.Adam(amsgrad=True), False),
        (Other(), False),
        (K.Nadam(), False),
        (K.SGD(), False),
    ):
        optimizer.apply(gradient, weights)
        assert len(noise_factors(optimizer, weights, 4)) == corrects
        assert noise_factors(optimizer, weights, 1) == []
        for factor in noise_factors(optimizer, weights, 4):
            assert factor.shape == weights[0].shape
            assert 1 <= factor.numpy().min() <= factor.numpy().max() <= 2


def test_the_agreed_weights_are_those_to_evaluate_and_to_compare() -> None:
    """Nodes that are ahead are no difference between replicas; agreed weights that differ are."""

    def work(comm: Comm) -> str:
        optimizer, weights = wrap(K.SGD(0.1), comm, StepAhead(), BY_NODE, "average"), new_weights()
        for step in range(5):
            optimizer.apply(gradients(comm.rank, step), weights)
        consolidate(optimizer)
        for weight, one in zip(weights, agreed(optimizer.exchanger), strict=True):
            np.testing.assert_array_equal(weight.numpy(), one)
        # Weights assigned now count, as those of a restored checkpoint must
        weights[0].assign(2 * weights[0])
        optimizer.apply(gradients(comm.rank, 5), weights)
        consolidate(optimizer)
        if comm.rank == 1:
            weights[0].assign(weights[0] + 1)
        with pytest.raises(ReplicaError, match=r"step 6\b.*'first_kernel'.*rank 1\b") as refused:
            optimizer.apply(gradients(comm.rank, 6), weights)
        return str(refused.value)

    assert "and were equal" in ThreadComm.run(TWO_OF_TWO, work)[0]


@pytest.mark.extended
@pytest.mark.parametrize("next_scheme", [DENSE, BY_RANK], ids=["dense", "other-route"])
def test_residuals_move_to_another_scheme(next_scheme: Scheme) -> None:
    """A change of scheme keeps the sum: dense steps send all that was not sent."""

    def work(comm: Comm) -> tuple[list[np.ndarray], Any]:
        optimizer, weights = wrap(K.SGD(0.1), comm, StepAhead(), BY_NODE, "average"), new_weights()
        for step in range(4):
            optimizer.apply(gradients(comm.rank, step), weights)
            if step == 1:
                optimizer.exchanger.switch(next_scheme)
        return agreed(optimizer.exchanger), optimizer.exchanger.export().residuals

    ranks = ThreadComm.run(TWO_OF_TWO, work)
    plain = train(lambda: K.SGD(0.1), "synchronous", TWO_OF_TWO)[0]
    assert any(kept for _, kept in ranks) == (next_scheme is BY_RANK)
    for place, (path, shape) in enumerate(SHAPES.items()):
        parts = [kept.get(path.replace("/", "_"), np.zeros(shape)) for _, kept in ranks]
        unsent = sum(part.reshape(shape) for part in parts) / 4
        np.testing.assert_allclose(ranks[0][0][place] + unsent, plain[place], atol=2e-6)


def test_residuals_move_to_another_number_of_ranks() -> None:
    """As a checkpoint restores them: their mean over the ranks is conserved, and is ahead again."""

    def first(comm: Comm) -> Any:
        optimizer, weights = wrap(K.SGD(0.1), comm, StepAhead(), BY_NODE, "average"), new_weights()
        for step in range(2):
            optimizer.apply(gradients(comm.rank, step), weights)
        consolidate(optimizer)
        return [one.numpy() for one in weights], optimizer.exchanger.export()

    saved = ThreadComm.run(TWO_OF_TWO, first)

    def second(comm: Comm) -> list[np.ndarray]:
        optimizer, weights = wrap(K.SGD(0.1), comm, StepAhead(), BY_RANK, "average"), new_weights()
        for weight, value in zip(weights, saved[0][0], strict=True):
            weight.assign(value)
        inherited = sum((state for _, state in saved[comm.rank :: 3]), GradientState())
        optimizer.exchanger.load(inherited.times(3 / 4), {})
        optimizer.apply([tf.zeros(shape) for shape in SHAPES.values()], weights)
        unsent = whole_residuals(optimizer.exchanger, comm, by_node=False)
        for weight, one, part in zip(weights, agreed(optimizer.exchanger), unsent, strict=True):
            np.testing.assert_array_equal(weight.numpy(), one + part)
        return [one.numpy() for one in weights]

    ranks = ThreadComm.run(THREE, second)
    plain = train(lambda: K.SGD(0.1), "synchronous", TWO_OF_TWO, steps=2)[0]
    for place, expected in enumerate(plain):
        np.testing.assert_allclose(np.mean([one[place] for one in ranks], 0), expected, atol=2e-6)


def test_residuals_of_updates_do_not_become_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """Another strategy would apply them once more, times the rate and with the wrong sign."""

    def work(comm: Comm) -> tuple[list[np.ndarray], list[np.ndarray]]:
        optimizer, weights = wrap(K.SGD(0.1), comm, StepAhead(), BY_NODE, "average"), new_weights()
        for step in range(2):
            optimizer.apply(gradients(comm.rank, step), weights)
        consolidate(optimizer)
        assert optimizer.exchanger.export().residuals
        before = [weight.numpy() for weight in weights]
        plain = wrap(K.SGD(0.1), comm, "synchronous", BY_NODE, "average")
        plain.apply([tf.zeros(shape) for shape in SHAPES.values()], weights)
        return before, [weight.numpy() for weight in weights]

    for before, after in ThreadComm.run(TWO_OF_TWO, work):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
    assert "sums of updates" in caplog.text and "SwitchScheme" in caplog.text


def test_what_has_no_residual_of_updates_is_refused() -> None:
    mixed = {"first*": Scheme("hitopk", "exact", 0.2, dense_below=0), "*": BY_RANK}
    moving = Scheme("hitopk", "exact", 0.2, dense_below=0, momentum=0.9)
    for scheme, op, received in (
        (BY_NODE, "sum", "op='sum'"),
        (moving, "average", "momentum=0.9"),
        (Scheme("torus", compression="powersgd/1"), "average", "'powersgd/1'"),
        (mixed, "average", "by slots"),
    ):
        with pytest.raises(PlanError, match=received):
            train(lambda: K.SGD(0.1), StepAhead(), TWO_OF_TWO, scheme, op)
    # One slot a node: both keep residuals by rank
    train(lambda: K.SGD(0.1), StepAhead(), THREE, mixed)
    for coefficient in (0, -0.5, 1.5, True, "1", float("nan")):
        with pytest.raises(ConfigurationError, match="`coefficient`"):
            StepAhead(coefficient)
    assert repr(StepAhead(np.float32(0.5))) == "StepAhead(coefficient=0.5)"


def test_a_constraint_is_refused() -> None:
    def work(comm: Comm) -> None:
        weight = keras.layers.Dense(2, kernel_constraint="non_neg")
        weight.build((3, 3))
        optimizer = wrap(K.SGD(0.1), comm, StepAhead(), BY_NODE, "average")
        with pytest.raises(ConfigurationError, match=r"NonNeg.*kernel"):
            optimizer.apply([tf.ones([3, 2])], [weight.kernel])

    ThreadComm.run(TWO_OF_TWO, work)
