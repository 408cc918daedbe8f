"""Predicts the throughput of 8 nodes of 4 GPUs on 10 Gbit/s Ethernet; see horovod.yaml.

python scripts/reproduce/horovod.py
"""

from __future__ import annotations

from typing import Any

from reproduction import CALIBRATED, NOT_SCORED, SCORED, main, read, row, solve, verdict

from tfcommx.planner.predict import Setting
from tfcommx.simulator import models
from tfcommx.terms import Link, Links, Profile, Scheme, Topology

TABLES = {"ResNet-50": "resnet50", "BERT-Large": "bert_large", "BERT-Base": "bert_base"}
MERGINGS = {"BSP": "single", "WFBP": "each", "MG-WFBP": "mg_wfbp"}
SLOTS = 4


def predict(data: dict[str, Any], model: str, method: str, gpus: int, efficiency: float) -> float:
    """Return the seconds of a step."""
    known = data["assumed"]
    words = None if model == "ResNet-50" else known["words"]
    profile = Profile.from_throughput(
        models.get(TABLES[model], words), data["single"][model], batch=data["batch"][model]
    )
    hop = (known["between_alpha_s"] + (SLOTS - 1) * known["inside_alpha_s"]) / SLOTS
    between = Link(hop, 8e-9 / known["between_gbit"] / efficiency, known["gamma_s_per_byte"])
    scheme = Scheme("allreduce", merging=MERGINGS[method])
    topology = Topology(gpus // SLOTS, SLOTS)
    return Setting(profile, topology, Links(between, between)).predict(scheme).step_s


def run() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and the verdict."""
    data = read("horovod")
    chosen = data["calibrated"]["efficiency"]
    where = (chosen["model"], chosen["method"], chosen["gpus"])

    def published(model: str, method: str, gpus: int) -> float:
        total = data["throughput"][model][method][data["gpus"].index(gpus)]
        return gpus * data["batch"][model] / total

    efficiency = solve(lambda x: predict(data, *where, x), published(*where), 0.05, 2.0)
    rows = []
    for model in TABLES:
        for method in MERGINGS:
            for gpus in data["gpus"]:
                role, reason, found = SCORED, "", (None, None)
                if gpus == SLOTS:
                    role, reason = NOT_SCORED, f"4 GPUs: {data['not_scored']['gpus_4']}"
                else:
                    found = tuple(
                        predict(data, model, method, gpus, x)
                        for x in (data["assumed"]["efficiency"], efficiency)
                    )
                if (model, method, gpus) == where:
                    role = CALIBRATED
                name = f"{model}, {method}, {gpus} GPUs"
                alone = data["batch"][model] / data["single"][model]
                time = published(model, method, gpus)
                rows.append(row("horovod", name, time, *found, alone, role, reason))
    said = [f"efficiency {efficiency:.3f}, from {', '.join(map(str, where))}"]
    return rows, [*said, verdict("10 Gbit/s, 8 x 4", rows, data["goal"])]


if __name__ == "__main__":
    main(__doc__, run)
