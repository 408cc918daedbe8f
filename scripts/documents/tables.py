"""The tables of the pages, each a function of the records: name -> Markdown.

A page has the name between two marker lines, `<!--table NAME-->` and `<!--/table-->`; figures.py
writes the table between them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# Heading -> a cell of a row; None: empty
Columns = Mapping[str, Callable[[Row], str | None]]


class FigureError(Exception):
    """A page or a table that names no table, record, row or column."""


class Records:
    """The records by name, as docs/records has them."""

    def __init__(self, contents: Iterable[Mapping[str, Any]]) -> None:
        self._contents = {one["name"]: one for one in contents}

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        try:
            return self._contents[name]
        except KeyError:
            has = ", ".join(self._contents) or "none"
            raise FigureError(f"No record is called {name!r}. Records: {has}.") from None

    def rows(self, record: str, **where: Any) -> list[Row]:
        """Return the rows of a record with these values."""
        rows: list[Row] = self[record]["rows"]
        return [row for row in rows if all(row.get(key) == one for key, one in where.items())]

    def row(self, record: str, name: str | None = None, **where: Any) -> Row:
        """Return the one row of a record with this name and these values."""
        if name is not None:
            where["name"] = name
        rows = self.rows(record, **where)
        if len(rows) != 1:
            raise FigureError(
                f"One row of {record!r} with {where} is required; it has {len(rows)}."
            )
        return rows[0]


def value(name: str, form: str, factor: float = 1) -> Callable[[Row], str | None]:
    """Return a column: a value of the row in Python's format, times a factor."""

    def cell(row: Row) -> str | None:
        if name not in row:
            raise FigureError(f"A row has no {name!r}. It has {', '.join(row)}.")
        found = row[name]
        if found is None:
            return None
        return format(found if factor == 1 else found * factor, form)

    return cell


def markdown(rows: Iterable[Row], columns: Columns) -> str:
    """Return a table; the first column is text, the others are numbers."""
    return of_cells(columns, ([cell(row) or "" for cell in columns.values()] for row in rows))


