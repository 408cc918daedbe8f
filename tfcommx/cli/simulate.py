"""`tfcommx simulate`: what a step would take on a cluster that one does not have."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from tfcommx.recipes.reader import YamlLoader
from tfcommx.terms import Link, Links, PlanError, Scheme, Topology, check_name, check_whole


@dataclass(frozen=True)
class Settings:
    """The settings of a simulation: flags, or keys of a YAML file with - or _."""

    # A name of the table in tfcommx.simulator.models.
    model: str = "resnet50"
    # Of a sample: pixels of a side, or words; None: the model's usual one.
    size: int | None = None
    # File of a measured profile; then model, batch and throughput are its own.
    profile: str | None = None
    # Samples of one rank in a step.
    batch: int = 64
    # Samples per second of one rank alone.
    throughput: float = 250.0
    nodes: int = 4
    # Ranks on each node.
    slots: int = 1
    # File of `tfcommx probe`; then the rates and latencies below are its own.
    links: str | None = None
    # Rate of a node's port to the other nodes, 10^9 bit/s.
    between_gbit: float = 10.0
    # Seconds of latency.
    between_alpha: float = 5e-5
    # Rate of a rank's connection inside its node, 10^9 byte/s.
    inside_gbytes: float = 10.0
    inside_alpha: float = 1e-5
    # Share of both rates that messages reach, in (0, 1].
    efficiency: float = 1.0
    # Seconds per byte that is added or selected from.
    gamma: float = 1e-11
    # A name of the table in tfcommx.routes, and the other settings of a Scheme.
    scheme: str = "allreduce"
    selection: str | None = None
    density: float | None = None
    wire: str = "plain"
    dense_route: str = "allreduce"
    merging: str = "threshold"
    # Of merging "threshold", 10^6 bytes.
    bucket_mbytes: float = Scheme().bucket_bytes / 1e6
    # See `simulator.assumptions.Assumptions`; engine and contention None: as the links say.
    selection_on: str = "compute"
    engine: float | None = None
    spread: float = 0.0
    contention: float | None = None
    loading: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and "str" not in str(field.type):
                object.__setattr__(self, field.name, _number(field.name, value, str(field.type)))
        for name in ("between_gbit", "inside_gbytes", "efficiency", "bucket_mbytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"`{name}` must be > 0. Received {getattr(self, name)!r}.")
        if self.efficiency > 1:
            raise PlanError(f"`efficiency` must be in (0, 1]. Received {self.efficiency}.")

    @property
    def topology(self) -> Topology:
        """Nodes and slots."""
        return Topology(self.nodes, self.slots)

    @property
    def planned(self) -> Scheme:
        """How gradients travel."""
        from tfcommx import routes

        sparse = routes.get(self.scheme).sparse
        selection = self.selection or ("mstopk" if sparse else "all")
        default = 1.0 if selection == "all" else 0.01
        return Scheme(
            self.scheme,
            selection,
            default if self.density is None else self.density,
            self.dense_route,
            bucket_bytes=round(self.bucket_mbytes * 1e6),
            wire=self.wire,
            merging=self.merging,
        )

    @property
    def priced(self) -> Links:
        """What messages cost."""
        if self.links is not None:
            return Links.read(self.links)
        return Links(
            Link(self.inside_alpha, 1e-9 / self.inside_gbytes / self.efficiency, self.gamma),
            Link(self.between_alpha, 8e-9 / self.between_gbit / self.efficiency, self.gamma),
        )


NAMES = tuple(field.name for field in dataclasses.fields(Settings))


def _number(name: str, value: Any, kind: str) -> Any:
    if "int" in kind:
        return check_whole(name, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"`{name}` must be a number. Received {value!r}.")
    return float(value)


def simulate(
    settings_file: Annotated[
        Path | None, typer.Argument(help="YAML file of these settings; options override it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="resnet50 (default), vgg16, ...")] = None,
    size: Annotated[int | None, typer.Option(help="Pixels or words of a sample.")] = None,
    profile: Annotated[str | None, typer.Option(help="File of a measured profile.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a rank in a step; 64.")] = None,
    throughput: Annotated[
        float | None, typer.Option(help="Samples per second of one rank alone; 250.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="4.")] = None,
    slots: Annotated[int | None, typer.Option(help="Ranks on each node; 1.")] = None,
    links: Annotated[str | None, typer.Option(help="File that `tfcommx probe` wrote.")] = None,
    between_gbit: Annotated[
        float | None, typer.Option(help="Rate between nodes, 10^9 bit/s; 10.")
    ] = None,
    between_alpha: Annotated[float | None, typer.Option(help="Its latency, s; 5e-5.")] = None,
    inside_gbytes: Annotated[
        float | None, typer.Option(help="Rate inside a node, 10^9 byte/s; 10.")
    ] = None,
    inside_alpha: Annotated[float | None, typer.Option(help="Its latency, s; 1e-5.")] = None,
    efficiency: Annotated[
        float | None, typer.Option(help="Share of both rates that messages reach; 1.")
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="Seconds per byte added; 1e-11.")] = None,
    scheme: Annotated[str | None, typer.Option(help="Route: allreduce, torus, hitopk ...")] = None,
    selection: Annotated[str | None, typer.Option(help="Rule of a sparse route; mstopk.")] = None,
    density: Annotated[float | None, typer.Option(help="Of a sparse route; 0.01.")] = None,
    wire: Annotated[
        str | None, typer.Option(help="Format: block16/float16; dense: float16.")
    ] = None,
    dense_route: Annotated[str | None, typer.Option(help="Of what stays dense.")] = None,
    merging: Annotated[
        str | None, typer.Option(help="threshold, single, each, mg_wfbp, omgs, optimal.")
    ] = None,
    bucket_mbytes: Annotated[float | None, typer.Option(help="Of threshold, 10^6 bytes.")] = None,
    selection_on: Annotated[
        str | None, typer.Option(help="compute (delays the backward pass) or beside.")
    ] = None,
    engine: Annotated[
        float | None, typer.Option(help="Seconds per collective; as --links say, or 0.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="Of compute times over ranks, relative; 0.")
    ] = None,
    contention: Annotated[
        float | None,
        typer.Option(help="Messages last so much longer during backward; as --links say, or 0."),
    ] = None,
    loading: Annotated[float | None, typer.Option(help="Seconds to load a batch; 0.")] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Setting and values: nodes=1,2,4,...,1024.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write one object a line.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the timeline, or the sweep.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline for chrome://tracing and Perfetto.")
    ] = None,
) -> None:
    """Simulate a step: what would a model take on a cluster, under a scheme?"""
    given = {name: value for name, value in locals().items() if name in NAMES}
    settings = _settings(settings_file, given)
    swept, values = _sweep(sweep, settings) if sweep else (None, [None])
    if swept and trace:
        raise PlanError("`--trace` writes one timeline. Received --sweep. Leave one of them out.")
    rows = []
    for value in values:
        chosen = dataclasses.replace(settings, **{swept: value}) if swept else settings
        timeline, row = _step(chosen)
        rows.append(_with(swept, value, row))
    if swept:
        swept = next(name for name in rows[0] if name in (swept, f"rank_{swept}"))
    _show(rows, swept)
    if json_file:
        json_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if swept:
        if png:
            from tfcommx.report.timeline import draw_sweep

            draw_sweep(rows, swept, png)
        return
    from tfcommx.report import timeline as report

    print(report.draw_text(timeline))
    if png:
        title = f"{settings.model}, {settings.nodes} x {settings.slots}, {settings.scheme}"
        report.draw_timeline(timeline, png, f"{title}, {settings.merging}")
    if trace:
        trace.write_text(report.trace_events(timeline))


def _with(swept: str | None, value: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Add the swept setting to a row; `throughput`, of one rank, beside that of all ranks."""
    if swept == "throughput":
        return {"rank_throughput": value, **row}
    return {swept: value, **row} if swept and swept not in row else row


