"""`tfcommx machines`: compare kinds and numbers of machines for a training, and schemes on them.

With prices it answers which machines to rent. Without, `--map` shows which scheme suits which.
"""

import csv
import io
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tfcommx.cli.parameters import JsonFile, output_file, write_rows
from tfcommx.cli.simulate import INTERVAL, KINDS, Settings, read_keys, simulated_step
from tfcommx.core import ConfigurationError, check_name, check_number, check_whole, write_text
from tfcommx.planner.choose import NOTABLY_FASTER
from tfcommx.planner.predict import MISSES
from tfcommx.report import figures
from tfcommx.report.summary import plural
from tfcommx.report.terminal import show_rows

# Approximate seconds of a simulated step
STEP_SECONDS = 0.01
# Number of simulated steps above which their time is announced, and above which they are refused
MANY_STEPS, MOST_STEPS = 10_000, 500_000
# Default schemes; both are lossless, and the first is plain Horovod's
SCHEMES: dict[str, dict[str, Any]] = {"horovod": {}, "torus": {"scheme": "torus"}}
# Keys of the file other than settings of a simulation
OWN = ("machines", "schemes", "epoch_samples")
# Columns of every row, even if the file has only one value
ALWAYS = ("model", "nodes", "slots")
# Columns of a row that a simulated step has, too
STEP = (
    *("merging", "step_seconds", *INTERVAL, "exposed_seconds"),
    *("throughput", "scaling_efficiency", "bytes_between"),
)


