"""Build tfcommx with its native ops, tfcommx/lib/libtfcommx.so, against the installed TensorFlow.

    pip install --no-build-isolation .       # into an environment with TensorFlow and Horovod
    pip install --no-build-isolation -e .    # the same in place, as `make setup` does
    pip wheel --no-build-isolation --no-deps -w dist .

If nvcc is found (on PATH, or in /usr/local/cuda/bin) the CUDA kernels are built too, unless
TFCOMMX_CUDA=0 is in the environment: for the GPUs of this machine, for those that
HOROVOD_BUILD_CUDA_CC_LIST names, or for all generations (tfcommx/kernels/build.py). A
library that was built before from the same sources, by the same compilers, for the same TensorFlow
and GPUs is used again. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OPS = ROOT / "ops"
LIBRARY, FACTS = "libtfcommx.so", "build.json"
# Without contraction a product is rounded before it is added, alike on every instruction set.
CPU_FLAGS = ["-ffp-contract=off", "-fPIC", "-Wall"]
WITHOUT_CUDA = "To build without the CUDA kernels: export TFCOMMX_CUDA=0"
# Files of the package that are needed before it can be imported
GPUS = runpy.run_path(str(ROOT / "tfcommx" / "kernels" / "build.py"))
digest = GPUS["digest"]


class Toolchain(NamedTuple):
    """What the library is compiled with."""

    # TensorFlow's version
    tensorflow: str
    # Flags for the files that include TensorFlow's headers
    compile_flags: list[str]
    link_flags: list[str]
    # Path of nvcc; None: no CUDA kernels
    nvcc: str | None
    # What it builds for: 70 is sm_70; none without nvcc
    architectures: list[int]

    @property
    def common(self) -> list[str]:
        """Flags of every file."""
        return ["-std=c++17", "-O3", f"-I{OPS}", *(["-DTFCOMMX_CUDA=1"] if self.nvcc else [])]

    @property
    def cuda_flags(self) -> list[str]:
        """Flags of the CUDA files."""
        return [*GPUS["nvcc_flags"](self.architectures), "-Xcompiler", "-fPIC"] if self.nvcc else []

    @property
    def devices(self) -> str:
        """The devices of the kernels, as kernels/loader reads them."""
        if self.nvcc:
            return "CPU and CUDA"
        return "CPU only: nvcc was not found, or not wanted"

    def fingerprint(self) -> str:
        """Hash compilers, flags and TensorFlow's version, but not the folders they are in."""
        versions = [
            subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
            for name in ("g++", self.nvcc)
            if name
        ]
        flags = [*self.common, *self.compile_flags, *self.link_flags, *CPU_FLAGS, *self.cuda_flags]
        kept = [flag for flag in flags if not flag.startswith(("-I", "-L"))]
        return hashlib.sha256(repr((self.tensorflow, versions, kept)).encode()).hexdigest()[:16]


def find_toolchain() -> Toolchain:
    """Return what the library is compiled with here; stop if TensorFlow is missing."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise SystemExit(
            "TensorFlow must be installed before the native ops are built, and pip be told to use "
            "it: pip install --no-build-isolation . (scripts/setup sets up all of it.)"
        ) from error
    nvcc = None if os.environ.get("TFCOMMX_CUDA") == "0" else GPUS["find_nvcc"]()
    return Toolchain(
        tf.__version__,
        tf.sysconfig.get_compile_flags(),
        tf.sysconfig.get_link_flags(),
        nvcc,
        find_architectures(nvcc) if nvcc else [],
    )


def find_architectures(nvcc: str) -> list[int]:
    """Return the GPU architectures to build for; warn of GPUs here that cannot run the kernels."""
    try:
        architectures, warning = GPUS["targets"](nvcc, os.environ.get(GPUS["VARIABLE"], ""))
    except ValueError as error:
        raise SystemExit(f"{error}\n{WITHOUT_CUDA}") from error
    if warning:
        print(warning, file=sys.stderr)
    return architectures


def compile_all(commands: list[list[str]]) -> None:
    """Run compiler calls side by side, one per processor; stop with the first failure's output."""
    waiting, running = list(commands), []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            command = waiting.pop(0)
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            running.append((command, process))
        command, process = running.pop(0)
        output, _ = process.communicate()
        if process.returncode:
            for _, other in running:
                other.kill()
            of_cuda = Path(command[0]).name == "nvcc"
            hint = f"\n{WITHOUT_CUDA}" if of_cuda else ""
            raise SystemExit(f"{' '.join(command)}\n{output}{hint}")


