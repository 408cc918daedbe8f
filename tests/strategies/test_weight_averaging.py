"""Averaging of weights: where it equals synchronous training, bytes sent, and equal replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from drawing import extended
from threaded_optimizers import gradients, new_weights, train, wrap

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import ConfigurationError, Scheme, Topology
from tfcommx.keras_internals.optimizers import slots_of
from tfcommx.optim.step_boundary import consolidate
from tfcommx.runtime.replica_guard import ReplicaError
from tfcommx.strategies import WeightAveraging

K = keras.optimizers
THREE = Topology(3, 1)
SPARSE = Scheme("allgather", "exact", 0.2, dense_below=0)


def furthest(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def all_equal(everyone: list[list[np.ndarray]]) -> bool:
    return all(furthest(one, everyone[0]) == 0 for one in everyone)


@pytest.mark.parametrize("sends", ["weights", extended("updates")])
def test_linear_optimizers_equal_synchronous_training_and_others_do_not(sends: str) -> None:
    """AWAGD: SGD with momentum and weight decay to float32 rounding; Adam and clipping not."""
    linear = lambda: K.SGD(0.1, momentum=0.9, weight_decay=0.01)  # noqa: E731
    clipped = lambda: K.SGD(0.1, global_clipnorm=0.5)  # noqa: E731
    far = {}
    for name, make in {"linear": linear, "adam": lambda: K.Adam(0.1), "clipped": clipped}.items():
        averaged = train(make, WeightAveraging(sends=sends), THREE)
        assert all_equal(averaged)
        far[name] = furthest(averaged[0], train(make, "synchronous", THREE)[0])
    assert far["linear"] < 2e-6 and far["adam"] > 1e-2 and far["clipped"] > 1e-2, far


def test_the_sum_of_updates_is_the_sum_of_gradients() -> None:
    """SUBGD: op="sum" on gradients, and on updates that are linear in them."""
    make = lambda: K.SGD(0.01)  # noqa: E731
    summed = train(make, WeightAveraging(sends="updates"), THREE, op="sum")
    plain = train(make, "synchronous", THREE, op="sum")
    assert all_equal(summed) and furthest(summed[0], plain[0]) < 2e-6


def test_averages_at_k_times_the_rate_are_sums_at_the_rate() -> None:
    """Theano-MPI, section 4: AWAGD, whose rate is scaled with the k ranks, equals SUBGD."""
    averaged = train(lambda: K.SGD(0.03, momentum=0.9), WeightAveraging(), THREE)
    summed = train(lambda: K.SGD(0.01, momentum=0.9), "synchronous", THREE, op="sum")
    assert all_equal(averaged) and furthest(averaged[0], summed[0]) < 2e-6


def test_updates_may_travel_in_16_bits() -> None:
    make = lambda: K.SGD(0.1, momentum=0.9)  # noqa: E731
    rounded = train(make, WeightAveraging(sends="updates"), THREE, Scheme(wire="float16"))
    plain = train(make, "synchronous", THREE)
    assert all_equal(rounded) and 0 < furthest(rounded[0], plain[0]) < 1e-3


@pytest.mark.parametrize("sends", ["weights", "updates"])
def test_local_steps_average_every_few_steps_and_when_asked(sends: str) -> None:
    """By hand: SGD's weights are the start minus the average of all gradients; drift between."""
    strategy = WeightAveraging(every=3, sends=sends)
    start = [one.numpy() for one in new_weights()]

    def expected(steps: int) -> list[np.ndarray]:
        total = [np.zeros_like(one) for one in start]
        for rank in range(3):
            for step in range(steps):
                for one, gradient in zip(total, gradients(rank, step), strict=True):
                    one += gradient.numpy()
        return [one - 0.1 * part / 3 for one, part in zip(start, total, strict=True)]

    assert not all_equal(train(lambda: K.SGD(0.1), strategy, THREE, steps=5))
    three = train(lambda: K.SGD(0.1), strategy, THREE, steps=3)
    assert all_equal(three) and furthest(three[0], expected(3)) < 2e-6

    def consolidated(optimizer: K.Optimizer, weights: list[keras.Variable]) -> list[np.ndarray]:
        consolidate(optimizer)
        first = [one.numpy() for one in weights]
        consolidate(optimizer)  # Nothing is left to do
        assert furthest(first, [one.numpy() for one in weights]) == 0
        return first

    five = train(lambda: K.SGD(0.1), strategy, THREE, steps=5, after=consolidated)
    assert all_equal(five) and furthest(five[0], expected(5)) < 2e-6


