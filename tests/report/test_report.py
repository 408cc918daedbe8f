"""The report shows the content of the summary.

The command line prints user errors in one line, with exit code 2.
"""

import io
import json
import os
import resource
import select
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT
from rich.console import Console

from tfcommx import report
from tfcommx.report import terminal
from tfcommx.report.progress import ProgressDisplay
from tfcommx.report.summary import PARTS, ReportError, bytes_text, phase_rows, snapshots_text


def row(epoch: int, resolution: int, route: str, **more) -> dict:
    return {
        "epoch": epoch,
        "resolution": resolution,
        "route": route,
        "selection": "all",
        "density": 1.0,
        "loss": 0.5,
        "train_accuracy": 0.8,
        "test_accuracy": 0.8123,
        "counted": "images",
        "throughput": 1234.5,
        "replicas_identical": True,
        "phase": 1 if route == "hitopk" else 2,
        "global_batch": 100,
        "steps": 11,
        "first_steps": 1,
        "ranks": 4,
        # In the order of PARTS: data, compute, gradients, update, first step, ...
        "seconds": dict(zip(PARTS, (1.0, 3.0, 1.0, 1.0, 2.0, 1.0, 0.5, 0.5), strict=True)),
        **more,
    }


@pytest.fixture
def summary() -> dict:
    rows = [
        row(1, 14, "hitopk", selection="mstopk", density=0.05),
        row(2, 28, "torus", test_accuracy=0.9012),
    ]
    return {
        "name": "tiny",
        "test_accuracy": 0.9012,
        "ranks": 4,
        "nodes": 2,
        "epochs": 2,
        "seconds": 20.0,
        "counted": "images",
        "throughput": 1000.0,
        "bytes_between_nodes": 2_000_000,
        "bytes_between_nodes_dense": 10_000_000,
        "replicas_identical": True,
        "rows": rows,
    }


def shown(summary: dict) -> str:
    stream = io.StringIO()
    report.show(summary, Console(file=stream, width=140))
    return stream.getvalue()


def test_written_files_and_read_again(summary, tmp_path):
    report.write_summary(summary, tmp_path / "run")
    assert report.read(tmp_path / "run") == summary


def test_a_run_that_diverged_is_json(summary, tmp_path):
    """Its NaN, which JSON lacks, kept jq, JavaScript and others from reading the whole file."""
    nan = float("nan")
    worse = row(3, 28, "torus", loss=nan, test_accuracy=nan)
    rows = [*summary["rows"], {**worse, "density": None}]
    target = report.time_to_target(rows, "accuracy", 0.95)
    assert target["best"] == 0.9012
    summary |= {"test_accuracy": nan, "rows": rows, "target": target}
    report.write_summary(summary, tmp_path)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text, parse_constant=refuse)["test_accuracy"] is None
    read = report.read(tmp_path)
    assert read["rows"][2]["density"] is None
    assert shown(read) == shown(summary) and "nan" in shown(read)


def test_terminal_report(summary):
    text = shown(summary)
    assert "0.9012" in text and "4 on 2 nodes" in text and "hitopk mstopk 0.05" in text
    assert "2.00 MB per rank, 5.0 times less than the 10.00 MB of dense gradients" in text
    assert "6.0 s" in text and "30 %" in text  # forward, backward: 3 of 10 seconds in two epochs
    assert "identical at the end of every epoch" in text


def test_a_data_set_may_report_its_own_statistics(summary):
    """A KeyError, `samples`, ended a training that had succeeded with status 2."""
    rows = [{**row, "loader": {"pairs": 3.0}} for row in summary["rows"]]
    assert shown({**summary, "rows": rows}) == shown(summary)


