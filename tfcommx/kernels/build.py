"""The GPUs that the native library and Horovod's kernels are built for, and the library's sources.

It needs only the standard library, because set-up and setup.py run it before any package is
installed.

An architecture is a number as in `sm_70`: ten times the compute capability, so 70 is 7.0, the
V100's. Machine code of an architecture runs on GPUs of the same major version and an equal or
higher minor one. PTX of the highest one in a list is compiled by the driver for all later GPUs.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SUFFIXES = {".cc", ".cu", ".h", ".inl"}


def digest(folder: Path) -> str:
    """Hash the names and contents of the native sources below a folder.

    **Cost:** reads about 200 kB.
    """
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        content = path.read_bytes()
        # With lengths, so that bytes cannot move from one file into the next unnoticed
        total.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()[:16]


# Horovod's name; one variable holds for both
VARIABLE = "HOROVOD_BUILD_CUDA_CC_LIST"
# Volta, because the table of tensors that norms and LARS pass to their kernels has up to 31 kB, and
# older GPUs, and CUDA before 12.1, allow only 4 kB of parameters
OLDEST = 70
# Architecture of the T4. It has separate machine code, although that of a V100 would run on it.
TURING = 75
# Modules with an integrated processor, Jetson and Thor. They are left out, because no cluster
# trains on them, and code for other GPUs does not run on them.
EMBEDDED = frozenset({72, 87, 88, 101, 110})
# Command whose output `parse_gpus` reads; it may hang if the driver does
QUERY = ("nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader")
QUERY_SECONDS = 30.0


class Gpu(NamedTuple):
    """A GPU of a machine."""

    name: str
    # Ten times its compute capability
    architecture: int

    def __str__(self) -> str:
        return f"{self.name} ({capability(self.architecture)})"


def find_nvcc() -> str | None:
    """Return the path of nvcc, on PATH or in NVIDIA's default folder; None if it is missing."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def capability(architecture: int) -> str:
    """Return an architecture as a compute capability: 70 -> "7.0"."""
    return f"{architecture // 10}.{architecture % 10}"


def toolkit_architectures(nvcc: str) -> list[int]:
    """Return the architectures that a CUDA toolkit can build for, ascending.

    **Raises:** ValueError if nvcc is older than CUDA 11 and does not list them.
    """
    ended = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    listed = sorted({int(number) for number in re.findall(r"^compute_(\d+)$", ended.stdout, re.M)})
    if ended.returncode or not listed:
        raise ValueError(
            f"An nvcc that lists its architectures is required, of CUDA 12.1 or later. Received "
            f"{nvcc}: {(ended.stderr or ended.stdout).strip()!r}. Install CUDA 12.1 or later."
        )
    return listed


def present_gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi shows on this machine; none without a driver."""
    try:
        ended = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(ended.stdout) if ended.returncode == 0 else []


def parse_gpus(answer: str) -> list[Gpu]:
    """Parse nvidia-smi's lines, such as "7.0, Tesla V100-SXM2-16GB"; skip others."""
    lines = re.findall(r"^(\d+)\.(\d), *(.*\S)", answer, re.M)
    return [Gpu(name, int(major) * 10 + int(minor)) for major, minor, name in lines]


def covers(architectures: Iterable[int], gpu: int) -> bool:
    """Return True if code built for a list of architectures runs on a GPU of one.

    >>> covers([70, 80], 75), covers([70, 80], 90), covers([75, 80], 70)
    (True, True, False)
    """
    built = set(architectures)
    of_its_version = {
        number
        for number in built - EMBEDDED
        if number // 10 == gpu // 10 and number <= gpu and gpu not in EMBEDDED
    }
    by_ptx = bool(built) and max(built) <= gpu
    return gpu in built or bool(of_its_version) or by_ptx