class Offers(NamedTuple):
    """Contents of the user's file: machines, and the training on them."""

    # Samples of an epoch, >= 1; None: epochs have no cost.
    epoch_samples: int | None
    # Name -> price of a node per hour, > 0; empty without `epoch_samples`.
    prices: dict[str, float]
    # Name -> its settings; a list holds several values, a mapping one value for each model.
    machines: dict[str, dict[str, Any]]
    # Name -> its settings.
    schemes: dict[str, dict[str, Any]]

    @property
    def steps(self) -> int:
        """Number of steps to simulate: each scheme in each cell."""
        cells = (
            math.prod(len(value) for value in settings.values() if isinstance(value, list))
            for settings in self.machines.values()
        )
        return sum(cells) * len(self.schemes)

    @property
    def columns(self) -> list[str]:
        """Settings that distinguish cells."""
        settings = itertools.chain(*(machine.items() for machine in self.machines.values()))
        listed = [name for name, value in settings if isinstance(value, list)]
        return list(dict.fromkeys([*ALWAYS, *listed]))

    def cells(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each machine with each combination of its values."""
        for name, settings in self.machines.items():
            listed = {key: x if isinstance(x, list) else [x] for key, x in settings.items()}
            for values in itertools.product(*listed.values()):
                cell = dict(zip(listed, values, strict=True))
                yield name, {key: _of_model(key, x, cell) for key, x in cell.items()}


def machines(
    file: Annotated[
        Path, typer.Argument(help="YAML file of machines, the training, and prices if known.")
    ],
    csv_file: Annotated[
        Path | None, output_file("--csv", text="Write all rows, of all schemes.")
    ] = None,
    json_file: JsonFile = None,
    figure: Annotated[
        Path | None,
        output_file(text="Draw cost over time, and the efficiency: .svg or .png.", picture=True),
    ] = None,
    map_file: Annotated[
        Path | None,
        output_file(
            "--map",
            text="Draw how many times faster each scheme is, by rate between nodes.",
            picture=True,
        ),
    ] = None,
) -> None:
    """Compare machines: step time, throughput, and the cost of an epoch, with the best scheme."""
    start = time.monotonic()
    offers = read_offers(file)
    # Before the simulations, which may take minutes
    if figure and not offers.prices:
        raise ConfigurationError(
            f"`--figure` draws costs: {file} needs `epoch_samples` and prices."
        )
    if map_file and "between_gbit" not in offers.columns:
        raise ConfigurationError(
            f"`--map` needs rates, as `between_gbit: [1, 10]`, in each machine or above. Received "
            f"{file}."
        )
    if offers.steps > MOST_STEPS:
        raise ConfigurationError(
            f"At most {MOST_STEPS:,} simulated steps are required, as many as take an hour or two. "
            f"Received {offers.steps:,}, the product of the lists and schemes in {file}. Shorten "
            "the lists."
        )
    if offers.steps > MANY_STEPS:
        minutes = offers.steps * STEP_SECONDS / 60
        print(f"{offers.steps:,} steps to simulate: about {minutes:.0f} min.", file=sys.stderr)
    rows = offer_rows(offers)
    best = [row for row in rows if row["best"]]
    _show(best)
    seconds = time.monotonic() - start
    print(f"{plural(len(best), 'cell')}, {len(rows)} simulated steps in {seconds:.1f} s.")
    if csv_file:
        table = io.StringIO()
        writer = csv.DictWriter(table, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        write_text(csv_file, table.getvalue())
    write_rows(json_file, rows)
    if figure:
        figures.draw_machines(best, figure)
    if map_file:
        figures.draw_map(rows, map_file)


def read_offers(file: Path) -> Offers:
    """Read the user's file.

    **Raises:** ConfigurationError for an unknown key, with the nearest known one, and for a machine
    without a price if there is an epoch to pay.
    """
    content = read_keys(file)
    shared = {name: value for name, value in content.items() if name not in OWN}
    _check_settings(file, shared, OWN)
    machines, prices = {}, {}
    for name, settings in _named(file, content, "machines").items():
        machines[name] = {**shared, **settings}
        _check_settings(file, settings, ("price",))
        price = machines[name].pop("price", None)
        if price is None and "epoch_samples" not in content:
            continue
        prices[name] = check_number(f"price of {name}", price, "> 0")
    schemes = _named(file, content, "schemes") if "schemes" in content else SCHEMES
    for settings in schemes.values():
        _check_settings(file, settings)
    samples = content.get("epoch_samples")
    if prices and "epoch_samples" not in content:
        raise ConfigurationError(
            f"Prices need `epoch_samples`, the samples to pay for. Received prices of "
            f"{', '.join(prices)} in {file}. Add it, or leave the prices out."
        )
    if prices:
        samples = check_whole("epoch_samples", samples, least=1)
    return Offers(samples, prices, machines, schemes)


def offer_rows(offers: Offers) -> list[dict[str, Any]]:
    """Simulate each scheme on each number of each machine.

    Returns:
        Rows; `speedup` is over the first scheme of a cell, and between `speedup_low` and
        `speedup_high` if all messages miss their prices alike. `best` is True for the recommended
        scheme of a cell, and `unbeaten` for such a row if no other of its model beats it in time
        and cost; without prices none is.

    **Cost:** about 10 ms per row, for any number of ranks. Prints why cells have no row.
    **Raises:** ConfigurationError for settings that are out of range, and for a scheme that is
    impossible in all cells.
    """
    rows: list[dict[str, Any]] = []
    refused: dict[str, ConfigurationError] = {}
    # Reasons, in place of a set because of their order
    empty: dict[str, None] = {}
    for machine, cell in offers.cells():
        cell_rows = []
        for name, scheme in offers.schemes.items():
            settings = Settings(**{**cell, **scheme})
            try:
                _, step = simulated_step(settings)
            except ConfigurationError as error:  # Such as a scheme of two levels on one node
                refused.setdefault(name, error)
                reason = error
                continue
            cell_rows.append(_row(offers, machine, settings, name, step))
        if not cell_rows:
            empty[f"{machine} has no row for some settings. {reason}"] = None
        best = _best(cell_rows)
        for row in cell_rows:
            row.update(_speedups(cell_rows[0], row))
            row["best"] = row is best
        rows += cell_rows
    for name, refusal in refused.items():
        if name not in {row["scheme"] for row in rows}:
            raise refusal
    for note in empty:
        print(f"tfcommx: {note}", file=sys.stderr)
    rivals = [row for row in rows if row["best"]] if offers.prices else []
    return [
        {**row, "unbeaten": bool(rivals) and row["best"] and not _is_beaten(row, rivals)}
        for row in rows
    ]


def _best(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    best = None
    for row in rows:
        # Notably faster, because a difference within the error of predictions recommends nothing
        if best is None or row["step_seconds"] <= NOTABLY_FASTER * best["step_seconds"]:
            best = row
    return best


def _speedups(first: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's times faster than the first: as predicted, and where all messages miss alike.

    >>> first = {"step_seconds": 3.0, "exposed_seconds": 2.0}
    >>> _speedups(first, {"step_seconds": 1.0, "exposed_seconds": 0.0})
    {'speedup': 3.0, 'speedup_low': 2.38, 'speedup_high': 4.2}
    """

    def ratio(factor: float) -> float:
        longer, shorter = (
            float(step["step_seconds"] + (factor - 1) * step["exposed_seconds"])
            for step in (first, row)
        )
        return longer / shorter

    low, high = sorted(map(ratio, (MISSES.message_low, MISSES.message_high)))
    return {"speedup": ratio(1.0), "speedup_low": low, "speedup_high": high}


def _row(
    offers: Offers, machine: str, settings: Settings, scheme: str, step: Mapping[str, Any]
) -> dict[str, Any]:
    row = {
        "machine": machine,
        # A step's throughput is that of all ranks
        **{
            name if name not in STEP else f"set_{name}": getattr(settings, name)
            for name in offers.columns
        },
        "ranks": settings.nodes * settings.slots,
        "scheme": scheme,
        "route": step["scheme"],
        **{name: step[name] for name in STEP},
    }
    if offers.epoch_samples is None:
        return row
    epoch_s = offers.epoch_samples / step["throughput"]
    cost = epoch_s / 3600 * settings.nodes * offers.prices[machine]
    return {**row, "epoch_seconds": epoch_s, "epoch_cost": cost}


def _is_beaten(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Return True if another row is faster and not dearer, or cheaper and not slower."""
    seconds, cost = row["epoch_seconds"], row["epoch_cost"]
    rivals = [other for other in rows if other["model"] == row["model"]]
    pairs = [(rival["epoch_seconds"], rival["epoch_cost"]) for rival in rivals]
    return any(pair != (seconds, cost) and pair[0] <= seconds and pair[1] <= cost for pair in pairs)


def _named(file: Path, content: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    rows = content.get(key)
    if (
        not rows
        or not isinstance(rows, dict)
        or not all(isinstance(x, dict) for x in rows.values())
    ):
        raise ConfigurationError(
            f"`{key}` must have a row for each name, as `large: {{slots: 8}}`. Received {rows!r} "
            f"in {file}."
        )
    return {
        str(name): {str(setting).replace("-", "_"): value for setting, value in row.items()}
        for name, row in rows.items()
    }


def _check_settings(file: Path, settings: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
    # A row is named by its scheme, so that a machine has none
    known = KINDS.keys() - {"scheme"} if also else KINDS
    for name, value in settings.items():
        check_name("setting", name, [*known, *also], f"in {file}")
        if value is None or value == []:
            raise ConfigurationError(
                f"`{name}` in {file} needs a value, or a list of values. Received {value!r}."
            )


def _of_model(name: str, value: Any, cell: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):  # Otherwise a mapping from models
        return value
    model = cell.get("model", Settings().model)
    return value[check_name("model", model, list(value), f"for the values of `{name}`")]


def _show(rows: list[dict[str, Any]]) -> None:
    shown = [{"machine": row["machine"], **_cells(row)} for row in rows]
    show_rows(shown, bold=lambda position: rows[position]["unbeaten"])
    if "epoch cost" in shown[0]:
        print("* nothing else is both faster and cheaper")


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    names = list(row)
    # The settings between name and ranks, some of which only this file varies
    tells_apart = names[1 : names.index("ranks")]
    within = "-".join(f"{1e3 * row[name]:.0f}" for name in INTERVAL)
    costs = {}
    if "epoch_cost" in row:
        costs = {
            "epoch min": f"{row['epoch_seconds'] / 60:.2f}",
            "epoch cost": f"{row['epoch_cost']:.2f}" + "*" * row["unbeaten"],
        }
    return {
        **{name.replace("_", " "): row[name] for name in tells_apart},
        "scheme": row["scheme"],
        "step ms": f"{1e3 * row['step_seconds']:.0f} ({within})",
        "samples/s": f"{row['throughput']:.0f}",
        "efficiency": f"{row['scaling_efficiency']:.1%}",
        "speedup": f"{row['speedup']:.2f}",
        **costs,
    }