def test_a_target_is_reported(summary):
    rows = [{**row, "clock_seconds": 7.0 * row["epoch"]} for row in summary["rows"]]
    for at_least, text in (
        (0.9, "accuracy >= 0.9 in epoch 2 after 14.0 s, without evaluation and saving"),
        (0.8, "accuracy >= 0.8 in epoch 1 after 7.0 s"),
        (0.95, "accuracy >= 0.95 was not reached; the best was 0.9012"),
    ):
        found = {**summary, "target": report.time_to_target(rows, "accuracy", at_least)}
        assert text in shown(found)
    assert "target" not in shown(summary)


def test_rows_of_an_earlier_process_may_lack_the_score_and_the_clock(summary):
    """As of a run that was begun with task.bleu_sentences=0, or before rows had a clock."""
    first, second = summary["rows"]
    for rows, at_least, text in (
        ([first, {**second, "test_bleu": 31.0}], 30, "bleu >= 30 in epoch 2, time not known"),
        ([first, {**second, "test_bleu": 31.0}], 32, "was not reached; the best was 31.0000"),
        ([first, second], 30, "bleu >= 30 was not reached; it was not measured"),
    ):
        found = {**summary, "target": report.time_to_target(rows, "bleu", at_least)}
        assert text in shown(found)


def test_bytes_just_below_a_unit_are_shown_in_it():
    """999,600 bytes were "1e+03 kB"."""
    counts = (999.4, 999.6, 999_600, 999_999_999, 5e12)
    assert [bytes_text(count) for count in counts] == [
        *("999 bytes", "1.00 kB", "999.60 kB", "1,000.00 MB", "5.00 TB")
    ]


def test_drifted_replicas_cannot_be_overlooked(summary):
    text = shown({**summary, "replicas_identical": False})
    assert "NOT IDENTICAL" in text and "identical at the end" not in text


def test_one_node_has_no_bytes_between_nodes(summary):
    """It said "4 on 1 nodes"."""
    alone = {**summary, "nodes": 1, "bytes_between_nodes": 0, "bytes_between_nodes_dense": 0}
    assert "4 on 1 node " in shown(alone)


def test_one_rank_sends_nothing(summary):
    assert "0 bytes per rank" in shown(
        {**summary, "bytes_between_nodes": 0, "bytes_between_nodes_dense": 0}
    )


def test_no_saving_is_claimed_where_there_is_none(summary):
    text = shown({**summary, "bytes_between_nodes": 221_000, "bytes_between_nodes_dense": 220_000})
    assert "221.00 kB per rank" in text and "less than" not in text


def test_progress_without_a_terminal_is_one_line_per_epoch(summary):
    stream = io.StringIO()
    with ProgressDisplay(steps=4, epochs=2, stream=stream) as progress:
        for each in summary["rows"]:
            progress.step()
            progress.step()
            progress.epoch(each)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in stream.getvalue()
    assert (
        "epoch  1/2   14 px  hitopk mstopk 0.05" in lines[0]
        and " 50 %" in lines[0]
        and "100 %" in lines[1]
    )


