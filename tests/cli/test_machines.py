"""`tfcommx machines`: the cost of an epoch by hand, the best scheme, files, refused input."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import yaml
from launching import ROOT
from matplotlib.figure import Figure
from typer.testing import CliRunner

from tfcommx.cli import machines
from tfcommx.cli.machines import offer_rows, read_offers
from tfcommx.cli.main import app
from tfcommx.core import ConfigurationError
from tfcommx.report.figures import draw_machines

PAGE = ROOT / "docs" / "how-to" / "which-machines.md"
# A step of 0.25 s; 10 million samples; messages inside one node of two ranks cost nothing
SMALL = {
    "epoch_samples": 10_000_000,
    "model": "alexnet",
    "batch": 50,
    "throughput": 200,
    "machines": {"a": {"price": 3, "slots": 2, "nodes": [1, 2], "inside_gbytes": 1e9}},
}


class WithoutAliases(yaml.SafeDumper):
    """Writes a list that stands twice twice, because files with aliases are refused."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def rows_of(folder: Path, **changes: object) -> list[dict[str, object]]:
    (folder / "offers.yaml").write_text(
        yaml.dump({**SMALL, **changes}, Dumper=WithoutAliases, sort_keys=False)
    )
    return offer_rows(read_offers(folder / "offers.yaml"))


def run(*words: str) -> str:
    ended = CliRunner().invoke(app, ["machines", *words])
    if ended.exception is not None:
        raise ended.exception
    return ended.output


