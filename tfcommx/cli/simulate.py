"""`tfcommx simulate`: predict the time of a step on a cluster that is not available."""

import dataclasses
import inspect
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tfcommx import routes
from tfcommx.cli.parameters import (
    JsonFile,
    output_file,
    read_timed_profile,
    show_parameters,
    write_rows,
)
from tfcommx.core import (
    AUTO,
    PLAIN,
    ConfigurationError,
    EngineSettings,
    Link,
    Links,
    Scheme,
    Topology,
    check_name,
    check_number,
    check_whole,
    write_text,
)
from tfcommx.engines import ENGINES
from tfcommx.engines.engine import WIRINGS, ring_link
from tfcommx.planner.check import check_scheme
from tfcommx.planner.choose import candidates
from tfcommx.planner.merging import MERGINGS
from tfcommx.planner.predict import Setting
from tfcommx.recipes.reader import read_mapping
from tfcommx.report import timeline as report
from tfcommx.report.terminal import show_rows
from tfcommx.routes.route import SparseRoute
from tfcommx.simulator import models
from tfcommx.simulator.assumptions import Assumptions, measured_time
from tfcommx.simulator.throughputs import (
    DEFAULT_BATCH,
    DEFAULT_GPU,
    GPU_NAMES,
    GPUS,
    model_profile,
)


def setting(default: Any, text: str, wanted: str = "") -> Any:
    """Declare a setting by its default, the help text of its option, and a number's range."""
    return dataclasses.field(default=default, metadata={"help": text, "range": wanted})