def test_progress_on_a_terminal_is_one_bar(summary, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    stream.isatty = lambda: True
    with ProgressDisplay(steps=4, epochs=2, stream=stream) as progress:
        for each in summary["rows"]:
            progress.step()
            progress.step()
            progress.epoch(each)
    text = stream.getvalue()
    assert "━" in text and "4/4" in text and "\x1b" in text  # drawn over and over in place
    assert text.count("test 0.9012") == 1 and "s remaining" not in text


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (60, ["━", "loss 0.512"]),
        (80, ["━", "loss 0.512", "accuracy 0.8100"]),
        (100, ["━", "loss 0.512", "accuracy 0.8100", "1234 images/s"]),
        (120, ["━", "loss 0.512", "accuracy 0.8100", "1234 images/s"]),
        (150, ["━", "loss 0.512", "accuracy 0.8100", "1234 images/s", "gradients 30 %"]),
    ],
)
def test_the_progress_line_fits_the_terminal(columns, parts, monkeypatch):
    """At 80 and 100 columns it was cut to `epoch 6/11 ━╺ … 0… 0… loss …`."""
    status = {"epoch": 6, "step": 1, "steps": 900, "loss": 0.5123, "accuracy": 0.81}
    status |= {"counted": "images", "throughput": 1234.0, "data": 0.02, "gradients": 0.3}
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    with ProgressDisplay(steps=9900, epochs=11, shown=False) as progress:
        monkeypatch.setattr(progress, "console", console)
        progress.shown = True
        progress.__enter__()
        progress.bar.update(progress.task, completed=5299)
        progress.bar.tasks[0].start_time -= 3600
        progress.step(status)
        (line,) = console.render_lines(progress.bar.get_renderable(), pad=False)
    text = "".join(segment.text for segment in line)
    assert len(text) <= columns and "…" not in text
    for part in ("epoch 6/11", "5300/9900", "1:00:00 0:0", *parts):
        assert part in text, text


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("columns", [None, 80, 40])
def test_a_table_breaks_no_words_and_no_numbers(columns, rows, monkeypatch, capsys):
    """`tfcommx simulate` had `4.952e+…`, and on a terminal `allre` above `duce`."""
    if columns:
        narrow = Console(highlight=False, markup=False, width=columns)
        monkeypatch.setattr(terminal, "terminal_console", lambda: narrow)
    row = {f"column {number} of seconds": f"1.2{number:02}e+07" for number in range(12)}
    terminal.show_rows([row | {"scheme": "allreduce, threshold"}] * rows)
    words = capsys.readouterr().out.split()
    for cell in (*row.values(), "allreduce,", "threshold"):
        assert words.count(cell) == rows, words


def test_what_is_counted_has_its_name(summary, tmp_path):
    """Images, or word pieces; runs before the two had names counted images."""
    stream = io.StringIO()
    words = {"counted": "word pieces"}
    with ProgressDisplay(steps=4, epochs=2, stream=stream) as progress:
        progress.epoch(summary["rows"][0] | words)
    assert "14 pieces" in stream.getvalue() and "word pieces/s" in stream.getvalue()
    text = shown(summary | words | {"rows": [one | words for one in summary["rows"]]})
    assert "word pieces/s" in text and "images" not in text and "14 pieces" in text
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ReportError, match=r"summary\.json(?!.*test_accuracy)"):
        report.read(tmp_path)


def test_other_ranks_are_silent(summary):
    stream = io.StringIO()
    with ProgressDisplay(steps=2, epochs=1, shown=False, stream=stream) as progress:
        progress.step()
        progress.epoch(summary["rows"][0])
    assert stream.getvalue() == ""


def test_a_folder_without_a_summary(tmp_path, summary):
    # Also that of a run that was stopped in its first epoch
    with pytest.raises(ReportError, match=r"summary\.json.*such file.*--resume"):
        report.read(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ReportError, match=r"summary\.json.*property name"):
        report.read(tmp_path)
    (tmp_path / "summary.json").write_text('{"ranks": 1}')
    with pytest.raises(ReportError, match=r"summary\.json.*\bnodes\b.*test_accuracy"):
        report.read(tmp_path)


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tfcommx.cli.main", *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("train", "none.yaml"), "none.yaml"),
        (
            ("train", "configs/fashion_mnist.yaml", "--set", "phases.0.epoch=1"),
            "'epochs'",
        ),
        (
            ("train", "configs/fashion_mnist.yaml", "--set", "phases.0.scheme.density=2"),
            "`density`",
        ),
        (("report", "tests"), "tests/summary.json. "),
    ],
)
def test_user_errors_are_one_line(words, named):
    done = command(*words)
    assert done.returncode == 2 and named in done.stderr and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and done.stderr.startswith("tfcommx: ")


