"""Tables of the pages are those of the records, and so are the numbers in sentences that matter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "scripts" / "documents"))
import figures
import tables
from bench import record, records, results


@pytest.mark.parametrize("page", list(figures.pages()), ids=lambda one: str(one.relative_to(ROOT)))
def test_a_page_shows_what_the_records_have(page: Path) -> None:
    text = page.read_text()
    new = figures.filled(text, figures.read_records())
    assert new == text, figures.differences(text, new)


def on_the_map(model: str, scheme: str) -> Callable[[tables.Records], float]:
    """Return how many times faster a scheme is predicted on 16 nodes of 8 H100s at 25 Gbit/s."""

    def ratio(records: tables.Records) -> float:
        row = records.row("scheme_map", f"H100, {model}, 16, 25.0")
        step = {
            name: row["compute_seconds"] + row["exposed_seconds"][name]
            for name in ("plain Horovod", scheme)
        }
        return float(step["plain Horovod"] / step[scheme])

    return ratio


# A page, a pattern of its text with one group, and the number from the records
TYPED: list[tuple[str, str, Callable[[tables.Records], float]]] = [
    (
        "README.md",
        r"lost ([\d.]+) BLEU of 38",
        lambda found: found.row("compare_translate", "elias_int4", bandwidth_mbit=200)["loss"],
    ),
    ("README.md", r"ResNet-50 is ([\d.]+) times faster", on_the_map("resnet50", "4 bits")),
    ("README.md", r"BERT-Large is ([\d.]+) times faster", on_the_map("bert_large", "1 bit")),
    (
        "configs/fashion_mnist.yaml",
        r"# Measured: ([\d.]+) in",
        lambda found: found.row("demo")["test_accuracy"],
    ),
    (
        "docs/results.md",
        r"The demo took (\d+) s",
        lambda found: found.row("demo")["seconds"],
    ),
]


@pytest.mark.parametrize(("page", "pattern", "number"), TYPED, ids=[one[1] for one in TYPED])
def test_a_number_in_a_sentence_is_that_of_the_record(
    page: str, pattern: str, number: Callable[[tables.Records], float]
) -> None:
    (typed,) = re.findall(pattern, (ROOT / page).read_text())
    decimals = len(typed.partition(".")[2])
    assert typed == f"{number(figures.read_records()):.{decimals}f}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("<!--table routes-->\n", "table"),
        ("Text <!--table routes--> more\n<!--/table-->", "table"),
        ("<!--conditions demo-->\n<!--/table-->", "conditions"),
        ("<!--table nothing-->\n<!--/table-->", "'nothing'.*gains"),
        ("<!--conditions nothing-->\n<!--/conditions-->", "'nothing'.*demo"),
    ],
)
def test_a_marker_that_is_wrong_is_an_error(text: str, named: str) -> None:
    with pytest.raises(tables.FigureError, match=named):
        figures.filled(text, figures.read_records())


def test_a_table_has_a_row_for_each_of_the_record() -> None:
    rows = [{"name": "add", "seconds": 2.0, "limit": None}, {"name": "sum", "seconds": 0.5}]
    found = tables.Records([{"name": "bench", "rows": rows}])
    columns = {"rule": tables.value("name", "s"), "ms": tables.value("seconds", ",.0f", 1e3)}
    text = tables.markdown(found.rows("bench"), columns)
    assert text == "| rule | ms |\n| --- | ---: |\n| add | 2,000 |\n| sum | 500 |\n"
    # A value that is missing leaves its cell empty; a column that is missing is an error
    assert tables.value("limit", ".1f")(rows[0]) is None
    with pytest.raises(tables.FigureError, match=r"'limit'.*name, seconds"):
        tables.value("limit", ".1f")(rows[1])
    with pytest.raises(tables.FigureError, match=r"'bench'.*'name': 'all'.*\b0\b"):
        found.row("bench", "all")


def test_a_table_that_somebody_changed_is_seen() -> None:
    text = (ROOT / "README.md").read_text()
    changed = text.replace("| 233 s |", "| 323 s |")
    assert changed != text
    new = figures.filled(changed, figures.read_records())
    assert new == text
    assert figures.differences(changed, new)


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
    # The first epochs of a run were recorded as the whole; a run on one node ended in a traceback
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"stopped": "SIGTERM"}))
    with pytest.raises(SystemExit, match="stopped"):
        record.row_of(tmp_path)
    one_node = dict.fromkeys(("bytes_between_nodes", "bytes_between_nodes_dense"), 0.0)
    (tmp_path / "summary.json").write_text(json.dumps(summary | one_node))
    assert record.row_of(tmp_path)["bytes_share"] is None
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