@dataclass(frozen=True)
class Settings:
    """The settings of a simulation: options, or keys of a YAML file with - or _."""

    model: str = setting("resnet50", "A network, such as resnet50 or vgg16.")
    size: int | None = setting(
        None, "Pixels a side, or words, of a sample; the GPU's, or the model's with --throughput."
    )
    profile: str | None = setting(
        None, "File of a measured profile; it replaces --model, --gpu, --batch and --throughput."
    )
    gpu: str = setting(
        DEFAULT_GPU, f"Its published throughput, batch and size are the defaults: {GPU_NAMES}."
    )
    batch: int | None = setting(
        None, f"Samples of one rank in a step; the GPU's, or {DEFAULT_BATCH} with --throughput."
    )
    throughput: float | None = setting(
        None, "Samples per second of one rank alone; the published one of --gpu.", "> 0"
    )
    nodes: int = setting(4, "Nodes of the cluster.")
    slots: int = setting(1, "Ranks on each node.")
    links: str | None = setting(
        None,
        "File that `tfcommx probe` wrote; it replaces rates, latencies and gamma of the kinds of "
        "links that it measured.",
    )
    between_gbit: float = setting(10.0, "Rate of a node's port to other nodes, 10^9 bit/s.", "> 0")
    between_alpha: float = setting(5e-5, "Its latency, s.", ">= 0")
    inside_gbytes: float = setting(10.0, "Rate of a rank inside its node, 10^9 byte/s.", "> 0")
    inside_alpha: float = setting(1e-5, "Its latency, s.", ">= 0")
    efficiency: float = setting(
        1.0, "Share of both rates that messages reach, in (0, 1].", "in (0, 1]"
    )
    gamma: float = setting(1e-11, "Seconds per byte that is added or selected from.", ">= 0")
    wiring: str | None = setting(
        None,
        "Connection of the ranks of a node: nvlink, pcie_switch, root_complex, host_memory or "
        "qpi; nvlink, or from --links.",
    )
    nics: int | None = setting(
        None, "Network adapters of a node, which share --between-gbit; 1, or from --links."
    )
    engine: str | None = setting(
        None,
        "Engine of the collectives: nccl, gloo, open_mpi, horovod_hierarchical, or ring, the "
        "papers' prices; ring, or from --links.",
    )
    cycle: float | None = setting(
        None, "Seconds of HOROVOD_CYCLE_TIME, which is in ms; 0, or from --links.", ">= 0"
    )
    fusion_mbytes: float | None = setting(
        None,
        "Buffer in which waiting allreduces are fused, 2^20 bytes; Horovod's 128, none with the "
        "engine ring, or from --links.",
        ">= 0",
    )
    scheme: str = setting(
        "allreduce",
        "Route: allreduce, torus, hitopk, ...; auto: the fastest by prediction of those that the "
        "next four allow.",
    )
    selection: str | None = setting(None, "Rule of a sparse route; mstopk.")
    density: float | None = setting(
        None, "Entries sent / entries, of a sparse route; 0.01.", "in (0, 1]"
    )
    wire: str = setting(
        "plain", "Format of selected entries: elias/int8; of all: float16, int8, int4."
    )
    dense_route: str = setting("allreduce", "Route of dense gradients.")
    compression: str = setting("none", "Compression of the gradients: powersgd/4.")
    merging: str = setting("threshold", "threshold, single, each, mg_wfbp, omgs or optimal.")
    # For the following settings see `simulator.assumptions.Assumptions`
    selection_on: str = setting("compute", "compute (delays the backward pass) or beside.")
    engine_seconds: float | None = setting(
        None, "Seconds per collective in addition to its price; 0, or from --links.", ">= 0"
    )
    spread: float = setting(0.0, "Relative spread of compute times over the ranks.", ">= 0")
    contention: float | None = setting(
        None, "Relative slowdown of messages during the backward pass; from --links, or 0.", ">= 0"
    )
    loading: float = setting(0.0, "Seconds to load a batch.", ">= 0")
    slow_node: float = setting(
        1.0, "Compute time of one node over that of the others, >= 1.", "> 0"
    )
    slow_port: float = setting(
        1.0, "Rate of one node's port over that of the others, in (0, 1].", "in (0, 1]"
    )
    jitter: float = setting(
        0.0, "Largest share of a port's rate that is missing in a step, in [0, 1).", "in [0, 1)"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if KINDS[name] is int:
                value = check_whole(name, value, least=1)
            elif KINDS[name] is float:
                value = check_number(name, value, field.metadata["range"])
            elif not isinstance(value, str):
                raise ConfigurationError(f"`{name}` must be text. Received {value!r}.")
            elif name in NAMES:
                check_name(name, value, NAMES[name])
            object.__setattr__(self, name, value)

    @property
    def requested_scheme(self) -> Scheme:
        """Scheme of the gradients."""
        sparse = self.scheme != AUTO and isinstance(routes.get(self.scheme), SparseRoute)
        selection = self.selection or ("mstopk" if sparse else "all")
        default = 1.0 if selection == "all" else 0.01
        return Scheme(
            self.scheme,
            selection,
            default if self.density is None else self.density,
            self.dense_route,
            wire=self.wire,
            merging=self.merging,
            compression=self.compression,
        )

    @property
    def link_prices(self) -> Links:
        """Prices of messages."""
        wire = Link(self.inside_alpha, 1e-9 / self.inside_gbytes / self.efficiency, self.gamma)
        links = Links(
            ring_link(wire, self.slots, self.wiring or EngineSettings().wiring),
            Link(self.between_alpha, 8e-9 / self.between_gbit / self.efficiency, self.gamma),
            # The papers price each message by itself
            fuses=(self.engine or EngineSettings().name) != EngineSettings().name,
        )
        if self.links is not None:
            measured = Links.read(self.links)
            # Links that the probe's cluster lacked keep the rates of the options
            nominal = {kind: getattr(links, kind) for kind in Links.unmeasured(self.links)}
            links = measured._replace(**nominal)
        buffer = None
        if self.fusion_mbytes is not None:
            buffer = round(self.fusion_mbytes * 2**20)
        changes: dict[str, Any] = {
            "name": self.engine,
            "nics": self.nics,
            "wiring": self.wiring,
            "cycle_s": self.cycle,
            "fusion_bytes": buffer,
        }
        engine = dataclasses.replace(
            links.engine, **{name: value for name, value in changes.items() if value is not None}
        )
        # A buffer of 0 bytes fuses nothing, as HOROVOD_FUSION_THRESHOLD=0
        return links._replace(engine=engine, fuses=links.fuses if buffer is None else buffer > 0)


# Columns of the rows that are printed in a sentence, not in the table
INTERVAL = ("step_seconds_low", "step_seconds_high")
TENTHS = ("step_seconds_p10", "step_seconds_p90")
# Largest number of values of a sweep, each of which is a simulation and a row
MOST_VALUES = 10_000
# Setting -> known names. Checked with the settings, because the price of some engines ignores a
# wiring, and `tfcommx machines` leaves out cells that cannot be simulated
NAMES: dict[str, Iterable[str]] = {
    **{"model": models.MODELS, "gpu": GPUS, "engine": ENGINES},
    **{"wiring": WIRINGS, "merging": MERGINGS},
}
# Name of a setting -> str, int or float
KINDS: dict[str, type] = {
    name: next(member for member in (*typing.get_args(kind), kind) if member is not type(None))
    for name, kind in typing.get_type_hints(Settings).items()
}


def _option(field: dataclasses.Field[Any]) -> inspect.Parameter:
    text, default = field.metadata["help"], field.default
    if default is not None:
        text += f" Default: {f'{default:g}' if isinstance(default, float) else default}."
    kind: Any = KINDS[field.name]
    option = Annotated[kind | None, typer.Option(help=text)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    # None, so that an option that was not given leaves the value of the file as it is
    return inspect.Parameter(field.name, keyword, default=None, annotation=option)


def simulate(
    settings_file: Annotated[
        Path | None, typer.Argument(help="YAML file of these settings; options override it.")
    ] = None,
    *,
    sweep: Annotated[
        str | None, typer.Option(help="Setting and values: nodes=1,2,4,...,1024.")
    ] = None,
    json_file: JsonFile = None,
    png: Annotated[
        Path | None, output_file(text="Draw the timeline, or the sweep.", picture=True)
    ] = None,
    trace: Annotated[
        Path | None, output_file(text="Write the timeline for chrome://tracing and Perfetto.")
    ] = None,
    **options: Any,
) -> None:
    """Simulate a training step of a model on a cluster, under a scheme."""
    settings = _settings(settings_file, options)
    if sweep and trace:
        raise ConfigurationError(
            "`--trace` writes one timeline. Received --sweep. Leave one of them out."
        )
    if sweep:
        name, values = _sweep(sweep)
        steps = [simulated_step(dataclasses.replace(settings, **{name: value})) for value in values]
        results = [row for _, row in steps]
        # A row has the throughput of all ranks, and the route that "auto" chose
        differs = any(row.get(name, x) != x for x, row in zip(values, results, strict=True))
        column = f"swept_{name}" if differs else name
        rows = [{column: x, **row} for x, row in zip(values, results, strict=True)]
        _show(rows, best=True)
        if KINDS[name] is str:
            _show_fastest(rows, column)
    else:
        timeline, row = simulated_step(settings)
        rows = [row]
        _show(rows)
    write_rows(json_file, rows)
    if sweep:
        if png:
            report.draw_sweep(rows, column, png)
        return
    print(report.draw_text(timeline))
    low, high = (f"{row[name]:.4g}" for name in INTERVAL)
    print(f"Range for nine of ten steps with this prediction: {low} to {high} s.")
    if settings.jitter:
        low, high = (f"{row[name]:.4g}" for name in TENTHS)
        print(f"Ports vary: one step in ten takes less than {low} s, one more than {high} s.")
    title = f"{settings.model}, {settings.nodes} x {settings.slots}, {settings.scheme}"
    title += f", {settings.merging}" + f", {settings.wire}" * (settings.wire != PLAIN)
    if png:
        report.draw_timelines({title: timeline}, png)
    if trace:
        write_text(trace, report.trace_events({title: timeline}))


# An option for each setting in place of `options`
_settings_file, *_others, _ = inspect.signature(simulate, eval_str=True).parameters.values()
_options = [_option(field) for field in dataclasses.fields(Settings)]
show_parameters(simulate, [_settings_file, *_options, *_others])


def _settings(file: Path | None, options: dict[str, Any]) -> Settings:
    content = read_keys(file) if file else {}
    # Checked here, because the constructor would name neither the file nor the nearest setting
    for name in content:
        check_name("setting", name, list(KINDS), f"in {file}")
    return Settings(**{**content, **{name: x for name, x in options.items() if x is not None}})


def read_keys(file: Path) -> dict[str, Any]:
    """Return the keys of a YAML file, with _ for -. **Raises:** errors of `read_mapping`."""
    content = {}
    for key, value in read_mapping(file, "The file of settings").items():
        name = str(key).replace("-", "_")
        if name in content:
            raise ConfigurationError(f"{file}: the key {name!r} comes twice, as {key!r} too.")
        content[name] = value
    return content


def _sweep(text: str) -> tuple[str, list[Any]]:
    """Parse `nodes=1,2,4,...,1024`: a setting, and its values."""
    name, _, listed = text.partition("=")
    name = check_name("setting", name.strip().replace("-", "_"), list(KINDS))
    words = [word.strip() for word in listed.split(",") if word.strip()]
    values = words if KINDS[name] is str else _numbers(words, name)
    if not values:
        raise ConfigurationError(f"`--sweep` needs values, as nodes=1,2,4. Received {text!r}.")
    return name, values


def _numbers(words: list[str], name: str) -> list[Any]:
    """Parse numbers; `...` continues the numbers before it, by a factor or by steps."""
    numbers: list[float] = []
    try:
        for position, word in enumerate(words):
            if word != "...":
                numbers.append(_finite(word))
                continue
            last = _finite(words[position + 1])
            first, second = numbers[-2:]
            factor, step = second / first if first > 0 else 1.0, second - first
            # Two numbers continue by their factor; three tell a factor from a step
            by_factor = first > 0 and (
                len(numbers) == 2 or math.isclose(numbers[-3] * factor, first)
            )
            while True:
                following = numbers[-1] * factor if by_factor else numbers[-1] + step
                is_between = (following - numbers[-1]) * (last - following) > 0
                if not is_between or math.isclose(following, last):
                    break
                numbers.append(following)
                if len(numbers) > MOST_VALUES:
                    raise ValueError(f"more than {MOST_VALUES:,} values")
    except (ValueError, IndexError) as error:
        raise ConfigurationError(
            f"At most {MOST_VALUES:,} finite numbers are required, as {name}=1,2,4 or "
            f"{name}=1,2,4,...,64. Received {','.join(words)!r}."
        ) from error
    return [int(number) if number.is_integer() else number for number in numbers]


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):  # A continuation to infinity would not end
        raise ValueError(f"{word!r} is no finite number")
    return number


def simulated_step(settings: Settings) -> tuple[Any, dict[str, Any]]:
    """Simulate one step; return its timeline and its row."""
    if settings.profile is not None:
        profile = read_timed_profile(settings.profile)
    else:
        profile = model_profile(
            settings.model, settings.gpu, settings.throughput, settings.batch, settings.size
        )
    assumptions = Assumptions(
        measured_time(profile),
        settings.selection_on,
        settings.engine_seconds,
        spread=settings.spread,
        contention=settings.contention,
        loading_s=settings.loading,
        slow_node=settings.slow_node,
        slow_port=settings.slow_port,
        jitter=settings.jitter,
    )
    topology = Topology(settings.nodes, settings.slots)
    setting = Setting(profile, topology, settings.link_prices, assumptions)
    requested = settings.requested_scheme
    if requested.route == AUTO:
        check_scheme(requested, topology)
        # Without the merging `optimal`, which takes seconds for a large model
        prediction = candidates(setting, requested, thorough=False)[0]
    else:
        prediction = setting.predict(requested)
    if not math.isfinite(prediction.step_s):
        raise ConfigurationError(
            f"Steps of finite time are required. Received {prediction.step_s} s, by a rate that is "
            "almost 0. Rates are in 10^9 bit/s and 10^9 byte/s."
        )
    return prediction.timeline, prediction.row()


def _show(rows: list[dict[str, Any]], best: bool = False) -> None:
    # The percentiles only if steps differ
    varies = any(row[TENTHS[0]] < row[TENTHS[1]] for row in rows)
    hidden = INTERVAL if varies else (*INTERVAL, *TENTHS)
    shown = [
        {name.replace("_", " "): _cell(x) for name, x in row.items() if name not in hidden}
        for row in rows
    ]
    fastest = max(rows, key=lambda row: row["throughput"])
    show_rows(shown, bold=lambda position: best and rows[position] is fastest)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _show_fastest(rows: list[dict[str, Any]], name: str) -> None:
    step, long = (min(rows, key=lambda row: row[key]) for key in ("step_seconds", TENTHS[1]))
    text = f"The shortest step: {name}={step[name]}."
    if long is not step:
        text += f" The shortest one that one step in ten exceeds: {name}={long[name]}."
    print(text)
