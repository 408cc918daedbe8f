"""What scripts/bench_training.py runs on every rank: trains, times, predicts, checks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import tfcommx.cli.quiet_start

# isort: split
import bench_training_models
import benchmark_options
import benchmark_times
import keras
import numpy as np
import plan_at_work
import tensorflow as tf
from bench_training import ALONE, options
from plain_horovod import PlainHorovod
from verify_step import sums_are_right
from verify_sums import weighted_sum

import tfcommx as cx
from tfcommx import routes
from tfcommx.comm.base import Comm
from tfcommx.measure.engine import matmul_load
from tfcommx.measure.links import probe
from tfcommx.measure.profile import StepTiming
from tfcommx.optim.variable_names import VariableNames
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.simulator.assumptions import Assumptions
from tfcommx.simulator.selection_time import measured_time
from tfcommx.simulator.step import simulate
from tfcommx.terms import NOMINAL, Links, Plan, PlanError, Profile, Scheme, VariableProfile

# Steps that are not counted: the first is traced; `auto` tries its plans in them
WARM_UP, WARM_UP_OF_AUTO = 2, 30
# Bytes of a message; those between pass a virtual cluster's links in one burst, too soon.
PROBED = (2**10, 2**12, 2**21, 2**23)


@dataclasses.dataclass
class Contestant:
    """A model that is trained under one scheme."""

    name: str
    model: keras.Model
    batch: bench_training_models.Batch
    # Of the slowest rank, step by step
    seconds: list[float] = dataclasses.field(default_factory=list)
    # That this rank has sent to other nodes in the steps that count
    sent: float = 0.0

    @property
    def exchanger(self) -> Any:
        """What the wrapped optimizer exchanges by; None if it is not wrapped."""
        return getattr(self.model.optimizer, "exchanger", None)

    def plan(self, comm: Comm) -> Plan | None:
        """Return what the gradients travel by; of plain Horovod, each by itself."""
        if self.name == ALONE:
            return None
        if self.exchanger is not None:
            (run,) = self.exchanger.runs.values()
            return run.executor.plan
        rows = zip(self.names(), self.model.trainable_variables, strict=True)
        gradients = [Gradient(name, tuple(one.shape), "float32") for name, one in rows]
        return make_plan(gradients, {"*": Scheme(merging="each")}, comm.topology)

    def names(self) -> list[str]:
        """Return what the plan calls the variables."""
        names = VariableNames() if self.exchanger is None else self.exchanger.names
        return names.of(self.model.trainable_variables)

    def named(self, profile: Profile) -> tuple[VariableProfile, ...]:
        """Return the rows of a profile of an equal model, under this one's names."""
        names = reversed(self.names())
        return tuple(
            dataclasses.replace(row, name=name)
            for row, name in zip(profile.variables, names, strict=True)
        )


class DenseSgd(keras.optimizers.SGD):
    """SGD that makes gradients of embeddings dense, as an exchange does."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update the variables by dense gradients."""
        with cx.allow_plain_optimizers():
            super().apply([tf.convert_to_tensor(one) for one in grads], trainable_variables)


def split_name(name: str, chosen: argparse.Namespace) -> tuple[str, float]:
    """Return a scheme's name without the density that may follow it, and its density."""
    first, _, last = name.rpartition(" ")
    return (first, float(last)) if last[:1] in ("0", ".") else (name, chosen.density)


def optimizer_of(name: str, links: Links, chosen: argparse.Namespace) -> keras.optimizers.Optimizer:
    """Return the optimizer of a scheme. **Raises:** PlanError for what cannot be carried out."""
    if name == ALONE:
        return DenseSgd(0.01)
    if name == "horovod":
        return PlainHorovod(0.01, name="plain_horovod")
    name, density = split_name(name, chosen)
    route, _, wire = name.partition(" ")
    route, _, peers = route.partition("+")
    how: dict[str, Any] = {"peer_route": peers or "allreduce", "bucket_bytes": chosen.bucket_bytes}
    if wire == "sparse" or (route in routes.ROUTES and routes.get(route).sparse):
        how |= {"selection": chosen.selection, "density": density}
    if wire and wire != "sparse":
        how["wire"] = wire
    scheme = Scheme(route, **how)
    return cx.DistributedOptimizer(
        keras.optimizers.SGD(0.01), scheme, links=links, check_replicas_every=None
    )


def contestants(
    comm: Comm, model: str, links: Links, chosen: argparse.Namespace
) -> Iterator[Contestant]:
    """Make a model for each scheme; say which schemes are refused. **Ranks:** all."""
    for name in dict.fromkeys([ALONE, *chosen.schemes]):
        try:
            optimizer = optimizer_of(name, links, chosen)
        except PlanError as refusal:
            if comm.rank == 0:
                print(f"{model}, {name}: left out: {refusal}", flush=True)
            continue
        made = bench_training_models.make(model, optimizer, chosen.batch, comm.rank)
        yield Contestant(name, *made)


def train(comm: Comm, racing: list[Contestant], alone: Contestant, repeats: int) -> StepTiming:
    """Let all take turns, step by step, and note how long they take; so does a profile's step.

    Each round has another order, the same on all ranks. Of two steps at a time the second counts,
    as in a training under one scheme.

    Args:
        racing: take their turns.
        alone: is profiled: its optimizer exchanges nothing.

    **Ranks:** all.
    """
    timing = StepTiming(alone.model, [alone.batch])
    for one in racing:
        for _ in range(WARM_UP_OF_AUTO if one.name.startswith("auto") else WARM_UP):
            one.model.train_on_batch(*one.batch)
    for _ in range(WARM_UP):
        timing.step()
    for number in range(repeats):
        for one in benchmark_times.turns([*racing, None], number):
            if one is None:
                timing.step()
                continue
            # After another's wait for the network the caches are cold, and its own next step is not
            one.model.train_on_batch(*one.batch)
            before = comm.traffic().between
            comm.gather_objects("ready")
            start = time.perf_counter()
            one.model.train_on_batch(*one.batch)  # Returns when the loss is there
            took = time.perf_counter() - start
            one.seconds.append(max(comm.gather_objects(took)))
            one.sent += (comm.traffic().between - before) / repeats
    return timing