def compile_library(tools: Toolchain, objects: Path, library: Path) -> None:
    """Compile ops/ and link it to `library`."""
    commands, outputs = [], []
    for source in sorted(OPS.rglob("*.cc")):
        outputs.append(str(objects / f"{source.stem}.o"))
        flags = CPU_FLAGS + (tools.compile_flags if source.parent.name == "tf" else [])
        commands.append(["g++", *tools.common, *flags, "-c", str(source), "-o", outputs[-1]])
    for source in sorted((OPS / "kernels").glob("*.cu")) if tools.nvcc else []:
        outputs.append(str(objects / f"{source.stem}_cu.o"))
        commands.append(
            [tools.nvcc, *tools.common, *tools.cuda_flags, "-c", str(source), "-o", outputs[-1]]
        )
    compile_all(commands)
    # nvcc adds the static CUDA runtime, so that the library also loads on machines without CUDA
    linker = tools.nvcc or "g++"
    flags = [*tools.cuda_flags, *tools.link_flags]
    compile_all([[linker, "-shared", *outputs, *flags, "-o", str(library)]])


def put(source: Path, target: Path) -> None:
    """Copy a file; a process that has the old one open keeps it, because renaming is atomic."""
    part = target.with_name(f"{target.name}.part")
    shutil.copyfile(source, part)
    part.rename(target)


def is_built(folder: Path, facts: dict[str, Any]) -> bool:
    """Return True if a folder has the library, built from and with exactly this."""
    try:
        return (folder / LIBRARY).is_file() and json.loads((folder / FACTS).read_text()) == facts
    except (OSError, ValueError):  # Missing, or cut when the disk was full: it is built anew
        return False


class BuildOps(build_ext):
    """Builds the native library instead of a Python extension module."""

    def build_extension(self, ext: Extension) -> None:
        tools = find_toolchain()
        facts = {
            "tensorflow": tools.tensorflow,
            "devices": tools.devices,
            "architectures": tools.architectures,
            # Before they are compiled: a file that changes meanwhile does not count as built.
            "sources": digest(OPS),
            "built_with": tools.fingerprint(),
        }
        target = Path(self.build_lib).resolve() / "tfcommx" / "lib"
        target.mkdir(parents=True, exist_ok=True)
        if is_built(target, facts):
            return
        in_place = ROOT / "tfcommx" / "lib"
        if is_built(in_place, facts):
            put(in_place / LIBRARY, target / LIBRARY)
        else:
            objects = Path(self.build_temp)
            objects.mkdir(parents=True, exist_ok=True)
            compile_library(tools, objects, objects / LIBRARY)
            put(objects / LIBRARY, target / LIBRARY)
        written = target / f"{FACTS}.part"
        written.write_text(json.dumps(facts) + "\n")
        written.replace(target / FACTS)

    def copy_extensions_to_source(self) -> None:
        """Copy the library for in-place builds: setuptools would look for a Python extension."""
        target = ROOT / "tfcommx" / "lib"
        target.mkdir(parents=True, exist_ok=True)
        for name in (LIBRARY, FACTS):
            put(Path(self.build_lib) / "tfcommx" / "lib" / name, target / name)

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildModules(build_py):
    """Copies the modules, and none that an earlier build left and the sources no longer have."""

    def run(self) -> None:
        if not self.editable_mode:
            for path in (Path(self.build_lib) / "tfcommx").rglob("*.py"):
                path.unlink()
        super().run()


class Wheel(bdist_wheel):
    """Tags the wheel for any Python 3: the native library does not use Python itself."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("tfcommx.lib.tfcommx", [])],
    cmdclass={"bdist_wheel": Wheel, "build_ext": BuildOps, "build_py": BuildModules},
)