def test_report_command_and_help_need_no_tensorflow(summary, tmp_path):
    report.write_summary(summary, tmp_path)
    code = (
        "import sys; sys.argv = ['tfcommx', *sys.argv[1:]]; import tfcommx.cli.main as cli\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'tensorflow' not in sys.modules, 'tensorflow was imported'"
    )
    for words, expected in ((["--help"], "train"), (["report", str(tmp_path)], "4 on 2 nodes")):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, text=True, capture_output=True
        )
        assert done.returncode == 0 and expected in done.stdout, done.stderr


def test_the_bar_goes_to_the_terminal_that_is_named(tmp_path, capsys):
    """Under horovodrun stdout is a pipe.

    A device that is a terminal gets the bar, anything else is not touched. Warnings stay in the
    pipe: the bar took them, so that `2> file` had none of rank 0.
    """
    leader, follower = os.openpty()
    with ProgressDisplay(steps=2, epochs=1, terminal=os.ttyname(follower)) as progress:
        print("a warning", file=sys.stderr)
        progress.step()
    shown = b""
    # The kernel delivers the written bytes in pieces, at any time
    while b"epoch 1/1" not in shown and select.select([leader], [], [], 10.0)[0]:
        shown += os.read(leader, 100_000)
    assert b"epoch 1/1" in shown and b"a warning" not in shown
    assert capsys.readouterr().err == "a warning\n"
    for name in ("not a tty", str(tmp_path / "file")):
        with ProgressDisplay(steps=2, epochs=1, terminal=name) as progress:
            progress.step()
            progress.epoch(row(1, 28, "torus"))
    assert not (tmp_path / "file").exists() and not Path("not a tty").exists()
    assert capsys.readouterr().out.count("epoch  1/1") == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_terminal_that_has_gone_ends_no_training():
    """A trained run ended without its summary, because the bar could not be removed."""
    leader, follower = os.openpty()
    with ProgressDisplay(steps=2, epochs=1, terminal=os.ttyname(follower)) as progress:
        progress.step()
        os.close(follower)
        os.close(leader)
        progress.step()
        progress.epoch(row(1, 28, "torus"))
    assert progress.lines_lost == 1


def test_the_phase_table_has_throughput_and_scaling_efficiency(summary):
    """11 steps of 100 images in 6 s, of which the first one is not counted: 10 steps in 6 s."""
    (first, second) = phase_rows({**summary, "alone": [100.0]})
    assert first["throughput"] == pytest.approx(1000 / 6)
    assert first["efficiency"] == pytest.approx(1000 / 6 / 400) and second["efficiency"] is None
    # An epoch that was resumed in the middle has more than one
    resumed = [{**summary["rows"][0], "first_steps": 3}]
    (first,) = phase_rows({**summary, "rows": resumed})
    assert first["throughput"] == pytest.approx(800 / 6)
    # So has one resumed with half the ranks and other batches: then half as much was possible
    changed = row(2, 14, "hitopk", global_batch=60, ranks=2)
    rows = [{**summary["rows"][0], "ranks": 4}, changed]
    (first,) = phase_rows({**summary, "ranks": 2, "rows": rows, "alone": [100.0]})
    assert first["throughput"] == pytest.approx((1000 + 600) / 12)
    assert first["efficiency"] == pytest.approx(1600 / (6 * 400 + 6 * 200))
    text = shown({**summary, "alone": [100.0]})
    assert "42 %" in text and "not measured" in text


