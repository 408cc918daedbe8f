"""`tfcommx profile --exchange` on real ranks, and `explain` of its file."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import pytest
from typer.testing import CliRunner

from tfcommx import routes
from tfcommx.cli.main import app
from tfcommx.collectives.comm import Comm
from tfcommx.core import NOMINAL, MeasuredStep

SMALL = [
    "batch_per_rank=8",
    "model.filters=[4, 8]",
    "node_size=null",
    "threads=null",
    "phases.0.resolution=8",
    "phases.0.scheme={route: allgather, selection: mstopk, density: 0.1, dense_below: 64}",
]


def run(*words: str) -> str:
    ended = CliRunner().invoke(app, list(words))
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.mark.exhaustive
def test_a_real_step_is_measured_and_drawn_beside_the_simulated_one(
    comm: Comm, folder: Path
) -> None:
    file, links, png = folder / "step.json", folder / "links.json", folder / "both.png"
    words = [word for setting in SMALL for word in ("--set", setting)]
    command = ["profile", "configs/fashion_mnist.yaml", "--exchange", str(file), "--steps", "2"]
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    keras.utils.clear_session()  # Other tests made models on one rank alone: layers have numbers
    said = run(*command, *words)
    assert (str(file) in said) == (comm.rank == 0)
    step = MeasuredStep.read(file, routes.read_plan)
    assert step.plan.topology == comm.topology and step.profile.batch == 8
    assert {bucket.route for bucket in step.plan.buckets} == {"allgather", "allreduce"}
    messages = [span for span in step.timeline.spans if span.kind == "message"]
    assert {span.bucket for span in messages} == set(range(len(step.plan.buckets)))
    ports = {"between"} if comm.topology.nodes > 1 else {"inside"}
    assert {span.resource for span in messages} == ports
    # A bucket's sum is ready after its last gradient; spans without length are not drawn
    ready = {one.name: one.end_s for one in step.timeline.spans if one.kind == "backward"}
    for span in messages:
        names = step.plan.buckets[span.bucket].variables
        assert span.end_s >= max(ready.get(name, 0.0) for name in names)
    if comm.rank == 0:
        links.write_text(json.dumps({"links": NOMINAL.to_dict()}))
        drawn = run("explain", str(file), "--links", str(links), "--png", str(png))
        assert "recorded\n" in drawn and "simulated\n" in drawn and "step differs from" in drawn
        assert png.read_bytes().startswith(b"\x89PNG")
