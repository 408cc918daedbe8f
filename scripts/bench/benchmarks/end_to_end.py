"""Claim: on a slow network a training reaches plain Horovod's score in less time than it takes.

    python scripts/bench end_to_end --setup commlib --json commlib.jsonl      # root and iproute2
    python scripts/bench end_to_end --setup two_sites --contestants horovod asa_int4
    python scripts/bench end_to_end --recipe translate --score test_bleu --loss 0.5
    python scripts/bench end_to_end --recipe language --score test_log2_likelihood --loss 0.02
    python scripts/bench end_to_end --here --most-steps 4 --seeds 1           # no root

Peer: plain Horovod, an allreduce of each gradient and then Keras's optimizer, without tfcommx.
`horovod_fp16` adds Horovod's compression; `none` exchanges nothing, which is the least time there
is. The others are methods of `tfcommx compare` or of end_to_end.yaml. All train by the same loop
(end_to_end_rank.py), a rank on each node of a virtual cluster, one training after the other. The
order differs from seed to seed, because other work on the machine varies. `ddp`, `ddp_fp16` and
`ddp_powersgd_4` are PyTorch's DistributedDataParallel over Gloo, plain and with its hooks
(end_to_end_torch.py): they train the network of the default recipe, are named by `--contestants`
only, and the first call installs PyTorch into build/frameworks.

Links are shaped so that an exchange costs plain Horovod as much of a step as on a real cluster,
which end_to_end.yaml names: `ratio_wanted` is (its step - the step without exchange) / the step
without exchange there, `ratio_measured` the same here, within 5 %, and `rate_mbit` the rate at
which probes, short trainings in turn, measured it. Compute is this machine's, so seconds are not
the real cluster's. Their ratios stand for its if codes cost as much beside compute as there;
tracing, which is the same for a short training and a long one, makes them too small.

`seconds` is a whole training, the median over seeds: opening data, Horovod's start, building,
tracing, measuring links, trials and averages count; evaluations, and imports before the first of
these, do not, for any contestant. Each `auto` measures and tries anew. `target` is plain Horovod's
mean final score less `--loss`; `target_seconds` the mean over seeds of the clock at the first
evaluation that reaches it, null unless all seeds do; nothing is interpolated. `times_sooner` is
plain Horovod's `target_seconds` over the row's. `first_step_seconds` is the clock at the end of the
first step, `step_seconds` the mean step after the first evaluation: that of `none` and of plain
Horovod give the ratio in the trainings themselves. `bytes_between` counts the bytes that a node's
interface has sent in a training, with protocol headers and evaluations; on this host, those of all
ranks by the loopback.
An epoch is cut to a multiple of its evaluations: 232 of 235 steps of the default recipe.
`verified`: weights are equal on all ranks in the end (of `none`: they differ), and all scores are
finite. `n` is the parameters of the model.
`predicted_step_seconds` is by the simulator, from links and a profile measured after the trainings,
as in `scripts/bench training`; `predicted_seconds` is the measured start, `first_step_seconds`, and
such steps. Both are null of `auto`, of PyTorch, and of strategies that do not exchange in each
step.

Trainings and calibration are kept in `--folder`, each in a file named by a digest of its settings:
a call that was interrupted continues with the next one. The digest does not include the version of
tfcommx, and a calibration is that of this machine: where they change, add --anew. `commits` are
those that trained a row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import environments, options, ranks, rounds, virtual_cluster
from bench.records import ROOT

from tfcommx.comparison.methods import Method, fitting, read_methods
from tfcommx.comparison.trainings import Setup
from tfcommx.core import write_text
from tfcommx.launch.hosts import Host
from tfcommx.recipes.reader import parse
from tfcommx.recipes.recipe import read

HERE = Path(__file__).parent
SETTINGS = parse((HERE / "end_to_end.yaml").read_text(encoding="utf-8"))
RECIPES = {
    "fashion": HERE / "end_to_end_fashion.yaml",
    "translate": ROOT / "configs" / "translate_miniature.yaml",
    "language": HERE / "end_to_end_language.yaml",
}
HOROVOD = "horovod"
# Those that do not use tfcommx, and train the recipe as it is, with every entry in float32
PLAIN = ("none", HOROVOD, "horovod_fp16")
# Those of PyTorch, which train the network of the default recipe
TORCH = ("ddp", "ddp_fp16", "ddp_powersgd_4")
CONTESTANTS = (
    *PLAIN,
    *("auto", "torus", "asa_int4", "elias_int4", "local_sgd", "momentum_int2", "one_bit_adam"),
)
# Rate of the first probe, and by how much the ratio may be off
FIRST_MBIT, TOLERANCE, MOST_PROBES = 500.0, 0.05, 8


def parser() -> argparse.ArgumentParser:
    arguments = options.parser(__doc__, sizes=[], repeats=6, meaning_of_repeats="turns of a probe")
    add = arguments.add_argument
    add("--setup", choices=SETTINGS["setups"], default="commlib")
    add("--recipe", default="fashion", help=f"{', '.join(RECIPES)}, or a file")
    add("--contestants", nargs="+", help="default: all that fit the optimizer")
    add("--seeds", type=int, default=3)
    add("--nodes", type=int, default=4, help="of the virtual cluster, of 1 slot")
    add("--rate-mbit", type=float, help="of links; default: calibrated to the setup")
    add("--here", action="store_true", help="all ranks on this host, without links")
    add("--score", default="test_accuracy", help="of the task; more is better")
    add("--loss", type=float, default=0.005, help="of the target, in the score")
    add("--evaluations", type=int, default=4, help="in an epoch")
    add("--most-steps", type=int, help="from one evaluation to the next")
    add("--set", nargs="+", default=[], help="changes of the recipe")
    add("--folder", type=Path, default=ROOT / "runs" / "end_to_end")
    add("--anew", action="store_true", help="train again, also where the folder has a result")
    add("--job", type=Path, help=argparse.SUPPRESS)
    add("--node-size", help=argparse.SUPPRESS)
    return arguments


def measure(chosen: argparse.Namespace) -> Iterator[options.Table]:
    """Calibrate the links, train all contestants, and yield their table."""
    if chosen.here and chosen.rate_mbit:
        raise SystemExit("Links have a rate on the virtual cluster only: leave --here or it out.")
    if chosen.job:  # This is a rank
        from bench.benchmarks import end_to_end_rank

        job, train = json.loads(chosen.job.read_text()), end_to_end_rank.train
        if job["contestant"] in TORCH:  # Only these need PyTorch
            from bench.benchmarks import end_to_end_torch

            train = end_to_end_torch.train
        end_to_end_rank.carry_out(job, train)
        return
    changes = changes_of(chosen)
    if not changes.keys().isdisjoint(TORCH):
        environments.torch_python()
    with cluster(chosen) as place:
        calibration = {"rate_mbit": chosen.rate_mbit, "ratio_measured": None}
        if calibrated(chosen):
            calibration = calibrate(chosen, place)
            place = shaped(place, calibration["rate_mbit"])
        trainings: dict[str, list[dict[str, Any]]] = {name: [] for name in changes}
        for seed in range(chosen.seeds):
            for name in rounds.turns(changes, seed):
                settings = [*changes[name], f"seed={seed}"]
                job = job_of(chosen, name, settings, calibration["rate_mbit"])
                trainings[name].append(done(chosen, place, job))
        rows = rows_of(trainings, chosen.score, chosen.loss)
        predict(rows, done(chosen, place, prediction_job(chosen, changes, calibration)))
    yield table(rows, chosen, calibration)


def prediction_job(
    chosen: argparse.Namespace, changes: Mapping[str, list[str]], calibration: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the job that predicts the steps of all contestants but PyTorch's."""
    turns, changes = 3 * chosen.repeats, {n: c for n, c in changes.items() if n not in TORCH}
    more = [f"turns={turns}", *(f"{name}: {own}" for name, own in changes.items())]
    job = job_of(chosen, "predicted", [], calibration["rate_mbit"], more) | {"turns": turns}
    shared = job["settings"]
    return job | {"contestants": {name: [*shared, *own] for name, own in changes.items()}}


