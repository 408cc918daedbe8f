"""`tfcommx plan`: rank the schemes for a model on a cluster, and the most effective changes."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from tfcommx.cli.parameters import (
    JsonFile,
    output_file,
    read_links,
    read_timed_profile,
    write_rows,
)
from tfcommx.core import (
    ConfigurationError,
    Profile,
    Scheme,
    Topology,
    check_name,
    is_member,
    load_member,
    write_text,
)
from tfcommx.planner import merging
from tfcommx.planner.check import check_scheme
from tfcommx.planner.choose import NOTABLY_FASTER, candidates, with_codes
from tfcommx.planner.predict import Prediction, Setting, describe, what_helps
from tfcommx.report.terminal import show_rows
from tfcommx.simulator import models
from tfcommx.simulator.assumptions import Assumptions, measured_time
from tfcommx.simulator.throughputs import DEFAULT_BATCH, DEFAULT_GPU, GPU_NAMES, model_profile

# Help texts of the options of a model that is given by its name
GPU_HELP = f"GPU whose published throughput a named model has: {GPU_NAMES}. Default: {DEFAULT_GPU}."
BATCH_HELP = (
    f"Samples per rank and step of a named model; the GPU's, or {DEFAULT_BATCH} with --throughput."
)
THROUGHPUT_HELP = "Samples/s of one rank alone, of a named model; the published one of --gpu."


def plan(
    model: Annotated[
        str, typer.Argument(help="File of a measured profile, or a name: resnet50, vgg16, ...")
    ],
    links: Annotated[Path, typer.Option(help="File that `tfcommx probe` wrote.")],
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.")] = 4,
    slots: Annotated[int, typer.Option(help="Ranks on each node.")] = 1,
    selection: Annotated[
        str, typer.Option(help="all, which is lossless, or a rule such as mstopk.")
    ] = "all",
    density: Annotated[
        float | None, typer.Option(help="Entries sent / entries, of a rule; 0.01.")
    ] = None,
    wire: Annotated[
        str,
        typer.Option(help="Format of selected entries: elias/int8; of all: float16, int8, int4."),
    ] = "plain",
    compression: Annotated[
        str, typer.Option(help="Include dense routes with this compression: powersgd/4.")
    ] = "none",
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine of the collectives, in place of that of the links: nccl, gloo, open_mpi, "
            "horovod_hierarchical, or ring, the papers' prices."
        ),
    ] = None,
    mpi: Annotated[bool, typer.Option(help="Include the routes that need MPI.")] = False,
    gpu: Annotated[str | None, typer.Option(help=GPU_HELP)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=BATCH_HELP)] = None,
    throughput: Annotated[float | None, typer.Option(help=THROUGHPUT_HELP)] = None,
    output: Annotated[
        Path | None, output_file(text="Write the chosen plan: DistributedOptimizer(plan=...).")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Rank the schemes for a model on a cluster by the predicted time of a step.

    With --selection, sums of all entries in 8 and 4 bits are ranked too, because they lose less.
    """
    profile = profile_of(model, gpu, throughput, batch)
    assumptions = Assumptions(measured_time(profile))
    topology = Topology(nodes, slots)
    measured = read_links(links, topology)
    if engine is not None:
        measured = measured._replace(engine=dataclasses.replace(measured.engine, name=engine))
    setting = Setting(profile, topology, measured, assumptions)
    ranking = candidates(setting, _asked(selection, density, wire, compression), mpi)
    if selection != "all":
        ranking = with_codes(ranking, setting)
    best = ranking[0]
    _show(ranking, what_helps(best.scheme, setting))
    print(f"\npredicted to be the fastest: {advice(best)}")
    plain = next(candidate for candidate in ranking if candidate.scheme == Scheme())
    if NOTABLY_FASTER * plain.step_s < best.step_s < plain.step_s:
        print(
            f"Its step is {1 - best.step_s / plain.step_s:.1%} shorter than plain Horovod's, less "
            'than predictions can tell. "auto" would keep plain Horovod: Scheme().'
        )
    write_rows(json_file, map(_row, ranking))
    if output:
        write_text(output, best.plan.to_json())
        print(f"{output}: its plan, of {len(best.plan.buckets)} buckets.")
        if model in models.MODELS:
            print(
                "It names the variables of a table, not those of a Keras model. For a plan that "
                "DistributedOptimizer(plan=...) takes, give a profile of your model."
            )


