"""`tfcommx plan`: its table, its files, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tfcommx import routes
from tfcommx.cli.main import app
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.simulator.step import simulate
from tfcommx.terms import (
    NOMINAL,
    MeasuredStep,
    PlanError,
    Profile,
    Scheme,
    Span,
    Timeline,
    Topology,
    VariableProfile,
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A measured profile, and links."""
    rows = tuple(
        VariableProfile(f"layer{number}/kernel", (256, 256), ready_s=0.01 * (number + 1))
        for number in range(6)
    )
    (tmp_path / "profile.json").write_text(Profile("small", rows, 0.03, 0.06, 16).to_json())
    (tmp_path / "links.json").write_text(json.dumps({"links": NOMINAL.to_dict()}))
    return str(tmp_path / "profile.json"), str(tmp_path / "links.json")


def run(*words: str) -> str:
    ended = CliRunner().invoke(app, ["plan", *words])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_the_table_and_the_plan_of_its_first_row(files: tuple[str, str], tmp_path: Path) -> None:
    profile, links = files
    words = ["--nodes", "2", "--slots", "2", "--selection", "mstopk", "--density", "0.05"]
    written = ["--output", str(tmp_path / "plan.json"), "--json", str(tmp_path / "rows.json")]
    printed = run(profile, "--links", links, *words, *written)
    rows = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    steps = [row["step_seconds"] for row in rows]
    assert steps == sorted(steps) and {"hitopk", "allreduce"} <= {row["scheme"] for row in rows}
    chosen = routes.read_plan((tmp_path / "plan.json").read_text())
    assert chosen.topology == Topology(2, 2) and len(chosen.buckets) == rows[0]["buckets"]
    assert f"Scheme('{rows[0]['scheme']}'" in printed and "twice the rate between nodes" in printed


def test_a_model_by_name(files: tuple[str, str]) -> None:
    assert "allreduce, threshold" in run("alexnet", "--links", files[1], "--nodes", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet"], "or a model .*resnet50.* is required. Received 'resnet'"),
        (["alexnet", "--selection", "mstop"], "Did you mean 'mstopk'"),
        (["alexnet", "--selection", "mstopk", "--density", "2"], r"`density` must be in \(0, 1\]"),
        (["alexnet", "--nodes", "0"], "nodes >= 1"),
        (["alexnet", "--throughput", "0"], "`samples_per_second` must be > 0"),
    ],
)
def test_what_is_refused(files: tuple[str, str], words: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run(*words, "--links", files[1])


def test_links_that_are_none_are_refused(files: tuple[str, str]) -> None:
    with pytest.raises(PlanError, match="A file of links"):
        run("alexnet", "--links", "nowhere.json")


def test_a_measured_step_beside_the_simulated_one(files: tuple[str, str], tmp_path: Path) -> None:
    profile = Profile.read(files[0])
    gradients = [Gradient(row.name, row.shape, row.dtype) for row in reversed(profile.variables)]
    plan = make_plan(gradients, {"*": Scheme(bucket_bytes=2**19)}, Topology(2, 1))
    spans = (
        Span("compute", "forward", "forward", 0.0, 0.03),
        Span("compute", "backward", "layer5/kernel", 0.03, 0.09),
        Span("between", "message", "tfcommx/bucket0", 0.05, 0.1, 0),
    )
    step = MeasuredStep(profile, plan, Timeline(spans, 0.1, 0.09, 16, 2))
    file, png = tmp_path / "step.json", tmp_path / "both.png"
    file.write_text(step.to_json())
    assert MeasuredStep.read(file, routes.read_plan) == step
    output = run(str(file), "--links", files[1], "--compare", str(png))
    said = [line for line in output.splitlines() if line.startswith(("measured", "simulated"))]
    assert said == ["measured", "simulated"]
    # The last bucket's message, of 2 ranks at nominal links, follows the backward pass
    simulated = simulate(plan, profile, NOMINAL)
    assert f"The simulated step is {1 - simulated.step_s / 0.1:.1%} shorter." in output
    assert 0.09 < simulated.step_s < 0.1 and png.stat().st_size > 10_000
    events = json.loads(png.with_suffix(".json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    with pytest.raises(PlanError, match="A file of a measured step"):
        run(files[0], "--links", files[1], "--compare", str(png))
