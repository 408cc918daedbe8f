"""`tfcommx simulate`: its rows by hand, its files, refused input; without TensorFlow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT
from typer.testing import CliRunner

from tfcommx.cli.main import app
from tfcommx.core import NOMINAL, ConfigurationError, Profile, TfcommxError
from tfcommx.simulator import models

KEYS = [
    "scheme",
    "wire",
    "merging",
    "nodes",
    "slots",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "step_seconds_p10",
    "step_seconds_p90",
    "compute_seconds",
    "exposed_seconds",
    "throughput",
    "scaling_efficiency",
    "bytes_between",
]
COMMAND = (
    "--model resnet50 --batch 64 --throughput 253.1 --nodes 8 --slots 4 --between-gbit 10 "
    "--between-alpha 5e-5 --inside-gbytes 10 --inside-alpha 1e-5 --efficiency 0.9 "
    "--scheme allreduce"
)
FLAGS = COMMAND.split()


def run(*words: str) -> str:
    ended = CliRunner().invoke(app, ["simulate", *words])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.output


def rows(folder: Path, *words: str) -> list[dict[str, object]]:
    run(*words, "--json", str(folder / "rows.json"))
    return [json.loads(line) for line in (folder / "rows.json").read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nodes: null", "`nodes` .*None"),
        ("between_gbit: null", "`between_gbit` .*None"),
        ("model: 5", "`model` .*5"),
        ("links: [1]", "`links` "),
        ("between-gbit: 1\nbetween_gbit: 2", "'between_gbit'"),
    ],
)
def test_values_of_another_kind_in_a_file_are_named(text: str, named: str, tmp_path: Path) -> None:
    """`nodes: null` was a TypeError, and of two spellings of a key the last one was taken."""
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        run(str(tmp_path / "file.yaml"))


def test_nothing_is_exposed_where_nothing_is_exchanged(tmp_path: Path) -> None:
    """On one rank the exposed seconds were -6.9e-18, the difference of two sums of one step."""
    (row,) = rows(tmp_path, "--nodes", "1")
    assert row["exposed_seconds"] == 0


def test_a_step_as_worked_out_by_hand(tmp_path: Path) -> None:
    """Everything after the backward pass: a ring of 32 ranks, 2 x 31/32 bytes.

    Of its 2 x 31 latencies a quarter is between nodes.
    """
    (row,) = rows(tmp_path, *FLAGS, "--merging", "single", "--gamma", "0")
    assert list(row) == KEYS
    compute = 64 / 253.1
    sent = 62 * (5e-5 + 3 * 1e-5) / 4 + 2 * 31 / 32 * 4 * 25_557_032 * 8e-9 / 10 / 0.9
    assert row["compute_seconds"] == pytest.approx(compute)
    assert row["exposed_seconds"] == pytest.approx(sent)
    assert row["throughput"] == pytest.approx(32 * 64 / (compute + sent))
    assert row["scaling_efficiency"] == pytest.approx(compute / (compute + sent))
    assert [row[name] for name in KEYS[:5]] == ["allreduce", "plain", "single", 8, 4]
    assert row["bytes_between"] == pytest.approx(62 / 32 * 4 * 25_557_032 / 4)


def test_bytes_of_messages_are_not_counted(tmp_path: Path) -> None:
    """Counting them on 512 ranks took 17 s."""
    (row,) = rows(tmp_path, "--nodes", "4", "--scheme", "pipeline")
    assert row["bytes_between"] is None and "None" not in run("--nodes", "4", "--scheme", "tree")


def test_merging_and_links_matter_as_they_should(tmp_path: Path) -> None:
    names = "single,each,threshold,mg_wfbp,optimal"
    swept = rows(tmp_path, *FLAGS, "--sweep", f"merging={names}")
    steps = {row["merging"]: row["step_seconds"] for row in swept}
    assert list(steps) == names.split(",") and min(steps, key=steps.get) == "optimal"
    assert steps["mg_wfbp"] < steps["single"]
    (probed,) = rows(tmp_path, *FLAGS, "--merging", "single", "--links", links(tmp_path))
    assert probed["exposed_seconds"] == pytest.approx(62 * 5e-5 + 31 / 16 * 102.2e6 * 8e-10, 0.01)


def test_links_that_the_probe_lacked_have_the_rates_of_the_settings(tmp_path: Path) -> None:
    """A probe on one machine replaced --between-gbit by 10, whatever it was."""
    points = {"inside": [[1, 1024, 1e-4]], "between": []}
    file = tmp_path / "alone.json"
    file.write_text(json.dumps({"links": NOMINAL.to_dict(), "points": points}))
    words = ("--nodes", "8", "--links", str(file), "--between-gbit")
    fast, slow = (rows(tmp_path, *words, rate)[0]["exposed_seconds"] for rate in ("10", "1"))
    assert slow > 5 * fast


def links(folder: Path) -> str:
    (folder / "links.json").write_text(json.dumps({"links": NOMINAL.to_dict()}))
    return str(folder / "links.json")


def test_a_yaml_file_of_the_same_and_flags_before_it(tmp_path: Path) -> None:
    pairs = zip(FLAGS[::2], FLAGS[1::2], strict=True)
    text = "".join(f"{flag[2:]}: {value}\n" for flag, value in pairs)
    (tmp_path / "a.yaml").write_text(text + "merging: single\n")
    file = str(tmp_path / "a.yaml")
    assert rows(tmp_path, file) == rows(tmp_path, *FLAGS, "--merging", "single")
    assert rows(tmp_path, file, "--nodes", "2")[0]["nodes"] == 2


def test_a_sweep_goes_on_as_it_began(tmp_path: Path) -> None:
    words = [*FLAGS, "--sweep", "nodes=1,2,4,...,32", "--png", str(tmp_path / "a.png")]
    swept = rows(tmp_path, *words)
    assert [row["nodes"] for row in swept] == [1, 2, 4, 8, 16, 32]
    steps = [row["step_seconds"] for row in swept]
    assert steps == sorted(steps) and (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    swept = rows(tmp_path, *FLAGS[:-2], "--sweep", "spread=0,0.1,...,0.3")
    assert [row["spread"] for row in swept] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_a_swept_setting_whose_name_is_that_of_a_result_has_its_own_column(tmp_path: Path) -> None:
    """The axis of the picture was that of all ranks, and `auto` was shown as its choice."""
    words = [*FLAGS, "--sweep", "throughput=100,200", "--png", str(tmp_path / "a.svg")]
    swept = rows(tmp_path, *words)
    assert [row["swept_throughput"] for row in swept] == [100, 200] < [swept[0]["throughput"]]
    assert "<!-- swept_throughput -->" in (tmp_path / "a.svg").read_text()
    swept = rows(tmp_path, *FLAGS[:-2], "--sweep", "scheme=auto,allreduce")
    assert [row["swept_scheme"] for row in swept] == ["auto", "allreduce"]


def test_ports_that_vary_spread_the_steps_and_the_fastest_scheme_is_named(tmp_path: Path) -> None:
    words = [*FLAGS[:-2], "--merging", "single", "--gamma", "0", "--jitter", "0.7"]
    (row,) = rows(tmp_path, *words)
    sent = 2 * 31 / 32 * 4 * 25_557_032 * 8e-9 / 10 / 0.9
    waits = 62 * (5e-5 + 3 * 1e-5) / 4
    for name, quantile in (("", 0.5), ("_p10", 0.1), ("_p90", 0.9)):
        slowest = 1 - 0.7 * quantile ** (1 / 8)
        step = 64 / 253.1 + waits + sent / slowest
        assert row[f"step_seconds{name}"] == pytest.approx(step)
    assert "Ports vary: one step in ten" in run(*words)
    swept = ["--slow-node", "1.2", "--sweep", "scheme=allreduce,torus,hitopk"]
    assert "The shortest step: scheme=hitopk." in run(*words, *swept)
    exposed = [one["exposed_seconds"] for one in rows(tmp_path, *words, *swept)]
    assert min(exposed) > 0.2 * 64 / 253.1


def test_a_timeline_is_drawn_and_exported(tmp_path: Path) -> None:
    png, trace = tmp_path / "a.png", tmp_path / "a.json"
    output = run(*FLAGS, "--scheme", "hitopk", "--png", str(png), "--trace", str(trace))
    assert "port inside" in output and "port between" in output and "hitopk" in output
    events = json.loads(trace.read_text())["traceEvents"]
    assert events[0]["args"]["name"] == "resnet50, 8 x 4, hitopk, threshold"
    assert {"forward", "select tfcommx/bucket0"} <= {event["name"] for event in events}
    assert png.stat().st_size > 1000


def test_a_measured_profile_counts_more_than_a_model(tmp_path: Path) -> None:
    profile = Profile.from_throughput(models.get("lstm_ptb"), 20, batch=10)
    (tmp_path / "profile.json").write_text(profile.to_json())
    (row,) = rows(tmp_path, *FLAGS, "--profile", str(tmp_path / "profile.json"))
    assert row["compute_seconds"] == pytest.approx(0.5)


def test_a_profile_of_sizes_is_refused(tmp_path: Path) -> None:
    """Its steps took no time, and its throughput was that of the messages."""
    rows = Profile.from_throughput(models.get("lstm_ptb"), 20, batch=10).variables
    (tmp_path / "sizes.json").write_text(Profile.of_sizes("mine", rows).to_json())
    with pytest.raises(ConfigurationError, match=r"sizes\.json, of 'mine'.*`tfcommx profile`"):
        run(*FLAGS, "--profile", str(tmp_path / "sizes.json"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "resnet"], r"'resnet'.*'resnet50'"),
        (["--scheme", "allreduc"], r"'allreduc'.*'allreduce'"),
        (["--merging", "optimum"], r"'optimum'.*'optimal'"),
        (["--efficiency", "2"], r"`efficiency`.*\b2\.0"),
        (["--between-gbit", "0"], "`between_gbit`"),
        (["--slow-node", "0.5"], r"slow_node=0\.5"),
        (["--slow-port", "1.5"], r"`slow_port`.*1\.5"),
        (["--jitter", "1"], r"`jitter`.*1\.0"),
        (["--nodes", "0"], "`nodes`.*0"),
        # Named as the user wrote it, not as a field of the links or of the profile
        (["--throughput", "-1"], "`throughput`"),
        (["--between-alpha", "-1"], r"`between_alpha`.*-1"),
        (["--gamma", "inf"], r"`gamma`.*inf"),
        (["--cycle", "-1"], r"`cycle`.*-1"),
        (["--loading", "nan"], r"`loading`.*nan"),
        (["--sweep", "node=1,2"], r"'node'.*'nodes'"),
        (["--sweep", "nodes=1,...,x"], r"'1,\.\.\.,x'"),
        (["--sweep", "nodes"], r"`--sweep`.*'nodes'"),
        (["--sweep", "nodes=1,2.5"], r"`nodes`.*2\.5"),
        (["--sweep", "nodes=1,2", "--trace", "t"], r"`--trace`.*--sweep"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(TfcommxError, match=message):
        run(*words)


def test_an_unknown_wiring_is_refused_also_if_its_price_ignores_it(tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(json.dumps({"links": NOMINAL.to_dict()}))
    with pytest.raises(ConfigurationError, match=r"'nvlinks'.*'nvlink'"):
        run("--links", str(tmp_path / "links.json"), "--wiring", "nvlinks")


def test_unknown_keys_of_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("batches: 3\n")
    with pytest.raises(ConfigurationError, match=r"'batches'.*'batch'"):
        run(str(tmp_path / "a.yaml"))
    for name in ("batch", "size"):  # A gradient was said to be ready before 0
        (tmp_path / "a.yaml").write_text(f"{name}: -1\n")
        with pytest.raises(ConfigurationError, match=rf"`{name}`.*-1"):
            run(str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text("batch: many\n")
    with pytest.raises(ConfigurationError, match=r"`batch`.*'many'"):
        run(str(tmp_path / "a.yaml"))


def test_simulating_loads_no_tensorflow() -> None:
    code = (
        "import sys; sys.argv = ['tfcommx', *sys.argv[1:]]; import tfcommx.cli.main as cli\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", *FLAGS, "--merging", "mg_wfbp"],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0 and "throughput" in done.stdout, done.stderr


def test_the_engine_and_the_wires_inside_are_inputs(tmp_path: Path) -> None:
    """Each changes the step; a node's slow wires count, however fast its port."""
    flat = (*FLAGS, "--merging", "single")

    def seconds(*words: str) -> float:
        (found,) = rows(tmp_path, *flat, *words)
        return found["step_seconds"]

    by_engine = {name: seconds("--engine", name) for name in ("ring", "nccl", "gloo", "open_mpi")}
    assert len(set(by_engine.values())) == 4
    fast = seconds("--between-gbit", "100", "--inside-gbytes", "50")
    shared = seconds("--between-gbit", "100", "--inside-gbytes", "50", "--wiring", "host_memory")
    slow = seconds("--between-gbit", "100", "--inside-gbytes", "2")
    assert fast < shared < slow
    assert seconds("--nics", "2") > seconds("--nics", "2", "--engine", "nccl")
    assert seconds("--cycle", "1") > 1 > seconds("--cycle", "0.001")
