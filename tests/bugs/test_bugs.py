"""Each past bug, and those of others that reached us, as a test that tells its story."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, WORKERS, horovodrun

from tfcommx.collectives import gloo_hosts
from tfcommx.core import LaunchError
from tfcommx.launch import launcher


@pytest.mark.exhaustive
def test_large_reduce_scatters_are_right_under_gloo() -> None:
    """Gloo's reduce-scatter in Horovod 0.28.1 sometimes returns wrong sums for 25 million entries.

    Four ranks on one machine saw 10,152,933 wrong entries in one call of six, none in the others;
    no error, and the torus then spreads the same wrong bits to every rank, so that comparing
    replicas shows nothing. HorovodComm sums the shards of an alltoall in its place. With Gloo's own
    (`self._gloo = False`) it could fail by chance only, and was not seen to.
    """
    ended = horovodrun(4, [str(WORKERS / "bugs.py")], seconds=240)
    assert ended.status == 0 and ended.output.count("all right") == 4, ended.output[-4000:]


def test_hosts_are_told_in_few_requests_and_who_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank read every rank's host from the launcher's store.

    These were 16,384 requests at 128 ranks, and 6,400 a second while one was late.
    """
    ranks, store, reads = 32, {}, []

    def ask(_: object, method: str, key: str, most: int, deadline: float, body: bytes = b"") -> Any:
        if method == "PUT":
            store[key] = body
            return 200, b"", ""
        reads.append(key)
        return (200, store[key][:most], "") if key in store else (404, b"", "")

    monkeypatch.setattr(gloo_hosts.Store, "_ask", ask)
    for name, value in (("GLOO_RENDEZVOUS_ADDR", "here"), ("GLOO_RENDEZVOUS_PORT", "1")):
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    monkeypatch.setenv("HOROVOD_HOSTNAME", "here")
    here = [launcher.Launcher("gloo", rank, ranks, 0) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        assert list(pool.map(gloo_hosts.gloo_hosts, here)) == [["here"] * ranks] * ranks
    assert len(reads) < 8 * ranks
    del store["all"], store["5"]
    monkeypatch.setattr(gloo_hosts, "RENDEZVOUS_SECONDS", 1e-6)
    for rank in (0, 7):
        with pytest.raises(LaunchError, match=rf"\b5 of 32\b.*rank {rank}\b"):
            gloo_hosts.gloo_hosts(here[rank])


def test_a_source_distribution_holds_what_the_library_is_built_from(tmp_path: Path) -> None:
    """Without MANIFEST.in it held no native sources.

    A build from it was a library without ops.
    """
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT,
        tree,
        ignore=shutil.ignore_patterns(
            ".*", "__pycache__", "lib", "build", "dist", "runs", "tests", "docs", "*.egg-info"
        ),
    )
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"], cwd=tree, check=True, capture_output=True
    )
    (archive,) = (tree / "dist").iterdir()
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    needed = {
        path.relative_to(tree).as_posix() for path in (tree / "ops").rglob("*") if path.is_file()
    }
    assert needed and needed | {"requirements.txt", "requirements-dev.txt", "setup.py"} <= held


@pytest.mark.parametrize(
    ("asked", "then", "made"),
    [
        ("--gpu", [], ["--gpu"]),
        ("--gpu", ["--no-gpu"], ["--gpu", "--no-gpu"]),
        ("--no-gpu", [], ["--no-gpu"]),
        ("--no-gpu", ["--gpu"], ["--no-gpu", "--gpu"]),
    ],
)
def test_the_set_up_for_gpus_stays_one(
    asked: str, then: list[str], made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `make setup TFCOMMX_SETUP=--gpu`, `make demo` set everything up again for CPUs.

    It emptied the environment first, and took some ten minutes.
    """
    monkeypatch.setenv("TFCOMMX_VENV", str(tmp_path))
    monkeypatch.syspath_prepend(ROOT / "scripts" / "setup")
    seen = []
    script = runpy.run_path(str(ROOT / "scripts" / "setup" / "__main__.py"))
    for name in (
        "check_tools",
        "install_packages",
        "install_horovod",
        "build_native",
        "native_is_current",
        "horovod_works",
    ):
        monkeypatch.setitem(script["main"].__globals__, name, lambda *given: True)
    monkeypatch.setitem(
        script["main"].__globals__,
        "make_environment",
        lambda: seen.append(options[0] if options else "by itself"),
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    for options in ([asked], then):
        monkeypatch.setattr(sys, "argv", ["setup", "--only", "horovod", *options])
        assert script["main"]() == 0
    assert seen == made


def test_a_path_that_horovod_cannot_be_built_in_is_refused_at_once(tmp_path: Path) -> None:
    """In a folder with a space in its name CMake does not find Open MPI.

    The error came after some minutes of downloads.
    """
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "setup"],
        capture_output=True,
        text=True,
        env={**os.environ, "TFCOMMX_VENV": str(tmp_path / "a b")},
    )
    assert (
        ended.returncode == 2 and "without spaces" in ended.stderr and not list(tmp_path.iterdir())
    ), ended.stdout + ended.stderr


def test_an_nvcc_that_cannot_build_the_kernels_does_not_keep_a_cpu_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvcc that is too old for sm_90 ended the set-up with its message alone.

    Many machines without a GPU have one, such as Ubuntu's.
    """
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    monkeypatch.chdir(ROOT)
    compile_all = runpy.run_path("setup.py")["compile_all"]
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Unsupported gpu architecture; exit 1\n")
    nvcc.chmod(0o755)
    with pytest.raises(SystemExit, match=r"(?s)gpu architecture.*TFCOMMX_CUDA=0"):
        compile_all([[str(nvcc), "select_cuda.cu"]])


def test_cuda_is_found_behind_a_script_that_calls_nvcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod's build was sent to the folder above the script's, and ended there."""
    cuda, commands = tmp_path / "cuda", tmp_path / "usr" / "bin"
    for folder in (cuda / "bin", cuda / "include", commands):
        folder.mkdir(parents=True)
    (cuda / "bin" / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={cuda}/bin/..'\n")
    (commands / "nvcc").write_text(f'#!/bin/sh\nexec {cuda}/bin/nvcc "$@"\n')
    for script in (cuda / "bin" / "nvcc", commands / "nvcc"):
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/bin:/usr/bin")
    monkeypatch.syspath_prepend(ROOT / "scripts" / "setup")
    cuda_home = runpy.run_path(str(ROOT / "scripts" / "setup" / "build_horovod.py"))["cuda_home"]
    assert cuda_home() is None  # no headers: its run-time part alone
    (cuda / "include" / "cuda_runtime.h").write_text("")
    assert cuda_home() == cuda
