"""Build the check of the CUDA kernels with every access checked for races, and run it.

    python tests/cuda_race/race.py --cases 90 --largest 150000

The options are those of scripts/check_cuda.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = ROOT / "tests" / "cuda_on_cpu"
FLAGS = [
    "-std=c++17",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-Wno-unknown-pragmas",
    "-fno-pie",
    "-DTFCOMMX_CUDA_ON_CPU",
]
FINDING = re.compile(
    r"cuda_race: (?P<kind>[^,]+), (?P<memory>\w+) memory; [^;]* at 0x(?P<at>[0-9a-f]+)"
    r"(?:; against (?P<whose>the same|another) block's .* at 0x(?P<other>[0-9a-f]+))?$"
)


class Finding(NamedTuple):
    """A report of the checker, with the lines of the sources."""

    # For example "read races with a write"
    kind: str
    # "shared" or "device"; "no": not about memory
    memory: str
    # "file:line"; of a function that is called in several places also of its callers, "a < b"
    at: str
    # The other access; empty if there is none
    other: str


class Run(NamedTuple):
    """The exit status and output of a run of the program."""

    status: int
    findings: list[Finding]
    output: str


def sources(tree: Path = ROOT) -> list[Path]:
    """Return the sources that scripts/check_cuda compiles, as paths in a tree."""
    script = (tree / "scripts" / "check_cuda").read_text()
    array = re.search(r"^sources=\(.*?\)$", script, re.M | re.S)
    assert array, "scripts/check_cuda must list its sources as sources=(...)"
    listed = subprocess.run(
        ["bash", "-c", array[0] + '; printf "%s\\n" "${sources[@]}"'],
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [tree / name for name in listed]


def compile_all(commands: list[list[str]]) -> None:
    """Run compilers, as many at a time as there are processors."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in pool.map(
            lambda command: subprocess.run(command, capture_output=True, text=True), commands
        ):
            assert done.returncode == 0, done.stderr


def command(file: Path, tree: Path = ROOT) -> list[str]:
    """Return the command that compiles a file: kernels with a call before each access.

    The check's own code and the kernels of CPUs are not optimized: compiling them would take longer
    than running them.
    """
    mode = ["-O0"]
    if file in runtime():
        mode = ["-O1"]
    elif file.suffix == ".cu" and "__global__" in file.read_text():
        mode = ["-O1", "-g", "-fsanitize=thread"]
    includes = [f"-I{EMULATOR}", f"-I{tree / 'ops'}"]
    return ["g++", *FLAGS, *mode, *includes, "-x", "c++", "-c", str(file)]


def objects(files: list[Path], folder: Path, tree: Path = ROOT) -> list[Path]:
    """Compile files into a folder, with the files that each includes in a file beside it."""
    found = [folder / f"{file.name}.o" for file in files]
    compile_all(
        [
            [*command(file, tree), "-MMD", "-o", str(output)]
            for file, output in zip(files, found, strict=True)
        ]
    )
    return found


def runtime() -> list[Path]:
    """Return the sources of the emulator and the checker."""
    return [EMULATOR / "cuda_on_cpu.cc", Path(__file__).with_name("cuda_race.cc")]


def link(program: Path, linked: list[Path]) -> Path:
    """Link a program at fixed addresses, so that those in reports need no offset."""
    compile_all([["g++", "-no-pie", *map(str, linked), "-o", str(program)]])
    return program


def build(folder: Path) -> Path:
    """Build the whole check into a folder and return its program."""
    return link(folder / "check_cuda_race", objects([*sources(), *runtime()], folder))


def lines(program: Path, addresses: set[str]) -> dict[str, str]:
    """Return the source line of each address, as Finding.at."""
    names = {}
    for address in addresses:
        stack = subprocess.run(
            ["addr2line", "-i", "-e", str(program), address], capture_output=True, text=True
        ).stdout.split()
        places = [
            Path(place).name for place in stack if ":" in place and "cuda_on_cpu" not in place
        ]
        names[address] = " < ".join(dict.fromkeys(places))
    return names


def run(program: Path, *options: str, timeout: float | None = None) -> Run:
    """Run a program and read its findings.

    Lanes may meet at two addresses of one line, because compilers copy code: that is no finding.
    """
    try:
        done = subprocess.run(
            [program, *options], capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Run(124, [], f"did not end within {timeout} s")
    reports = [match for match in map(FINDING.match, done.stderr.splitlines()) if match]
    name = lines(
        program, {match[key] for match in reports for key in ("at", "other") if match[key]}
    )
    findings = [
        Finding(match["kind"], match["memory"], name[match["at"]], name.get(match["other"], ""))
        for match in reports
    ]
    findings = [one for one in findings if one.memory != "no" or one.at != one.other]
    return Run(done.returncode, list(dict.fromkeys(findings)), done.stdout + done.stderr)


def main() -> int:
    """Build and run with the options of the command line; print findings with their lines."""
    with tempfile.TemporaryDirectory() as folder:
        result = run(build(Path(folder)), "--rounds", "0", *sys.argv[1:])
    print(result.output, *result.findings, sep="\n")
    return 1 if result.findings or result.status else 0


if __name__ == "__main__":
    sys.exit(main())