def joint_profile(
    comm: Comm, timing: StepTiming, alone_s: float, chosen: argparse.Namespace
) -> Profile:
    """Make one profile of what all ranks have measured at once.

    When gradients are ready is the ranks' mean, in a step as long as the one that exchanges
    nothing; what a selection takes is the slowest rank's, because all wait for it.

    Args:
        alone_s: seconds of a step without exchange, of the slowest rank.

    **Ranks:** all.
    """
    comm.gather_objects("ready")
    measured = timing.measured(chosen.selection, chosen.density).profile
    profiles = comm.gather_objects(measured)
    update_s = statistics.fmean(found.update_s for found in profiles)
    passes_s = statistics.fmean(found.forward_s + found.backward_s for found in profiles)
    factor = max(alone_s - update_s, 0.0) / passes_s

    def scaled(name: str, parts: Any) -> float:
        return factor * statistics.fmean(getattr(part, name) for part in parts)

    rows = tuple(
        dataclasses.replace(
            parts[0],
            ready_s=scaled("ready_s", parts),
            selection_s=max(part.selection_s for part in parts),
            update_s=update_s * parts[0].size / sum(row.size for row in measured.variables),
        )
        for parts in zip(*(found.variables for found in profiles), strict=True)
    )
    both = {name: scaled(name, profiles) for name in ("forward_s", "backward_s")}
    return dataclasses.replace(measured, variables=rows, **both)


def row_of(
    comm: Comm,
    one: Contestant,
    predicted: float,
    horovod: list[float] | None,
    chosen: argparse.Namespace,
) -> dict[str, Any]:
    """Return the row of a scheme whose steps are done.

    Args:
        comm: of this rank.
        one: the scheme's contestant.
        predicted: seconds of its step.
        horovod: seconds of plain Horovod's steps, if it took turns.
        chosen: the options.

    **Ranks:** all.
    """
    model, plan, optimizer = one.model, one.plan(comm), one.model.optimizer
    selects = plan is not None and plan_at_work.selects(plan)
    density = split_name(one.name, chosen)[1] if selects else 1.0
    promised = 0.0
    if plan is not None:
        promised = sum(
            routes.get(bucket.route).wire_bytes(bucket, comm.topology).between
            for bucket in plan.buckets
        )
    weights = [weighted_sum(variable.numpy().ravel()) for variable in model.trainable_variables]
    everyone = comm.gather_objects((weights, one.sent))
    equal = all(other == weights for other, _ in everyone) or one.name == ALONE
    sent = statistics.fmean(sent for _, sent in everyone)
    counted = one.exchanger is None or abs(sent - promised) <= 1e-6 * promised
    decided = plan_at_work.is_decided(optimizer)
    words = "" if plan is None else plan_at_work.in_words(plan)
    # After the steps that were timed, so that it is their plan that is checked
    right = sums_are_right(comm, optimizer, model.trainable_variables, one.name != ALONE)
    seconds = statistics.median(one.seconds)
    return benchmark_options.row(
        one.name,
        model.count_params(),
        one.seconds,
        right and decided and equal and counted and bool(np.isfinite(weights).all()),
        density,
        scheme=one.name,
        model="",
        nodes=comm.topology.nodes,
        slots=comm.topology.slots,
        rate_mbit=chosen.rate_mbit,
        step_seconds=seconds,
        predicted_seconds=predicted,
        bytes_between=promised if one.exchanger is None else sent,
        ratio=None if horovod is None else benchmark_times.paired_ratio(one.seconds, horovod),
        chosen=words if decided else "undecided",
    )


def measure_model(
    comm: Comm, name: str, links: Links, chosen: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Train a model under every scheme; yield the rows. **Ranks:** all."""
    racing = list(contestants(comm, name, links, chosen))
    optimizer = optimizer_of(ALONE, links, chosen)
    made = bench_training_models.make(name, optimizer, chosen.batch, comm.rank)
    timing = train(comm, racing, Contestant(ALONE, *made), chosen.repeats)
    alone_s = statistics.median(next(one.seconds for one in racing if one.name == ALONE))
    profile = joint_profile(comm, timing, alone_s, chosen)
    assumptions = Assumptions(measured_time(profile))
    horovod = next((one.seconds for one in racing if one.name == "horovod"), None)
    for one in racing:
        plan, named = one.plan(comm), dataclasses.replace(profile, variables=one.named(profile))
        step = alone_s if plan is None else simulate(plan, named, links, assumptions).step_s
        yield row_of(comm, one, step, horovod, chosen) | {"model": name}


def main() -> None:
    """Measure all that was asked for; rank 0 writes one line of JSON per row as it comes."""
    chosen = options().parse_args()
    # Nodes of a virtual cluster share one machine, which may be slow.
    comm = cx.init(node_size=chosen.node_size, watch_seconds=120)
    blocks = [NOMINAL.block_bytes]
    links = probe(comm, PROBED, 5, blocks=blocks, load=matmul_load(), fusion=True).links
    for name in chosen.models:
        for found in measure_model(comm, name, links, chosen):
            if comm.rank == 0:
                with chosen.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
