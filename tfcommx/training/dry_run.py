"""Dry runs: a few steps of every phase on made-up data, to predict time, memory and bytes."""

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfcommx as cx
from tfcommx import callbacks, report, routes
from tfcommx.data.pipeline import without_autotune
from tfcommx.optim.automatic import ExpectedRun
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.wrapped import exchanger_of, steps_of_update
from tfcommx.planner.automatic import find_auto
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.run import Run, prepare
from tfcommx.training.steps import FitCall, Timing
from tfcommx.training.train import compile_model

# Minimum of timed steps in each phase; rounded up to whole rounds of the strategy
STEPS = 5


def dry_run(recipe: Recipe, output_folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Take a few steps of every phase, and write `dry_run.json`.

    The times exclude waiting for data, evaluation and saving. Epochs with a `warm_up` density are
    predicted like the phase's others. With "auto", the trial of a real run precedes the timed
    steps; its choice is not kept, but measured links are.

    Args:
        steps: number to time in each phase, >= 1, after one that traces.

    Returns:
        The content of the file: seconds of rank 0, memory of the largest rank, and bytes that one
        rank sends in a step, as the mean over the ranks.

    **Ranks:** all, with the same recipe. **Raises:** ConfigurationError and DataError before the
    first step.
    """
    run = prepare(recipe, output_folder)
    keras.utils.set_random_seed(recipe.seed)
    model = recipe.build_model(run.objective)
    schemes = [phase.scheme for phase in recipe.phases]
    optimizer, timing = compile_model(model, run, schemes[0]), Timing()
    timing.watch(model)
    phases, round_steps = [], recipe.strategy.every
    # Whole rounds, because a strategy may exchange in one step of a round only
    steps = -(-steps // round_steps) * round_steps
    for number, scheme in enumerate(schemes):
        # An equal scheme would trace the step again for nothing
        if number and scheme != schemes[number - 1]:
            optimizer.exchanger.switch(scheme)
        phases.append(_phase(model, run, number, timing, steps))
    run.data.close()
    memory = run.comm.gather_objects(_memory())
    result = {
        "name": recipe.name,
        "ranks": run.comm.topology.size,
        "nodes": run.comm.topology.nodes,
        "parameters": model.count_params(),
        "counted": run.objective.counted,
        **{kind: max(usage[kind] for usage in memory) for kind in memory[0]},
        "phases": phases,
        "predicted_seconds": sum(phase["predicted_seconds"] for phase in phases),
    }
    if cx.is_chief():
        report.write_dry_run(result, output_folder)
    return result


def _phase(model: keras.Model, run: Run, number: int, timing: Timing, steps: int) -> dict[str, Any]:
    phase, start = run.recipe.phases[number], time.monotonic()
    model.make_train_function(force=True)  # As `fit_phases` does
    # The data set is opened only for its size, shapes and types
    spec = run.samples_of(FitCall(number, range(1))).element_spec
    batch_size = run.global_batch(number) // run.comm.topology.size
    rank = run.comm.rank
    batch = made_up(spec, run.objective.outputs, batch_size, phase.resolution, rank)
    # One batch in memory, repeated, so that no step waits for data
    data = without_autotune(
        run.objective.targets(tf.data.Dataset.from_tensors(batch)).cache().repeat()
    )
    # Broadcast once, because weights stay equal from the first phase on
    begin, exchanger, first = [callbacks.BroadcastState()] * (number == 0), exchanger_of(model), 0.0
    accumulated = steps_of_update(model.optimizer)
    exchanger.requested.expected_run = expected_run(run, number, accumulated)
    # The trial of "auto" ends before the timed steps
    tries = exchanger.ranks > 1 and not exchanger.runs and find_auto(exchanger.requested.schemes)
    tried = [(exchanger.requested.expected_run.trial_steps + 1) * accumulated] if tries else []
    for count in [*tried, 1 + steps]:
        model.fit(data, steps_per_epoch=count, verbose=0, shuffle=False, callbacks=[*begin, timing])
        begin, first = [], first or timing.seconds["first_step"]
    seconds = timing.seconds
    step = (seconds["compute"] + seconds["gradients"] + seconds["update"]) / steps
    global_batch = run.global_batch(number)
    return {
        "epochs": phase.epochs,
        "steps": run.steps[number],
        "resolution": phase.resolution,
        # Densities of the first epochs, which are not run
        "warm_up": list(phase.warm_up),
        "global_batch": global_batch,
        "first_step_seconds": round(first, 3),
        "step_seconds": step,
        "gradients_seconds": seconds["gradients"] / steps,
        "throughput": round(global_batch / step, 1),
        "bytes_by_route": bytes_by_route(exchanger),
        "predicted_seconds": round(first + step * run.steps[number] * phase.epochs, 1),
        "dry_seconds": round(time.monotonic() - start, 1),
    }


def expected_run(run: Run, number: int, accumulated: int = 1) -> ExpectedRun:
    """Return the expected run of a phase after its `warm_up`, for "auto"."""
    phase, begin = run.recipe.phases[number], sum(run.phases[:number])
    begin += min(len(phase.warm_up), phase.epochs - 1)
    # The choice is not kept, because a real run measures with its own batches
    return run.expected_run(begin, accumulated)._replace(keeps_choice=False)


def made_up(spec: Sequence[Any], outputs: int, batch: int, resolution: int, rank: int = 0) -> Any:
    """Return a batch of these shapes and types: floats in [0, 1), integers below `outputs`.

    >>> spec = (tf.TensorSpec([None, 4, 4, 1]), tf.TensorSpec([None], tf.int64))
    >>> pictures, labels = made_up(spec, outputs=10, batch=2, resolution=4)
    >>> pictures.shape.as_list(), labels.dtype.name
    ([2, 4, 4, 1], 'int64')

    Args:
        outputs: classes, or words of the vocabulary.
        batch: of one rank; in word pieces for sentences.
        resolution: of the phase; replaces unknown sizes.
        rank: the seed, because `BroadcastState` warns of ranks with the same batch.
    """
    # Integer rows of unknown length
    sentences = any(
        part.dtype.is_integer and part.shape.as_list()[1:] == [None]
        for part in tf.nest.flatten(spec)
    )
    rows = max(1, batch // resolution) if sentences else batch

    def random_part(part: tf.TensorSpec) -> tf.Tensor:
        first, *sizes = part.shape.as_list() or [None]
        shape = [first or rows, *(size or resolution for size in sizes)]
        if part.dtype.is_floating:
            return tf.cast(tf.random.stateless_uniform(shape, [1, rank]), part.dtype)
        integers = tf.random.stateless_uniform(shape, [3, rank], 0, outputs, tf.int64)
        return tf.cast(integers, part.dtype)

    return tf.nest.map_structure(random_part, spec)


def bytes_by_route(exchanger: Exchanger) -> dict[str, dict[str, float]]:
    """Return, for each route, the bytes that one rank sends per step inside and between nodes."""
    by_route: dict[str, dict[str, float]] = {}
    for strategy in exchanger.runs.values():
        plan = strategy.executor.plan
        for bucket in plan.buckets:
            sent = routes.of(bucket).wire_bytes(bucket, plan.topology)
            sums = by_route.setdefault(bucket.route, {"inside": 0.0, "between": 0.0})
            # A round of several steps may have one exchange
            sums["inside"] += sent.inside / strategy.steps_per_exchange
            sums["between"] += sent.between / strategy.steps_per_exchange
    return by_route


def _memory() -> dict[str, int]:
    # `ru_maxrss` counts units of 1,024 bytes on Linux
    memory = {"memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if tf.config.list_logical_devices("GPU"):
        memory["gpu_memory_bytes"] = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return memory
