"""Predicts the throughput of 8 nodes of 4 GPUs on three networks; see horovod.yaml.

python scripts/reproduce/horovod.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

from reproduction import CALIBRATED, SCORED, main, read, row, solve, verdict

from tfcommx.core import EngineSettings, Link, Links, Profile, Scheme, Topology
from tfcommx.planner.predict import Setting
from tfcommx.simulator import models
from tfcommx.simulator.step import simulate

TABLES = {"ResNet-50": "resnet50", "BERT-Large": "bert_large", "BERT-Base": "bert_base"}
MERGINGS = {"BSP": "single", "WFBP": "each", "MG-WFBP": "mg_wfbp"}
SLOTS = 4
NCCL = EngineSettings("nccl", wiring="host_memory")


class Row(NamedTuple):
    """Which number of the table."""

    network: str
    model: str
    method: str
    gpus: int


class Constants(NamedTuple):
    """The constants set by calibration."""

    # Of a network, share of its rate
    efficiency: dict[str, float]
    # Inside a node, 10^9 byte/s of each GPU while all of them send
    inside_gbytes: float
    # Model -> seconds
    overhead_s: dict[str, float]


def predict(data: dict[str, Any], one: Row, constants: Constants) -> float:
    """Return the seconds of a step."""
    known = data["assumed"]
    words = None if one.model == "ResNet-50" else known["words"]
    profile = Profile.from_throughput(
        models.get(TABLES[one.model], words),
        data["single"][one.model],
        batch=data["batch"][one.model],
    )
    gamma, rate = known["gamma_s_per_byte"], constants.efficiency[one.network]
    links = Links(
        Link(known["inside_alpha_s"], 1e-9 / constants.inside_gbytes, gamma),
        Link(
            known["between_alpha_s"][one.network],
            8e-9 / known["between_gbit"][one.network] / rate,
            gamma,
        ),
        engine=NCCL,
    )
    topology = Topology(one.gpus // SLOTS, SLOTS)
    believed = links
    if one.method == "MG-WFBP":
        believed = ring_of(known["merging"][one.network][one.gpus], one.gpus)
    scheme = Scheme("allreduce", merging=MERGINGS[one.method])
    plan = Setting(profile, topology, believed).predict(scheme).plan
    return simulate(plan, profile, links).step_s + constants.overhead_s[one.model]


def ring_of(alpha_beta: list[float], ranks: int) -> Links:
    """Return links on which an allreduce of so many ranks takes alpha + bytes beta."""
    alpha, beta = alpha_beta
    link = Link(alpha / 2 / (ranks - 1), beta * ranks / 2 / (ranks - 1))
    return Links(link, link)


def published(data: dict[str, Any], one: Row) -> float:
    """Return the published seconds of a step."""
    total = data["throughput"][one.network][one.model][one.method][data["gpus"].index(one.gpus)]
    return one.gpus * data["batch"][one.model] / total


def nominal(data: dict[str, Any]) -> Constants:
    """Return the assumed constants."""
    known = data["assumed"]
    overhead_s = dict.fromkeys(TABLES, known["overhead_s"])
    return Constants(known["efficiency"], known["inside_gbytes"], overhead_s)


def calibrate(data: dict[str, Any]) -> tuple[Constants, set[Row]]:
    """Return the constants that the calibration rows set, and these rows."""
    chosen, constants = data["calibrated"], nominal(data)
    inside = Row(**chosen["inside_gbytes"])
    used = {inside}
    found = solve(
        lambda rate: predict(data, inside, constants._replace(inside_gbytes=rate)),
        published(data, inside),
        0.5,
        50.0,
    )
    constants = constants._replace(inside_gbytes=found)
    overhead_s = dict(constants.overhead_s)
    where = dict(chosen["overhead_s"])
    for model in where.pop("models"):
        one = Row(model=model, **where)
        used.add(one)
        overhead_s[model] = max(published(data, one) - predict(data, one, constants), 0.0)
    constants = constants._replace(overhead_s=overhead_s)
    efficiency = dict(constants.efficiency)
    for network in efficiency:
        one = Row(network=network, **chosen["efficiency"])
        used.add(one)

        def at(rate: float, network: str = network, one: Row = one) -> float:
            changed = {**constants.efficiency, network: rate}
            return predict(data, one, constants._replace(efficiency=changed))

        efficiency[network] = solve(at, published(data, one), 0.05, 2.0)
    return constants._replace(efficiency=efficiency), used


def run() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and the verdicts."""
    data = read("horovod")
    constants, used = calibrate(data)
    both, rows, said = (nominal(data), constants), [], []
    for network in data["throughput"]:
        of_network = []
        for model in TABLES:
            for method in MERGINGS:
                for gpus in data["gpus"]:
                    one = Row(network, model, method, gpus)
                    found = (predict(data, one, each) for each in both)
                    role = CALIBRATED if one in used else SCORED
                    alone = data["batch"][model] / data["single"][model]
                    name = f"{network}, {model}, {method}, {gpus} GPUs"
                    time = published(data, one)
                    of_network.append(row("horovod", name, time, *found, alone, role))
        said.append(verdict(network, of_network, data["goal"]))
        rows += of_network
    rates = ", ".join(f"{name} {rate:.3f}" for name, rate in constants.efficiency.items())
    more = ", ".join(f"{name} {1e3 * one:.0f}" for name, one in constants.overhead_s.items())
    head = [
        f"efficiency {rates}; inside {constants.inside_gbytes:.2f} GB/s; overhead, ms: {more}",
    ]
    return rows, [*head, *said]


if __name__ == "__main__":
    main(__doc__, run)
