"""`tfcommx plan`: its table, its files, refused input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drawing import case
from typer.testing import CliRunner

from tfcommx import routes
from tfcommx.cli.main import app
from tfcommx.core import (
    NOMINAL,
    ConfigurationError,
    DataError,
    Profile,
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


def test_links_that_the_probe_lacked_are_named(files: tuple[str, str], tmp_path: Path) -> None:
    points = {"inside": [[1, 1024, 1e-4]], "between": []}
    file = tmp_path / "alone.json"
    file.write_text(json.dumps({"links": NOMINAL.to_dict(), "points": points}))
    note = "without links between nodes. Assumed: 10 Gbit/s"
    assert note in run(files[0], "--links", str(file), "--nodes", "2")
    assert note not in run(files[0], "--links", str(file), "--slots", "2", "--nodes", "1")


def test_a_gain_that_is_not_notable_is_marked(files: tuple[str, str], tmp_path: Path) -> None:
    """It advised a selection, which delays entries, for steps that were .1 % shorter."""
    rows = tuple(VariableProfile(f"layer{n}/kernel", (64, 64), ready_s=1.0 + n) for n in range(4))
    (tmp_path / "slow.json").write_text(Profile("slow", rows, 1.0, 4.0, 16).to_json())
    words = ("--links", files[1], "--nodes", "16", "--selection", "mstopk")
    printed = run(str(tmp_path / "slow.json"), *words)
    assert "Its step is 0." in printed and printed.rstrip().endswith("Scheme().")


def test_a_model_by_name(files: tuple[str, str], tmp_path: Path) -> None:
    """The advice was to pass its plan to an optimizer, which refused the table's variables."""
    words = ("--links", files[1], "--output", str(tmp_path / "plan.json"))
    printed = run("vgg19", "--gpu", "v100", *words)
    assert "allreduce, threshold" in printed and "not those of a Keras model" in printed
    assert "not those of a Keras model" not in run(files[0], *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet"], "'resnet'"),
        (["resnet5"], r"'resnet5'.*'resnet50'"),
        (["resnet50", "--selection", "mstop"], r"'mstop'.*'mstopk'"),
        (["resnet50", "--selection", "no_package:RULE"], "'no_package:RULE'"),
        (["resnet50", "--selection", "mstopk", "--density", "2"], r"`density`.*\b2\.0"),
        (["resnet50", "--density", "0.1"], r"density=0\.1"),
        (["resnet50", "--nodes", "0"], "nodes=0"),
        (["alexnet"], "'alexnet'.*'h100'"),
        (["alexnet", "--throughput", "0"], "`throughput`"),
    ],
)
def test_what_is_refused(files: tuple[str, str], words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(*words, "--links", files[1])


@pytest.mark.parametrize("words", ["--gpu a100", "--batch 64", "--throughput 250"])
def test_options_of_a_named_model_are_refused_for_a_file(
    files: tuple[str, str], words: str
) -> None:
    """They had no effect."""
    with pytest.raises(ConfigurationError, match=rf"profile\.json.*{words}"):
        run(files[0], "--links", files[1], *words.split())


def test_links_that_are_none_are_refused(files: tuple[str, str]) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json"):
        run("resnet50", "--links", "nowhere.json")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("nodes", "slots", "wins"),
    [(4, 1, False), (16, 8, True), case(64, 8, True, kept=False)],
)
def test_beside_selections_all_entries_in_few_bits_are_ranked(
    files: tuple[str, str], tmp_path: Path, nodes: int, slots: int, wins: bool
) -> None:
    """From some 16 nodes on 4 bits an entry are fewer bytes than 10 % of the entries."""
    words = ["--nodes", str(nodes), "--slots", str(slots), "--selection", "mstopk"]
    words += ["--density", "0.1", "--wire", "elias/int4", "--json", str(tmp_path / "rows.json")]
    printed = run("vgg19", "--gpu", "v100", "--links", files[1], *words)
    rows = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    steps = [row["step_seconds"] for row in rows]
    fewest = {
        wire: min(row["bytes_between"] for row in rows if row["wire"] == wire)
        for wire in ("int8", "int4", "elias/int4", "plain")
    }
    assert steps == sorted(steps) and "int4" in printed
    assert (fewest["int4"] < fewest["elias/int4"]) == wins
    # As `--wire int4` tries it; the quick mergings were slower
    assert any(row["wire"] == "int4" and row["merging"] == "optimal" for row in rows)
    assert fewest["int4"] < 0.55 * fewest["int8"] < 0.3 * fewest["plain"]
    if nodes == 4:
        _check_lossless(files, tmp_path, words)


def _check_lossless(files: tuple[str, str], tmp_path: Path, words: list[str]) -> None:
    run("vgg19", "--gpu", "v100", "--links", files[1], *words[:4], *words[-2:])
    lossless = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert {row["wire"] for row in lossless} == {"plain"}
