"""The benchmark of whole trainings: its target, rates, names of trainings, and setups."""

from __future__ import annotations

import doctest
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_runs import COLUMNS, bench
from launching import ROOT

from tfcommx.recipes.reader import RecipeError, parse
from tfcommx.simulator import models
from tfcommx.simulator.throughputs import PUBLISHED

sys.path.insert(0, str(ROOT / "scripts"))
from bench.benchmarks import end_to_end


def training(*evaluations: tuple[float, float], verified: bool = True) -> dict[str, Any]:
    """Make a training of (seconds, score)."""
    rows = [
        {"steps": 5 * number, "seconds": clock, "test_accuracy": score}
        for number, (clock, score) in enumerate(evaluations)
    ]
    shared = {"parameters": 7, "first_step_seconds": 1.0, "bytes_between": 100.0}
    return {"rows": rows, "verified": verified, **shared}


def rows(loss: float = 0.01, **trainings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = end_to_end.rows_of(trainings, "test_accuracy", loss)
    return {row["name"]: row for row in found}


HOROVOD = [training((10, 0.70), (20, 0.80)), training((10, 0.795), (20, 0.80))]


def test_the_target_is_horovods_mean_less_the_loss() -> None:
    found = rows(horovod=HOROVOD, torus=[training((4, 0.79), (8, 0.70)), training((6, 0.81))])
    horovod, torus = found["horovod"], found["torus"]
    assert horovod["target"] == pytest.approx(0.79) and horovod["times_sooner"] == 1
    # The first evaluation that reaches it counts, also if a later one falls below
    assert (horovod["target_seconds"], torus["target_seconds"]) == (15, 5)
    assert torus["times_sooner"] == 3 and torus["seconds"] == 7
    assert torus["final_score"] == pytest.approx(0.755)
    # Of 5 steps in 10 s; a seed with a single evaluation has none
    assert horovod["step_seconds"] == 2 and torus["step_seconds"] is None
    assert rows(loss=0.0, horovod=HOROVOD)["horovod"]["target_seconds"] == 20


def test_a_seed_that_misses_the_target_leaves_no_time() -> None:
    slow = [training((4, 0.80)), training((4, 0.78))]
    torus = rows(horovod=HOROVOD, torus=slow)["torus"]
    assert torus["seeds_reached"] == 1 and torus["seconds"] == 4
    assert torus["target_seconds"] is None and torus["times_sooner"] is None
    lost = [training((4, 0.8)), training((4, 0.8), verified=False)]
    assert not rows(horovod=HOROVOD, torus=lost)["torus"]["verified"]


def test_a_prediction_is_the_measured_start_and_predicted_steps() -> None:
    found = list(rows(horovod=HOROVOD, auto=HOROVOD).values())
    end_to_end.predict(found, {"horovod": 3.0, "auto": None})
    assert found[0]["steps"] == 5 and found[0]["predicted_seconds"] == 1 + 4 * 3
    assert found[1]["predicted_seconds"] is None


def test_the_rate_is_found_in_few_probes() -> None:
    """A step has a part that no rate shortens; noise lets two points fall the wrong way."""
    points: list[tuple[float, float]] = []
    while not points or abs(points[-1][1] / 4 - 1) > end_to_end.TOLERANCE:
        rate = end_to_end.next_rate(points, 4)
        points.append((rate, 0.6 + 850 / rate))
        assert len(points) <= 3
    # All probes count: the last two alone fall the wrong way
    assert end_to_end.next_rate([(100, 9.5), (240, 3.3), (207, 3.25)], 4) == 195.1
    assert doctest.testmod(end_to_end) == (0, 2)
    assert end_to_end.next_rate([(200, 4.0), (210, 4.4)], 4) == 231
    assert end_to_end.next_rate([(200, 4.0), (210, 4.4)], 20) == 46.2
    assert end_to_end.next_rate([(200, -0.1)], 4) == 20


def named(*words: str, rate: float = 200.0, name: str = "torus") -> Path:
    chosen = end_to_end.parser().parse_args(words)
    settings = end_to_end.changes_of(chosen)[name]
    return Path(end_to_end.job_of(chosen, name, settings, rate)["output"])


def test_what_decides_a_training_is_in_its_name() -> None:
    words = [[], ["--evaluations", "3"], ["--most-steps", "5"], ["--nodes", "2"]]
    words += [["--set", "seed=1"], ["--set", "optimizer.momentum=0.8"], ["--here"]]
    names = [named(*one) for one in words] + [named(rate=201.0), named(name="asa_int4")]
    assert len(set(names)) == len(names) and named() == named("--loss", "0.1", "--seeds", "9")


def test_a_prediction_is_made_anew_for_other_contestants_and_turns() -> None:
    def prediction(changes: dict[str, list[str]], *words: str) -> str:
        chosen = end_to_end.parser().parse_args(words)
        return str(end_to_end.prediction_job(chosen, changes, {"rate_mbit": 9.0})["output"])

    changes = {"horovod": list[str](), "asa_int4": ["scheme.wire=int4"]}
    other = changes | {"asa_int4": ["scheme.wire=int8"]}
    found = [prediction(changes), prediction(other), prediction(changes, "--repeats", "9")]
    assert len(set(found)) == 3 and prediction(dict(changes)) == found[0]
    assert prediction(changes | {"ddp": list[str]()}) == found[0]


def test_contestants_fit_the_recipe() -> None:
    def changes(*words: str) -> dict[str, list[str]]:
        return end_to_end.changes_of(end_to_end.parser().parse_args(words))

    every = set(end_to_end.CONTESTANTS)
    assert set(changes()) == every - {"one_bit_adam"}
    assert set(changes("--recipe", "translate")) == every - {"momentum_int2"}
    with pytest.raises(RecipeError, match="one_bit_adam"):
        changes("--contestants", "horovod", "one_bit_adam")
    with pytest.raises(SystemExit, match="horovod"):
        changes("--contestants", "torus")
    assert changes("--contestants", "horovod", "ddp_fp16")["ddp_fp16"] == changes()["horovod"]
    # PyTorch's contestants trained by SGD in float32 beside others that did not
    for words in (
        ["--recipe", "translate"],
        ["--set", "optimizer.name=lars"],
        ["--set", "precision=mixed_bfloat16"],
    ):
        with pytest.raises(SystemExit, match="ddp"):
            changes("--contestants", "horovod", "ddp", *words)


def test_the_setups_follow_from_their_sources() -> None:
    setups = end_to_end.SETTINGS["setups"]
    known = parse((ROOT / "scripts" / "reproduce" / "commlib.yaml").read_text())
    published, batch = known["rows"]["r50_96"], known["assumed"]["batch"]
    ranks = known["assumed"]["nodes"] * known["assumed"]["slots"]
    dense = published["throughput"][known["columns"].index("Dense")]
    alone_s, horovod_s = batch / published["single"], batch * ranks / dense
    assert setups["commlib"]["alone_s"] == pytest.approx(alone_s, rel=1e-5)
    assert setups["commlib"]["horovod_s"] == pytest.approx(horovod_s, rel=1e-5)
    h100 = PUBLISHED["h100", "resnet50"]
    assert h100.rate is not None
    alone_s, sent = h100.batch / h100.rate, 2 * 15 / 16 * 4 * models.get("resnet50").parameters
    assert setups["two_sites"]["alone_s"] == pytest.approx(alone_s, rel=1e-5)
    assert setups["two_sites"]["horovod_s"] == pytest.approx(alone_s + sent * 8 / 1e9, rel=1e-4)
    assert end_to_end.ratio_wanted("commlib") == pytest.approx(3.97, abs=0.005)
    computed = json.loads((ROOT / "docs" / "records" / "scheme_map.json").read_text())["rows"]
    for name in set(setups) - {"commlib", "two_sites"}:
        model, gpu, gbit = name.split("_")
        case = f"{gpu.upper()}, {model}_large, 4, {float(gbit)}"
        (row,) = (row for row in computed if row["name"] == case)
        assert setups[name]["alone_s"] == row["compute_seconds"]
        exposed_s = setups[name]["horovod_s"] - setups[name]["alone_s"]
        assert exposed_s == pytest.approx(row["exposed_seconds"]["plain Horovod"], rel=1e-5)


@pytest.mark.exhaustive
def test_trainings_that_have_ended_are_kept(tmp_path: Path) -> None:
    words = ["--here", "--nodes", "2", "--seeds", "1", "--contestants", "horovod", "torus"]
    words += ["--most-steps", "3", "--set", "phases.0.epochs=1", "--folder", str(tmp_path / "kept")]
    first, output = bench(tmp_path, "end_to_end", *words)
    assert [row["name"] for row in first] == ["horovod", "torus"] and "torus-seed-0" in output
    assert all(list(row)[: len(COLUMNS)] == COLUMNS for row in first)
    again, output = bench(tmp_path, "end_to_end", *words)
    assert again == first and "-seed-0" not in output
