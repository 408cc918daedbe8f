"""The benchmark of training steps still runs, verifies a few small ones, and predicts them."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from bench_runs import COLUMNS, bench
from launching import ROOT

import tfcommx as cx

sys.path.insert(0, str(ROOT / "scripts"))
from bench.benchmarks.training_contestants import Contestant
from bench.checks import gradient, weighted_sum

OWN = ["scheme", "model", "nodes", "slots", "rate_mbit", "step_seconds", "predicted_seconds"]
OWN += ["bytes_between", "ratio", "chosen"]
SCHEMES = ["none", "horovod", "hitopk pair32", "auto sparse", "allreduce bfloat16"]


@pytest.mark.exhaustive
def test_on_one_host(tmp_path: Path) -> None:
    png = tmp_path / "found.png"
    words = ["--nodes", "2", "--rates", "none", "--models", "embedding", "--repeats", "2"]
    words += ["--batch", "4", "--png", str(png), "--schemes", *SCHEMES]
    # allreduce writes no bfloat16: a scheme that is refused is left out with a word
    rows, output = bench(tmp_path, "training", *words)
    assert "embedding, allreduce bfloat16: left out: The route 'allreduce' writes" in output
    assert [row["scheme"] for row in rows] == SCHEMES[:4]
    assert all(list(row) == [*COLUMNS, *OWN] for row in rows)
    assert all(row["verified"] and row["predicted_seconds"] > 0 for row in rows), rows
    # 2 ranks send a whole gradient of float32 each; of the embedding 0.01, as pairs
    none, horovod, sparse, _ = (row["bytes_between"] for row in rows)
    assert none == 0 and horovod == 4 * rows[0]["n"]
    assert 0.02 * horovod < sparse < 0.03 * horovod
    # Plans as they are after the steps: the trial of "auto sparse" is over
    none, horovod, sparse, auto = (row["chosen"] for row in rows)
    assert (none, horovod.split(", ")[0]) == ("", "allreduce")
    assert "hitopk pair32" in sparse and auto not in ("", "undecided")
    assert rows[1]["ratio"] == 1 and all(row["ratio"] > 0 for row in rows)
    assert png.stat().st_size > 10_000


@pytest.mark.parametrize("place", [0, 1008, 1009, 5000])
def test_an_entry_that_is_lost_changes_the_sum(place: int) -> None:
    whole = gradient(1, 6000) + 20  # No zeros
    lost = whole.copy()
    lost[place] = 0
    assert weighted_sum(whole) - weighted_sum(lost) == whole[place] * (place * 7927 % 1009 + 1)
    assert weighted_sum(np.concatenate([whole, lost])) > 0


def test_a_plan_of_two_phases_has_each_variable_once() -> None:
    comm = cx.init()
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64)])
    adam = cx.optimizers.OneBitAdam(0.001, freeze_after=1000)
    optimizer = cx.DistributedOptimizer(adam, cx.Scheme("torus", wire="int1"))
    model.compile(optimizer, loss="mse", jit_compile=False)
    batch = np.ones((2, 64), np.float32), np.ones((2, 64), np.float32)
    model.train_on_batch(*batch)
    contestant = Contestant("one_bit_adam", model, batch)
    plan = contestant.plan(comm)
    assert plan is not None
    assert sorted(plan.paths) == sorted(contestant.names())
