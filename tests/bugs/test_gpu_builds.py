"""Past bugs in which GPUs the CUDA code is built for.

It was built for sm_80 and sm_90, whatever the machine had. On a V100 or a T4 our kernels failed in
the first step, and Horovod's, whose launches nothing checks, left its buffers as they were: sums
of several tensors were wrong, without a message.

nvcc and nvidia-smi are scripts here that answer as the real ones do.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launching import ROOT

from tfcommx.kernels import build
from tfcommx.kernels.build import VARIABLE

CUDA_12 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)
CUDA_13 = (75, 80, 86, 87, 88, 89, 90, 100, 110, 103, 120, 121)
V100, T4 = "7.0, Tesla V100-SXM2-16GB", "7.5, Tesla T4"
Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that puts an nvcc of these architectures, and GPUs, on this machine."""

    def make(listed: tuple[int, ...], *present: str) -> Path:
        cuda = tmp_path / "cuda"
        scripts = {
            "nvcc": 'case "$*" in --list-gpu-arch) printf "compute_%s\\n" '
            f'{" ".join(map(str, listed))};; --dryrun*) echo "#\\$ TOP={cuda}/bin/.."; esac',
            "nvidia-smi": f"printf '%s\\n' {' '.join(map(repr, present))}" if present else "exit 9",
        }
        (cuda / "bin").mkdir(parents=True)
        (cuda / "include").mkdir()
        (cuda / "include" / "cuda_runtime.h").write_text("")
        for name, line in scripts.items():
            (cuda / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
            (cuda / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{cuda / 'bin'}:{os.environ['PATH']}")
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.delenv("TFCOMMX_CUDA", raising=False)
        return cuda

    return make


@pytest.fixture
def build_horovod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the set-up's module, with a TensorFlow and an NCCL that are found."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "setup")
    for name in ("build_horovod", "tools"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("build_horovod")
    monkeypatch.setattr(module, "tensorflow_include", lambda environment: tmp_path)
    monkeypatch.setattr(module, "nccl_home", lambda environment, shims: tmp_path)
    return module


def our_flags(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags with which setup.py compiles CUDA files."""
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    monkeypatch.chdir(ROOT)
    tools = runpy.run_path("setup.py")["find_toolchain"]()
    return [flag for flag in tools.cuda_flags if "gencode" in flag]


def horovods_list(module: ModuleType, folder: Path) -> str:
    """Return the architectures that Horovod's build is given."""
    environment = module.Environment(folder / "venv", gpu=True)
    settings, able = module.build_settings(environment)
    assert "NCCL" in able and "sm_" in able
    return settings[VARIABLE]


@pytest.mark.parametrize(
    ("listed", "present", "wanted", "built"),
    [
        (CUDA_12, [V100] * 4, "", [70]),
        (CUDA_12, [V100, T4], "", [70, 75]),
        (CUDA_12, [], "", [70, 75, 80, 90]),
        (CUDA_13, [], "", [75, 80, 90, 100, 120]),
        (CUDA_13, [T4], "90,80", [80, 90]),
    ],
    ids=["V100", "V100 and T4", "CUDA 12", "CUDA 13", "named"],
)
def test_our_kernels_and_horovods_are_built_for_the_same_gpus(
    machine: Machine,
    build_horovod: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listed: tuple[int, ...],
    present: list[str],
    wanted: str,
    built: list[int],
) -> None:
    machine(listed, *present)
    if wanted:
        monkeypatch.setenv(VARIABLE, wanted)
    *others, last = built
    assert our_flags(monkeypatch) == [
        *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in others),
        f"-gencode=arch=compute_{last},code=[sm_{last},compute_{last}]",
    ]
    assert horovods_list(build_horovod, tmp_path) == ",".join(map(str, built))


def test_horovod_is_built_anew_for_another_gpu(
    machine: Machine, build_horovod: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cached wheel was taken for any GPU."""
    machine(CUDA_12)

    def key(wanted: str) -> str:
        monkeypatch.setenv(VARIABLE, wanted)
        build_horovod.gpu_targets.cache_clear()
        return build_horovod.horovod_key(build_horovod.Environment(tmp_path, gpu=True))

    assert key("70") == key("70") != key("80")


def set_up(folder: Path, *options: str, **variables: str) -> Any:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "setup", *options],
        capture_output=True,
        text=True,
        # If it continued, it would end at the first package
        env={
            **os.environ,
            "TFCOMMX_VENV": str(folder / "venv"),
            "PIP_NO_INDEX": "1",
            **variables,
        },
    )


@pytest.mark.parametrize(
    ("present", "variables", "words"),
    [
        (
            [V100],
            {},
            rf"Tesla V100-SXM2-16GB \(7\.0\).*Volta.*cuda-12.*export {VARIABLE}=75,80,90",
        ),
        ([V100, T4], {}, rf"V100.*export {VARIABLE}=75\. "),
        (["6.1, GTX 1080"], {}, r"GTX 1080 \(6\.1\).*\b7\.0\b"),
        ([], {VARIABLE: "70"}, r"'70'.*\bsm_75\b.*Volta"),
        ([], {VARIABLE: "8.0"}, r"'8\.0'"),
        ([], {VARIABLE: "130"}, r"'130'.*\bsm_130\b"),
    ],
    ids=["V100", "one of two", "too old", "named", "with a dot", "too new"],
)
def test_gpus_that_cuda_cannot_build_for_end_the_set_up_at_once(
    machine: Machine,
    tmp_path: Path,
    present: list[str],
    variables: dict[str, str],
    words: str,
) -> None:
    """Everything was built, in some ten minutes, and failed when training began."""
    machine(CUDA_13, *present)
    ended = set_up(tmp_path, "--gpu", **variables)
    assert ended.returncode == 2 and re.search(words, ended.stderr), ended.stdout + ended.stderr
    assert "TFCOMMX_CUDA=0" in ended.stderr and not (tmp_path / "venv").exists()


def test_who_names_the_gpus_may_build_for_other_machines(
    machine: Machine, build_horovod: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(CUDA_13, V100)
    monkeypatch.setenv(VARIABLE, "80")
    build_horovod.check_gpus()
    architectures, warning = build_horovod.gpu_targets(build.find_nvcc())
    assert architectures == [80] and "No code is built for Tesla V100" in warning
    monkeypatch.delenv(VARIABLE)
    build_horovod.gpu_targets.cache_clear()
    with pytest.raises(build_horovod.Missing):
        build_horovod.check_gpus()


def test_an_nvcc_that_lists_nothing_does_not_keep_a_cpu_from_being_built_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = machine(())
    with pytest.raises(SystemExit, match=r"(?s)'compute_'.*TFCOMMX_CUDA=0"):
        our_flags(monkeypatch)
    (cuda / "bin" / "nvcc").write_text("#!/bin/sh\necho compute_50; echo compute_62\n")
    with pytest.raises(SystemExit, match=r"(?s)sm_62.*CUDA 12\.1.*TFCOMMX_CUDA=0"):
        our_flags(monkeypatch)
    monkeypatch.setenv("TFCOMMX_CUDA", "0")
    assert our_flags(monkeypatch) == []


def test_the_library_says_what_it_was_built_for() -> None:
    facts = json.loads((ROOT / "tfcommx" / "lib" / "build.json").read_text())
    assert bool(facts["architectures"]) == (facts["devices"] == "CPU and CUDA")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on PATH")
def test_the_real_nvcc_takes_the_flags() -> None:
    """It is asked which steps it would take: machine code of each, PTX of the highest alone."""
    nvcc = build.find_nvcc()
    assert nvcc is not None
    architectures = build.targets(nvcc, "").architectures
    flags = build.nvcc_flags(architectures)
    source = ROOT / "ops" / "kernels" / "keep_cuda.cu"
    command = [nvcc, "--dryrun", *flags, "-c", source, "-o", os.devnull]
    steps = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert {int(n) for n in re.findall(r"ptxas .*-arch=sm_(\d+)", steps)} == {*architectures}
    assert re.findall(r"kind=ptx,sm=(\d+)", steps) == [str(architectures[-1])]
