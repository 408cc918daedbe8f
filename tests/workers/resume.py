"""Trains a small recipe whole, then in pieces, and compares the results: resume.py FOLDER TASK.

Started by test_resume.py. TASK is `few` or `many` stops; or `stop` and `continue`, for another
number of ranks.
A launch trains many times, each time with a new model, graph and optimizer.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import keras
import numpy as np

import tfcommx as cx
from tfcommx import checkpoint
from tfcommx.recipes.models.small_cnn import SmallCnn
from tfcommx.recipes.recipe import Recipe
from tfcommx.training import callbacks, save_and_stop
from tfcommx.training.dry_run import dry_run
from tfcommx.training.steps import Position
from tfcommx.training.train import TrainOptions, train

ROOT, TASK = Path(sys.argv[1]), sys.argv[2]
SPARSE = {"route": "hitopk", "selection": "mstopk", "density": 0.1, "dense_below": 8}
# Samples a step over all ranks; steps of an epoch
BATCH, STEPS = 16, 4
# Each with another resolution or scheme: epochs 0 and 1, 2, 3; `few` has the first and the last
PHASES = [
    {"epochs": 2, "resolution": 8, "scheme": SPARSE, "warm_up": [0.5]},
    {"epochs": 1, "resolution": 10, "scheme": SPARSE},
    {"epochs": 1, "resolution": 12, "scheme": {"route": "torus"}},
]
NETWORK = {"filters": (4, 8), "residual": 1}
if TASK == "few":  # Most of its time is tracing, layer by layer
    del PHASES[1], PHASES[0]["warm_up"]
    NETWORK = {"filters": (4,), "residual": 0}
EPOCHS = sum(phase["epochs"] for phase in PHASES)

comm = cx.init(node_size=1)
save_and_stop.ASK_STEPS = 1  # The ranks ask each other after every step


class WithDropout(SmallCnn):
    """A network with batch normalisation and dropout, whose seed is a state."""

    def build(self, *sizes: int) -> keras.Model:
        inside = super().build(*sizes)
        dropped = keras.layers.Dropout(0.2)(inside.output)
        return keras.Model(inside.input, keras.layers.Dense(10, name="last")(dropped))


def recipe(**more: object) -> Recipe:
    """Return the recipe with all phases."""
    return Recipe(
        name="small",
        data={"limit": BATCH * STEPS + 5},
        model=WithDropout(**NETWORK),
        batch_per_rank=BATCH // comm.topology.size,
        phases=PHASES,
        learning_rate={"peak": 0.05},
        node_size=1,
        threads=None,
        **more,
    )


class Killed(BaseException):
    """All ranks are gone, and nothing was saved."""


def run(folder: Path, resume: bool, interrupt: dict[Position, str], **more: object) -> dict:
    """Train until the end, a stop or a kill; `interrupt` maps steps to interruptions."""
    keras.utils.clear_session()

    def rate_at(the_run: object, phase: int, position: Position) -> float:
        what = interrupt.get(position)
        if what == "kill":
            raise Killed
        if what == "signal" and comm.rank == comm.topology.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain_rate(the_run, phase, position)

    plain_rate, callbacks.rate_at = callbacks.rate_at, rate_at
    try:
        return train(recipe(**more), folder, TrainOptions(resume=resume))
    except Killed:
        return {}
    finally:
        callbacks.rate_at = plain_rate


def in_pieces(
    folder: Path, interrupts: Iterable[tuple[Position, str]], resume: bool, **more: object
) -> dict:
    """Train with an interruption at each of these steps, and resume after each."""
    for number, (position, what) in enumerate(interrupts):
        summary = run(folder, resume or number > 0, {position: what}, **more)
        assert summary.get("stopped") or what == "kill", summary
        if what == "signal":
            step = position.step + 1
            expected = (position.epoch, step) if step < STEPS else (position.epoch + 1, 0)
            stopped = summary["stopped"]
            assert (stopped["epoch"], stopped["step"]) == expected, (stopped, position)
            assert f"SIGTERM on rank {comm.topology.size - 1}" in stopped["reason"], stopped
    return run(folder, True, {}, **more)


def left(folder: Path) -> dict[str, np.ndarray]:
    """Return the content of the last checkpoint: weights, optimizer, and this rank's own state."""
    head = checkpoint.last(folder / "checkpoint")
    files = folder / "checkpoint"
    model = keras.saving.load_model(files / f"tfcommx-{head.save:04d}.keras")
    variables = [*model.variables, *model.optimizer.variables]
    # By position: a path has a number that grows with every model of the process
    found = {f"{at} {one.name}": one.numpy() for at, one in enumerate(variables)}
    # Keras does not save the seeds, which are part of each rank's own state
    found = {name: value for name, value in found.items() if "seed_generator" not in name}
    with np.load(files / f"residuals-{head.save:04d}-rank-{comm.rank:04d}.npz") as stored:
        # Without the head, which has the number and the tag of its save
        return found | {name: stored[name] for name in stored.files if name != "head"}


