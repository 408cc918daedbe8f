"""Builds the native op library tfcommx/lib/libtfcommx.so from ops/ against the installed
TensorFlow.

`pip install --no-build-isolation -e .` builds in place. Where nvcc is found (on PATH, or in
/usr/local/cuda/bin) the CUDA kernels are built too, unless TFCOMMX_CUDA=0 is in the environment.
Everything else about the package is in pyproject.toml.
"""

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "libtfcommx.so"
# sm_80 and sm_90 as machine code; PTX for what comes after them.
CUDA_TARGETS = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
]


def compile_all(commands: list[list[str]]) -> None:
    """Run compiler calls side by side, one per processor; stop with the first failure's
    own words.
    """
    waiting, running = list(commands), []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            command = waiting.pop(0)
            running.append(
                (
                    command,
                    subprocess.Popen(
                        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                    ),
                )
            )
        command, process = running.pop(0)
        output, _ = process.communicate()
        if process.returncode:
            for _, other in running:
                other.kill()
            hint = (
                "\nDo without the CUDA kernels: export TFCOMMX_CUDA=0"
                if Path(command[0]).name == "nvcc"
                else ""
            )
            raise SystemExit(f"{' '.join(command)}\n{output}{hint}")


class BuildOps(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            import tensorflow as tf
        except ImportError as error:
            raise SystemExit(
                "TensorFlow must be installed before the native ops are built: "
                "scripts/bootstrap.py does both."
            ) from error
        target = Path(self.build_lib) / "tfcommx" / "lib"
        objects = Path(self.build_temp)
        target.mkdir(parents=True, exist_ok=True)
        objects.mkdir(parents=True, exist_ok=True)

        # Before they are compiled: what is changed meanwhile is not taken for built.
        sources = runpy.run_path(str(ROOT / "tfcommx" / "kernels" / "build_digest.py"))["digest"](
            ROOT / "ops"
        )
        cpu = sorted((ROOT / "ops").rglob("*.cc"))
        found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        nvcc = found if os.environ.get("TFCOMMX_CUDA") != "0" else None
        cuda = sorted((ROOT / "ops" / "kernels").glob("*.cu")) if nvcc else []
        common = ["-std=c++17", "-O3", f"-I{ROOT / 'ops'}"] + (["-DTFCOMMX_CUDA=1"] if cuda else [])
        commands, outputs = [], []
        for source in cpu:
            outputs.append(str(objects / f"{source.stem}.o"))
            tensorflow = tf.sysconfig.get_compile_flags() if source.parent.name == "tf" else []
            # Without contraction a product is rounded before it is added, on every instruction set
            # alike.
            commands.append(
                [
                    "g++",
                    *common,
                    "-ffp-contract=off",
                    "-fPIC",
                    "-Wall",
                    *tensorflow,
                    "-c",
                    str(source),
                    "-o",
                    outputs[-1],
                ]
            )
        for source in cuda:
            outputs.append(str(objects / f"{source.stem}_cu.o"))
            commands.append(
                [
                    nvcc,
                    *common,
                    *CUDA_TARGETS,
                    "-Xcompiler",
                    "-fPIC",
                    "-c",
                    str(source),
                    "-o",
                    outputs[-1],
                ]
            )
        compile_all(commands)
        part = target / f"{LIBRARY}.part"
        # nvcc adds the static CUDA runtime: the library loads where no CUDA is
        linker = nvcc if cuda else "g++"
        compile_all(
            [[linker, "-shared", *outputs, *tf.sysconfig.get_link_flags(), "-o", str(part)]]
        )
        part.rename(target / LIBRARY)
        facts = {
            "tensorflow": tf.__version__,
            "devices": "CPU and CUDA" if cuda else "CPU only: nvcc was not found, or not wanted",
            "sources": sources,
        }
        (target / "build.json").write_text(json.dumps(facts) + "\n")

    def copy_extensions_to_source(self) -> None:
        """In-place builds: setuptools would look for a Python extension module, which this library
        is not.
        """
        target = ROOT / "tfcommx" / "lib"
        target.mkdir(parents=True, exist_ok=True)
        # rename is atomic: a process that has the old library open keeps it
        for name in (LIBRARY, "build.json"):
            part = target / f"{name}.part"
            shutil.copyfile(Path(self.build_lib) / "tfcommx" / "lib" / name, part)
            part.rename(target / name)

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(ext_modules=[Extension("tfcommx.lib.tfcommx", [])], cmdclass={"build_ext": BuildOps})