def predict(rows: list[dict[str, Any]], steps: Mapping[str, float | None]) -> None:
    """Add to each row its predicted step, and the seconds of a training of such steps.

    Its start, until the end of the first step, is the measured one.
    """
    for row in rows:
        step_s = row["predicted_step_seconds"] = steps.get(row["name"])
        later = row["steps"] - 1
        row["predicted_seconds"] = step_s and row["first_step_seconds"] + later * step_s


def changes_of(chosen: argparse.Namespace) -> dict[str, list[str]]:
    """Return each contestant's changes of the recipe.

    **Raises:** RecipeError for an unknown contestant, and for one that needs another optimizer;
    SystemExit without plain Horovod.
    """
    names = list(dict.fromkeys(chosen.contestants or CONTESTANTS))
    if HOROVOD not in names:
        raise SystemExit(f"The contestant {HOROVOD!r} is required: its score is the target.")
    recipe = read(recipe_of(chosen), chosen.set)
    own = {name: Method.model_validate(one) for name, one in SETTINGS["methods"].items()}
    if set(names) & set(TORCH) and (
        (chosen.recipe, recipe.optimizer.name, recipe.precision) != ("fashion", "sgd", "float32")
    ):
        raise SystemExit(
            f"{', '.join(TORCH)} train the recipe 'fashion' by SGD in float32. Received recipe "
            f"{chosen.recipe!r}, {recipe.optimizer.name}, {recipe.precision}. Omit them."
        )
    of_compare = [name for name in names if name not in (*own, *PLAIN, *TORCH)]
    methods = own | (read_methods(of_compare) if of_compare else {})
    dense = Method(about="", scheme={"route": "allreduce"}, strategy={"name": "synchronous"})
    methods |= dict.fromkeys((*PLAIN, *TORCH), dense)
    methods = fitting({name: methods[name] for name in names}, recipe, bool(chosen.contestants))
    epochs = [phase.epochs for phase in recipe.phases]
    changes = {name: method.settings(epochs) for name, method in methods.items()}
    for settings in changes.values():
        read(recipe_of(chosen), [*chosen.set, *settings])
    return changes


