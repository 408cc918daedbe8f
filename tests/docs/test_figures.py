"""Every number on a page that was measured is the one that a record has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "scripts" / "documents"))
import figures
from bench import record, records, results

# Numbers in README that nobody measured: versions, of a license too, and what a setting is
ALLOWED = {
    *("2.0", "2.21", "3.15", "0.28.1", "3.11", "3.13"),
    *("200 Mbit/s", "1 Gbit/s", "1 %", "4 %", "5 %", "10 %"),
}
# With a decimal point, or before a unit
NUMBER = re.compile(
    r"(?<![\w.])\d[\d,]*(?:\.\d+)*"
    r"(?: (?:%|ms\b|s\b|min\b|MB\b|GB\b|[MG]bit/s|times\b|points\b|BLEU\b))?"
)


def typed_numbers(text: str) -> list[str]:
    """Return the numbers of a page that look measured and stand in no marker."""
    for marked in (figures.FIGURE, figures.TABLE, figures.CONDITIONS):
        text = marked.sub("", text)
    text = re.sub(r"```.*?```|^ {4}[^\n]*$", "", text, flags=re.S | re.M)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    found = [one[0] for one in NUMBER.finditer(text)]
    return [one for one in found if "." in one or " " in one]


@pytest.mark.parametrize("page", list(figures.pages()), ids=lambda one: str(one.relative_to(ROOT)))
def test_a_page_shows_what_the_records_have(page: Path) -> None:
    text = page.read_text()
    new = figures.filled(text, figures.read_records())
    assert new == text, figures.differences(text, new)


def test_the_readme_has_no_measured_number_that_was_typed() -> None:
    text = (ROOT / "README.md").read_text()
    assert [one for one in typed_numbers(text) if one not in ALLOWED] == []


def test_a_typed_number_is_seen() -> None:
    text = "It takes 0.53 s, or 12 times less; Python 3.11; 4 nodes; `0.7`; [x](a/1.5)\n"
    text += "    2.5 s\n```\n1.5 s\n```\n7 %\n"
    marked = "<!--figure demo.seconds .0f-->114<!--/--> s"
    assert typed_numbers(text + marked) == ["0.53 s", "12 times", "3.11", "7 %"]


@pytest.mark.parametrize("marker", ["<!--figure a.b-->0.1<!--/-->", "<!--figure a.b .1f-->0.1"])
def test_a_marker_without_its_format_or_end_is_an_error(marker: str) -> None:
    with pytest.raises(figures.FigureError, match=r"<!--figure \.\.\.-->"):
        figures.filled(f"{marker} and more\n# A heading <!--figure a.b .1f-->1<!--/-->\n", {})


@pytest.fixture
def two() -> dict[str, figures.Record]:
    rows = [
        {"name": "add", "density": 1.0, "seconds": 2.0, "limit_seconds": None},
        {"name": "sum", "density": 0.1, "seconds": 0.5, "limit_seconds": 1.0},
        {"name": "sum", "density": 0.2, "seconds": 1.5, "limit_seconds": 1.0},
    ]
    return {
        "bench": figures.Record({"name": "bench", "rows": rows}),
        "run": figures.Record({"name": "run", "rows": [{"name": "run", "score": 0.91234}]}),
    }


def test_figures_tables_and_templates(two: dict[str, figures.Record]) -> None:
    page = (
        "Score <!--figure run.score .4f-->0<!--/-->, "
        '<!--figure bench("add").seconds / bench("sum", density=0.1).seconds .1f-->9<!--/-->'
        " times.\n"
        "<!--table bench where density < 1\nrule: name s\nms: seconds * 1e3 ,.0f\n"
        "limit: seconds / limit_seconds .1f\n-->\nold\n<!--/table-->\n"
        "# Measured: 0.1\n# figures: Measured: {run.score:.2f}\n"
    )
    new = figures.filled(page, two)
    assert ".4f-->0.9123<!--/-->" in new and ".1f-->4.0<!--/--> times" in new
    assert (
        "| rule | ms | limit |\n| --- | ---: | ---: |\n| sum | 500 | 0.5 |\n| sum | 1,500 | 1.5 |\n"
    ) in new
    assert "old" not in new
    assert new.endswith("# Measured: 0.91\n# figures: Measured: {run.score:.2f}\n")
    assert figures.filled(new, two) == new
    # A figure that somebody typed over is found
    changed = new.replace("0.9123", "0.9124")
    assert figures.differences(changed, figures.filled(changed, two))
    # A cell whose value is missing is empty
    whole = figures.filled(page.replace(" where density < 1", ""), two)
    assert "| add | 2,000 |  |" in whole


@pytest.mark.parametrize(
    "what, says",
    [
        ("nothing.seconds", "nothing.*bench, run"),
        ("run.speed", "'speed'.*name, score"),
        ('bench("sum").seconds', r"'sum'.*\b2\b"),
        ('bench("all").seconds', r"'all'.*\b0\b.*add, sum"),
        ("bench.seconds", r"'bench'.*\b3\b"),
        ("run.score +", "invalid syntax"),
    ],
)
def test_a_marker_that_names_nothing_is_an_error(
    two: dict[str, figures.Record], what: str, says: str
) -> None:
    with pytest.raises(figures.FigureError, match=f"(?s){says}"):
        figures.filled(f"<!--figure {what} .1f-->1<!--/-->", two)


def test_a_record_says_how_it_was_measured(tmp_path: Path) -> None:
    path = records.write("some", [{"name": "one", "seconds": 1.0}], "python x.py", None, tmp_path)
    found = json.loads(path.read_text())
    assert found["machine"]["cores"] >= 1 and found["versions"]["keras"].startswith("3.")
    assert found["versions"]["tensorflow"] and found["machine"]["processor"]
    shown = figures.conditions("some", figures.read_records(tmp_path))
    assert "    python x.py\n" in shown and "TensorFlow" in shown and "load before" in shown
    for name, rows in (("Some-1", [{}]), ("some", [])):
        with pytest.raises(SystemExit):
            records.write(name, rows, "", None, tmp_path)


def test_what_is_recorded_can_be_measured_again() -> None:
    assert {path.stem for path in records.FOLDER.glob("*.json")} <= set(results.COMMANDS)


def test_a_training_is_recorded_from_its_summary(tmp_path: Path) -> None:
    seconds = {"first_step": 3.0, "evaluation": 2.0}
    summary = {
        "test_accuracy": 0.9,
        "ranks": 4,
        "nodes": 2,
        "epochs": 2,
        "seconds": 20.0,
        "throughput": 100.0,
        "bytes_between_nodes": 30.0,
        "bytes_between_nodes_dense": 120.0,
        "replicas_identical": True,
        "rows": [{"seconds": seconds}, {"seconds": seconds}],
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    row = record.row_of(tmp_path)
    assert (row["bytes_share"], row["tracing_seconds"], row["verified"]) == (0.25, 6.0, True)
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"replicas_identical": False}))
    command = [sys.executable, "scripts/bench", "record", str(tmp_path), "never", "--command", "x"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "not recorded" in ended.stderr
    assert not (records.FOLDER / "never.json").exists()


def test_a_comparison_is_recorded_from_its_rows(tmp_path: Path) -> None:
    """Its rows have names of methods, a simulation's those of schemes."""
    file = tmp_path / "rows.jsonl"
    slow = {"name": "dense", "bandwidth_mbit": 200.0, "measured": True}
    fast = {"name": "dense", "bandwidth_mbit": 1000.0, "measured": False}
    file.write_text(f"{json.dumps(slow)}\n{json.dumps(fast)}\n")
    rows, note = record.rows_of(file)
    assert rows == [slow, fast] and "except at 200 Mbit/s, where they were measured" in note
    file.write_text(json.dumps({"scheme": "torus"}))
    rows, note = record.rows_of(file)
    assert rows[0]["name"] == "torus" and note.startswith("a prediction")
