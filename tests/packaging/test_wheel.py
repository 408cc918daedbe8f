"""A wheel is built and used beside an existing TensorFlow and Horovod. Needs no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from launching import ROOT

TRAIN = """
from pathlib import Path
import sys

import keras
import numpy as np
import tfcommx as cx

assert Path(cx.__file__).is_relative_to(sys.prefix), cx.__file__
cx.init()
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(300), keras.layers.Dense(1)])
scheme = cx.Scheme("allgather", "mstopk", 0.1)
opt = cx.DistributedOptimizer(keras.optimizers.SGD(0.01), scheme)
model.compile(opt, loss="mse", jit_compile=False)
inputs = np.random.default_rng(0).normal(size=(32, 8))
before = [np.array(weight) for weight in model.weights]
model.fit(inputs, inputs.sum(1), callbacks=[cx.callbacks.BroadcastState()], verbose=0)
assert all((old != np.array(new)).any() for old, new in zip(before, model.weights))
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
assert str(Path(cx.__file__).parent / "lib" / "libtfcommx.so") in mapped
print("trained with the installed package")
"""


def call(*words: object, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a command; return its output, and show it if the command fails."""
    ended = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the tree; the library that set-up built is used again."""
    folder = tmp_path_factory.mktemp("wheel")
    not_needed = (".*", "build", "runs", "tests", "docs", "scripts", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*not_needed))
    # Files of an earlier build must not be in the wheel
    stale = (
        folder / "tree" / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    )
    (stale / "tfcommx").mkdir(parents=True)
    (stale / "tfcommx" / "removed_long_ago.py").write_text("")
    flags = ("--no-build-isolation", "--no-deps", "--no-index")
    call(sys.executable, "-m", "pip", "wheel", *flags, "-w", folder, "./tree", folder=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.extended
def test_a_wheel_holds_the_package_and_its_library(wheel: Path) -> None:
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in opened.namelist() if name.endswith("/METADATA")]
        lines = opened.read(metadata).decode().splitlines()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tfcommx").rglob("*.py")}
    others = {"lib/libtfcommx.so", "lib/build.json", "comparison/methods.yaml"}
    assert held == modules | {f"tfcommx/{name}" for name in others}
    required = [line for line in lines if line.startswith("Requires-Dist:")]
    assert any("keras" in line for line in required)
    assert all("extra ==" in line for line in required if "pytest" in line or "ruff" in line)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a new environment, beside an existing TensorFlow and Horovod."""
    tmp_path = tmp_path_factory.mktemp("installed")
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    call(sys.executable, "-m", "venv", "--without-pip", venv, folder=tmp_path)
    install = ("install", "--no-deps", "--no-index", wheel)
    call(sys.executable, "-m", "pip", "--python", python, *install, folder=tmp_path)
    # After the installation, so that pip does not change the existing packages
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "existing.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.extended
def test_a_wheel_trains_beside_an_existing_tensorflow_and_horovod(
    installed: Path, tmp_path: Path
) -> None:
    """Outside the source tree."""
    (tmp_path / "train.py").write_text(TRAIN)
    output = call(installed / "bin" / "python", "train.py", folder=tmp_path, environment=OUTSIDE)
    assert "trained with the installed package" in output
    answer = call(installed / "bin" / "tfcommx", "--help", folder=tmp_path, environment=OUTSIDE)
    assert "train" in answer


REFUSED = """
import tensorflow as tf

built_for, tf.__version__ = tf.__version__, "2.0.0"
from tfcommx.kernels import loader

try:
    loader.library()
except loader.NativeLibraryError as error:
    message = str(error)
assert "loads it, 2.0.0. Received one built for " + built_for in message, message
assert "Install TensorFlow " + built_for + ", or a tfcommx that is built for yours" in message
"""


# test_loader.py has its message
@pytest.mark.exhaustive
def test_a_wheel_beside_another_tensorflow_says_what_fits(installed: Path, tmp_path: Path) -> None:
    call(installed / "bin" / "python", "-c", REFUSED, folder=tmp_path, environment=OUTSIDE)