def calibrated(chosen: argparse.Namespace) -> bool:
    """Return True if the links' rate is found by probes, and not given."""
    return not chosen.here and chosen.rate_mbit is None


def recipe_of(chosen: argparse.Namespace) -> Path:
    """Return the file of the recipe."""
    return RECIPES.get(chosen.recipe, Path(chosen.recipe)).resolve()


@contextlib.contextmanager
def cluster(chosen: argparse.Namespace) -> Iterator[ranks.Place]:
    """Make a virtual cluster, and remove it; with --here the ranks are on this host."""
    if chosen.here:
        yield ranks.Place((Host("localhost", chosen.nodes),), node_size=1)
        return
    rate = f"{chosen.rate_mbit or FIRST_MBIT}mbit"
    with virtual_cluster.made(chosen.nodes, 1, rate) as name:
        made = ranks.Cluster(name, chosen.nodes, 1, rate)
        yield ranks.Place(made.hosts(), made)


def shaped(place: ranks.Place, rate_mbit: float) -> ranks.Place:
    """Change the rate of all links."""
    assert place.cluster is not None and place.cluster.name is not None
    rate = f"{rate_mbit:.3f}mbit"
    virtual_cluster.call(place.cluster.name, "rate", rate)
    return ranks.Place(place.hosts, place.cluster._replace(rate=rate))


