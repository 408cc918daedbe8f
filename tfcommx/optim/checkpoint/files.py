"""The files of a checkpoint: their names, how they are written and read."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from tfcommx.comm import process
from tfcommx.optim.distributed_optimizer import unlisted
from tfcommx.optim.exchanger import PlanState
from tfcommx.optim.keras_internals import (
    accumulated,
    exchanger_in,
    seed_generators,
    wrapped_optimizers,
)
from tfcommx.routes import read_plan
from tfcommx.runtime.residuals import Residuals
from tfcommx.terms import PlanError

HEAD = "checkpoint.json"


# save; save, rank
OURS = re.compile(r"\.?(?:model-(\d{4,})\.keras|owed-(\d{4,})-rank-(\d{4,})\.npz)")


def heads(folder: Path) -> list[dict[str, int] | None]:
    """Return what checkpoint.json says, as each rank sees it. **Ranks:** all. **Raises:**
    PlanError, on all, if one is damaged.
    """
    path, mine = folder / HEAD, None
    if path.is_file():
        text = path.read_text(errors="replace")
        try:
            mine = {name: int(json.loads(text)[name]) for name in ("save", "epoch", "ranks")}
        except (ValueError, TypeError, KeyError):
            mine = text
    heads = process.current().gather_objects(mine)
    for rank, head in enumerate(heads):
        if isinstance(head, str):
            raise PlanError(
                f'{path} must name a save, such as {{"save": 3, "epoch": 3, "ranks": 4}}. '
                f"Received {head[:80]!r} on rank "
                f"{rank}. Write into it what lies beside it (model-0003.keras, "
                "owed-0003-rank-0000.npz to rank-0003.npz "
                "are save 3 of 4 ranks), or delete it to begin anew."
            )
    return heads


class Record(NamedTuple):
    """What one rank keeps beside the model, of one optimizer."""

    # Paths of the variables that the optimizer was built for, in its order
    trained: list[str]
    owed: Residuals
    velocity: Residuals
    # Gradients that are being accumulated
    sums: Residuals
    lefts: list[PlanState]
    # What the optimizer keeps and Keras does not save
    unlisted: dict[str, np.ndarray]
    # Of the model's generators
    seeds: list[list[int]]

    @property
    def paths(self) -> set[str]:
        return {*self.owed, *self.velocity, *self.sums}.union(
            *(left.variables for left in self.lefts)
        )


def model_name(number: int) -> str:
    return f"model-{number:04d}.keras"


def residuals_name(number: int, rank: int) -> str:
    return f"owed-{number:04d}-rank-{rank:04d}.npz"


def put_in_place(part: Path, path: Path) -> None:
    """Give a written file its name; both are on the disk afterwards, also if the machine fails."""
    _sync(part)
    part.rename(path)
    try:
        _sync(path.parent)
    except OSError as error:
        # some network file systems cannot, for a folder
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise


def why_not_writable(folder: Path) -> str | None:
    """Make a folder; say why nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return (
        None
        if os.access(folder, os.W_OK | os.X_OK)
        else "no permission, or a read-only file system"
    )


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_residuals(model: keras.Model, path: Path) -> None:
    arrays: dict[str, np.ndarray] = {}

    def put(kept: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Add arrays to the file; return what they are called there."""
        called = {name: f"array{number}" for number, name in enumerate(kept, len(arrays))}
        arrays.update((called[name], array) for name, array in kept.items())
        return called

    index = []
    for optimizer in wrapped_optimizers(model):
        exchanger, sums = (
            exchanger_in(optimizer),
            {name: np.ravel(total.numpy()) for name, total in accumulated(optimizer).items()},
        )
        index.append(
            {
                "trained": exchanger.names_of(
                    getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables
                ),
                "owed": put(exchanger.owed),
                # NumPy's files know no bfloat16: float32 holds it exactly
                "velocity": put(exchanger.velocity),
                "sums": put({name: _wide(total) for name, total in sums.items()}),
                "seeds": [generator.state.numpy().tolist() for generator in seed_generators(model)],
                "unlisted": put(
                    {
                        name: _wide(variable.numpy())
                        for name, variable in unlisted(optimizer).items()
                    }
                ),
                "plans": [
                    {
                        "plan": left.plan.to_json(),
                        "steps": left.steps,
                        "residuals": put(left.residuals),
                        "velocities": put(left.velocities),
                    }
                    for left in exchanger.plan_states()
                ],
            }
        )
    part = path.with_name(f".{path.name}")
    with part.open("wb") as file:
        np.savez(file, index=np.array(json.dumps(index)), **arrays)
    put_in_place(part, path)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.promote_types(array.dtype, np.float32))


def read_residuals(path: Path, rank: int) -> list[Record]:
    """Return what `rank` kept, of each wrapped optimizer."""
    with np.load(path) as stored:

        def get(called: Mapping[str, str]) -> dict[str, np.ndarray]:
            return {name: stored[array] for name, array in called.items()}

        return [
            Record(
                row["trained"],
                get(row["owed"]),
                get(row["velocity"]),
                get(row["sums"]),
                [
                    PlanState(
                        read_plan(plan["plan"]),
                        plan["steps"],
                        rank,
                        get(plan["residuals"]),
                        get(plan["velocities"]),
                    )
                    for plan in row["plans"]
                ],
                get(row.get("unlisted", {})),
                row.get("seeds", []),
            )
            for row in json.loads(str(stored["index"]))
        ]