def test_the_dry_run_of_one_process_is_the_baseline(tmp_path):
    phase = {
        "epochs": 2,
        "steps": 10,
        "resolution": 14,
        "global_batch": 512,
        "warm_up": [0.5, 0.25],
        "step_seconds": 0.25,
        "gradients_seconds": 0.05,
        "throughput": 2048.0,
        "bytes_by_route": {"torus": {"inside": 2e6, "between": 1e6}},
        "predicted_seconds": 150.0,
    }
    found = {
        "name": "tiny",
        "ranks": 1,
        "nodes": 1,
        "parameters": 61402,
        "counted": "images",
        "memory_bytes": 2e9,
        "phases": [phase],
        "predicted_seconds": 150.0,
    }
    report.write_dry_run(found, tmp_path)
    assert report.read_alone(tmp_path) == [2048.0]
    stream = io.StringIO()
    report.show_dry_run(found, Console(file=stream, width=160))
    text = stream.getvalue()
    assert "torus: 1.00 MB between nodes, 2.00 MB inside" in text and "250.0 ms" in text
    assert "phase 1: its first epochs, of density 0.5, 0.25, were not run" in text
    assert "1 process on 1 node, 61,402 parameters" in text
    assert "2.00 GB of memory" in text and "the whole run: 2 min 30 s" in text
    report.write_dry_run({**found, "ranks": 4}, tmp_path)
    with pytest.raises(ReportError, match=r"\b4\b.*dry_run\.json"):
        report.read_alone(tmp_path)
    with pytest.raises(ReportError, match=r"dry_run\.json.*--dry-run"):
        report.read_alone(tmp_path / "none")


def test_long_epochs_have_lines_of_their_own(monkeypatch):
    monkeypatch.setattr("tfcommx.report.progress.LINE_SECONDS", 0)
    status = {"epoch": 1, "step": 1, "steps": 4, "loss": 0.5, "accuracy": 0.81}
    status |= {"counted": "images", "throughput": 1000.0, "data": 0.02, "gradients": 0.3}
    stream = io.StringIO()
    with ProgressDisplay(steps=8, epochs=1, stream=stream) as progress:
        for _ in range(2):
            progress.step(status)
    *_, line = stream.getvalue().splitlines()
    assert line.startswith("step 1/4 of epoch 1/1  loss 0.500  accuracy 0.8100  1000 images/s")
    assert "waiting: data 2 %, gradients 30 %   25 %" in line and "s remaining" in line


def test_tensorboard_events_are_written_while_the_run_goes(summary, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    writer = report.TensorBoardEvents(tmp_path)
    status = {
        "loss": 0.5,
        "accuracy": 0.8,
        "counted": "images",
        "throughput": 9.0,
        "data": 0.0,
        "gradients": 0.1,
    }
    writer.step(7, status)
    for each in summary["rows"]:
        writer.epoch(each)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = {
        name: {
            event.step: float(tensor_util.make_ndarray(event.tensor_proto))
            for event in events.Tensors(name)
        }
        for name in ("test_accuracy", "step/waiting_for_gradients")
    }
    assert values["test_accuracy"] == pytest.approx({1: 0.8123, 2: 0.9012})
    assert values["step/waiting_for_gradients"] == pytest.approx({7: 0.1})


def test_a_full_disk_under_the_log_ends_no_training(caplog):
    """A line of progress that could not be written ended the run, whose checkpoints had room."""
    with open("/dev/full", "w") as full:
        with ProgressDisplay(steps=4, epochs=2, stream=full) as progress:
            progress.step()
            for _ in range(2):
                progress.epoch(row(1, 14, "hitopk"))
            progress.say("the target is reached")
        assert progress.lines_lost == 3 and caplog.text.count("[Errno 28]") == 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_full_disk_under_the_curves_ends_no_training(tmp_path, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    events = report.TensorBoardEvents(tmp_path)
    events.epoch(row(1, 14, "hitopk"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        for epoch in range(2, 6):
            events.epoch(row(epoch, 14, "hitopk"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert events.failed and len(caplog.records) == 1 and str(tmp_path) in caplog.text


def test_times_have_no_exponent():
    """`steps waited 1e+03 ms`."""
    cost = dict(count=1, copy_seconds=0.9996, write_seconds=123.4, bytes=1)
    assert "1 s" in snapshots_text(cost) and "2 min 3 s" in snapshots_text(cost)
    assert "e+" not in snapshots_text(cost | {"write_seconds": 12345.6})
