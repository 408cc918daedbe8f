"""Predicts tables 1 and 3 of Theano-MPI; see theano_mpi.yaml.

python scripts/reproduce/theano_mpi.py
"""

from __future__ import annotations

from typing import Any

from reproduction import CALIBRATED, SCORED, main, read, row, verdict

from tfcommx import routes
from tfcommx.core import EngineSettings, Link, Links, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.simulator import models

SCHEMES = {
    "AR": Scheme("allreduce", merging="each"),
    "ASA": Scheme("asa", merging="each"),
    "ASA16": Scheme("asa", merging="each", wire="float16"),
}
RANKS = 8
# So small that it adds nothing to a latency term
NO_BETA = 1e-30
# Cluster -> (alpha, beta); the ratio of AR's beta to ASA's
Constants = tuple[dict[str, tuple[float, float]], float]


def price(model: str, column: str, ranks: int, alpha_s: float, beta: float) -> float:
    """Return the seconds of the messages of one step, array by array."""
    topology, link = Topology(ranks, 1), Link(alpha_s, beta)
    gradients = [
        Gradient(f"{layer.name}/{name}", shape, "float32")
        for layer in models.get(model).layers
        for name, shape in layer.variables
    ]
    plan = make_plan(gradients, {"*": SCHEMES[column]}, topology)
    links = Links(link, link, engine=EngineSettings("open_mpi_1"))
    return sum(routes.get(bucket.route).seconds(bucket, topology, links) for bucket in plan.buckets)


def messages(
    data: dict[str, Any], name: str, column: str, known: Constants, ranks: int = RANKS
) -> float:
    """Return the seconds of all messages for 5,120 images."""
    about, (clusters, over_asa) = data["table_3"][name], known
    alpha_s, beta = clusters[about["cluster"]]
    beta *= over_asa if column == "AR" else 1.0
    steps = data["images"] / about["batch"] / ranks
    return steps * price(about["model"], column, ranks, alpha_s, beta)


def of_one_step(data: dict[str, Any], name: str, column: str) -> float:
    """Return the published seconds of the messages of one step."""
    about = data["table_3"][name]
    total = about["messages"][data["columns"].index(column)]
    return total * about["batch"] * RANKS / data["images"]


def calibrate(data: dict[str, Any]) -> Constants:
    """Return the constants that the calibration rows set: prices are linear in alpha and beta."""

    def parts(name: str, column: str) -> tuple[float, float, float]:
        model = data["table_3"][name]["model"]
        latency = price(model, column, RANKS, 1.0, NO_BETA)
        return latency, price(model, column, RANKS, 0.0, 1.0), of_one_step(data, name, column)

    rows = data["calibrated"]
    (a, b, first), (c, d, second) = (parts(one["row"], one["column"]) for one in rows["mosaic"])
    beta = (a * second - c * first) / (a * d - c * b)
    alpha_s = (first - b * beta) / a
    e, f, copper = parts(*rows["copper"].values())
    g, h, reduced = parts(*rows["allreduce_over_asa"].values())
    clusters = {"mosaic": (alpha_s, beta), "copper": (alpha_s, (copper - e * alpha_s) / f)}
    return clusters, (reduced - g * alpha_s) / h / beta


def nominal(data: dict[str, Any]) -> Constants:
    """Return the assumed constants."""
    known = data["assumed"]
    clusters = {
        name: (known[name]["alpha_s"], 1e-9 / known[name]["gbytes"])
        for name in ("mosaic", "copper")
    }
    return clusters, known["allreduce_over_asa"]


def run() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and the verdict; seconds are those of 5,120 images."""
    data = read("theano_mpi")
    both, rows = (nominal(data), calibrate(data)), []
    wanted = data["calibrated"]
    used = [*wanted["mosaic"], wanted["copper"], wanted["allreduce_over_asa"]]
    for name, about in data["table_3"].items():
        train = about["train"][1]
        for column, seconds in zip(data["columns"], about["messages"], strict=True):
            found = (train + messages(data, name, column, known) for known in both)
            role = CALIBRATED if {"row": name, "column": column} in used else SCORED
            rows.append(
                row("theano_mpi", f"{name}, {column}", train + seconds, *found, train, role)
            )
    for name, about in data["table_1"].items():
        for ranks, train, speedup in zip((2, 4), about["train"][1:], about["speedup"], strict=True):
            found = (train + messages(data, name, "ASA", known, ranks) for known in both)
            time = about["train"][0] / speedup
            rows.append(row("theano_mpi", f"{name}, ASA, {ranks} GPUs", time, *found, train))
    clusters, over_asa = both[1]
    said = [
        f"{name}: alpha {alpha_s * 1e6:.0f} us, {1e-9 / beta:.2f} GB/s"
        for name, (alpha_s, beta) in clusters.items()
    ]
    said.append(f"beta of AR / beta of ASA {over_asa:.2f}")
    said.append(f"not scored: table 1 with 8 GPUs: {data['not_scored']['table_1_8']}")
    return rows, ["; ".join(said[:3]), said[3], verdict("tables 1 and 3", rows, data["goal"])]


if __name__ == "__main__":
    main(__doc__, run)
