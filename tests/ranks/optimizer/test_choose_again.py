"""ChooseAgain on real ranks: plans take turns again if steps and links have changed, and only then.

The test sets the links that a new measurement returns, and the clock by which steps are longer. A
network that really changes is tried on a virtual cluster (scripts/trials/changing_network.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
from drawing import case
from rank_helpers import batch

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.callbacks import choose_again
from tfcommx.collectives.comm import Comm
from tfcommx.core import Link, Links, Topology
from tfcommx.runtime.trial import STEPS, TrialExecutor

SLOW = Links(Link(1e-6, 1e-7), Link(1e-6, 1e-7))
SLOWER = Links(Link(1e-6, 3e-7), Link(1e-6, 3e-7))
EVERY, CHANGES_AT = 5, 2 * STEPS


class Clock(keras.callbacks.Callback):
    """Counts seconds, of which some steps take more, for longer than ChooseAgain looks at.

    On a busy machine real steps of some milliseconds may take many times as long at any time.
    """

    def __init__(self, chooses: callbacks.ChooseAgain) -> None:
        super().__init__()
        self.chooses, self.slow, self.since, self.seconds = chooses, False, None, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Once ChooseAgain knows the usual time: the first trial ends late in a busy process
        known = len(self.chooses._messages) >= choose_again.IN_A_ROW
        if self.since is None and batch >= CHANGES_AT and (known or on_one_node()):
            self.since = batch
        self.slow = self.since is not None and batch < self.since + 6 * EVERY
        self.seconds += 0.1 if self.slow else 0.01


def on_one_node() -> bool:
    return cx.collectives.current().topology.nodes == 1


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFCOMMX_CACHE", str(folder / "kept"))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("nodes", "drift", "now", "measured", "again"),
    [
        (2, 2.5, 10.0, True, True),
        case(2, 2.5, 1.5, True, False, kept=False),
        case(2, 1e6, 10.0, True, False, kept=False),
        case(1, 2.5, 10.0, False, False, kept=False),
    ],
    ids=["slower", "same_network", "same_steps", "one_node"],
)
def test_a_plan_is_chosen_again_if_steps_and_network_have_changed(
    comm: Comm,
    nodes: int,
    drift: float,
    now: float,
    measured: bool,
    again: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a run on one machine `auto` said twice that the network had changed: it has none.

    Links inside the node were compared, whose time varies by a factor of 30 with other work on the
    machine.
    """
    if comm.topology.size != 2:
        pytest.skip("takes two ranks")
    monkeypatch.setattr(comm, "topology", Topology(nodes, 2 // nodes))
    calls: list[Comm] = []
    chooses = callbacks.ChooseAgain(EVERY)
    clock = Clock(chooses)

    def fastest_message(comm: Comm) -> float:
        calls.append(comm)
        return 0.002 * (now if clock.slow else 1.0)

    monkeypatch.setattr(choose_again, "fastest_message", fastest_message)
    monkeypatch.setattr(choose_again, "links_of", lambda comm, again: SLOWER)
    monkeypatch.setattr(choose_again, "DRIFT", drift)
    monkeypatch.setattr(choose_again, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(192, activation="relu") for _ in range(3)]
    net = keras.Sequential([keras.layers.Input((12,)), *layers, keras.layers.Dense(3)])
    scheme = cx.Scheme("auto", "mstopk", 0.05)
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme, links=SLOW)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss=loss, jit_compile=False)
    rows = tf.data.Dataset.from_tensor_slices(batch(comm.rank, rows=8)).batch(8).repeat()
    same = callbacks.CompareReplicas()
    every = [callbacks.BroadcastState(), chooses, clock, same]
    # Keras does not know the number of steps: there are enough for another trial
    steps = CHANGES_AT + 20 * EVERY + 2 * STEPS
    net.fit(rows.take(steps).filter(lambda *_: True), epochs=1, verbose=0, callbacks=every)
    assert same.identical
    assert bool(calls) == measured
    requested = optimizer.exchanger.requested
    assert requested.links == (SLOWER if again else SLOW)
    (run,) = optimizer.exchanger.runs.values()
    assert isinstance(run.executor, TrialExecutor) and run.executor.chosen is not None
    said = [text for text in caplog.messages if "chosen again" in text]
    assert len(said) == (again and comm.rank == 0), said
    if said:
        assert "of 256 KiB between nodes takes 20 ms and took 2 ms" in said[0]
