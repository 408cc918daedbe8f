"""The tile loops of all instruction sets agree, and selection reads and allocates as it says.

A processor runs only the fastest loops, so these tests call all of them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from drawing import case
from launching import ROOT
from native_files import compiled

KERNELS = ROOT / "ops" / "kernels"
LOOPS = [
    path for path in sorted(KERNELS.glob("select_scan_*.cc")) if path.stem != "select_scan_choice"
]


def program(main: str, *others: Path, optimise: tuple[str, ...] = ("-O2",)) -> Path:
    flags = [
        "-std=c++17",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        f"-I{ROOT / 'ops'}",
        *optimise,
    ]
    files = map(str, [ROOT / "tests" / f"{main}.cc", *LOOPS, *others])
    return compiled(["g++", *flags, *files], main)


@pytest.mark.extended
@pytest.mark.parametrize(
    "optimise",
    [
        case(("-O2",), kept=False),
        case(("-O3", "-fPIC"), kept=False),
        ("-O1", "-finstrument-functions", "-w"),
    ],
    ids=" ".join,
)
def test_all_instruction_sets_agree(optimise):
    """Compiled in three ways: with calls in between, registers run out.

    Then the compiler puts masks on the stack; `-finstrument-functions` adds such calls.
    """
    check = program("scan_check", optimise=optimise)
    done = subprocess.run([check], capture_output=True, text=True)
    assert done.returncode == 0 and "checked portable" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def cases() -> list[tuple]:
    """Selections from 2^23 entries: (kind, rule, states, n, k, entries read, peak bytes)."""
    check = program("select_check", KERNELS / "select_cpu.cc", KERNELS / "select_band_cpu.cc")
    lines = subprocess.run(
        [check, str(2**23)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    words = [line.split() for line in lines]
    return [(kind, rule, *map(int, numbers)) for kind, rule, *numbers in words]


@pytest.mark.extended
def test_no_vector_is_read_more_than_twice(cases):
    """Neither if all are alike, nor if there are few values, nor if neighbours are alike."""
    assert len(cases) == 10 * 2 * 3 * 3
    for kind, rule, states, n, k, read, _ in cases:
        assert n <= read <= 2 * n, (kind, rule, states, k, read / n)
        if kind in ("normal", "laplace") and k <= n // 100:
            assert read == n, (kind, rule, states, k, read / n)


@pytest.mark.extended
def test_extra_memory_is_at_most_2_percent(cases):
    for kind, rule, states, n, k, _, peak in cases:
        noted = 8 * k if kind == "not_finite" else 0  # a list of indices that doubles as it grows
        if k <= n // 100:
            assert 0 < peak <= 0.02 * 4 * n + noted, (kind, rule, states, k, peak / n / 4)
