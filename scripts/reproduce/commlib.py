"""Predicts tables 3 and 4, the order in figure 7, and the record of CommLib; see commlib.yaml.

python scripts/reproduce/commlib.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

from reproduction import CALIBRATED, NOT_SCORED, SCORED, main, read, row, solve, verdict

from tfcommx.core import (
    EngineSettings,
    Link,
    Links,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)
from tfcommx.planner.predict import Setting
from tfcommx.simulator import models
from tfcommx.simulator.assumptions import Assumptions


def scheme_of(data: dict[str, Any], column: str) -> Scheme:
    """Return how gradients travel in a column of the tables."""
    known = data["assumed"]
    if column == "MSTopK":
        return Scheme(
            "hitopk",
            "mstopk",
            known["density"],
            "torus",
            bucket_bytes=known["bucket_bytes"],
            wire=known["wire"],
        )
    route = {"Dense": "allreduce", "2DTAR": "torus"}[column]
    return Scheme(route, bucket_bytes=known["bucket_bytes"])


def setting_of(known: dict[str, Any], profile: Profile, efficiency: float) -> Setting:
    """Return the paper's cluster, whose network reaches a share of its rate."""
    gamma = known["gamma_s_per_byte"]
    links = Links(
        Link(known["inside_alpha_s"], 1e-9 / known["inside_gbytes"], gamma),
        Link(known["between_alpha_s"], 8e-9 / known["between_gbit"] / efficiency, gamma),
        engine=EngineSettings("nccl"),
    )
    topology = Topology(known["nodes"], known["slots"])
    return Setting(profile, topology, links, Assumptions(selection_on="beside"))


# Fastest first, as section 5.3 describes figure 7, which has no table of its numbers
FIGURE_7 = ("HiTopKComm", "2DTAR", "TreeAR", "NaiveAG")


def figure_7(data: dict[str, Any], millions: int) -> str:
    """Say how long each method needs to add vectors, and whether the order is the paper's."""
    known = data["assumed"]
    vector = VariableProfile("vector", (millions, 10**6), "float16", ready_s=1e-9)
    profile = Profile("vector", (vector,), 1e-9, 1e-9, batch=1)
    one = {"bucket_bytes": 2**30, "merging": "single"}
    sparse = {"selection": "mstopk", "density": known["density"], "wire": known["wire"], **one}
    schemes = (
        *(Scheme("hitopk", **sparse), Scheme("torus", **one)),
        *(Scheme("allreduce", **one), Scheme("allgather", **sparse)),
    )
    setting = setting_of(known, profile, known["efficiency"])
    seconds = [setting.predict(scheme).step_s for scheme in schemes]
    times = ", ".join(f"{name} {1e3 * x:.1f} ms" for name, x in zip(FIGURE_7, seconds, strict=True))
    order = "as in figure 7" if seconds == sorted(seconds) else "NOT as in figure 7"
    return f"{millions} million entries, nominal: {times}; the order is {order}"


def predict(
    data: dict[str, Any], name: str, column: str, efficiency: float, overhead_s: float
) -> float:
    """Return the seconds of a step."""
    known, about = data["assumed"], data["rows"][name]
    batch = about.get("batch", known["batch"])
    table = models.get(about["model"], about["size"])
    profile = Profile.from_throughput(table, about["single"], batch=batch, dtype="float16")
    last = dataclasses.replace(profile.variables[-1], update_s=known["lars_s"])
    profile = dataclasses.replace(profile, variables=(*profile.variables[:-1], last))
    step = setting_of(known, profile, efficiency).predict(scheme_of(data, column)).step_s
    return step + (overhead_s if column == "MSTopK" else 0.0)


def run() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and the verdicts."""
    data = read("commlib")
    known, columns = data["assumed"], data["columns"]
    ranks = known["nodes"] * known["slots"]

    def published(name: str, column: str) -> float | None:
        about = data["rows"][name]
        total = about["throughput"][columns.index(column)]
        return total and ranks * about.get("batch", known["batch"]) / total

    def efficiency_from(name: str, column: str) -> float:
        wanted = published(name, column)
        return solve(lambda x: predict(data, name, column, x, 0.0), wanted, 0.02, 1.0)

    efficiency = efficiency_from("r50_96", "2DTAR")
    dense = efficiency_from("r50_96", "Dense")
    slower = published("r50_96", "MSTopK") - predict(data, "r50_96", "MSTopK", efficiency, 0.0)
    overhead_s = max(slower, 0.0)
    rows, steps = [], {}
    for column in columns:
        for name, about in data["rows"].items():
            time = published(name, column)
            if time is None:
                continue
            reason = data["not_scored"].get(name, "")
            role = NOT_SCORED if reason else SCORED
            role = CALIBRATED if name == "r50_96" else role
            alone = about.get("batch", known["batch"]) / about["single"]
            found: tuple[float | None, ...] = (None, None)
            if about["model"] in models.MODELS:
                found = (
                    predict(data, name, column, known["efficiency"], known["overhead_s"]),
                    predict(
                        data, name, column, dense if column == "Dense" else efficiency, overhead_s
                    ),
                )
                steps[name, column] = found[1]
            reason = f"{name}: {reason}" if reason else ""
            rows.append(row("commlib", f"{name}, {column}", time, *found, alone, role, reason))
    record = [
        (
            steps[name, column]
            * epochs
            * known["images"]
            / ranks
            / data["rows"][name].get("batch", known["batch"])
        )
        for name, column, epochs in data["record"]["phases"]
    ]
    total = row("commlib", "the record", data["record"]["seconds"], None, sum(record))
    sparse = [one for one in rows if "Dense" not in one["name"]]
    thick = [one for one in rows if "Dense" in one["name"]]
    said = [
        f"efficiency {efficiency:.3f} (2DTAR), {dense:.3f} (Dense); overhead of MSTopK "
        f"{overhead_s * 1e3:.1f} ms",
        verdict("tables 3 and 4, 2DTAR and MSTopK", sparse, data["goal"]["2DTAR and MSTopK"]),
        verdict("table 3, Dense", thick, data["goal"]["Dense"]),
        verdict("the record", [total], data["goal"]["record"]),
        *(figure_7(data, millions) for millions in (1, 25, 110)),
    ]
    return [*rows, total], said


if __name__ == "__main__":
    main(__doc__, run)
