"""Predicts tables V and VI of the paper on merged gradient sparsification; see omgs.yaml.

python scripts/reproduce/omgs.py
"""

from __future__ import annotations

from typing import Any

from reproduction import CALIBRATED, SCORED, main, read, row, solve, verdict

from tfcommx.core import Profile
from tfcommx.planner import merging
from tfcommx.planner.merging.merging import Prices, finish_s
from tfcommx.simulator import models
from tfcommx.simulator.assumptions import sorting_time

MERGINGS = {"TopK-SGD": "single", "MGS-SGD": "threshold", "OMGS-SGD": "omgs"}


def prices(data: dict[str, Any], model: str) -> Prices:
    """Return the authors' prices of a group."""
    known, density = data["assumed"], data["density"][model]
    per_entry = known["beta_s_per_byte"] * 4 * known["ranks"] * density
    return Prices(
        message_s=lambda entries: 2 * (known["alpha_s"] + per_entry * entries),
        selection_s=sorting_time(known["gamma_s"]),
        entry_bytes=4,
        bucket_bytes=4 * known["threshold_entries"],
    )


def predict(data: dict[str, Any], model: str, method: str, compute_s: float) -> float:
    """Return the seconds of a step."""
    batch = data["batch"][model]
    profile = Profile.from_throughput(models.get(model), batch / compute_s, batch=batch)
    found = merging.get(MERGINGS[method]).groups(profile, prices(data, model))
    return profile.forward_s + finish_s(found, profile, prices(data, model))


def nominal_compute_s(data: dict[str, Any], model: str) -> float:
    """Return the stated seconds of a step without exchange, or those at ResNet-50's rate."""
    stated = data["assumed"]["compute_s"]
    if stated[model] is not None:
        return stated[model]
    work = {name: data["batch"][name] * models.get(name).operations for name in (model, "resnet50")}
    return stated["resnet50"] * work[model] / work["resnet50"]


def groups_of_mgs(data: dict[str, Any], model: str) -> int:
    """Count the groups of MGS-SGD, which the sizes of the tensors alone decide."""
    profile = Profile.from_throughput(models.get(model), 1.0, batch=1)
    return len(merging.get("threshold").groups(profile, prices(data, model)))


def run() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of table VI and the verdicts."""
    data = read("omgs")
    rows, counts, omgs_groups = [], [], []
    for model, published in data["table_6"].items():
        times = dict(zip(data["columns"], published, strict=True))

        def of_omgs(compute_s: float, model: str = model) -> float:
            return predict(data, model, "OMGS-SGD", compute_s)

        compute_s = solve(of_omgs, times["OMGS-SGD"], 1e-3, 10.0)
        for method, time in times.items():
            found = (
                predict(data, model, method, nominal_compute_s(data, model)),
                predict(data, model, method, compute_s),
            )
            role = CALIBRATED if method == "OMGS-SGD" else SCORED
            rows.append(row("omgs", f"{model}, {method}", time, *found, compute_s, role))
        _, _, mgs, omgs = data["table_5"][model]
        counts.append((model, groups_of_mgs(data, model), mgs))
        batch = data["batch"][model]
        profile = Profile.from_throughput(models.get(model), batch / compute_s, batch=batch)
        ours = len(merging.get("omgs").groups(profile, prices(data, model)))
        omgs_groups.append(f"{model} {ours} ({omgs})")
    exact = all(ours == paper for _, ours, paper in counts)
    said = [
        "table V, groups of MGS-SGD, ours (the paper's): "
        + ", ".join(f"{model} {ours} ({paper})" for model, ours, paper in counts)
        + f"; goal (exact) {'reached' if exact else 'MISSED'}",
        f"table V, groups of OMGS-SGD, not scored: {', '.join(omgs_groups)}",
        verdict("table VI", rows, data["goal"]),
    ]
    return rows, said


if __name__ == "__main__":
    main(__doc__, run)