def _settings(file: Path | None, given: dict[str, Any]) -> Settings:
    """Return the settings of a file and of flags."""
    found: dict[str, Any] = {}
    if file is not None:
        try:
            # A subclass of PyYAML's safe loader
            found = yaml.load(file.read_text(), YamlLoader) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise PlanError(f"A YAML file is required. Received {file}: {error}.") from error
        if not isinstance(found, dict):
            raise PlanError(f"Settings, one a line, are required. Received {file}: {found!r}.")
        found = {str(name).replace("-", "_"): value for name, value in found.items()}
        for name in found:
            check_name(f"setting in {file}", name, NAMES)
    return Settings(**{**found, **{name: x for name, x in given.items() if x is not None}})


def _sweep(text: str, settings: Settings) -> tuple[str, list[Any]]:
    """Read `nodes=1,2,4,...,1024`: a setting, and its values."""
    name, _, listed = text.partition("=")
    name = check_name("setting", name.strip().replace("-", "_"), NAMES)
    words = [word.strip() for word in listed.split(",") if word.strip()]
    kind = {field.name: str(field.type) for field in dataclasses.fields(Settings)}[name]
    if "str" in kind:
        values: list[Any] = list(words)
    else:
        values = _numbers(words, name)
    if not values:
        raise PlanError(f"`--sweep` needs values, as nodes=1,2,4. Received {text!r}.")
    return name, values


