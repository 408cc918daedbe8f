"""Hostile bytes do not lead the kernels outside their memory, under the compiler's sanitizers.

Other users can write neither to a slab nor to a wire, but other processes of the user and broken
hardware can: a number may change between its check and its use.
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from launching import ROOT

KERNELS = ROOT / "ops" / "kernels"
SOURCES = {
    "wire_fuzz": ["wire_cpu", "wire_codes_cpu", "wire_elias_cpu"],
    "slab_fuzz": [
        "slab_cpu",
        "fill_cpu",
        "augment_cpu",
        "augment_rows_avx2",
        "augment_rows_avx512",
    ],
    "array_fuzz": [
        *("dense_cpu", "keep_cpu", "lars_cpu", "low_bits_cpu", "merge_cpu", "norms_cpu"),
        *("norms_chunk_avx2", "norms_chunk_avx512", "norms_chunk_portable"),
        *("select_cpu", "select_band_cpu", "select_scan_choice"),
        *("select_scan_avx2", "select_scan_avx512", "select_scan_portable"),
    ],
}
# In some 20 seconds; 400,000 buffers passed once.
COUNTS = {"wire_fuzz": 60_000, "slab_fuzz": 60_000, "array_fuzz": 3_000}


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", SOURCES)
def test_the_kernels_stay_inside_their_memory(tmp_path: Path, program: str) -> None:
    """A slab's number led before the mapping, a record's size overflowed, a header was read twice.

    Of the wire this is a claim: nothing was found.
    """
    sources = [KERNELS / f"{name}.cc" for name in SOURCES[program]]
    built = tmp_path / program
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"),
            *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{ROOT / 'ops'}"),
            *(ROOT / "tests" / f"{program}.cc", *sources, "-o", built),
        ],
        check=True,
    )
    seed = random.randrange(2**32)
    done = subprocess.run(
        [built, str(seed), str(COUNTS[program])],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "ASAN_OPTIONS": "handle_segv=1"},
    )
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-1000:]}{done.stderr[-5000:]}"
