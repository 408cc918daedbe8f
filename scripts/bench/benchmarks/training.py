"""Claim: a simulated step takes as long as a measured one, under every scheme.

    python scripts/bench training --nodes 4 --slots 1 --rates 200mbit 1000mbit --json t.jsonl
    python scripts/bench training --nodes 2 --slots 1 --rates none        # on this host, no root
    python scripts/bench training --models resnet50 --batch 16 \\
        --schemes none horovod "hitopk block16/float16"

Peer: plain Horovod. The same model is trained under each scheme, on a virtual cluster (needs root
and iproute2) or, at the rate `none`, by as many ranks on this host. Models: convolutional,
transformer (both about a million parameters), embedding (most of its parameters are one), and
ResNet-50 at 64 x 64. Schemes: `none` exchanges nothing; `horovod` is plain Horovod, one allreduce
for each gradient; the others are routes, sparse ones with their wire format, and `auto` and `auto
sparse`. A density may follow, in place of --density: "auto sparse 0.05". With "momentum" in front,
as in "momentum asa int1", LowBitSGD sends its momentum in place of the gradient.

`seconds` and `step_seconds` are the median over steps of the slowest rank's time; the schemes take
turns, two steps at a time of which the second counts, and so do the steps of the profile, in
another order each round, because other work on the machine comes and goes. `ratio` is the median,
over the rounds, of the time over plain Horovod's in the same round ("x horovod" is its inverse).
`chosen` describes the plan of the exchange; for `auto`, the plan that its trial chose.
`predicted_seconds`: links measured first (probe, also under load), a profile of the model, measured
on all ranks at once (as cx.profile does), and the simulator. The profile has the times at which
gradients are ready and the time of a selection; forward pass, backward pass and update together are
as long as the measured step of `none`, which therefore always takes its turn and is not counted as
a prediction.
`none` exchanges nothing; gradients of embeddings are made dense in it, as in an exchange.
`bytes_between` counts the bytes that a rank sends to other nodes in a step, as the mean over the
ranks; for `horovod` they come from its route's formula.
`verified`: a step with known gradients, after the others and by the same plan, gave their average,
and unsent entries are in the residuals; the ranks' weights are equal in the end; the bytes
counted are those that the routes promise; no trial was under way. `none` must leave each rank its
own gradients. With --json the rows of a model are in the file as soon as it has ended.
`n` is the parameters of the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench import options, plans, ranks, rounds
from bench.benchmarks import training_models
from bench.benchmarks.training_contestants import (
    ALONE,
    Contestant,
    contestants,
    optimizer_of,
    split_name,
)
from bench.checks import weighted_sum

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.core import NOMINAL, Links, Profile, replacing
from tfcommx.measure.engine import matmul_load
from tfcommx.measure.links import probe
from tfcommx.measure.profile import StepTiming
from tfcommx.simulator.assumptions import Assumptions, measured_time
from tfcommx.simulator.step import simulate

MODELS = ("convolutional", "transformer", "embedding", "resnet50")
SCHEMES = (
    ALONE,
    "horovod",
    "allreduce",
    "torus",
    "hitopk pair32",
    "hitopk block16/float16",
    "allgather pair32",
    "allgather block16/float16",
    "auto",
    "auto sparse",
)
# Steps that are not counted: the first is traced; `auto` tries its plans in them
WARM_UP, WARM_UP_OF_AUTO = 2, 30
# Bytes of a message; 256 KiB, because two ranks of Gloo send longer ones at half the rate
PROBED = (2**10, 2**12, 2**18, 2**20, 2**22)


def parser() -> argparse.ArgumentParser:
    found = options.parser(__doc__, sizes=[], repeats=10, meaning_of_repeats="steps")
    found.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS[:3]))
    found.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    found.add_argument("--batch", type=int, default=16, help="samples of a rank")
    found.add_argument("--density", type=float, default=0.01, help="of sparse routes")
    found.add_argument("--selection", default="mstopk", help="of sparse routes")
    found.add_argument("--bucket-bytes", type=int, default=2**20, help="of the mergings by size")
    return found


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
        for one in rounds.turns([*racing, None], number):
            if one is None:
                timing.step()
                continue
            # After another's wait for the network the caches are cold, and its own next step is not
            one.model.train_on_batch(*one.batch)
            before = comm.traffic().between

            def step(one: Contestant = one) -> None:  # Returns when the loss is computed
                one.model.train_on_batch(*one.batch)

            one.seconds.append(rounds.seconds_of(step, comm))
            one.sent += (comm.traffic().between - before) / repeats
    return timing


def joint_profile(
    comm: Comm, timing: StepTiming, alone_s: float, chosen: argparse.Namespace
) -> Profile:
    """Make one profile from the simultaneous measurements of all ranks.

    The times at which gradients are ready are means over the ranks, scaled to the length of a step
    without exchange; the time of a selection is the slowest rank's, because all wait for it.

    Args:
        alone_s: seconds of a step without exchange, of the slowest rank.

    **Ranks:** all.
    """
    comm.gather_objects("ready")
    measured = timing.measured(chosen.selection, chosen.density).profile
    profiles = [Profile.from_json(text) for text in comm.gather_objects(measured.to_json())]
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
    selects = plan is not None and plans.selects(plan)
    density = split_name(one.name, chosen)[1] if selects else 1.0
    promised = 0.0
    if plan is not None:
        promised = sum(
            routes.of(bucket).wire_bytes(bucket, comm.topology).between for bucket in plan.buckets
        )
    weights = [weighted_sum(variable.numpy().ravel()) for variable in model.trainable_variables]
    everyone = comm.gather_objects((weights, one.sent))
    equal = all(other == weights for other, _ in everyone) or one.name == ALONE
    sent = statistics.fmean(sent for _, sent in everyone)
    counted = one.exchanger is None or abs(sent - promised) <= 1e-6 * promised
    decided = plans.is_decided(optimizer)
    words = "" if plan is None else plans.in_words(plan)
    # After the steps that were timed, so that it is their plan that is checked
    right = plans.sums_are_right(comm, optimizer, model.trainable_variables, one.name != ALONE)
    seconds = statistics.median(one.seconds)
    return options.row(
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
        ratio=None if horovod is None else rounds.paired_ratio(one.seconds, horovod),
        chosen=words if decided else "undecided",
    )


def measure_model(
    comm: Comm, name: str, links: Links, chosen: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Train a model under every scheme; yield the rows. **Ranks:** all."""
    racing = list(contestants(comm, name, links, chosen))
    optimizer = optimizer_of(ALONE, links, chosen)
    made = training_models.make(name, optimizer, chosen.batch, comm.rank)
    timing = train(comm, racing, Contestant(ALONE, *made), chosen.repeats)
    alone_s = statistics.median(next(one.seconds for one in racing if one.name == ALONE))
    profile = joint_profile(comm, timing, alone_s, chosen)
    assumptions = Assumptions(measured_time(profile))
    horovod = next((one.seconds for one in racing if one.name == "horovod"), None)
    for one in racing:
        plan, named = one.plan(comm), dataclasses.replace(profile, variables=one.named(profile))
        step = alone_s if plan is None else simulate(plan, named, links, assumptions).step_s
        yield row_of(comm, one, step, horovod, chosen) | {"model": name}


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Measure all that was asked for. **Ranks:** all."""
    comm = ranks.join(chosen)
    blocks = [NOMINAL.block_bytes]
    links = probe(comm, PROBED, 5, blocks=blocks, load=matmul_load(), fusion=True).links
    for name in chosen.models:
        yield table(list(measure_model(comm, name, links, chosen)))


def table(rows: list[dict[str, Any]]) -> options.Table:
    """Make the table of one model."""

    def error(one: dict[str, Any]) -> float:
        return one["predicted_seconds"] / one["step_seconds"] - 1

    own = {
        "predicted": lambda one: f"{one['predicted_seconds'] * 1e3:.2f}",
        "error": lambda one: f"{error(one):+.1%}",
        "MB between": lambda one: f"{one['bytes_between'] / 1e6:.2f}",
    }
    one = rows[0]
    if one["ratio"] is not None:
        own["x horovod"] = lambda one: f"{1 / one['ratio']:.2f}"
    rate = "this host" if one["rate_mbit"] is None else f"{one['rate_mbit']:g} Mbit/s"
    title = f"{one['model']}, {one['nodes']} nodes of {one['slots']} slots, {rate}"
    notes = [
        f"{one['scheme']} has chosen: {one['chosen']}"
        for one in rows
        if one["scheme"].startswith("auto")
    ]
    errors = [abs(error(one)) for one in rows if one["scheme"] != ALONE]
    if errors:
        notes.append(
            f"predicted against measured: {len(errors)} rows, median error "
            f"{statistics.median(errors):.1%}, largest {max(errors):.1%}"
        )
    return options.Table(title, rows, own=own, notes=notes)


def draw(rows: list[dict[str, Any]], png: Path) -> None:
    """Draw a panel for each model and rate: measured steps as bars, predicted ones as marks."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(one["model"] for one in rows))
    rates = list(dict.fromkeys(one["rate_mbit"] for one in rows))
    figure = Figure(figsize=(4.5 * len(rates) + 1, 2.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(rates), squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for panel, rate in zip(line, rates, strict=True):
            mine = [one for one in rows if (one["model"], one["rate_mbit"]) == (model, rate)]
            places = range(len(mine))
            panel.barh(places, [1e3 * one["step_seconds"] for one in mine], label="measured")
            predicted = [1e3 * one["predicted_seconds"] for one in mine]
            panel.plot(predicted, places, "k|", markersize=12, label="predicted")
            panel.set_yticks(places, [one["scheme"] for one in mine], fontsize=8)
            panel.invert_yaxis()
            where = "this host" if rate is None else f"{rate:g} Mbit/s"
            panel.set_title(f"{model}, {where}", loc="left", fontsize=9)
            panel.set_xlabel("ms a step", fontsize=8)
    panels[0, 0].legend(fontsize=8)
    with replacing(png) as part:
        figure.savefig(part, dpi=120)