def of_cells(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells; the first column is text, the others are numbers."""
    heads = list(headings)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *map(list, rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


TIMES: Columns = {
    "ms": value("seconds", ".0f", 1e3),
    "lowest": value("lowest_seconds", ".0f", 1e3),
    "highest": value("highest_seconds", ".0f", 1e3),
    "repeats": value("repeats", "d"),
}
STEPS: Columns = {
    "simulated, ms": value("predicted_seconds", ".0f", 1e3),
    "MB between nodes": value("bytes_between", ".1f", 1e-6),
}


def training(records: Records) -> str:
    """Return steps of ResNet-50 under several schemes."""
    horovod = records.row("training", "horovod")["seconds"]
    return markdown(
        records.rows("training"),
        {
            "scheme": value("name", "s"),
            **TIMES,
            "plain Horovod / this": lambda row: f"{horovod / row['seconds']:.1f}",
            **STEPS,
        },
    )


def training_of(record: str) -> Callable[[Records], str]:
    """Return steps of ResNet-50 by density, from a record."""
    columns = {"scheme, density": value("name", "s"), **TIMES, **STEPS}
    return lambda records: markdown(records.rows(record), columns)


def seeds_of(record: str, unit: str, loss: str) -> Callable[[Records], str]:
    """Return scores of methods over seeds, from a record."""
    columns: Columns = {
        "method": value("name", "s"),
        "seeds": value("seeds", "d"),
        unit: value("mean", ".2f"),
        "standard deviation": value("spread", ".2f"),
        f"loss, {loss}": value("loss", "+.2f"),
        "bytes": value("bytes_share", ".2f", 100),
    }
    return lambda records: markdown(records.rows(record, bandwidth_mbit=200), columns)


def compare_methods(records: Records) -> str:
    """Return methods at equal bytes and at equal time."""

    def at(mbit: int, name: str, form: str, factor: float = 1) -> Callable[[Row], str | None]:
        of_row = value(name, form, factor)
        return lambda row: of_row(records.row("compare_methods", row["name"], bandwidth_mbit=mbit))

    return markdown(
        records.rows("compare_methods", bandwidth_mbit=200),
        {
            "method": value("name", "s"),
            "accuracy, %": value("mean", ".2f"),
            "loss, points": value("loss", "+.2f"),
            "bytes": value("bytes_share", ".1f", 100),
            "with 3 % of dense's bytes": value("within_3_percent_of_bytes", ".2f"),
            "with 10 %": value("within_10_percent_of_bytes", ".2f"),
            "a step at 200 Mbit/s, ms": value("step_seconds", ".0f", 1e3),
            "at 1 Gbit/s": at(1000, "step_seconds", ".0f", 1e3),
            "at 10 Gbit/s": at(10000, "step_seconds", ".0f", 1e3),
            "in 25 % of dense's time, 200 Mbit/s": value("within_25_percent_of_time", ".2f"),
            "1 Gbit/s": at(1000, "within_25_percent_of_time", ".2f"),
        },
    )


def local_updates(records: Records) -> str:
    """Return steps of weight averaging with fragments and overlap."""
    return markdown(
        records.rows("local_updates"),
        {
            "fragments / overlap": value("name", "s"),
            "mean step, ms": value("seconds", ".0f", 1e3),
            "to no exchange": value("ratio", ".2f"),
            "longest step, ms": value("longest_step", ".0f", 1e3),
            "MB a step": value("bytes_between", ".1f", 1e-6),
        },
    )


def frameworks(records: Records) -> str:
    """Return steps of other frameworks on the same network."""
    return markdown(
        records.rows("frameworks"),
        {
            "setting": value("name", "s"),
            "a step, s": value("step_seconds", ".2f"),
            "lowest": value("lowest_seconds", ".2f"),
            "highest": value("highest_seconds", ".2f"),
            "to no exchange": value("to_alone", ".2f"),
            "MB a node sends": value("bytes_sent", ".1f", 1e-6),
        },
    )


def predicted(records: Records) -> str:
    """Return predicted steps on faster networks, dense and sparse."""

    def sparse_s(row: Row) -> float:
        rate = row["between_gbit"]
        return float(records.row("predicted_sparse", "hitopk", between_gbit=rate)["step_seconds"])

    return markdown(
        records.rows("predicted_dense"),
        {
            "between nodes, Gbit/s": value("between_gbit", "d"),
            "everything by allreduce, ms": value("step_seconds", ".0f", 1e3),
            "1 % by hitopk, ms": lambda row: f"{1e3 * sparse_s(row):.0f}",
            "compute alone, ms": value("compute_seconds", ".0f", 1e3),
            "faster": lambda row: f"{row['step_seconds'] / sparse_s(row):.2f}",
        },
    )


def routes(records: Records) -> str:
    """Return one exchange by each route."""
    plain = records.row("routes", "allreduce plain")["seconds"]
    return markdown(
        records.rows("routes"),
        {
            "route, wire": value("name", "s"),
            **TIMES,
            "over its limit": value("times_limit", ".2f"),
            "allreduce / this": lambda row: f"{plain / row['seconds']:.1f}",
            "MB sent per rank between nodes": value("wire_bytes", ".2f", 1e-6),
        },
    )


def step(records: Records) -> str:
    """Return a step beside plain Horovod's."""
    columns = {"name": value("name", "s"), **TIMES, "ratio": value("ratio", ".3f")}
    return markdown(records.rows("step"), columns)


def select(records: Records) -> str:
    """Return selections beside the addition of the residual."""

    def over_addition(row: Row) -> str:
        addition = records.row("select", "residual_add", density=row["density"])
        return f"{row['seconds'] / addition['seconds']:.2f}"

    return markdown(
        records.rows("select"),
        {
            "rule": value("name", "s"),
            "k / n": value("density", "g"),
            "ms": value("seconds", ".2f", 1e3),
            "lowest": value("lowest_seconds", ".2f", 1e3),
            "highest": value("highest_seconds", ".2f", 1e3),
            "repeats": value("repeats", "d"),
            "over the addition": over_addition,
        },
    )


def data(records: Records) -> str:
    """Return images a second from several input pipelines."""
    return markdown(
        records.rows("data"),
        {
            "pipeline": value("name", "s"),
            "pixels": value("n", "d"),
            "images": value("images", ","),
            "images a second": value("images_per_second", ","),
            "images a CPU second": value("images_per_cpu_second", ","),
            "memcpy alone": value("limit_images_per_second", ","),
        },
    )


def input_pipelines(records: Records) -> str:
    """Return images per CPU second of the DataCache and of other frameworks, best first."""
    rows = records.rows("input_pipelines")
    return markdown(
        sorted(rows, key=lambda row: (-row["n"], -row["images_per_cpu_second"])),
        {
            "pipeline": value("name", "s"),
            "pixels": value("n", "d"),
            "images a CPU second": value("images_per_cpu_second", ","),
            "lowest epoch": value("lowest", ","),
            "highest": value("highest", ","),
            "times fewer than the DataCache": value("datacache_is", ".1f"),
            "images a second": value("images_per_second", ","),
            "first epoch, CPU s": value("first_cpu_seconds", ".1f"),
            "memory, MiB": value("memory_bytes", ",.0f", 2**-20),
            "on disk, MiB": value("disk_bytes", ",.0f", 2**-20),
        },
    )


def versions(records: Records) -> str:
    """Return the versions that were tested."""
    return markdown(
        records.rows("versions"),
        {
            "Python": value("python", "s"),
            "TensorFlow": value("tensorflow", "s"),
            "Keras": value("keras", "s"),
            "Horovod": value("horovod", "s"),
            "set-up, s": value("setup_seconds", "d"),
            "demo, accuracy": value("demo_accuracy", ".4f"),
            "tests passed": value("passed", "d"),
            "failed": lambda row: str(row["failed"] + row["error"]),
            "commit": value("commit", "s"),
        },
    )


def losses(records: Records) -> str:
    """Return the times and results of a supervised run after each kind of fault."""

    def yes(name: str) -> Callable[[Row], str]:
        return lambda row: {True: "yes", False: "no", None: ""}[row[name]]

    return markdown(
        records.rows("losses"),
        {
            "setup": value("setup", "s"),
            "fault": value("fault", "s"),
            "load before": value("load", ".0f"),
            "cold start, s": value("cold_start", ".1f"),
            "continued": yes("went_on"),
            "ranks have ended after, s": value("detected", ".1f"),
            "next step after, s": value("next_step", ".1f"),
            "steps repeated": value("repeated", "d"),
            "from": value("source", "s"),
            "ranks afterwards": value("ranks_after", "d"),
            "same bits": yes("same_bits"),
        },
    )


def changing_network(records: Records) -> str:
    """Return steps before and after the network changes in mid-run."""
    return markdown(
        records.rows("changing_network"),
        {
            "scheme": value("scheme", "s"),
            "before, ms": value("before", ".0f", 1e3),
            "after, ms": value("after", ".0f", 1e3),
            "over the fastest, before": value("before_to_best", ".2f"),
            "after": value("after_to_best", ".2f"),
            "chosen again after, s": value("waited", ".0f"),
        },
    )


def training_4x1(records: Records) -> str:
    """Return measured and predicted steps at 200 Mbit/s on 4 nodes of 1."""
    rows = records.rows("training_4x1", rate_mbit=200)
    return markdown(
        [row for row in rows if row["scheme"] != "none"],
        {
            "scheme": value("name", "s"),
            "model": value("model", "s"),
            "measured": value("step_seconds", ".0f", 1e3),
            "predicted": value("predicted_seconds", ".0f", 1e3),
            "error": lambda row: f"{row['predicted_seconds'] / row['step_seconds'] - 1:+.0%}",
            "over plain Horovod": value("ratio", ".2f"),
            "MB between nodes": value("bytes_between", ".2f", 1e-6),
        },
    )


# --- The same setting's accuracy, bytes and step ----------------------------------------------

# Record of seed 0 -> name of the setting; the record of seed 1 ends with _seed1
SETTINGS = {
    "dense": "dense",
    "float16": "dense in 16 bits, `wire: float16`",
    "demo": "the demo: 10 % in every epoch, `elias/int4`",
    "one_percent": "1 % in every epoch",
    "four_percent": "4 % in every epoch, `block16/float16`",
    "short_dense_end": "1 % after a warm-up, dense in the last 2 epochs",
    "dense_end": "1 % after a warm-up, dense in the last 6 epochs",
}


def accuracies(records: Records, setting: str) -> list[float]:
    """Return the test accuracies of seeds 0 and 1."""
    return [float(records.row(name)["test_accuracy"]) for name in (setting, f"{setting}_seed1")]


def step_of_settings(records: Records) -> dict[str, float]:
    """Return seconds of ResNet-50's step at 200 Mbit/s for settings that stay the same."""
    return {
        setting: float(records.row(record, name)["seconds"])
        for setting, record, name in (
            ("dense", "training", "horovod"),
            ("float16", "training", "allreduce float16"),
            ("demo", "training_short_wire", "hitopk elias/int4 0.1"),
            ("one_percent", "training", "auto sparse"),
            ("four_percent", "training_densities", "hitopk block16/float16 0.04"),
        )
    }


# Row of the README's table -> row of its step, and record and row of its accuracy
GAINS = {
    "plain Horovod: everything": ("horovod", "compare_low_bit", "dense"),
    'everything in 16 bits, `wire="float16"`': (
        *("allreduce float16", "compare_four_nodes", "float16"),
    ),
    'everything in 4 bits, `wire="int4"`': ("asa int4", "compare_low_bit", "int4"),
    '10 % of the entries, `wire="elias/int4"`': (
        *("hitopk elias/int4 0.1", "compare_four_nodes", "elias_int4"),
    ),
}


def gains(records: Records) -> str:
    """Return the README's table: bytes, step and accuracy on 4 nodes of 1."""
    plain, rows = records.row("training_gains", "horovod"), []
    for name, (step_of, record, accuracy_of) in GAINS.items():
        step = records.row("training_gains", step_of)
        score = records.row(record, accuracy_of, bandwidth_mbit=200)
        rows.append(
            [
                name,
                f"{100 * step['bytes_between'] / plain['bytes_between']:.1f} %",
                f"{step['seconds']:.2f} s",
                f"{plain['seconds'] / step['seconds']:.1f}",
                f"{score['mean']:.2f} ± {score['spread']:.2f} %",
            ]
        )
    return of_cells(("sent", "bytes", "step", "times faster", "accuracy"), rows)


def settings(records: Records) -> str:
    """Return accuracy and bytes of each setting, by seed."""
    dense, rows = statistics.fmean(accuracies(records, "dense")), []
    for setting, name in SETTINGS.items():
        first, second = accuracies(records, setting)
        mean = statistics.fmean((first, second))
        loss = "" if setting == "dense" else f"{100 * (mean - dense):+.2f}"
        share = f"{100 * records.row(setting)['bytes_share']:.1f} %"
        rows.append([name, share, f"{first:.4f}", f"{second:.4f}", f"{mean:.4f}", loss])
    heads = ("setting", "bytes", "accuracy, seed 0", "seed 1", "mean", "against dense, points")
    return of_cells(heads, rows)


def time_to_accuracy(records: Records) -> str:
    """Return steps and minutes to an accuracy, on 4 nodes of 1."""
    seconds, rows = step_of_settings(records), []
    for name, method, setting in (
        ("plain Horovod", "dense", "dense"),
        ("Horovod in 16 bits", "float16", "float16"),
        ("10 %, `elias/int4`", "elias_int4", "demo"),
    ):
        row = records.row("compare_four_nodes", method, bandwidth_mbit=200)
        steps = row["seconds_to_target"] / row["step_seconds"]
        share = 100 * row["bytes_share"]
        bytes_sent = f"{share:.1f}" if share < 10 else f"{share:.0f}"
        minutes = steps * seconds[setting] / 60
        cells = [f"{bytes_sent} %", f"{row['mean']:.2f}", f"{steps:.0f}"]
        rows.append([name, *cells, f"{seconds[setting]:.2f}", f"{minutes:.0f}"])
    heads = ("method", "bytes", "accuracy, %", "steps to the target", "measured step, s")
    return of_cells((*heads, "time to the target, minutes"), rows)


# --- Steps on nine virtual clusters -------------------------------------------------------------

MODELS = ("convolutional", "transformer", "embedding")
BY_HAND = ("hitopk block16/float16", "allgather block16/float16")


def clusters(records: Records) -> str:
    """Return errors of predictions, and the time of "auto", by nodes, slots and Mbit/s."""
    rows = [
        row
        for record in ("training_4x1", "training_4x2", "training_8x1")
        for row in records.rows(record)
        if row["scheme"] != "none"
    ]
    clusters_of_rows = dict.fromkeys((row["nodes"], row["slots"], row["rate_mbit"]) for row in rows)
    cells = []
    for nodes, slots, rate in clusters_of_rows:
        here = [
            row
            for row in rows
            if (row["nodes"], row["slots"], row["rate_mbit"]) == (nodes, slots, rate)
        ]
        ratios = {(row["model"], row["scheme"]): row["ratio"] for row in here}
        errors = _errors(here), _errors([row for row in here if row["scheme"] in DENSE])
        auto = [ratios.get((model, "auto")) for model in MODELS]
        torus = [ratios.get((model, "torus")) for model in MODELS]
        sparse = [ratios.get((model, "auto sparse")) for model in MODELS]
        hand = [
            min((ratios[model, name] for name in BY_HAND if (model, name) in ratios), default=None)
            for model in MODELS
        ]
        over_dense = [
            _over(one, other and min(1, other)) for one, other in zip(auto, torus, strict=True)
        ]
        over_hand = [_over(one, other) for one, other in zip(sparse, hand, strict=True)]
        cells.append(
            [
                f"{nodes} x {slots}",
                f"{rate:,.0f}",
                *(text for found in errors for text in found),
                *map(_ratios, (auto, over_dense, over_hand, sparse)),
            ]
        )
    heads = (
        "nodes x slots",
        "Mbit/s",
        "median error",
        "largest",
        "dense: median",
        "dense: largest",
    )
    more = (
        *("`auto` / plain Horovod", "`auto` / best dense"),
        *("`auto sparse` / best by hand", "`auto sparse` / plain Horovod"),
    )
    return of_cells((*heads, *more), cells)


DENSE = ("horovod", "torus", "auto")


def _errors(rows: Sequence[Row]) -> tuple[str, str]:
    errors = [abs(row["predicted_seconds"] / row["step_seconds"] - 1) for row in rows]
    return f"{statistics.median(errors):.1%}", f"{max(errors):.0%}"


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _ratios(ratios: Sequence[float | None]) -> str:
    if all(ratio is None for ratio in ratios):
        return ""
    return ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)


TABLES: Mapping[str, Callable[[Records], str]] = {
    "gains": gains,
    "settings": settings,
    "time_to_accuracy": time_to_accuracy,
    "training": training,
    "training_densities": training_of("training_densities"),
    "training_short_wire": training_of("training_short_wire"),
    "compare_methods": compare_methods,
    "compare_three_seeds": seeds_of("compare_three_seeds", "accuracy, %", "points"),
    "compare_glosses": seeds_of("compare_glosses", "accuracy, %", "points"),
    "compare_dawnbench": seeds_of("compare_dawnbench", "accuracy, %", "points"),
    "compare_translate": seeds_of("compare_translate", "BLEU", "BLEU"),
    "compare_translate_rate": seeds_of("compare_translate_rate", "BLEU", "BLEU"),
    "local_updates": local_updates,
    "frameworks": frameworks,
    "predicted": predicted,
    "routes": routes,
    "step": step,
    "select": select,
    "data": data,
    "input_pipelines": input_pipelines,
    "versions": versions,
    "losses": losses,
    "changing_network": changing_network,
    "training_4x1": training_4x1,
    "clusters": clusters,
}
