"""Shards over a node or the peers: the torus's sums and bytes, and the update between them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from drawing import case
from threaded_optimizers import (
    SHAPES,
    continue_from,
    equal,
    gradients,
    new_weights,
    save,
    train,
    wrap,
)

from tfcommx import engines
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import (
    NOMINAL,
    ConfigurationError,
    EngineSettings,
    Link,
    Links,
    PlanError,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)
from tfcommx.optim.step_boundary import consolidate
from tfcommx.planner.plan import make_plan
from tfcommx.strategies import Sharded
from tfcommx.strategies.sharded.strategy import pull_times

K = keras.optimizers
CLUSTER = Topology(2, 2)
# Node and peers are of unequal sizes
WIDE = Topology(2, 3)


def adamw() -> K.Optimizer:
    optimizer = K.AdamW(0.01, weight_decay=0.1, global_clipnorm=2.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def test_over_the_node_it_equals_synchronous_training_by_the_torus_to_the_bit() -> None:
    """Laws 1, 3 and 4: the same sums, in the same order, and the same bytes."""

    def look(optimizer: K.Optimizer, weights: list[keras.Variable]) -> tuple:
        consolidate(optimizer)
        traffic = optimizer.exchanger.comm.traffic()
        return [one.numpy() for one in weights], traffic.inside, traffic.between

    make = lambda: K.AdamW(0.01, weight_decay=0.1)  # noqa: E731
    torus = Scheme("torus", dense_below=0)
    for topology in (CLUSTER, WIDE):
        plain = train(make, "synchronous", topology, torus, "sum", after=look)
        found = train(make, Sharded(group="node"), topology, op="sum", after=look)
        assert equal([one[0] for one in found], [one[0] for one in plain])
        for mine, theirs in zip(found, plain, strict=True):
            assert mine[1:] == pytest.approx(theirs[1:]) and min(mine[1:]) > 0


@pytest.mark.extended
@pytest.mark.parametrize(
    "strategy", [case(Sharded(group="peers"), kept=False), Sharded("layers", group="peers")]
)
def test_over_the_peers_all_ranks_have_the_weights_of_synchronous_training(
    strategy: Sharded,
) -> None:
    plain = train(adamw, "synchronous", WIDE)
    found = train(adamw, strategy, WIDE)
    assert equal([found[0]] * 6, found)
    for mine, theirs in zip(found[0], plain[0], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize(("group", "parts"), [("node", 3), case("peers", 2, kept=False)])
def test_a_rank_keeps_the_state_of_its_part_of_the_group(group: str, parts: int) -> None:
    """And a step that begins with the pull, and a file, are of the group's shards, too."""

    def kept(comm: Comm) -> int:
        optimizer = wrap(adamw(), comm, Sharded("layers", group=group), Scheme(), "average")
        weights = new_weights()
        optimizer.build(weights)
        run = optimizer.exchanger.run_for(weights)
        for step in range(2):
            run.begin([])
            optimizer.apply(gradients(comm.rank, step), weights)
        return sum(int(np.prod(one.shape)) for one in optimizer.exchanger.sharding.state)

    entries = sum(int(np.prod(shape)) for shape in SHAPES.values())
    for state in ThreadComm.run(WIDE, kept):
        assert 2 * entries / parts <= state <= 2 * (entries / parts + len(SHAPES))
    store = train(adamw, Sharded("layers", group=group), WIDE, after=save)[0]
    plain = train(adamw, "synchronous", WIDE, after=lambda o, _: [v.numpy() for v in o.variables])
    for place, value in enumerate(plain[0]):
        np.testing.assert_allclose(store[str(place)], value, atol=1e-6)
    ended = continue_from(store, adamw, Sharded(group=group), CLUSTER, distinct=4)
    assert equal([ended[0]] * 4, ended)


def test_a_group_needs_equal_nodes_and_a_known_name() -> None:
    with pytest.raises(ConfigurationError, match="'slot'"):
        Sharded(group="slot")
    plan = make_plan([], {"*": Scheme()}, Topology(2, 2, (("a", 2), ("b", 1))))
    with pytest.raises(PlanError, match="a:2, b:1"):
        Sharded(group="node").make_shards(plan, {}, [], 0, NOMINAL)


def test_a_gather_is_priced_by_the_links_of_the_group() -> None:
    """Of the node by the link inside; of the peers by the node's port, which n slots share."""
    links = Links(inside=Link(1e-6, 1e-10), between=Link(1e-3, 1e-8))
    profile = Profile(
        "m", (VariableProfile("a", (1200,), ready_s=1.0, forward_s=1.0),), 4.0, 2.0, batch=1
    )
    weights = [keras.Variable(np.zeros(1200, "float32"))]
    found = {
        group: pull_times(profile, [(0, 1)], weights, WIDE, links, group)
        for group in ("world", "node", "peers")
    }
    # By hand: log2(p) alpha, and (p - 1)/p of 4,800 bytes
    assert found["node"].startup_s == pytest.approx(np.log2(3) * 1e-6)
    assert found["node"].transfer_s[0] == pytest.approx(2 / 3 * 4800 * 1e-10)
    assert found["peers"].startup_s == pytest.approx(1e-3)
    assert found["peers"].transfer_s[0] == pytest.approx(1 / 2 * 4800 * 3 * 1e-8)
    assert found["world"].transfer_s[0] == pytest.approx(5 / 6 * 4800 * 1e-8)


def test_a_gather_is_priced_by_the_engine_and_its_time_a_collective() -> None:
    """Open MPI up to 256 KiB a rank: ceil(log2(6)) latencies; a ring of more has 5."""
    links = Links(
        inside=Link(1e-3, 1e-10),
        between=Link(1e-3, 1e-8),
        engine_s=0.5,
        engine=EngineSettings("open_mpi"),
    )
    for entries, steps in ((1200, 3), (6_000_000, 5)):
        row = VariableProfile("a", (entries,), ready_s=1.0, forward_s=1.0)
        profile = Profile("m", (row,), 4.0, 2.0, batch=1)
        weights = [keras.Variable(np.zeros(entries, "float32"))]
        found = pull_times(profile, [(0, 1)], weights, WIDE, links)
        assert found.startup_s == pytest.approx(0.5 + steps * 1e-3)
        assert found.transfer_s[0] == pytest.approx(5 / 6 * 4 * entries * 1e-8)
    assert engines.gather_seconds(8, "node", Topology(6, 1), links) == 0
