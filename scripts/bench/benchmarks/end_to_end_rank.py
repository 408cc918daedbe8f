"""Work of a rank in the benchmark of whole trainings: it trains, probes or predicts steps.

All contestants train by the same loop: the recipe's data, model, schedule, loss and scores, under
Keras's `fit`. They differ in the optimizer alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from bench import records, rounds
from bench.benchmarks import training
from bench.benchmarks.training_contestants import Contestant
from bench.peers import plain_optimizer

import tfcommx as cx
from tfcommx import callbacks
from tfcommx.core import AUTO, NOMINAL, Scheme, write_text
from tfcommx.measure.engine import matmul_load
from tfcommx.measure.links import probe as measure_links
from tfcommx.measure.profile import StepTiming
from tfcommx.optim.wrapped import exchanger_of, steps_of_update
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.recipes.recipe import read
from tfcommx.simulator.assumptions import Assumptions, measured_time
from tfcommx.simulator.step import simulate
from tfcommx.training.callbacks import rate_at
from tfcommx.training.run import Run, prepare
from tfcommx.training.steps import FitCall, Position, fit_calls

ALONE, HOROVOD = "none", "horovod"
# Contestants without tfcommx -> compression of plain Horovod's allreduce; None: no allreduce
PLAIN = {ALONE: None, HOROVOD: hvd.Compression.none, "horovod_fp16": hvd.Compression.fp16}
# Steps of a turn of the probe; the mean of all but the first counts
TURN = 20


def carry_out(job: dict[str, Any], train: Callable[[Run, dict[str, Any], float], Any]) -> None:
    """Do a job, and write its result to the job's file on rank 0.

    Args:
        job: recipe, settings, output; of a training contestant, interface, evaluations and
            most_steps; of a probe turns; of predictions also contestants, with their settings.
        train: trains the contestant, as `train` below does.

    **Ranks:** all.
    """
    start = time.perf_counter()
    recipe, output = read(Path(job["recipe"]), job["settings"]), Path(job["output"])
    run = prepare(recipe, output.parent)
    if "contestants" in job:
        result: dict[str, Any] = predicted_steps(run, job)
    elif "turns" in job:
        result = probe(run, job["turns"])
    else:
        result = train(run, job, start)
    run.data.close()
    if cx.is_chief():
        write_text(output, json.dumps(result | {"commit": records.commit()}, indent=1) + "\n")


def compiled(run: Run, contestant: str) -> keras.Model:
    """Make the recipe's model, of equal weights on all ranks, with a contestant's optimizer."""
    keras.utils.set_random_seed(run.recipe.seed)
    model = run.recipe.build_model(run.objective)
    if contestant in PLAIN:
        optimizer = plain_optimizer(run.recipe.optimizer.build(), PLAIN[contestant])
    else:
        optimizer = cx.DistributedOptimizer(
            run.recipe.optimizer.build(),
            scheme=run.recipe.scheme_of_epoch()[0],
            links=run.recipe.links,
            strategy=run.recipe.strategy.build(),
        )
    metrics = list(run.objective.metrics())
    model.compile(optimizer, loss=run.objective.loss(), metrics=metrics, jit_compile=False)
    return model


class Schedule(keras.callbacks.Callback):
    """Sets each step's learning rate, and tells "auto" how many steps follow.

    An epoch of Keras is here a part of an epoch, from one evaluation to the next.
    """

    def __init__(self, run: Run, wrapped: bool) -> None:
        super().__init__()
        self.run, self.wrapped, self.call, self.done = run, wrapped, FitCall(0, range(1)), 0

    def begin(self, call: FitCall) -> None:
        """Begin a phase."""
        self.call, self.done = call, 0

    def position(self) -> Position:
        """Return the step that begins, as the recipe counts."""
        epoch, step = divmod(self.done, self.run.steps[self.call.phase])
        return Position(self.call.epochs.start + epoch, step)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the expected run of "auto"."""
        if self.wrapped:
            expected = self.run.expected_run(
                self.position().epoch, steps_of_update(self.model.optimizer)
            )
            exchanger_of(self.model).requested.expected_run = expected

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the step that begins."""
        rate = rate_at(self.run, self.call.phase, self.position())
        self.model.optimizer.learning_rate = rate
        self.done += 1


class Evaluation(keras.callbacks.Callback):
    """Scores the model after each part of an epoch; the clock stands still meanwhile.

    Weights that drift apart are averaged first, which counts.
    """

    def __init__(self, run: Run, wrapped: bool, start: float) -> None:
        super().__init__()
        self.run, self.wrapped, self.start, self.steps = run, wrapped, start, 0
        self.rows: list[dict[str, float]] = []
        # Clock at the end of the first step
        self.first_s = 0.0

    def begin(self, model: keras.Model, call: FitCall) -> None:
        """Begin a phase."""
        phase = self.run.recipe.phases[call.phase]
        self.test = self.run.data.test(self.run.recipe.batch(phase), phase.resolution)
        self.score = self.run.objective.scorer(model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.first_s = self.first_s or time.perf_counter() - self.start

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add a row. **Ranks:** all."""
        if self.wrapped:
            cx.consolidate(self.model.optimizer)
        self.run.comm.gather_objects("ready")
        before = time.perf_counter()
        scores = self.score(self.test, self.run.comm.gather_objects)
        self.steps += self.params["steps"]
        row = {"steps": self.steps, "seconds": before - self.start}
        self.rows.append(row | {name: float(value) for name, value in scores.items()})
        self.run.comm.gather_objects("scored")
        self.start += time.perf_counter() - before


