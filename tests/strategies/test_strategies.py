"""Strategies: refused settings, and the laws that each of them keeps, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import NOMINAL, ConfigurationError, Plan, PlanError, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies import (
    STRATEGIES,
    Rebroadcast,
    Root,
    Sharded,
    StepAhead,
    Strategy,
    Synchronous,
    Update,
    WeightAveraging,
    strategy_of,
)
from tfcommx.strategies.sharded.strategy import ShardedRun

SHAPES = {"first/kernel": (7, 5), "last/kernel": (5, 9)}
EVERY = [strategy_of(name) for name in STRATEGIES]


def plan_for(strategy: Strategy, topology: Topology, scheme: Scheme | None = None) -> Plan:
    return make_plan(
        [Gradient(path, shape, "float32") for path, shape in SHAPES.items()],
        {"*": scheme or Scheme()},
        topology,
        reduce_to_root=strategy.reduces_to_root,
    )


def train(strategy: Strategy, topology: Topology, scheme: Scheme) -> list[dict[str, np.ndarray]]:
    """Take six traced steps, with different gradients on each rank; return each rank's weights."""

    def work(comm: Comm) -> dict[str, np.ndarray]:
        plan = plan_for(strategy, topology, scheme)
        strategy.check(plan)
        run = strategy.start(PlanExecutor(plan, comm))
        weights = {path: tf.Variable(tf.ones(shape)) for path, shape in SHAPES.items()}
        updated = weights
        if isinstance(strategy, Sharded) and isinstance(run, ShardedRun):
            shards = strategy.make_shards(plan, weights, [True, True], comm.rank, NOMINAL)
            run.attach(shards)
            updated = {
                segment.name: shard.value
                for segment, shard in zip(shards.segments, shards.variables, strict=True)
            }
        numbers = np.random.default_rng(comm.rank)
        for _ in range(6):
            run.agreed_weights(weights)
            gradients = run.exchange(
                {
                    path: tf.constant(numbers.normal(size=shape), tf.float32)
                    for path, shape in SHAPES.items()
                }
            )
            apply = _applier(gradients, updated)
            run.update(Update(apply, list(gradients.values()), weights))
        return {path: variable.numpy() for path, variable in weights.items()}

    return ThreadComm.run(topology, work)


def _applier(
    gradients: dict[str, tf.Tensor], weights: dict[str, tf.Variable]
) -> Callable[[], None]:
    def apply() -> None:
        for path, gradient in gradients.items():
            weights[path].assign_sub(0.1 * gradient)

    return apply


@pytest.mark.parametrize("route", ["allreduce", "pipeline", "torus"])
@pytest.mark.parametrize("strategy", [one for one in EVERY if one.in_lock_step], ids=repr)
def test_every_strategy_ends_with_the_weights_of_the_identity(
    strategy: Strategy, route: str
) -> None:
    plain = train(Synchronous(), Topology(2, 2), Scheme(route, dense_below=0))
    everyone = train(strategy, Topology(2, 2), Scheme(route, dense_below=0))
    for weights in everyone:
        for path in SHAPES:
            assert weights[path].tobytes() == everyone[0][path].tobytes()
            if strategy.updates_apart:  # It adds in another order
                np.testing.assert_allclose(weights[path], plain[0][path], atol=1e-6)
            else:
                assert weights[path].tobytes() == plain[0][path].tobytes()


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
def test_the_table_makes_what_is_asked_for(strategy: Strategy) -> None:
    (name,) = [name for name, cls in STRATEGIES.items() if isinstance(strategy, cls)]
    assert strategy_of(name) == strategy and strategy_of(strategy) is strategy


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "5"])
def test_a_broadcast_comes_after_whole_steps(every: object) -> None:
    with pytest.raises(ConfigurationError, match="`every`"):
        Rebroadcast(every=every)


def test_a_broadcast_comes_every_five_steps_as_in_the_paper() -> None:
    """Wang et al. (2016), Algorithm 3, line 7."""
    assert Rebroadcast() == Rebroadcast(every=5)


def test_numbers_of_numpy_are_numbers() -> None:
    assert repr(Rebroadcast(every=np.int64(3))) == "Rebroadcast(every=3)"


@pytest.mark.parametrize("asked", [Synchronous, "tfcommx.strategies.synchronous:Synchronous"])
def test_a_class_in_place_of_an_instance_is_refused(asked: object) -> None:
    """By its name it passed, because a class has the members of the protocol, too."""
    with pytest.raises(ConfigurationError, match="class"):
        strategy_of(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [Synchronous(), Rebroadcast()], ids=repr)
def test_a_plan_that_reduces_to_the_root_is_refused_if_all_ranks_update(
    strategy: Strategy,
) -> None:
    plan = plan_for(Root(), Topology(2, 1), Scheme("tree", dense_below=0))
    Root().check(plan)
    with pytest.raises(PlanError, match=r"/bucket0\b.*reduce_to_root=False"):
        strategy.check(plan)


@pytest.mark.parametrize("strategy", [WeightAveraging(2, sends="updates"), StepAhead()], ids=repr)
def test_a_limit_of_gradients_is_refused_if_updates_are_sent(strategy: Strategy) -> None:
    """Updates above the limit were cut, and lost: weights missed .46 after four steps of SGD."""
    scheme = Scheme("allgather", "exact", 0.5, dense_below=0, clip_norm=2.0)
    plan = plan_for(strategy, Topology(2, 1), scheme)
    with pytest.raises(PlanError, match=r"clip_norm=2\.0\b.*global_clipnorm"):
        strategy.check(plan)
    Synchronous().check(plan)


def test_momentum_of_the_scheme_needs_the_sums_on_all_ranks() -> None:
    scheme = Scheme("allgather", "exact", 0.5, dense_below=0, momentum=0.9)
    with pytest.raises(PlanError, match=r"strategy=\"root\".*\bmomentum\b"):
        Root().check(plan_for(Root(), Topology(2, 1), scheme))
