"""Claims: norms cost a bare read; a step of LARS costs its bytes; `auto` takes the faster form.

    python scripts/bench norms                                # norms, and the steps of LARS
    python scripts/bench norms --ranks 2                      # the parallel operator
    python scripts/bench norms --models resnet50 --json norms.jsonl

Peers: TensorFlow's and Keras's operations, and bare passes over memory. In one process, for each
model, weights and gradients of its sizes:

    norms        one native operation over all. `limit_seconds` is 1.3 times `read`
    tf_norm      tf.norm of each, in one traced step
    read         tf.reduce_max of one vector of as many bytes: a bare read
    lars         a whole step. `limit_seconds` is 1.25 times what its bytes take: the read of two
                 vectors, and 5/3 of `add`, which moves three vectors where the update moves five
    lars_plain   the same by plain TensorFlow operations, norms by tf.norm
    sgd          Keras's SGD with momentum
    add          w += g over one vector

On several ranks, the parallel operator on `norms`, on `tf_norm` (the paper's set-up) and on `svd`,
singular values of matrices: `local`, `parallel` and `auto`, whose `limit_seconds` is 1.05 times the
faster of both. `form` is what auto chose.

All run inside a tf.function each and take turns. Norms and steps are verified against float64,
results of the operator against each other, bit by bit.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from bench import options, ranks, rounds

import tfcommx as cx
from tfcommx.collectives.comm import Comm
from tfcommx.kernels import loader
from tfcommx.kernels.lars import squared_norms
from tfcommx.optimizers.parallel_operator import ParallelOperator
from tfcommx.optimizers.parallel_shares import SharesPlanner
from tfcommx.simulator import models

SMOKE_ENTRIES = 40_000  # Of a variable: larger ones are left out of a smoke run
OVER_READ, OVER_BYTES, OVER_BETTER = 1.3, 1.25, 1.05
Shapes = list[tuple[int, ...]]
Step = Callable[[], Any]


MODELS = ("resnet50", "transformer_base", "transformer_big")


def shapes_of(model: str) -> Shapes:
    """Return the shapes of a model's variables."""
    return [shape for layer in models.get(model).layers for _, shape in layer.variables]


def entries_of(shapes: Shapes) -> int:
    return sum(int(np.prod(shape)) for shape in shapes)


def arrays(shapes: Shapes, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


def timed(steps: dict[str, Step], repeats: int, comm: Comm | None = None) -> dict[str, float]:
    """Return the median seconds of each step, in turns."""

    def whole(step: Step) -> Step:
        return lambda: [one.numpy() for one in tf.nest.flatten(step()) if one is not None]

    calls = {name: whole(step) for name, step in steps.items()}
    seconds = rounds.take_turns(calls, repeats, comm, warm_up=1)
    return {name: statistics.median(found) for name, found in seconds.items()}


def measure_norms(model: str, shapes: Shapes, repeats: int) -> list[dict]:
    """Time the norms of a model's weights and gradients."""
    values = arrays(shapes, 1) + arrays(shapes, 2)
    # Variables, as in training; a traced step could compute with constants beforehand
    tensors = [tf.Variable(value) for value in values]
    flat = tf.Variable(tf.zeros([2 * entries_of(shapes)]))
    exact = [np.sum(np.square(value, dtype=np.float64)) for value in values]
    steps: dict[str, Step] = {
        "norms": tf.function(lambda: squared_norms([one.read_value() for one in tensors])),
        "tf_norm": tf.function(lambda: tf.stack([tf.norm(one) for one in tensors])),
        "read": tf.function(lambda: tf.reduce_max(flat)),
    }
    verified = {
        "norms": np.allclose(steps["norms"](), exact, rtol=1e-6, atol=0),
        "tf_norm": np.allclose(steps["tf_norm"](), np.sqrt(exact), rtol=1e-4, atol=0),
        "read": True,
    }
    seconds = timed(steps, repeats)
    limits = {"norms": OVER_READ * seconds["read"]}
    return rows_of(model, 2 * entries_of(shapes), seconds, limits, verified)


def measure_steps(model: str, shapes: Shapes, repeats: int) -> list[dict]:
    """Time steps of LARS and SGD on a model's variables."""
    entries = entries_of(shapes)
    gradients = [tf.Variable(value * 1e-3) for value in arrays(shapes, 2)]
    optimizers = {
        "lars": cx.optimizers.LARS(0.1, weight_decay=1e-4, exclude=()),
        "lars_plain": PlainLars(0.1, 0.9, 1e-4, 0.001),
        "sgd": keras.optimizers.SGD(0.1, momentum=0.9),
    }
    weights = {name: [keras.Variable(one) for one in arrays(shapes, 1)] for name in optimizers}
    steps: dict[str, Step] = {
        name: step_of(optimizer, gradients, weights[name]) for name, optimizer in optimizers.items()
    }
    flat, added = tf.Variable(tf.zeros([entries])), tf.Variable(tf.ones([entries]))
    both = tf.Variable(tf.zeros([2 * entries]))

    @tf.function
    def add() -> None:
        flat.assign_add(added, read_value=False)

    steps |= {"add": add, "read": tf.function(lambda: tf.reduce_max(both))}
    for step in steps.values():
        step()
    first = [
        value - expected_step(value, grad)
        for value, grad in zip(arrays(shapes, 1), gradients, strict=True)
    ]
    checked = {
        name: all(
            np.allclose(one.numpy(), other, rtol=1e-5, atol=1e-6)
            for one, other in zip(weights[name], first, strict=True)
        )
        for name in ("lars", "lars_plain")
    }
    seconds = timed(steps, repeats)
    limits = {"lars": OVER_BYTES * (seconds["read"] + 5 / 3 * seconds["add"])}
    return rows_of(model, entries, seconds, limits, dict.fromkeys(steps, True) | checked)


def expected_step(weight: np.ndarray, gradient: tf.Variable) -> np.ndarray:
    """Return what the first step of LARS takes from a weight, in float64."""
    weight, grad = weight.astype(np.float64), gradient.numpy().astype(np.float64)
    norm, other = np.linalg.norm(weight), np.linalg.norm(grad)
    return 0.1 * 0.001 * norm / (other + 1e-4 * norm) * (grad + 1e-4 * weight)


class PlainLars(keras.optimizers.Optimizer):
    """LARS as it is usually written: variable by variable, each norm by tf.norm."""

    def __init__(self, rate: float, momentum: float, decay: float, trust: float) -> None:
        super().__init__(rate)
        self.momentum, self.decay, self.trust = momentum, decay, trust

    def build(self, variables: list[keras.Variable]) -> None:
        super().build(variables)
        self.moved = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: Any) -> None:
        moved = self.moved[self._get_variable_index(variable)].value
        norm, other = tf.norm(variable), tf.norm(gradient)
        known = (norm > 0) & (other > 0)
        ratio = tf.where(known, self.trust * norm / (other + self.decay * norm), 1.0)
        step = learning_rate * ratio * (gradient + self.decay * variable)
        variable.assign_add(moved.assign(self.momentum * moved - step))