def _asked(selection: str, density: float | None, wire: str, compression: str) -> Scheme:
    if density is None:
        density = 1.0 if selection == "all" else 0.01
    requested = Scheme("auto", selection, density, wire=wire, compression=compression)
    # The fields of "auto" are checked alone, so the topology does not matter
    check_scheme(requested, Topology(1, 1))
    if is_member(selection):
        # Because its price needs no rule, and it would be planned without one
        load_member("selection rule", selection)
    return dataclasses.replace(requested, route="allreduce" if selection == "all" else "allgather")


def profile_of(model: str, gpu: str | None, throughput: float | None, batch: int | None) -> Profile:
    """Return the profile of a file, or of a known model: at a throughput, or as published.

    **Raises:** ConfigurationError for a name that is neither, for a model without any throughput,
    and for a file without times, or with any of the other arguments.
    """
    if model in models.MODELS or not Path(model).is_file():
        check_name("model or file of a profile", model, models.MODELS)
        return model_profile(model, gpu or DEFAULT_GPU, throughput, batch)
    check_is_measured(model, gpu, throughput, batch)
    return read_timed_profile(model)


def check_is_measured(
    model: str, gpu: str | None, throughput: float | None, batch: int | None
) -> None:
    """Check that no option of a named model is given for one whose steps are measured.

    **Raises:** ConfigurationError.
    """
    options = {"--gpu": gpu, "--throughput": throughput, "--batch": batch}
    given = [f"{name} {value}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigurationError(
            "`--gpu`, `--throughput` and `--batch` are for a model that is given by its name, such "
            f"as resnet50; those of {model} are measured. Received {', '.join(given)}. Leave them "
            "out."
        )


def _row(candidate: Prediction) -> dict[str, Any]:
    scheme, timeline = candidate.scheme, candidate.timeline
    names = ("peer_route", "dense_route", "wire", "compression", "merging", "selection", "density")
    return {
        "scheme": scheme.route,
        **{name: getattr(scheme, name) for name in names},
        "buckets": len(candidate.plan.buckets),
        "step_seconds": timeline.step_s,
        "exposed_seconds": timeline.exposed_s,
        "throughput": timeline.throughput,
        "scaling_efficiency": timeline.scaling_efficiency,
        "bytes_between": candidate.bytes_between,
        "residual_bytes": candidate.residual_bytes,
    }


def _show(ranking: list[Prediction], changes: dict[str, Prediction]) -> None:
    shown = [
        {
            "scheme": describe(candidate.scheme),
            "buckets": len(candidate.plan.buckets),
            "step ms": f"{1e3 * candidate.step_s:.1f}",
            "exposed ms": f"{1e3 * candidate.timeline.exposed_s:.1f}",
            "samples/s": f"{candidate.timeline.throughput:.4g}",
            "efficiency": f"{candidate.timeline.scaling_efficiency:.1%}",
            "MB between": f"{candidate.bytes_between / 1e6:.2f}",
            "MB of residuals": f"{candidate.residual_bytes / 1e6:.1f}",
        }
        for candidate in ranking
    ]
    show_rows(shown, left=["scheme"], bold=lambda position: position == 0)
    helps = [
        {
            "change": change,
            "step ms": f"{1e3 * prediction.step_s:.1f}",
            "samples/s": f"{prediction.timeline.throughput:.4g}",
        }
        for change, prediction in changes.items()
    ]
    show_rows(helps, left=["change"], title="with one change")


def advice(best: Prediction) -> str:
    """Return the line of code for a scheme."""
    scheme = best.scheme
    words = [
        f"{field.name}={getattr(scheme, field.name)!r}"
        for field in dataclasses.fields(scheme)[1:]
        if getattr(scheme, field.name) != field.default
    ]
    code = f"Scheme({', '.join([repr(scheme.route), *words])})"
    if not merging.get(scheme.merging).needs_times:
        return code
    return (
        f"{code}. Its merging needs a file of your model's profile, as cx.profile measures it in "
        "one process: DistributedOptimizer(..., profile='profile.json', links='links.json')"
    )
