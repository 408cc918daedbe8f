"""`tfcommx machines`: which machines, and how many of them, to rent for a training."""

from __future__ import annotations

import csv
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tfcommx.cli.simulate import INTERVAL, KINDS, Settings, read_keys, simulated_step
from tfcommx.core import ConfigurationError, check_name, check_whole, replacing

# Compared where the file names none: they lose nothing, and the first is plain Horovod's
SCHEMES: dict[str, dict[str, Any]] = {"horovod": {}, "torus": {"scheme": "torus"}}
# A scheme is better than those before it in the file if its step takes at most this share of
# theirs: predictions are not exact, and who names a scheme later may like it less.
NOTABLY_FASTER = 0.97
# What the file has besides settings of a simulation
OWN = ("machines", "schemes", "epoch_samples")
# In every row, whether the file lists several or one
ALWAYS = ("model", "nodes", "slots")


class Offers(NamedTuple):
    """The file of a user: machines, and what is to be trained on them."""

    # Samples of an epoch, >= 1.
    epoch_samples: int
    # Name -> price of a node per hour, > 0.
    prices: dict[str, float]
    # Name -> its settings; a list holds several values, a mapping one value for each model.
    machines: dict[str, dict[str, Any]]
    # Name -> its settings.
    schemes: dict[str, dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        """Settings that tell cells apart."""
        listed = [
            name
            for machine in self.machines.values()
            for name, value in machine.items()
            if isinstance(value, list)
        ]
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
        Path, typer.Argument(help="YAML file of machines, their prices, and what to train.")
    ],
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write all rows, of all schemes.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw cost over time, and the efficiency: .svg or .png.")
    ] = None,
) -> None:
    """Compare machines: step time, throughput, and what an epoch costs, with the best scheme."""
    start = time.monotonic()
    rows = offer_rows(read_offers(file))
    best = [row for row in rows if row["best"]]
    _show(best)
    print(f"{len(best)} cells, {len(rows)} simulated steps in {time.monotonic() - start:.1f} s.")
    if csv_file:
        with replacing(csv_file) as part, part.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if figure:
        from tfcommx.report.figures import draw_machines

        draw_machines(best, figure)


def read_offers(file: Path) -> Offers:
    """Read the file of a user.

    **Raises:** ConfigurationError for a key that is not known, with the nearest one, and for a
    machine without a price.
    """
    found = read_keys(file)
    shared = {name: value for name, value in found.items() if name not in OWN}
    _check_settings(file, shared, OWN)
    machines, prices = {}, {}
    for name, settings in _named(file, found, "machines").items():
        price = settings.pop("price", None)
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e12:
            raise ConfigurationError(
                f"`price`, of a node per hour and > 0, is required of each machine. Received "
                f"{price!r} of {name!r}."
            )
        prices[name], machines[name] = float(price), {**shared, **settings}
        _check_settings(file, settings, ("price",))
    schemes = _named(file, found, "schemes") if "schemes" in found else SCHEMES
    for settings in schemes.values():
        _check_settings(file, settings, ())
    samples = check_whole("epoch_samples", found.get("epoch_samples"), least=1)
    return Offers(samples, prices, machines, schemes)


def offer_rows(offers: Offers) -> list[dict[str, Any]]:
    """Simulate each scheme on each number of each machine.

    A scheme is left out where it cannot be carried out, such as on one node.

    Returns:
        Rows; `speedup` is over the first scheme of a cell. `best` is the scheme to take in its
        cell, and `unbeaten` one of these if none of its model is faster and cheaper.

    **Cost:** some 10 ms for each row, however many ranks.
    **Raises:** ConfigurationError for settings that are out of range, and for a scheme that can be
    carried out nowhere.
    """
    rows: list[dict[str, Any]] = []
    refused: dict[str, ConfigurationError] = {}
    for machine, cell in offers.cells():
        found = []
        for name, scheme in offers.schemes.items():
            settings = Settings(**{**cell, **scheme})
            try:
                _, step = simulated_step(settings)
            except ConfigurationError as error:
                refused.setdefault(name, error)
                continue
            found.append(_row(offers, machine, settings, name, step))
        best = _best(found)
        for row in found:
            row["speedup"] = found[0]["step_seconds"] / row["step_seconds"]
            row["best"] = row is best
        rows += found
    for name, refusal in refused.items():
        if name not in {row["scheme"] for row in rows}:
            raise refusal
    best_ones = [row for row in rows if row["best"]]
    return [{**row, "unbeaten": row["best"] and not _is_beaten(row, best_ones)} for row in rows]


