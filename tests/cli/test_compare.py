"""`tfcommx compare` from end to end, with trainings and profiles that are made up."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tfcommx.cli.main import app
from tfcommx.comparison import step_times, trainings
from tfcommx.core import ConfigurationError, Profile, VariableProfile
from tfcommx.recipes.reader import RecipeError

RECIPE = """
name: small
batch_per_rank: 8
phases: [{epochs: 1, resolution: 14}, {epochs: 2, resolution: 28}]
learning_rate: {peak: 0.1, warm_up_epochs: 0}
"""
METHODS = "dense,one_percent"
PROFILE = Profile("small", (VariableProfile("kernel", (100, 100), ready_s=0.02),), 0.01, 0.02, 8)


class Commands:
    """Stands in for the processes: records their arguments, and writes their output files."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        # Fails the call of this number
        self.fails = -1
        # Methods whose trainings diverge: True for dense, False for the other
        self.diverges: tuple[bool, ...] = ()

    def __call__(self, words: Sequence[str], log: Path) -> None:
        self.calls.append(list(words))
        if len(self.calls) - 1 == self.fails:
            raise trainings.TrainingError("it failed")
        output = Path(words[words.index("--output") + 1])
        output.parent.mkdir(parents=True, exist_ok=True)
        if words[0] == "profile":
            output.write_text(PROFILE.to_json())
            return
        output.mkdir(exist_ok=True)
        name = "dry_run.json" if "--dry-run" in words else "summary.json"
        found = self.dry_run() if "--dry-run" in words else self.summary(words)
        (output / name).write_text(json.dumps(found))

    @staticmethod
    def dry_run() -> dict[str, Any]:
        return {"phases": [{"step_seconds": 0.08, "gradients_seconds": 0.03}] * 2}

    def summary(self, words: Sequence[str]) -> dict[str, Any]:
        dense = not any("mstopk" in word for word in words)
        score = math.nan if dense in self.diverges else 1.0
        rows = [
            {
                "epoch": epoch,
                "phase": 1,
                "steps": 10,
                "test_accuracy": score * (0.2 * epoch + 0.05 * dense),
                "bytes_between_nodes": epoch * (1000 if dense else 20),
                "clock_seconds": 1.0,
            }
            for epoch in (1, 2, 3)
        ]
        last = {"test_accuracy": rows[-1]["test_accuracy"], "rows": rows}
        count = {"ranks": 2, "nodes": 2, "epochs": 3, "seconds": 3.0, "throughput": 1.0}
        sent = {"bytes_between_nodes": 1, "bytes_between_nodes_dense": 3000}
        return {**last, **count, **sent, "replicas_identical": True, "parameters": 10000}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands()
    for module in (trainings, step_times, "tfcommx.comparison.step_times"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.run_command", found)
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def compare(recipe: Path, *words: str) -> Any:
    folder = recipe.parent
    options = ["--nodes", "2", "--seeds", "2", "--output", str(folder / "out")]
    words = ("compare", str(recipe), *options, "--json", str(folder / "rows.jsonl"), *words)
    return CliRunner().invoke(app, list(words))


def test_tables_rows_and_figure(commands: Commands, recipe: Path) -> None:
    ended = compare(recipe, "--methods", METHODS, "--bandwidths", "1e6,1e9")
    assert ended.exit_code == 0, ended.output
    rows = [json.loads(line) for line in (recipe.parent / "rows.jsonl").read_text().splitlines()]
    assert [(row["name"], row["bandwidth_mbit"]) for row in rows] == [
        ("dense", 1.0),
        ("one_percent", 1.0),
        ("dense", 1000.0),
        ("one_percent", 1000.0),
    ]
    assert rows[1]["loss"] == pytest.approx(5) and rows[1]["bytes_share"] == pytest.approx(0.02)
    # 40 kB of gradients at 1 Mbit/s; at 1 Gbit/s nearly all time is computing
    assert rows[1]["times_faster"] > 3 and rows[3]["times_faster"] < 1.1
    assert "In bytes nothing beats one_percent (60.00" in ended.output
    assert (recipe.parent / "out" / "comparison.png").stat().st_size > 10_000


@pytest.mark.parametrize("diverges", [(True,), (False,), (True, False)])
def test_trainings_that_diverged_are_shown(
    commands: Commands, recipe: Path, diverges: tuple[bool, ...]
) -> None:
    """If all did, the figure ended in an error, and `--json` wrote nothing after hours."""
    commands.diverges = diverges
    ended = compare(recipe, "--methods", METHODS, "--bandwidths", "1e9")
    assert ended.exit_code == 0, ended.output
    rows = [json.loads(line) for line in (recipe.parent / "rows.jsonl").read_text().splitlines()]
    assert [row["mean"] is None for row in rows] == [dense in diverges for dense in (True, False)]
    assert (recipe.parent / "out" / "comparison.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words", [("--links", "none.json"), ("--set", "links=none.json"), ("--model", "none.json")]
)
def test_links_and_profiles_are_read_before_the_first_training(
    commands: Commands, recipe: Path, words: tuple[str, str]
) -> None:
    ended = compare(recipe, "--methods", METHODS, *words)
    assert "none.json" in str(ended.exception) and not commands.calls


def test_each_training_has_its_seed_nodes_and_changes(commands: Commands, recipe: Path) -> None:
    compare(recipe, "--methods", METHODS, "--set", "batch_per_rank=4", "--slots", "3")
    training = [words for words in commands.calls if words[0] == "train"]
    assert len(training) == 4
    assert [("seed=1" in words, "seed=0" in words) for words in training] == [
        (False, True),
        (False, True),
        (True, False),
        (True, False),
    ]
    for words in training:
        assert words[words.index("--processes") + 1] == "6"
        assert {"node_size=3", "batch_per_rank=4"} <= set(words)
    outputs = [words[words.index("--output") + 1] for words in training]
    assert len(set(outputs)) == 4


def test_what_is_there_is_not_trained_again(commands: Commands, recipe: Path) -> None:
    commands.fails = 2
    ended = compare(recipe, "--methods", METHODS)
    assert isinstance(ended.exception, trainings.TrainingError)
    commands.fails = -1
    commands.calls.clear()
    assert compare(recipe, "--methods", METHODS).exit_code == 0
    kinds = [words[0] for words in commands.calls]
    assert kinds == ["train", "train", "profile", "profile"]
    commands.calls.clear()
    # A comment changes nothing, a setting does
    recipe.write_text(f"# a comment\n{RECIPE}")
    assert compare(recipe, "--methods", METHODS).exit_code == 0 and not commands.calls
    recipe.write_text(RECIPE.replace("0.1", "0.2"))
    compare(recipe, "--methods", METHODS)
    assert len(commands.calls) == 6


def test_a_training_that_a_signal_ended_goes_on(
    commands: Commands, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = commands.summary

    def ended_by_a_signal(words: Sequence[str], log: Path) -> None:
        monkeypatch.setattr(commands, "summary", lambda words: {**whole(words), "stopped": {}})
        commands(words, log)
        raise SystemExit(143)

    monkeypatch.setattr(trainings, "run_command", ended_by_a_signal)
    assert compare(recipe, "--methods", METHODS).exit_code == 143
    monkeypatch.setattr(trainings, "run_command", commands)
    monkeypatch.setattr(commands, "summary", whole)
    assert compare(recipe, "--methods", METHODS).exit_code == 0
    first, second = commands.calls[:2]
    assert first == second and "--resume" in second


def test_a_strategy_that_the_recipe_has_anyway_is_not_said(
    commands: Commands, recipe: Path
) -> None:
    """Trainings of before methods said it have names without it."""
    for averages in (False, True):
        commands.calls.clear()
        setting = ["--set", 'strategy={"name": "weight_averaging"}'] if averages else []
        assert compare(recipe, "--methods", "dense", *setting).exit_code == 0
        training = next(words for words in commands.calls if words[0] == "train")
        assert ('strategy={"name": "synchronous"}' in training) == averages


def test_steps_on_hosts(commands: Commands, recipe: Path) -> None:
    """They replace the predicted ones at their bandwidth, and the others begin with them."""
    where = ["--hosts", "node0:1,node1:1", "--measured-at", "2e6", "--bandwidths", "1e12"]
    ended = compare(recipe, "--methods", METHODS, *where)
    assert ended.exit_code == 0, ended.output
    rows = [json.loads(line) for line in (recipe.parent / "rows.jsonl").read_text().splitlines()]
    assert [row["measured"] for row in rows] == [True, True, False, False]
    assert rows[0]["step_seconds"] == pytest.approx(0.08)
    # 40 kB at 2 Mbit/s take .16 s, after .05 s of computing
    assert rows[0]["predicted_over_measured"] == pytest.approx(0.21 / 0.08, rel=0.01)
    assert rows[2]["step_seconds"] == pytest.approx(0.05, rel=0.01)
    assert "Predicted over measured time at 2 Mbit/s: dense 2.6" in ended.output


def test_steps_of_another_model(commands: Commands, recipe: Path) -> None:
    """64 samples at 250 a second take .256 s, 102 MB at 200 Mbit/s 4.1 s; nothing is profiled."""
    words = ["--model", "resnet50", "--batch", "64", "--throughput", "250"]
    assert compare(recipe, "--methods", METHODS, "--bandwidths", "200e6", *words).exit_code == 0
    assert {words[0] for words in commands.calls} == {"train"}
    rows = [json.loads(line) for line in (recipe.parent / "rows.jsonl").read_text().splitlines()]
    assert 4.1 < rows[0]["step_seconds"] < 4.1 + 0.3 and rows[1]["step_seconds"] < 0.45


@pytest.mark.parametrize(
    ("words", "kind", "received"),
    [
        (["--methods", "dnese"], RecipeError, r"'dnese'.*'dense'"),
        (["--bandwidths", "fast"], ConfigurationError, "fast"),
        (["--batch", "64"], ConfigurationError, "--batch 64"),
        (["--hosts", "a:1"], ConfigurationError, r"--measured-at.*\ba:1\b"),
        (["--hosts", "a:1,b:1", "--measured-at", "0"], ConfigurationError, r"\b0\b"),
        (["--hosts", "a:1", "--measured-at", "1e9"], ConfigurationError, r"\b2 .*\b1\b"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(
    commands: Commands, recipe: Path, words: list[str], kind: type, received: str
) -> None:
    ended = compare(recipe, *words)
    assert isinstance(ended.exception, kind)
    assert re.search(received, str(ended.exception)), ended.exception
    assert not commands.calls


@pytest.mark.parametrize(
    ("change", "left_out"),
    [("optimizer.momentum=0", "momentum_int2"), ("phases.0.scheme={route: auto}", "recipe")],
)
def test_a_shipped_method_that_the_recipe_does_not_take_is_left_out(
    commands: Commands, recipe: Path, change: str, left_out: str
) -> None:
    """The whole comparison was refused, although the user had not named the method."""
    ended = compare(recipe, "--set", change, "--seeds", "1", "--bandwidths", "1e9")
    assert ended.exit_code == 0 and f"Left out: {left_out}. " in ended.output
    rows = [json.loads(line) for line in (recipe.parent / "rows.jsonl").read_text().splitlines()]
    names = {row["name"] for row in rows}
    assert len(names) > 10 and left_out not in names and ended.output.count("Left out") == 1
    ended = compare(recipe, "--set", change, "--methods", f"dense,{left_out}")
    assert isinstance(ended.exception, RecipeError) and repr(left_out) in str(ended.exception)


def test_ranks_with_different_weights_are_refused(
    commands: Commands, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = commands.summary
    monkeypatch.setattr(
        commands, "summary", lambda words: {**whole(words), "replicas_identical": False}
    )
    ended = compare(recipe, "--methods", METHODS)
    assert isinstance(ended.exception, trainings.TrainingError)
    assert not list((recipe.parent / "out" / "trainings").glob("*.json"))


# Two of its convolutions have more than the 1,024 entries below which a variable is sent in 16 bits
REAL = """
name: real
data: {name: fashion_mnist, limit: 2400, test_limit: 200}
model: {name: small_cnn, filters: [8, 16]}
batch_per_rank: 300
phases: [{epochs: 2, resolution: 8}]
learning_rate: {peak: 0.1}
threads: 1
"""


@pytest.mark.exhaustive
def test_real_trainings_and_steps_measured_on_this_host(recipe: Path) -> None:
    recipe.write_text(REAL)
    words = ["--methods", "dense,elias_int4,local_sgd", "--seeds", "1", "--bandwidths", "1e9"]
    ended = compare(recipe, *words, "--hosts", "localhost:2", "--measured-at", "1e10")
    assert ended.exit_code == 0, ended.output
    rows = [json.loads(line) for line in (recipe.parent / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and sum(row["measured"] for row in rows) == 3
    dense, short, local = rows[:3]
    assert short["bytes_share"] < 0.5 and local["bytes_share"] < 0.5 and dense["bytes_share"] == 1
    assert all(row["step_seconds"] > 0 for row in rows)