def test_a_model_without_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was missing from the table without a word."""
    content = {"model": ["resnet50", "vgg16"], "nodes": [1, 2], "machines": {"a": {"slots": 8}}}
    (tmp_path / "offers.yaml").write_text(yaml.dump(content))
    rows = offer_rows(read_offers(tmp_path / "offers.yaml"))
    assert {row["model"] for row in rows} == {"resnet50"}
    assert capsys.readouterr().err.count("'vgg16'") == 1


def test_the_cost_of_an_epoch_as_worked_out_by_hand(tmp_path: Path) -> None:
    """Two ranks without exchange: 400 samples a second, 25,000 s, 6.94 hours at 3 an hour."""
    schemes = {"one": {"merging": "single", "inside_alpha": 0, "gamma": 0}}
    first, second = rows_of(tmp_path, schemes=schemes)
    assert first["throughput"] == pytest.approx(400) and first["scheme"] == "one"
    assert first["epoch_seconds"] == pytest.approx(25_000)
    assert first["epoch_cost"] == pytest.approx(25_000 / 3600 * 3)
    assert second["nodes"] == 2 and second["ranks"] == 4
    assert second["epoch_seconds"] == pytest.approx(10_000_000 / second["throughput"])
    assert second["epoch_cost"] == pytest.approx(second["epoch_seconds"] / 3600 * 2 * 3)


def test_the_best_scheme_is_notably_faster_than_those_before_it(tmp_path: Path) -> None:
    schemes = {"plain": {}, "again": {}, "less": {"scheme": "allgather", "density": 0.001}}
    rows = rows_of(tmp_path, schemes=schemes, nodes=4)
    assert [row["scheme"] for row in rows if row["best"]] == ["plain", "less"]
    for first, second, third in (rows[:3], rows[3:]):
        assert first["speedup"] == second["speedup"] == 1
        assert third["speedup"] == first["step_seconds"] / third["step_seconds"]


def test_what_no_other_row_beats_in_time_and_cost(tmp_path: Path) -> None:
    """The same machine at a higher price is beaten; more nodes are faster, fewer cheaper."""
    dear = {**SMALL["machines"]["a"], "price": 4}
    rows = rows_of(tmp_path, machines={**SMALL["machines"], "dear": dear}, schemes={"plain": {}})
    unbeaten = [(row["machine"], row["nodes"]) for row in rows if row["unbeaten"]]
    assert unbeaten == [("a", 1), ("a", 2)]


def test_values_by_model_and_lists_in_a_machine(tmp_path: Path) -> None:
    both = {"price": 1, "throughput": {"alexnet": 200, "lstm_ptb": 20}, "between_gbit": [10, 25]}
    rows = rows_of(tmp_path, model=["alexnet", "lstm_ptb"], machines={"b": both})
    assert [(row["model"], row["between_gbit"]) for row in rows if row["scheme"] == "horovod"] == [
        ("alexnet", 10.0),
        ("alexnet", 25.0),
        ("lstm_ptb", 10.0),
        ("lstm_ptb", 25.0),
    ]
    assert rows[-1]["throughput"] < 80 < rows[0]["throughput"]


def test_a_listed_throughput_is_that_of_one_rank(tmp_path: Path) -> None:
    """Its column had the throughput of all ranks, and so was that of no cell."""
    rows = rows_of(tmp_path, throughput=[100, 200], schemes={"plain": {}})
    assert [row["set_throughput"] for row in rows] == [100, 100, 200, 200]
    assert rows[1]["throughput"] > 200


def test_the_file_of_the_page_and_all_that_is_written(tmp_path: Path) -> None:
    text = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)[1]
    # As many ranks as the issue asks for, in place of a few
    (tmp_path / "offers.yaml").write_text(
        text.replace("nodes: [1, 2, 4, 8, 16]", "nodes: [2, 512]")
    )
    csv_file, figure = tmp_path / "rows.csv", tmp_path / "offers.svg"
    said = run(str(tmp_path / "offers.yaml"), "--csv", str(csv_file), "--figure", str(figure))
    assert "8 cells, 32 simulated steps" in said and "one_percent" in said
    with csv_file.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        low, high = row["step_seconds_low"], row["step_seconds_high"]
        assert 0 < float(low) <= float(row["step_seconds"]) < float(high)
    assert re.search(r" horovod +\d+ \(\d+-\d+\) ", said)
    assert len(rows) == 32 and {row["ranks"] for row in rows} == {"2", "512", "16", "4096"}
    assert sum(row["best"] == "True" for row in rows) == 8
    assert figure.read_text().count("nothing is both faster and cheaper") == 1


def test_schemes_without_prices_and_their_map(tmp_path: Path) -> None:
    """`auto` is never slower than plain Horovod, and messages that take longer favour it."""
    (tmp_path / "offers.yaml").write_text(
        "{model: resnet50, machines: {v100: {gpu: v100, slots: 2, nodes: [2, 4],"
        " between_gbit: [1, 100]}}, schemes: {horovod: {}, lossless: {scheme: auto}}}"
    )
    file, rows_file, picture = (tmp_path / name for name in ("offers.yaml", "rows", "map.svg"))
    said = run(str(file), "--json", str(rows_file), "--map", str(picture))
    assert "cost" not in said and "4 cells, 8 simulated steps" in said
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    for row in rows:
        assert 1 <= row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert (row["scheme"] == "lossless") or row["speedup"] == 1
    assert max(row["speedup"] for row in rows if row["route"] == "torus") > 1.3
    assert "times faster than horovod" in picture.read_text()
    with pytest.raises(ConfigurationError, match="`epoch_samples`"):
        run(str(file), "--figure", str(tmp_path / "costs.svg"))
    file.write_text("{model: resnet50, machines: {v100: {gpu: v100, between_gbit: 10}}}")
    with pytest.raises(ConfigurationError, match="`between_gbit"):
        run(str(file), "--map", str(picture))


def test_a_figure_of_machines_that_differ_in_words(tmp_path: Path) -> None:
    """A list of wirings or engines ended in a ValueError: words were formatted as numbers."""
    rows = rows_of(tmp_path, wiring=["nvlink", "host_memory"], between_gbit=[10, 2.5])
    draw_machines([row for row in rows if row["best"]], figure := tmp_path / "offers.svg")
    assert "wiring host_memory, between_gbit 2.5" in figure.read_text()


def test_a_machine_has_one_colour_in_the_panels_of_all_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only machine of the second model had the colour that the legend gave to another one."""
    offer = SMALL["machines"]["a"]
    offers = {
        "first": {**offer, "model": ["alexnet"]},
        "both": {**offer, "model": ["alexnet", "lstm_ptb"]},
        "second": {**offer, "model": ["lstm_ptb"]},
    }
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *to, **how: (drawn.append(self), save(self, *to, **how))
    )
    draw_machines(rows_of(tmp_path, machines=offers, schemes={"plain": {}}), tmp_path / "a.svg")
    (legend,) = drawn[0].legends
    texts = [text.get_text() for text in legend.get_texts()]
    colours = dict(zip(texts, (line.get_color() for line in legend.get_lines()), strict=True))
    assert list(colours)[:-1] == list(offers) and "cheaper" in texts[-1]
    # Two panels for each model; the first has the rings too
    in_panels = ["first both"] * 2 + ["both second"] * 2
    for axes, names in zip(drawn[0].axes, in_panels, strict=True):
        lines = axes.lines[:2]
        assert [line.get_color() for line in lines] == [colours[name] for name in names.split()]
    assert len(set(colours.values())) == len(offers) + 1