def parse_list(text: str) -> list[int]:
    """Parse a value of VARIABLE, such as "70,80"; return it ascending.

    **Raises:** ValueError if it does not have Horovod's form.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{1,2}", word) for word in words):
        raise ValueError(
            f"{VARIABLE} must list compute capabilities without their dots, separated by commas, "
            f"such as 70,80 for V100 and A100. Received {text!r}."
        )
    return sorted({int(word) for word in words})


def default_architectures(listed: Iterable[int], present: Iterable[Gpu]) -> list[int]:
    """Choose the default architectures, ascending: those of this machine's GPUs, or else all.

    Args:
        present: GPUs of the machine that builds. For a GPU that the toolkit does not support, the
            highest architecture below it that is of no embedded module is chosen.
    """
    supported = sorted(number for number in listed if number >= OLDEST)
    chosen: set[int] = set()
    for gpu in present:
        others = EMBEDDED - {gpu.architecture}
        fitting = [arch for arch in supported if arch <= gpu.architecture and arch not in others]
        chosen.update(fitting[-1:])
    if chosen:
        return sorted(chosen)
    # Turing, and the first architecture of each major version, because its machine code also runs
    # on the later ones of that version. Each costs about 15 seconds of one core
    first_of_version: dict[int, int] = {}
    for number in supported:
        if number not in EMBEDDED:
            first_of_version.setdefault(number // 10, number)
    return sorted({*first_of_version.values()} | ({TURING} & {*supported}))


class Targets(NamedTuple):
    """The architectures to build for on a machine."""

    # Ascending, at least one
    architectures: list[int]
    # Names of the GPUs of this machine that cannot run the code, with reason and remedy; "": none
    warning: str


def targets(nvcc: str, wanted: str) -> Targets:
    """Choose the architectures to build for.

    Args:
        wanted: value of VARIABLE; "": this machine's GPUs, or else all generations.

    **Cost:** runs nvcc and nvidia-smi, together about a second.
    **Raises:** ValueError for an nvcc that cannot list its architectures, supports none from OLDEST
    up, or does not support those that are wanted.
    """
    listed, present = toolkit_architectures(nvcc), present_gpus()
    possible = [number for number in listed if number >= OLDEST]
    if not possible:
        raise ValueError(
            f"An nvcc that builds for sm_{OLDEST} or later is required. Received {nvcc}, which "
            f"builds up to sm_{listed[-1]}. Install CUDA 12.1 or later."
        )
    chosen = parse_list(wanted) if wanted.strip() else default_architectures(listed, present)
    if impossible := [number for number in chosen if number not in possible]:
        raise ValueError(
            f"{VARIABLE} must name architectures of at least {OLDEST} that nvcc has. Received "
            f"{wanted!r}; {nvcc} has {_joined(possible)}. {_why_not(impossible, listed)}"
        )
    missed = [gpu for gpu in present if not covers(chosen, gpu.architecture)]
    if not missed:
        return Targets(chosen, "")
    names = ", ".join(sorted({str(gpu) for gpu in missed}))
    why = _why_not([gpu.architecture for gpu in missed], listed)
    return Targets(chosen, f"No code is built for {names} of this machine. {why}")


def _why_not(numbers: list[int], listed: list[int]) -> str:
    """Return the remedy for architectures that are not built, for the lowest of them."""
    lowest = min(numbers)
    if lowest < OLDEST:
        return f"GPUs of compute capability {capability(OLDEST)} or later are required."
    if lowest in listed:
        return f"Add {lowest} to {VARIABLE}."
    if lowest < TURING:
        return (
            "CUDA 13 has dropped Volta: install CUDA 12 beside it, and put its nvcc first on PATH "
            "(export PATH=/usr/local/cuda-12.9/bin:$PATH)."
        )
    return f"Install a CUDA whose nvcc has sm_{lowest}, and put that first on PATH."


def nvcc_flags(architectures: Iterable[int]) -> list[str]:
    """Return nvcc's options for machine code of each, and PTX of the highest.

    >>> nvcc_flags([70, 90])
    ['-gencode=arch=compute_70,code=sm_70', '-gencode=arch=compute_90,code=[sm_90,compute_90]']
    """
    *lower, highest = sorted(architectures)
    return [
        *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in lower),
        f"-gencode=arch=compute_{highest},code=[sm_{highest},compute_{highest}]",
    ]


def in_words(architectures: Iterable[int]) -> str:
    """Return a list as text.

    >>> in_words([70, 90])
    'sm_70, sm_90 and, as PTX, later GPUs'
    """
    numbers = sorted(architectures)
    return f"{_joined(numbers)} and, as PTX, later GPUs" if numbers else "no GPU"


def build_advice(architectures: Iterable[int]) -> str:
    """Return the command that builds the native library and Horovod for these GPUs, if they can be.

    >>> print(build_advice([90, 80, 90]))
    Build both for all GPUs, on each host: `export HOROVOD_BUILD_CUDA_CC_LIST=80,90; \
python3 scripts/setup --gpu`.
    """
    numbers = sorted(set(architectures))
    if numbers[0] < OLDEST:
        return (
            f"GPUs of compute capability {capability(OLDEST)} or later are required: leave out "
            "others by CUDA_VISIBLE_DEVICES."
        )
    toolkit = ", with the nvcc of CUDA 12 first on PATH" if numbers[0] < TURING else ""
    command = f"export {VARIABLE}={','.join(map(str, numbers))}; python3 scripts/setup --gpu"
    return f"Build both for all GPUs, on each host{toolkit}: `{command}`."


def _joined(numbers: Iterable[int]) -> str:
    return ", ".join(f"sm_{number}" for number in numbers)
