"""A recipe with `Scheme("auto")`: a dry run, a run, its resumption: auto_in_recipes.py FOLDER.

Started by test_auto_in_recipes.py. Gradients accumulate: every other step exchanges.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import keras

import tfcommx as cx
from tfcommx.core import Link, Links
from tfcommx.optim import automatic
from tfcommx.optim.exchanger import Exchanger
from tfcommx.recipes.optimizers import Sgd
from tfcommx.recipes.recipe import Recipe
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.trial import TrialExecutor
from tfcommx.training import callbacks, dry_run, save_and_stop, train
from tfcommx.training.steps import Position

ROOT, KEPT = Path(sys.argv[1]), Path(os.environ["TFCOMMX_CACHE"])
# So slow that predictions find several schemes faster than plain Horovod
SLOW = Links(Link(1e-6, 1e-7), Link(1e-6, 1e-7))
# Samples a step on one rank, steps of an epoch, steps of an update
BATCH, STEPS, UPDATE = 8, 12, 2

comm = cx.init(node_size=1)
save_and_stop.ASK_STEPS = 1  # The ranks ask each other after every step
automatic.SHARE, automatic.FEW = 0.5, 0  # Few steps are enough for a whole trial


class Accumulating(Sgd):
    """An optimizer that adds the gradients of some steps up."""

    def build(self) -> keras.optimizers.Optimizer:
        optimizer = super().build()
        optimizer.gradient_accumulation_steps = UPDATE
        return optimizer


def recipe() -> Recipe:
    """Two phases that share "auto", of 4 epochs and of one with half the batch."""
    phase = {"resolution": 8, "scheme": {"route": "auto"}}
    return Recipe(
        name="small",
        data={"limit": BATCH * STEPS * comm.topology.size},
        model={"name": "small_cnn", "filters": [16, 64, 64]},
        optimizer=Accumulating(),
        batch_per_rank=BATCH,
        phases=[{"epochs": 4, **phase}, {"epochs": 1, "batch": BATCH // 2, **phase}],
        learning_rate={"peak": 0.05},
        links=ROOT / "links.json",
        node_size=1,
    )


def executor_of(exchanger: Exchanger) -> PlanExecutor | TrialExecutor:
    (run,) = exchanger.runs.values()
    return run.executor


def choices() -> list[str]:
    """The files of the cache, once all ranks are here."""
    comm.gather_objects("written")
    return sorted(path.name.partition("-")[0] for path in KEPT.glob("*"))


def run(stop: Position | None) -> PlanExecutor | TrialExecutor:
    """Train, from the checkpoint if there is one, until after `stop`; return the executor."""
    keras.utils.clear_session()
    made: list[keras.optimizers.Optimizer] = []
    plain_rate, plain_compile = callbacks.rate_at, train.compile_model

    def rate_at(the_run: object, phase: int, position: Position) -> float:
        if position == stop and comm.rank == 0:
            (ROOT / "run" / "stop").touch()
        return plain_rate(the_run, phase, position)

    def compile_model(*given: object) -> keras.optimizers.Optimizer:
        made.append(plain_compile(*given))
        return made[-1]

    callbacks.rate_at, train.compile_model = rate_at, compile_model
    try:
        summary = train.train(recipe(), ROOT / "run", train.TrainOptions(resume=True))
    finally:
        callbacks.rate_at, train.compile_model = plain_rate, plain_compile
    assert ("stopped" in summary) == (stop is not None), summary
    return executor_of(made[-1].exchanger)


def dry() -> None:
    """Make a dry run: its trial is over before steps are timed, and its choice is not kept."""
    seen: list[PlanExecutor | TrialExecutor] = []
    plain = dry_run._phase

    def phase(model: keras.Model, *more: object) -> dict:
        found = plain(model, *more)
        seen.append(executor_of(model.optimizer.exchanger))
        return found

    dry_run._phase = phase
    dry_run.dry_run(recipe(), ROOT / "dry", steps=3)
    turns = seen[0].rounds
    assert turns.chosen is not None, turns.steps
    taken = sum(int(one.steps.numpy()) for one in seen[0].executors)
    # The trial in the first phase, and one update after it; then the timed steps of both phases
    assert taken == turns._most + 1 + 2 * ((1 + 3) // UPDATE), (taken, turns._most)
    assert choices() == []


if comm.rank == 0:
    (ROOT / "run").mkdir()
    (ROOT / "links.json").write_text(json.dumps({"links": SLOW.to_dict()}))
comm.gather_objects("written")
dry()
first = run(Position(4, 3))
assert isinstance(first, TrialExecutor) and first.rounds.chosen is not None
assert choices() == ["choice"]
second = run(None)
assert isinstance(second, PlanExecutor) and second.plan == first.plan
assert choices() == ["choice"]
print("all as it should be", flush=True)