def test_a_scheme_that_can_be_carried_out_nowhere_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'toru'.*'torus'"):
        rows_of(tmp_path, schemes={"plain": {}, "wrong": {"scheme": "toru"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machines": {"a": {"slots": 2}}}, r"price.*\ba`"),
        ({"machines": {"a": {"price": 0}}}, r"price.*\ba`"),
        ({"machines": {"a": {"price": 1, "slot": 2}}}, r"'slot'.*'slots'"),
        ({"machines": 3}, "`machines`"),
        ({"schemes": {"a": 3}}, "`schemes`"),
        ({"epoch_samples": None}, r"`epoch_samples`.*None"),
        ({"epoch_samples": 0}, r"`epoch_samples`.*\b0\b"),
        ({"gpu": "p100", "throughput": None}, "`throughput`"),
        ({"nodes": []}, r"`nodes`.*\[\]"),
        ({"between_gbit": None}, r"`between_gbit`.*None"),
        ({"fusion_mbytes": float("inf")}, r"`fusion_mbytes`.*inf"),
        ({"epochs": 3}, r"'epochs'.*'epoch_samples'"),
        # The rows of a torus were those of `horovod`
        ({"scheme": "torus"}, r"'scheme'.*'schemes'"),
        ({"batch": {"vgg16": 3}}, "'alexnet'"),
        # A note in place of an error, and no row of that name
        ({"model": ["alexnet", "vgg"]}, "'vgg'"),
        ({"machines": {"a": {"price": 1}, "b": {"price": 1, "gpu": "v10"}}}, r"'v10'.*'v100'"),
        ({"machines": {"a": {"price": 1}, "b": {"price": 1, "engine": "ncl"}}}, r"'ncl'.*'nccl'"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rows_of(tmp_path, **changes)


@pytest.mark.parametrize(("nodes", "slots", "wins"), [(4, 1, False), (16, 8, True), (64, 8, True)])
def test_on_many_nodes_all_entries_in_4_bits_are_fewer_bytes_than_10_percent_of_them(
    tmp_path: Path, nodes: int, slots: int, wins: bool
) -> None:
    """ResNet-50 on 10 Gbit/s: there they are the faster step, too, by more than 4 % on 64 nodes."""
    machine = {"price": 3, "slots": slots, "nodes": nodes, "between_gbit": 10}
    schemes = {
        "plain": {},
        "four_bits": {"scheme": "torus", "wire": "int4"},
        "ten_percent": {"scheme": "hitopk", "density": 0.1, "wire": "elias/int4"},
    }
    machines = {"a": machine}
    rows = rows_of(
        tmp_path, model="resnet50", batch=64, throughput=250, machines=machines, schemes=schemes
    )
    plain, codes, selection = (row["bytes_between"] for row in rows)
    assert (codes < selection) == wins
    assert codes < 0.15 * plain
    if nodes == 64:
        assert [row["scheme"] for row in rows if row["best"]] == ["four_bits"]
        assert rows[1]["step_seconds"] < 0.96 * rows[2]["step_seconds"]


def test_a_list_that_would_take_hours_is_announced_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80,000 cells took half an hour without a word."""
    machine = {"price": 3, "slots": [2, 4], "nodes": [1, 2, 4]}
    text = yaml.dump({**SMALL, "machines": {"a": machine, "b": {"price": 1}}})
    (tmp_path / "offers.yaml").write_text(text)
    assert read_offers(tmp_path / "offers.yaml").steps == (6 + 1) * 2
    monkeypatch.setattr(machines, "MANY_STEPS", 13)
    told = CliRunner().invoke(app, ["machines", str(tmp_path / "offers.yaml")])
    assert told.exit_code == 0 and "14 steps" in told.output
    monkeypatch.setattr(machines, "MOST_STEPS", 13)
    refused = CliRunner().invoke(app, ["machines", str(tmp_path / "offers.yaml")])
    assert isinstance(refused.exception, ConfigurationError) and "14" in str(refused.exception)