def train(run: Run, job: dict[str, Any], start: float) -> dict[str, Any]:
    """Train a contestant; return its scores, seconds and bytes.

    Args:
        run: the recipe with the contestant's settings.
        job: see `carry_out`.
        start: when this rank has begun, by `time.perf_counter`.

    **Ranks:** all.
    """
    parts = job["evaluations"]
    sent, model = bytes_sent(job["interface"]), compiled(run, job["contestant"])
    wrapped = job["contestant"] not in PLAIN
    schedule, evaluation = Schedule(run, wrapped), Evaluation(run, wrapped, start)
    begin: list[keras.callbacks.Callback] = []
    shared: list[keras.callbacks.Callback] = [callbacks.AverageBatchNorm(), evaluation]
    if wrapped:
        begin = [callbacks.BroadcastState()]
        shared = [callbacks.SwitchScheme(changes(run, parts)), callbacks.ChooseAgain(), *shared]
    else:
        model.optimizer.build(model.trainable_variables)
        hvd.broadcast_variables([one.value for one in model.variables], root_rank=0)
    for call in fit_calls(run.phases, Position(0)):
        schedule.begin(call)
        evaluation.begin(model, call)
        model.make_train_function(force=True)
        model.fit(
            run.batches(call),
            initial_epoch=call.epochs.start * parts,
            epochs=call.epochs.stop * parts,
            steps_per_epoch=min(run.steps[call.phase] // parts, job["most_steps"] or sys.maxsize),
            verbose=0,
            shuffle=False,
            callbacks=[schedule, *begin, *shared],
        )
        begin = []
    return outcome(run, job, model, evaluation, bytes_sent(job["interface"]) - sent)


def outcome(
    run: Run, job: dict[str, Any], model: keras.Model, evaluation: Evaluation, sent: int
) -> dict[str, Any]:
    """Return scores, seconds and bytes of a training that has ended. **Ranks:** all."""
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in model.trainable_variables))
    everyone = run.comm.gather_objects((digest.hexdigest(), sent))
    same = len({weights for weights, _ in everyone}) == 1
    finite = all(math.isfinite(value) for row in evaluation.rows for value in row.values())
    return {
        "contestant": job["contestant"],
        "parameters": model.count_params(),
        "rows": evaluation.rows,
        "first_step_seconds": evaluation.first_s,
        "bytes_between": statistics.fmean(count for _, count in everyone),
        # Without exchange each rank has different weights
        "verified": finite and same == (job["contestant"] != ALONE),
    }


def changes(run: Run, parts: int) -> dict[int, cx.Scheme]:
    """Return the schemes that follow the first one, by the part of an epoch that begins with it."""
    schemes = enumerate(pairwise(run.recipe.scheme_of_epoch()), 1)
    return {epoch * parts: new for epoch, (old, new) in schemes if new != old}


def bytes_sent(interface: str) -> int:
    """Return the bytes that have left this node by its network interface.

    With the headers of all protocols, and whatever else is sent: the same for all contestants.
    """
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    counts = {name.strip(): rest.split() for name, rest in lines}
    return int(counts[interface][8])