def assert_equal(one: Path, other: Path, what: str) -> None:
    """Compare two runs, bit by bit; report all differences of this rank."""
    first, second = left(one), left(other)
    assert first.keys() == second.keys(), (what, first.keys() ^ second.keys())
    differ = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    assert not differ, f"{what}: rank {comm.rank} differs in {differ}"


def stops(positions: Iterable[tuple[int, int]], afresh: bool) -> None:
    """Stop by the time limit, then by a signal in each of these steps; resume each time.

    `afresh`: another run begins beside the first checkpoint meanwhile.
    """
    whole = run(ROOT / "whole", False, {})
    assert "stopped" not in whole and len(whole["rows"]) == EPOCHS
    dry(whole)
    keras.utils.clear_session()
    in_time = train(recipe(), ROOT / "stops", TrainOptions(minutes=1e-6))
    assert in_time["stopped"] == {"epoch": 0, "step": 1, "reason": "the time limit"}, in_time
    assert not in_time["rows"] and not (ROOT / "stops" / "summary.json").exists()
    if afresh:
        beside(ROOT / "stops", whole)
    ended = in_pieces(ROOT / "stops", [(Position(*at), "signal") for at in positions], True)
    assert_equal(ROOT / "whole", ROOT / "stops", "a run with stops")
    for name in ("loss", "train_accuracy", "test_accuracy", "epoch", "steps"):
        mine, theirs = ([row[name] for row in one["rows"]] for one in (whole, ended))
        assert mine == theirs, (name, mine, theirs)
    assert ended["bytes_between_nodes_dense"] == whole["bytes_between_nodes_dense"]
    # The ranks ask each other at other steps: 16 bytes each time
    ours, theirs = (one["bytes_between_nodes"] for one in (ended, whole))
    assert abs(ours - theirs) <= 16 * 2 * len(list(positions)) + 32, (ours, theirs)


def beside(stopped: Path, whole: dict) -> None:
    """Train afresh beside a checkpoint of mid-epoch: nothing of it is taken over."""
    if comm.rank == 0:
        shutil.copytree(stopped, ROOT / "beside")
    comm.gather_objects("copied")
    assert checkpoint.last(ROOT / "beside" / "checkpoint").step == 1
    fresh = run(ROOT / "beside", False, {Position(1, 0): "signal"})
    for name in ("loss", "train_accuracy", "test_accuracy"):
        mine, theirs = (one["rows"][0][name] for one in (fresh, whole))
        assert mine == theirs, (name, mine, theirs)


def dry(whole: dict) -> None:
    """Make a dry run: it writes its report alone, and counts the bytes of a real step."""
    keras.utils.clear_session()
    found = dry_run(recipe(), ROOT / "dry", steps=1)
    comm.gather_objects("written")
    assert [path.name for path in (ROOT / "dry").iterdir()] == ["dry_run.json"]
    first, *_, last = found["phases"]
    assert [phase["steps"] for phase in found["phases"]] == [STEPS] * len(PHASES)
    assert set(first["bytes_by_route"]) == {"hitopk", "allreduce"}, first
    # Both count the bytes of dense gradients, up to padding
    dense = whole["bytes_between_nodes_dense"] / (EPOCHS * STEPS)
    assert abs(last["bytes_by_route"]["torus"]["between"] / dense - 1) < 0.02, (last, dense)
    assert first["bytes_by_route"]["hitopk"]["between"] < dense / 2 and found["memory_bytes"] > 1e8
    assert found["predicted_seconds"] == sum(one["predicted_seconds"] for one in found["phases"])


def kills() -> None:
    """Kill after random steps, and resume each time."""
    steps = np.random.default_rng().choice(EPOCHS * STEPS, 3, replace=False)
    steps = comm.gather_objects(sorted(int(step) for step in steps))[0]
    interrupts = [(Position(*divmod(step, STEPS)), "kill") for step in steps]
    in_pieces(ROOT / "kills", interrupts, False, checkpoint={"every_steps": 3, "keep": 2})
    assert_equal(ROOT / "whole", ROOT / "kills", f"a run killed at steps {steps}")
    names = [path.name for path in (ROOT / "kills" / "checkpoint").glob("tfcommx-*")]
    assert len(names) == 2, names


if TASK == "few":  # At the start of a phase
    stops([(1, 3)], afresh=False)
elif TASK == "many":  # Before, at and after the start of each phase
    stops([(0, 2), (1, 2), (1, 3), (2, 0), (2, 2), (2, 3), (3, 0)], afresh=True)
    kills()
elif TASK == "stop":
    assert run(ROOT, False, {Position(1, 1): "signal"})["stopped"]["step"] == 2
else:
    assert len(run(ROOT, True, {})["rows"]) == EPOCHS
print("all as it should be", flush=True)