def job_of(
    chosen: argparse.Namespace,
    name: str,
    settings: Sequence[str],
    rate_mbit: float | None,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a training as the ranks read it; the name of its file depends on all its settings.

    Args:
        more: whatever else decides the result.
    """
    setup = Setup(recipe_of(chosen), tuple(chosen.set), chosen.nodes, 1, chosen.folder)
    parts = {"evaluations": chosen.evaluations, "most_steps": chosen.most_steps}
    settings = setup.settings(settings)
    interface = "lo" if chosen.here else "eth0"  # As scripts/cluster names it
    decides = [*settings, f"rate={rate_mbit}", f"interface={interface}", *more]
    decides += [f"{key}={value}" for key, value in parts.items()]
    output = chosen.folder.resolve() / f"{setup.name(name, decides)}.json"
    recipe = {"recipe": str(setup.recipe), "settings": settings, "output": str(output)}
    return {"contestant": name, "interface": interface, **recipe, **parts}


def done(chosen: argparse.Namespace, place: ranks.Place, job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a job from its file; without one, launch the ranks first."""
    output = Path(job["output"])
    if chosen.anew or not output.exists():
        print(f"{output.stem} at {place.cluster.rate if place.cluster else 'no rate'}", flush=True)
        file = output.with_suffix(".job")
        write_text(file, json.dumps(job))
        # Where "auto" keeps measurements and choices for later trainings: each pays for its own
        shutil.rmtree(cache := output.with_suffix(".cache"), ignore_errors=True)
        os.environ["TFCOMMX_CACHE"] = str(cache)
        if ranks.launch(place, ["end_to_end", "--job", str(file)]):
            raise SystemExit(f"{output.stem} failed. Call it again to continue.")
    return json.loads(output.read_text())


def calibrate(chosen: argparse.Namespace, place: ranks.Place) -> dict[str, float]:
    """Find the rate of the links at which the exchange has the cost that the setup states.

    Returns:
        The rate, the ratio measured at it, and the steps without exchange and of plain Horovod.

    **Raises:** SystemExit if the probes do not find it.
    """
    wanted, points = ratio_wanted(chosen.setup), list[tuple[float, float]]()
    for _ in range(MOST_PROBES):
        rate = next_rate(points, wanted)
        job = job_of(chosen, f"probe_{chosen.repeats}", [], rate) | {"turns": chosen.repeats}
        steps = done(chosen, shaped(place, rate), job)
        points.append((rate, steps[HOROVOD] / steps["none"] - 1))
        print(
            f"{rate:.4g} Mbit/s: {steps['none']:.4f} s without exchange, {steps[HOROVOD]:.4f} s by "
            f"Horovod: ratio {points[-1][1]:.3f}, wanted {wanted:.3f}",
            flush=True,
        )
        if abs(points[-1][1] / wanted - 1) <= TOLERANCE:
            measured = {"step_alone_seconds": steps["none"], "step_horovod_seconds": steps[HOROVOD]}
            return {"rate_mbit": rate, "ratio_measured": points[-1][1], **measured}
    raise SystemExit(f"A ratio of {wanted:.3f} was not found: {points}. Add --anew on quiet cores.")


def ratio_wanted(setup: str) -> float:
    """Return how much the exchange lengthens plain Horovod's step there, over one without it."""
    known = SETTINGS["setups"][setup]
    return float(known["horovod_s"] / known["alone_s"] - 1)


def next_rate(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """Return the rate to probe next, to four digits.

    The ratio is fixed + slope / rate, fitted to all probes, because other work on the machine
    changes single ones. One probe, or a fit that falls the wrong way, is taken for proportional.

    >>> next_rate([], 4.0), next_rate([(100.0, 8.0)], 4.0)
    (500.0, 200.0)
    >>> next_rate([(100.0, 8.0), (200.0, 4.5)], 4.0)
    233.3

    Args:
        points: rate and ratio of the probes so far.
        wanted: ratio, > 0.
    """
    if not points:
        return FIRST_MBIT
    rate, ratio = points[-1]
    best = rate * max(ratio, 0.1 * wanted) / wanted
    if len({rate for rate, _ in points}) > 1:
        ratios = [ratio for _, ratio in points]
        slope, fixed = statistics.linear_regression([1 / rate for rate, _ in points], ratios)
        if slope > 0 and wanted > fixed:
            best = slope / (wanted - fixed)
    return float(f"{best:.4g}")


def reached(training: Mapping[str, Any], score: str, target: float) -> float | None:
    """Return the clock at the first evaluation that reaches the target; None if none does."""
    clocks = [row["seconds"] for row in training["rows"] if row[score] >= target]
    return clocks[0] if clocks else None


def step_seconds(training: Mapping[str, Any]) -> float | None:
    """Return the mean step after the first evaluation; None without a later one."""
    first, last = training["rows"][0], training["rows"][-1]
    steps = last["steps"] - first["steps"]
    return (last["seconds"] - first["seconds"]) / steps if steps else None


def rows_of(
    trainings: Mapping[str, Sequence[Mapping[str, Any]]], score: str, loss: float
) -> list[dict[str, Any]]:
    """Make a row for each contestant.

    Args:
        trainings: contestant -> a training for each seed, plain Horovod among them.
        score: name of the score.
        loss: that the target allows, in the score.
    """
    final = {
        name: [one["rows"][-1][score] for one in of_seeds] for name, of_seeds in trainings.items()
    }
    target = statistics.fmean(final[HOROVOD]) - loss
    to_target: dict[str, float | None] = {}
    for name, of_seeds in trainings.items():
        clocks = [reached(one, score, target) for one in of_seeds]
        to_target[name] = None if None in clocks else statistics.fmean(filter(None, clocks))
    rows, horovod_s = [], to_target[HOROVOD]
    for name, of_seeds in trainings.items():
        target_s = to_target[name]
        steps = [step_seconds(training) for training in of_seeds]
        sooner = None if target_s is None or horovod_s is None else horovod_s / target_s
        row = options.row(
            name,
            of_seeds[0]["parameters"],
            [training["rows"][-1]["seconds"] for training in of_seeds],
            all(training["verified"] for training in of_seeds),
            seeds=len(of_seeds),
            score=score,
            target=target,
            seeds_reached=sum(reached(one, score, target) is not None for one in of_seeds),
            target_seconds=target_s,
            times_sooner=sooner,
            steps=of_seeds[0]["rows"][-1]["steps"],
            step_seconds=None if None in steps else statistics.median(steps),
            first_step_seconds=statistics.fmean(one["first_step_seconds"] for one in of_seeds),
            bytes_between=statistics.fmean(one["bytes_between"] for one in of_seeds),
            # A training that was kept may be of an earlier one
            commits=", ".join(sorted({one.get("commit", "unknown") for one in of_seeds})),
            final_score=statistics.fmean(final[name]),
            final_lowest=min(final[name]),
            final_highest=max(final[name]),
            evaluations=[
                [[row["seconds"], row[score]] for row in training["rows"]] for training in of_seeds
            ],
        )
        rows.append(row)
    return rows


def note(chosen: argparse.Namespace) -> str:
    """Return a record's note: where the trainings ran, and which cluster the links stand for."""
    if chosen.here:
        return "all ranks on this host, no links"
    text = f"a virtual cluster: {chosen.nodes} nodes of 1 (scripts/cluster); rows have the commits "
    text += "of their trainings"
    if not calibrated(chosen):
        return text
    known = SETTINGS["setups"][chosen.setup]
    return f"{text}; its links are calibrated to {known['cluster']}: {known['source'].strip()}"


def table(
    rows: list[dict[str, Any]], chosen: argparse.Namespace, links: Mapping[str, float | None]
) -> options.Table:
    """Add the setup's columns to the rows, and say how they are printed."""
    wanted = ratio_wanted(chosen.setup) if calibrated(chosen) else None
    place = {"setup": chosen.setup if wanted else None, "recipe": chosen.recipe}
    place |= {"nodes": chosen.nodes, "ratio_wanted": wanted, **links}
    rows = [row | place for row in rows]

    def number(name: str, form: str, factor: float = 1.0) -> Any:
        return lambda row: "" if row[name] is None else f"{factor * row[name]:{form}}"

    own = {
        "predicted, s": number("predicted_seconds", ".1f"),
        "s to target": number("target_seconds", ".1f"),
        "x sooner": number("times_sooner", ".2f"),
        "MB between": number("bytes_between", ".1f", 1e-6),
        "score": number("final_score", ".4f"),
        "lowest": number("final_lowest", ".4f"),
        "highest": number("final_highest", ".4f"),
    }
    title = f"{chosen.recipe} on {chosen.nodes} nodes"
    if wanted is not None:
        title += f" as {SETTINGS['setups'][chosen.setup]['cluster']}: ratio "
        title += f"{links['ratio_measured']:.3f} (wanted {wanted:.3f}) at {links['rate_mbit']:g} "
        title += "Mbit/s"
    return options.Table(title, rows, own=own)