def probe(run: Run, turns: int) -> dict[str, float]:
    """Measure the step without exchange, and plain Horovod's, which take turns. **Ranks:** all.

    Each turn is a short training, because its steps also load batches, and without exchange no rank
    waits for another.
    """
    models = {name: compiled(run, name) for name in (ALONE, HOROVOD)}
    steps: dict[str, list[float]] = {name: [] for name in models}
    for number in range(-1, turns):  # The first turn traces
        for name in rounds.turns(models, number):
            seconds = trained_seconds(run, models[name])
            if number >= 0:
                steps[name].append(seconds)
    return {name: statistics.median(times) for name, times in steps.items()}


def trained_seconds(run: Run, model: keras.Model) -> float:
    """Train TURN steps; return the mean seconds of one, of the slowest rank. **Ranks:** all."""
    ends: list[float] = []
    end = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )
    run.comm.gather_objects("ready")
    batches = run.batches(FitCall(0, range(1)))
    model.fit(batches, steps_per_epoch=TURN, verbose=0, shuffle=False, callbacks=[end])
    return max(run.comm.gather_objects((ends[-1] - ends[0]) / (TURN - 1)))


def step_begun_together(run: Run, model: keras.Model) -> float:
    """Return the seconds of a step without exchange that all ranks begin together.

    It is the median over steps of the slowest rank, for which the others wait in each exchange.

    **Ranks:** all.
    """
    begins: list[float] = []
    ends: list[float] = []

    def begin(batch: int, logs: Any = None) -> None:
        run.comm.gather_objects("ready")
        begins.append(time.perf_counter())

    clock = keras.callbacks.LambdaCallback(
        on_train_batch_begin=begin,
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()),
    )
    batches = run.batches(FitCall(0, range(1)))
    model.fit(batches, steps_per_epoch=TURN, verbose=0, shuffle=False, callbacks=[clock])
    steps = [end - start for start, end in zip(begins, ends, strict=True)][1:]
    return statistics.median(map(max, zip(*run.comm.gather_objects(steps), strict=True)))


def predicted_steps(run: Run, job: dict[str, Any]) -> dict[str, float | None]:
    """Predict each contestant's step, as scripts/bench training does: None if no plan decides it.

    That is so for a strategy that does not exchange in each step, and for "auto" before its trial.

    **Ranks:** all.
    """
    comm = run.comm
    links = measure_links(
        comm, training.PROBED, 5, blocks=[NOMINAL.block_bytes], load=matmul_load(), fusion=True
    ).links
    batch = first_batch(run)
    alone = compiled(run, ALONE)
    timing = StepTiming(alone, [batch])
    trained_seconds(run, alone)  # Traces
    seconds, together = list[float](), list[float]()
    for _ in range(job["turns"]):
        seconds.append(trained_seconds(run, alone))
        together.append(step_begun_together(run, alone))
        timing.step()
    selected = argparse.Namespace(selection="mstopk", density=0.1)
    profile = training.joint_profile(comm, timing, statistics.median(together), selected)
    assumptions = Assumptions(measured_time(profile))
    steps: dict[str, float | None] = {ALONE: statistics.median(seconds)}
    for name, settings in job["contestants"].items():
        recipe = read(Path(job["recipe"]), settings)
        if name == ALONE or recipe.scheme_of_epoch()[0].route == AUTO:
            steps.setdefault(name, None)
            continue
        model = compiled(dataclasses.replace(run, recipe=recipe), name)
        model.train_on_batch(*batch)
        contestant = Contestant(name, model, batch)
        plan = contestant.plan(comm)
        if name == "horovod_fp16":
            shapes = reversed(
                [(row.name, row.shape, row.dtype) for row in contestant.named(profile)]
            )
            each = Scheme(merging="each", wire="float16")
            plan = make_plan([Gradient(*one) for one in shapes], {"*": each}, comm.topology)
        named = dataclasses.replace(profile, variables=contestant.named(profile))
        synchronous = recipe.strategy.name == "synchronous"
        steps[name] = simulate(plan, named, links, assumptions).step_s if synchronous else None
    return steps


def first_batch(run: Run) -> Any:
    """Return a batch of this rank as arrays."""
    batch = next(iter(run.batches(FitCall(0, range(1)))))
    return tf.nest.map_structure(np.asarray, batch)