def test_sparse_updates_conserve_what_was_not_sent() -> None:
    """Law 2: averaged updates plus the average of all residuals are the dense average.

    Also while the learning rate rises: updates have it in them already.
    """

    def after(optimizer: K.Optimizer, weights: list[keras.Variable]) -> tuple:
        return [one.numpy() for one in weights], optimizer.exchanger.export().residuals

    # One average: later ones begin from other weights, but SGD's gradients here do not see them.
    strategy = WeightAveraging(every=2, sends="updates")
    rising = keras.optimizers.schedules.PolynomialDecay(0.05, 4, 0.4)
    ranks = train(lambda: K.SGD(rising), strategy, THREE, SPARSE, after=after)
    dense = train(lambda: K.SGD(rising), WeightAveraging(every=2), THREE)
    assert all_equal([weights for weights, _ in ranks])
    for place, one in enumerate(new_weights()):
        kept = [residuals[one.path] for _, residuals in ranks if one.path in residuals]
        assert len(kept) == (3 if len(one.shape) == 2 else 0)  # Biases travel dense
        unsent = np.reshape(sum(kept) / 3, one.shape) if kept else 0.0
        if kept:
            assert np.abs(unsent).max() > 1e-3
        np.testing.assert_allclose(ranks[0][0][place] + unsent, dense[0][place], atol=1e-5)


@pytest.mark.parametrize("momentum", ["keep", "average", "reset"])
def test_momentum_at_an_average(momentum: str) -> None:
    def velocities(optimizer: K.Optimizer, _: object) -> list[np.ndarray]:
        (slot,) = slots_of(optimizer).values()
        return [one.numpy() for one in slot]

    def run(steps: int, option: str) -> list[list[np.ndarray]]:
        strategy = WeightAveraging(every=2, momentum=option)
        make = lambda: K.SGD(0.1, momentum=0.9)  # noqa: E731
        return train(make, strategy, THREE, steps=steps, after=velocities)

    found, kept = run(2, momentum), run(2, "keep")
    assert not all_equal(kept)
    if momentum == "average":
        mean = [np.mean(ranks, axis=0) for ranks in zip(*kept, strict=True)]
        assert all_equal(found) and furthest(found[0], mean) < 1e-6
    elif momentum == "reset":
        assert all(np.all(one == 0) for one in found[0])
    else:
        assert all_equal([found[0], kept[0]])


def test_the_guard_compares_after_averages_only() -> None:
    """It is due in every step here: drift between averages is no error, one at an average is."""

    def work(comm: Comm) -> str:
        strategy = WeightAveraging(every=2, sends="updates")
        optimizer, weights = wrap(K.SGD(0.1), comm, strategy, Scheme(), "average"), new_weights()
        for step in range(4):
            optimizer.apply(gradients(comm.rank, step), weights)
        if comm.rank == 1:
            weights[0].assign(weights[0] + 1)
        with pytest.raises(ReplicaError, match=r"step 4\b.*'first_kernel'.*rank 1\b") as refused:
            optimizer.apply(gradients(comm.rank, 4), weights)
        return str(refused.value)

    assert "and were equal" in ThreadComm.run(THREE, work)[0]


def test_what_cannot_carry_weights_is_refused() -> None:
    for scheme, op, received in (
        (SPARSE, "average", "'allgather'"),
        (Scheme(), "sum", "op='sum'"),
        (Scheme("asa", wire="float16"), "average", "wire='float16'"),
    ):
        with pytest.raises(ConfigurationError, match=received):
            train(lambda: K.SGD(0.1), WeightAveraging(), THREE, scheme, op)
    for options in ({"every": 0}, {"every": True}, {"sends": "gradients"}, {"momentum": "drop"}):
        with pytest.raises(ConfigurationError):
            WeightAveraging(**options)