def _numbers(words: list[str], name: str) -> list[float]:
    """Read numbers; `...` goes on as the two before it do, by a factor or else by steps."""
    found: list[float] = []
    try:
        for place, word in enumerate(words):
            if word != "...":
                found.append(float(word))
                continue
            last = float(words[place + 1])
            first, second = found[-2:]
            factor, step = second / first if first > 0 else 1.0, second - first
            by_factor = first > 0 and (len(found) == 2 or math.isclose(found[-3] * factor, first))
            while True:
                following = found[-1] * factor if by_factor else found[-1] + step
                if not found[-1] < following < last * (1 - 1e-9):
                    break
                found.append(following)
    except (ValueError, IndexError) as error:
        raise PlanError(
            f"Numbers are required, as {name}=1,2,4 or {name}=1,2,4,...,64. Received "
            f"{','.join(words)!r}."
        ) from error
    return [int(number) if number.is_integer() else number for number in found]


def _step(settings: Settings) -> tuple[Any, dict[str, Any]]:
    """Simulate one step; return its timeline and its row."""
    from tfcommx.planner.predict import predict_step, row_of
    from tfcommx.simulator import models
    from tfcommx.simulator.assumptions import Assumptions, measured_time
    from tfcommx.terms import Profile

    if settings.profile is not None:
        profile = Profile.read(settings.profile)
    else:
        table = models.get(settings.model, settings.size)
        profile = Profile.from_throughput(table, settings.throughput, batch=settings.batch)
    assumptions = Assumptions(
        measured_time(profile),
        settings.selection_on,
        settings.engine,
        spread=settings.spread,
        contention=settings.contention,
        loading_s=settings.loading,
    )
    scheme, topology = settings.planned, settings.topology
    timeline = predict_step(profile, scheme, topology, settings.priced, assumptions)
    return timeline, row_of(timeline, scheme, topology)


def _show(rows: list[dict[str, Any]], swept: str | None) -> None:
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table

    from tfcommx.report.terminal import WIDE

    table = Table(box=None)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        cells = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values())
        table.add_row(*cells, style="bold" if swept and row is _best(rows) else None)
    wide = None if sys.stdout.isatty() else WIDE
    Console(highlight=False, width=wide).print(table)


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return max(rows, key=lambda row: row["throughput"])
