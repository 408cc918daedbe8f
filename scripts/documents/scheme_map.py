"""The tables of docs/how-to/choose-a-scheme.md and docs/laboratory/scheme_map.md, and CommLib's.

A cell of the map is a model on a number of nodes of one kind, at one rate between them. In each the
fastest scheme is recommended of those that lose no more than the reader accepts; one that stands
later in `ACCEPTED` must be notably faster to be taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping

from tables import Records, Row, of_cells

from tfcommx.planner.choose import NOTABLY_FASTER
from tfcommx.planner.predict import MISSES
from tfcommx.simulator import models
from tfcommx.simulator.throughputs import PUBLISHED

LOSSLESS = ("plain Horovod", "torus", "lossless")
# Accepted loss -> schemes of docs/records/scheme_map.yaml
ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "lossless": LOSSLESS,
    "8 or 4 bits an entry": (*LOSSLESS, "8 bits", "4 bits"),
    "1 bit, `OneBitAdam`": (*LOSSLESS, "1 bit"),
    "10 % of the entries": (*LOSSLESS, "10 %"),
    "1 % of the entries": (*LOSSLESS, "1 %"),
}
CODE = {
    **{"plain Horovod": "`Scheme()`", "torus": '`Scheme("torus")`', "lossless": '`Scheme("auto")`'},
    **{"8 bits": "`int8`", "4 bits": "`int4`", "1 bit": "`int1`"},
    **{"10 %": "`elias/int4`", "1 %": "`elias/int8`"},
}
HEADS = {"machine": "GPU", "between_gbit": "Gbit/s", "nodes": "nodes"}
NAMES = {
    "resnet50": "ResNet-50",
    "vgg19": "VGG-19",
    "bert_large": "BERT-Large",
    "transformer_big": "Transformer",
    "gpt2_xl": "GPT-2, 1.5 B",
}


def recommended(cell: Row, schemes: Iterable[str]) -> str:
    """Return the scheme of a cell: the fastest, unless an earlier one is about as fast."""
    best, best_s = "", float("inf")
    for scheme in schemes:
        step_s = cell["compute_seconds"] + cell["exposed_seconds"][scheme]
        if step_s <= NOTABLY_FASTER * best_s:
            best, best_s = scheme, step_s
    return best


def times_faster(cell: Row, scheme: str, than: str = "plain Horovod", miss: float = 1.0) -> float:
    """Return a step over another; all messages take `miss` times as long as predicted."""
    slow_s, fast_s = (
        cell["compute_seconds"] + miss * cell["exposed_seconds"][name] for name in (than, scheme)
    )
    return float(slow_s / fast_s)


def _summary(cells: list[Row], schemes: Iterable[str]) -> str:
    """Return the scheme that most cells recommend, and how many times faster the cells are."""
    chosen = [recommended(cell, schemes) for cell in cells]
    gains = sorted(map(times_faster, cells, chosen))
    least, most = f"{gains[0]:.1f}", f"{gains[-1]:.1f}"
    return f"{CODE[statistics.mode(chosen)]}, {least}" + (f" to {most}" if most != least else "")


def grouped(rates: Iterable[float], *names: str) -> Callable[[Records], str]:
    """Return the table of recommendations for each group of cells with equal values of `names`."""

    def table(records: Records) -> str:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for cell in records.rows("scheme_map"):
            if cell["between_gbit"] in rates:
                key = tuple(str(cell[name]).upper().removesuffix(".0") for name in names)
                groups.setdefault(key, []).append(cell)
        rows = [
            [*key, *(_summary(cells, schemes) for schemes in ACCEPTED.values())]
            for key, cells in groups.items()
        ]
        rows.sort(key=lambda row: (row[0].zfill(4), float(row[1])))
        return of_cells((*(HEADS[name] for name in names), *ACCEPTED), rows)

    return table


def by_model(records: Records) -> str:
    """Return times faster for each model and GPU, with the range of missed messages."""

    def gain(cell: Row, scheme: str, than: str = "plain Horovod") -> str:
        misses = (MISSES.message_low, MISSES.message_high)
        low, high = sorted(times_faster(cell, scheme, than, miss) for miss in misses)
        return f"{times_faster(cell, scheme, than):.1f} ({low:.1f}-{high:.1f})"

    rows = []
    for cell in records.rows("scheme_map", nodes=16, between_gbit=25):
        step_s = cell["compute_seconds"] + cell["exposed_seconds"]["plain Horovod"]
        gains = [gain(cell, recommended(cell, schemes)) for schemes in ACCEPTED.values()]
        four_bits = gain(cell, recommended(cell, ACCEPTED["8 or 4 bits an entry"]), "torus")
        name = f"{NAMES[cell['model']]}, {cell['machine'].upper()}"
        rows.append([name, f"{1e3 * step_s:.0f}", *gains, four_bits])
    heads = ("plain Horovod, ms", *ACCEPTED, "8 or 4 bits, times faster than `torus`")
    return of_cells(("model, GPU", *heads), rows)


def throughputs(records: Records) -> str:
    """Return the published throughputs, with their sources; no record has them."""
    rows = []
    for (gpu, model), row in PUBLISHED.items():
        table = models.get(model, row.size)
        address, _, place = row.source.rpartition(": ")
        source = f"[{place}]({address})" if address else row.source
        rate = f"{row.samples_per_second(table):.4g}"
        name = f"{gpu.upper()}, {NAMES[model]}, {table.sample}"
        rows.append([name, rate, str(row.batch), source, row.note])
    return of_cells(("GPU, model, sample", "samples/s", "batch", "source", "derivation"), rows)


def commlib(records: Records) -> str:
    """Return steps on CommLib's cluster, as published and as predicted, misses included."""
    rows = []
    columns = ("published_s", "nominal_s", "calibrated_s")
    for row in records.rows("commlib"):
        if row["nominal_s"] is None:
            continue
        model, _, system = row["name"].partition(", ")
        published, *predicted = (row[name] for name in columns)
        (dense,) = records.rows("commlib", name=f"{model}, Dense") or [{}]
        cells = [f"{1e3 * published:.0f}"]
        cells += [f"{1e3 * x:.0f} ({x / published - 1:+.0%})" for x in predicted]
        cells += [f"{dense[name] / row[name]:.2f}" if dense else "" for name in columns]
        rows.append([f"{model}, {system}", *cells])
    heads = ("measured, ms", "predicted, nominal", "calibrated")
    over = ("times faster than Dense: measured", "nominal", "calibrated")
    return of_cells(("row", *heads, *over), rows)


TABLES: Mapping[str, Callable[[Records], str]] = {
    "map_by_rate": grouped((1, 5, 10, 25, 50, 100, 200), "machine", "between_gbit"),
    "map_by_nodes": grouped((10, 100), "between_gbit", "nodes"),
    "map_by_model": by_model,
    "throughputs": throughputs,
    "commlib": commlib,
}
