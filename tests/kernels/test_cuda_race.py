"""The CUDA kernels with every access checked for races, and with a GPU's rules for denormals."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contract import check_contract
from cuda_race import mutations, race
from launching import ROOT
from native_files import compiled

EXAMPLES = ROOT / "tests" / "cuda_race" / "examples.cu"
READ, WRITE, BOTH = "write races with a read", "read races with a write", "write races with a write"
# Kernel of examples.cu -> findings that the checker must report, at least; none: no finding
EXPECTED = {
    "no order": {WRITE},
    "shuffle": {WRITE},
    "syncwarp": set(),
    "syncwarp of half warps": set(),
    "syncthreads": set(),
    "syncwarp between warps": {WRITE},
    "syncthreads between warps": set(),
    "two blocks": {BOTH},
    "outside": {"access outside of device memory"},
    "not written": {"read of memory that nothing wrote"},
    "misaligned": {"misaligned access"},
    "neighbours of a word": set(),
    "same word": {BOTH},
    "different intrinsics": {"lanes meet at different intrinsics"},
    "last block": set(),
    "last block without fence before": {WRITE},
    "last block without fence after": {WRITE},
    "last block without syncwarp": {WRITE},
    "in turn": set(),
}
# Barriers that protect nothing today, by the name of their site, with the reason
REDUNDANT = {
    "select_band_cuda.h: __syncthreads() before: return result;": (
        "every caller passes a barrier of `clear` before it calls `find` again"
    ),
    "wire_elias_cuda.cu: __syncthreads() before: indices += buffer * k;": (
        "exclusive_sum_of_block, one line above, has barriers after `total` and `start` are written"
    ),
    "select_band_cuda.h: __syncthreads() before: #pragma unroll": (
        "every caller of `take` comes from the barriers of `last_block`"
    ),
}


def objects(files: list[Path]) -> list[Path]:
    """Return the compiled files; as many are compiled at a time as there are processors."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda file: compiled(race.command(file), f"{file.name}.o"), files))


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """Build the small kernels with and without mistakes."""
    folder = tmp_path_factory.mktemp("examples")
    return race.link(folder / "examples", objects([EXAMPLES, *race.runtime()]))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that links the kernels with one of two main programs."""
    folder = tmp_path_factory.mktemp("kernels")
    mains = {"check_cuda.cu": race.sources(), "denormals_check.cu": race.sources()[1:]}
    mains["denormals_check.cu"].append(ROOT / "tests" / "denormals_check.cu")
    assert race.sources()[0].name == "check_cuda.cu"
    return lambda main: race.link(folder / main, objects([*mains[main], *race.runtime()]))


@pytest.mark.parametrize("name", EXPECTED)
def test_races_and_other_mistakes_are_reported_and_nothing_else(examples, name):
    done = race.run(examples, name)
    kinds = {finding.kind for finding in done.findings}
    assert kinds >= EXPECTED[name] and bool(kinds) == bool(EXPECTED[name]), done.output
    assert done.status == (4 if kinds else 0), done.output


def test_every_example_is_expected():
    names = re.findall(r'(?:one|last)\("([^"]+)"|all\["([^"]+)"\]', EXAMPLES.read_text())
    assert {one or other for one, other in names} == {*EXPECTED, "barrier of some"}


def test_a_barrier_that_some_threads_do_not_reach_ends_the_program(examples):
    done = race.run(examples, "barrier of some")
    assert done.status == 3 and "wait for others that have ended" in done.output


def test_no_accesses_of_the_kernels_race_and_they_keep_the_contract(program):
    """compute-sanitizer sees races in shared memory; only this sees those between blocks."""
    timed = ("--rounds", "1", "--n", "2000", "--peers", "2")
    done = race.run(program("check_cuda.cu"), *mutations.SMALL, *timed)
    assert done.findings == [] and done.status == 0, done.output
    check_contract(done.output, cases=15)


@pytest.mark.exhaustive
def test_no_accesses_of_the_kernels_race_in_large_cases(program):
    done = race.run(program("check_cuda.cu"), *mutations.LARGE)
    assert done.findings == [] and done.status == 0, done.output


def test_kernels_treat_denormals_as_threads_of_cpus_do(program):
    """Plain arithmetic keeps denormals on a GPU built without -ftz; TensorFlow's threads do not.

    So dense bfloat16 lost entries below 1e-37, and rounding to codes left errors unlike a CPU's.
    """
    done = race.run(program("denormals_check.cu"))
    assert done.status == 0 and "0 differ" in done.output, done.output


def test_barriers_are_found_in_the_sources():
    sites = mutations.sites()
    assert len(sites) > 10 and {site.file.suffix for site in sites} == {".cu", ".h"}
    assert all(list(map(str, sites)).count(name) <= 1 for name in REDUNDANT)
    for site in sites:
        assert site.file.read_text().splitlines()[site.line - 1][site.start : site.end] == site.call


@pytest.mark.exhaustive
def test_each_removed_barrier_is_noticed(tmp_path):
    """Those in REDUNDANT protect nothing, or only code that no case reaches."""
    missed = {str(site) for site, how in mutations.mutations(tmp_path) if not how}
    assert missed <= set(REDUNDANT), missed - set(REDUNDANT)
