"""`tfcommx explain`: of Horovod's timeline and of a measured step; refused input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launching import ROOT, horovodrun
from typer.testing import CliRunner

from tfcommx import routes
from tfcommx.cli.main import app
from tfcommx.core import (
    NOMINAL,
    DataError,
    MeasuredStep,
    Profile,
    Scheme,
    Span,
    Timeline,
    Topology,
    VariableProfile,
)
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.simulator.step import simulate

TIMELINE = str(ROOT / "tests" / "measure" / "horovod_timeline.json")
TRAIN = """\
import keras, numpy as np, tfcommx as cx
cx.init()
model = keras.Sequential([keras.layers.Dense(64), keras.layers.Dense(1)])
model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme=cx.Scheme()), loss="mse",
              jit_compile=False)
x = np.ones((24, 4), "float32")
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[cx.callbacks.BroadcastState()])
"""


@pytest.fixture
def links(tmp_path: Path) -> str:
    (tmp_path / "links.json").write_text(json.dumps({"links": NOMINAL.to_dict()}))
    return str(tmp_path / "links.json")


def run(*words: str) -> str:
    ended = CliRunner().invoke(app, ["explain", *words])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_a_timeline_alone_says_what_messages_waited_for(tmp_path: Path) -> None:
    said = run(TIMELINE, "--json", str(tmp_path / "steps.json"))
    assert "4 steps of 2 ranks" in said and "A step takes: 106.0 ms" in said
    assert "waiting for other ranks 42.0 ms" in said and "--links links.json" in said
    rows = [json.loads(line) for line in (tmp_path / "steps.json").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["step_seconds"] == pytest.approx(0.106, abs=1e-4)
    parts = [rows[0][f"exposed_{name}"] for name in ("messages_s", "ranks_s", "engine_s")]
    assert sum(parts) == pytest.approx(rows[0]["exposed_seconds"])


def test_with_links_it_is_compared_with_plans(links: str, tmp_path: Path) -> None:
    trace, profile = tmp_path / "both.json", tmp_path / "profile.json"
    files = ["--trace", str(trace), "--profile", str(profile)]
    said = run(TIMELINE, "--slots", "2", "--links", links, *files)
    events = json.loads(trace.read_text())["traceEvents"]
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == ["recorded", "simulated"]
    # Computing, waiting and messages explain the whole difference
    whole, *parts = map(float, re.findall(r"([+-][\d.]+) ms", said))
    assert sum(parts) == pytest.approx(whole, abs=0.2) and parts[:2] == [0.0, 42.0]
    ranges = re.findall(r" (\d+\.\d+) +(\d+\.\d+) to (\d+\.\d+)", said)
    assert len(ranges) == 4
    assert all(float(low) < float(step) < float(high) for step, low, high in ranges)
    better = [float(one) for one in re.findall(r"(-?[\d.]+)% *\n", said)]
    assert 0 <= better[0] < better[1] < better[2]
    assert Profile.read(profile).size == 6_443_338


def test_a_measured_step_beside_the_simulated_one(links: str, tmp_path: Path) -> None:
    rows = tuple(
        VariableProfile(f"layer{number}/kernel", (256, 256), ready_s=0.01 * (number + 1))
        for number in range(6)
    )
    profile = Profile("small", rows, 0.03, 0.06, 16)
    gradients = [Gradient(row.name, row.shape, row.dtype) for row in reversed(rows)]
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
    # `--json` wrote no file
    json_file = tmp_path / "steps.json"
    said = run(str(file), "--links", links, "--png", str(png), "--json", str(json_file))
    row = json.loads(json_file.read_text())
    assert (row["step_seconds"], row["messages"]) == (0.1, len(plan.buckets))
    # The last bucket's message, of 2 ranks at nominal links, follows the backward pass
    simulated = simulate(plan, profile, NOMINAL)
    apart = 1e3 * (0.1 - simulated.step_s)
    assert f"simulated one by {apart:+.1f} ms: computing +0.0 ms" in said
    assert 0.09 < simulated.step_s < 0.1 and png.stat().st_size > 10_000


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--timeline-filename.*nowhere\.json"):
        run(str(tmp_path / "nowhere.json"))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match=r"a\.json\b.*'timeline'"):
        run(str(tmp_path / "a.json"))
    with pytest.raises(DataError, match=r"\b2 .*slots=3\b"):
        run(TIMELINE, "--slots", "3", "--trace", str(tmp_path / "trace.json"))


@pytest.mark.exhaustive
def test_a_timeline_of_this_horovod(links: str, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    ended = horovodrun(2, ["-c", TRAIN], HOROVOD_TIMELINE=str(file))
    assert ended.status == 0, ended.output
    said = run(str(file), "--slots", "2", "--links", links)
    assert "steps of 2 ranks" in said and "best that loses nothing" in said