def _best(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first row that no later one is notably faster than."""
    best = None
    for row in found:
        if best is None or row["step_seconds"] <= NOTABLY_FASTER * best["step_seconds"]:
            best = row
    return best


def _row(
    offers: Offers, machine: str, settings: Settings, scheme: str, step: Mapping[str, Any]
) -> dict[str, Any]:
    epoch_s = offers.epoch_samples / step["throughput"]
    return {
        "machine": machine,
        **{name: getattr(settings, name) for name in offers.columns},
        "ranks": settings.nodes * settings.slots,
        "scheme": scheme,
        **{name: step[name] for name in ("step_seconds", *INTERVAL)},
        "throughput": step["throughput"],
        "scaling_efficiency": step["scaling_efficiency"],
        "bytes_between": step["bytes_between"],
        "epoch_seconds": epoch_s,
        "epoch_cost": epoch_s / 3600 * settings.nodes * offers.prices[machine],
    }


def _is_beaten(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Tell whether another one is faster and no dearer, or cheaper and no slower."""
    mine = row["epoch_seconds"], row["epoch_cost"]
    return any(
        other["model"] == row["model"]
        and (other["epoch_seconds"], other["epoch_cost"]) != mine
        and other["epoch_seconds"] <= mine[0]
        and other["epoch_cost"] <= mine[1]
        for other in rows
    )


def _named(file: Path, found: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """Return the settings below a key, by name."""
    rows = found.get(key)
    if (
        not isinstance(rows, dict)
        or not rows
        or not all(isinstance(x, dict) for x in rows.values())
    ):
        raise ConfigurationError(
            f"`{key}` must have a row for each name, as `large: {{slots: 8}}`. Received {rows!r} "
            f"in {file}."
        )
    return {
        str(name): {str(one).replace("-", "_"): value for one, value in row.items()}
        for name, row in rows.items()
    }


def _check_settings(file: Path, settings: Mapping[str, Any], also: tuple[str, ...]) -> None:
    for name, value in settings.items():
        check_name(f"setting in {file}", name, [*KINDS, *also])
        if value is None or value == []:
            raise ConfigurationError(
                f"`{name}` in {file} needs a value, or a list of values. Received {value!r}."
            )


def _of_model(name: str, value: Any, cell: Mapping[str, Any]) -> Any:
    """Return the value of the cell's model, of a mapping from models."""
    if not isinstance(value, dict):
        return value
    return value[check_name(f"model of {name}", cell.get("model", Settings().model), list(value))]


def _show(rows: list[dict[str, Any]]) -> None:
    """Print the best row of each cell; those that nothing beats bold, and with a star."""
    from rich.table import Table

    from tfcommx.report.terminal import terminal_console

    shown = [{"machine": row["machine"], **_cells(row)} for row in rows]
    table = Table(box=None)
    for name in shown[0]:
        table.add_column(name, justify="right")
    for row, cells in zip(rows, shown, strict=True):
        table.add_row(*map(str, cells.values()), style="bold" if row["unbeaten"] else None)
    terminal_console().print(table)
    print("* nothing else is both faster and cheaper")


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is printed of a row."""
    names = list(row)
    tells_apart = names[1 : names.index("ranks")]
    within = "-".join(f"{1e3 * row[name]:.0f}" for name in INTERVAL)
    return {
        **{name.replace("_", " "): row[name] for name in tells_apart},
        "scheme": row["scheme"],
        "step ms": f"{1e3 * row['step_seconds']:.0f} ({within})",
        "samples/s": f"{row['throughput']:.0f}",
        "efficiency": f"{row['scaling_efficiency']:.1%}",
        "speedup": f"{row['speedup']:.2f}",
        "epoch min": f"{row['epoch_seconds'] / 60:.2f}",
        "epoch cost": f"{row['epoch_cost']:.2f}" + "*" * row["unbeaten"],
    }
