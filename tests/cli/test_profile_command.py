"""`tfcommx profile --exchange`: as a user starts it, and refused input."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import horovodrun
from typer.testing import CliRunner

from tfcommx import routes
from tfcommx.cli.main import app
from tfcommx.core import ConfigurationError, MeasuredStep

COMMAND = ["profile", "configs/fashion_mnist.yaml", "--steps", "2", "--set", "batch_per_rank=8"]


def test_one_rank_alone_exchanges_nothing(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    ended = CliRunner().invoke(app, [*COMMAND, "--exchange", str(file)])
    assert isinstance(ended.exception, ConfigurationError) and "two or more ranks" in str(
        ended.exception
    )
    assert not file.exists()


@pytest.mark.parametrize("option", ["--output", "--exchange"])
def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(
    option: str, tmp_path: Path
) -> None:
    ended = CliRunner().invoke(app, [*COMMAND, option, str(tmp_path)])
    assert isinstance(ended.exception, ConfigurationError)
    assert f"'{tmp_path}': {tmp_path} is in the way" in str(ended.exception)


@pytest.mark.exhaustive
def test_a_launch_writes_the_file_that_plan_compares(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    ended = horovodrun(2, ["-m", "tfcommx.cli.main", *COMMAND, "--exchange", str(file)])
    assert ended.status == 0 and ended.output.count("2 ranks: a step of") == 1, ended.output
    step = MeasuredStep.read(file, routes.read_plan)
    assert (step.plan.topology.nodes, step.plan.topology.slots) == (1, 2)
    assert any(span.kind == "message" for span in step.timeline.spans)