def step_of(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[tf.Variable],
    weights: list[keras.Variable],
) -> Step:
    optimizer.build(weights)

    @tf.function
    def step() -> None:
        with cx.allow_plain_optimizers():
            optimizer.apply([one.read_value() for one in gradients], weights)

    return step


def rows_of(
    model: str,
    n: int,
    seconds: dict[str, float],
    limits: dict[str, float],
    verified: dict[str, bool],
    **more: Any,
) -> list[dict]:
    return [
        options.row(
            name, n, value, verified[name], limit_seconds=limits.get(name), model=model, **more
        )
        for name, value in seconds.items()
    ]


# --- The parallel operator, on several ranks ------------------------------------------------------


def native_norms(items: list[tf.Tensor]) -> list[tf.Tensor]:
    return tf.unstack(tf.sqrt(squared_norms(items)))


def each_norm(items: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.norm(item) for item in items]


def svd(items: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.linalg.svd(item, compute_uv=False) for item in items]


def measure_operator(name: str, comm: Comm, model: str, repeats: int) -> list[dict]:
    """Time the three modes of an operator. **Ranks:** all."""
    op = {"norms": native_norms, "tf_norm": each_norm, "svd": svd}[name]
    shapes = [(192, 192)] * 16 if name == "svd" else shapes_of(model) * 2
    tensors = [tf.Variable(value) for value in arrays(shapes, 1)]
    operators = {
        mode: ParallelOperator(SharesPlanner(op, mode, "world", None, None, comm))
        for mode in ("local", "parallel", "auto")
    }
    steps = {
        mode: tf.function(lambda operator=operator: operator([one.read_value() for one in tensors]))
        for mode, operator in operators.items()
    }
    found = {mode: [one.numpy().tobytes() for one in step()] for mode, step in steps.items()}
    everyone = comm.gather_objects(found)
    verified = all(one == everyone[0]["local"] for rank in everyone for one in rank.values())
    seconds = timed(steps, repeats, comm)
    limits = {"auto": OVER_BETTER * min(seconds["local"], seconds["parallel"])}
    (choice,) = operators["auto"].choices
    rows = rows_of(
        "matrices" if name == "svd" else model,
        entries_of(shapes),
        seconds,
        limits,
        dict.fromkeys(steps, verified),
        ranks=comm.topology.size,
        form=choice.form,
        reason=choice.reason,
    )
    return [one | {"name": f"{name}/{one['name']}"} for one in rows]


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, sizes=[], repeats=11)
    found.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="whose variables"
    )
    found.add_argument(
        "--operators",
        nargs="+",
        choices=["norms", "tf_norm", "svd"],
        default=["norms", "tf_norm", "svd"],
        help="what the parallel operator computes, on several ranks",
    )
    return found


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Time the operator on several ranks, norms and steps on one. **Ranks:** all."""
    if loader.library() is None:
        raise SystemExit(f"The native library is needed. {loader.REBUILD}")
    comm = ranks.join(chosen)
    if comm.topology.size > 1:
        for name in chosen.operators:
            rows = measure_operator(name, comm, chosen.models[0], chosen.repeats)
            title = f"{name} on {comm.topology.size} ranks"
            notes = [f"auto: {rows[0]['form']}: {rows[0]['reason']}"]
            yield options.Table(title, rows, f"{name}/local", notes=notes)
        return
    with tf.device("/cpu:0"):
        for model in chosen.models:
            shapes = shapes_of(model)
            if chosen.smoke:
                shapes = [one for one in shapes if np.prod(one) <= SMOKE_ENTRIES]
            yield options.Table(model, measure_norms(model, shapes, chosen.repeats), "read")
            yield options.Table(model, measure_steps(model, shapes, chosen.repeats), "sgd")
