"""The code that nvcc makes of the CUDA kernels: float arithmetic, and enough registers."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import ROOT
from native_files import compiled

needs_nvcc = pytest.mark.skipif(
    not shutil.which("nvcc"), reason="nvcc is not on PATH: the CUDA sources are not compiled here"
)
SOURCES = sorted((ROOT / "ops" / "kernels").glob("*_cuda.cu"))
INSTRUCTION = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?(?P<name>(?:add|sub|mul|fma|mad|div|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh"
    r"|min|max)\.[\w.]*(?<=\.)(?:f16|f16x2|bf16|bf16x2|f32|f64))\s+(?P<operands>[^;]*);"
)
CONSTANT = re.compile(r"\b0f([0-9A-F]{8})\b")
EXACT = {
    # A code has at most 15 bits, and its step is 0 or at least 2^-126: the product is exact and
    # normal
    "wire_cuda.cu": {"mul.f32"},
    "wire_codes_cuda.cu": {"mul.f32"},
    # The smaller of an entry and the largest bfloat16; the product behind it flushes denormals
    "dense_cuda.cu": {"min.f32"},
}


def nvcc(*options):
    """Return the words that start nvcc, without the source."""
    return ["nvcc", "-std=c++17", "-O3", f"-I{ROOT / 'ops'}", *options]


def of_each(sources, text):
    """Return a text of each source by its name; as many are made at a time as processors."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip([source.name for source in sources], pool.map(text, sources), strict=True))


def ptx(architecture, sources=SOURCES):
    """Return the PTX of each source."""
    command = nvcc("-ptx", f"-arch={architecture}")
    return of_each(
        sources,
        lambda source: compiled([*command, str(source)], f"{source.stem}.ptx").read_text(),
    )


def keeps_denormals(name, operands):
    """Return True if a denormal number could change the result of this instruction.

    Not if it rounds to nearest and flushes (minima and maxima do not round), and not if it adds a
    constant of at least 2^-102: beside that a denormal number is lost, and a difference between
    them is a multiple of 2^-126.
    """
    modifiers = name.split(".")
    if "ftz" in modifiers and ("rn" in modifiers or modifiers[0] in ("min", "max")):
        return False
    constants = [struct.unpack(">f", bytes.fromhex(bits))[0] for bits in CONSTANT.findall(operands)]
    exact = modifiers[0] in ("add", "sub") and any(abs(number) >= 2**-102 for number in constants)
    return not exact


def plain_arithmetic(ptx, allowed=frozenset()):
    """Return the instructions that keep denormals or fuse a product with a sum, each once."""
    matches = filter(None, map(INSTRUCTION.match, ptx.splitlines()))
    return {
        f"{match['name']} {match['operands']}"
        for match in matches
        if match["name"] not in allowed and keeps_denormals(match["name"], match["operands"])
    }


def test_plain_arithmetic_is_found():
    ptx = """
    add.rn.ftz.f32 %f3, %f1, %f2;
    @%p1 max.ftz.f32 %f3, %f1, %f2;
    ld.global.f32 %f1, [%rd1];
    cvt.rn.f32.s32 %f1, %r1;
    setp.gt.f32 %p1, %f1, %f2;
    add.f32 %f4, %f1, 0fB8800000;
    add.s32 %r4, %r1, 1;
    add.f32 %f5, %f1, %f2;
    add.f32 %f5, %f1, 0f00800000;
    @!%p2 fma.rn.f32 %f6, %f1, %f2, %f3;
    fma.rn.f32 %f7, %f1, 0f3F800000, %f3;
    mul.f32 %f8, %f1, 0f3F800000;
    div.full.ftz.f32 %f9, %f1, %f2;
    min.f32 %f10, %f1, %f2;
    add.f64 %fd1, %fd2, %fd3;
    """
    assert {one.split()[0] + one.split()[1] for one in plain_arithmetic(ptx)} == {
        "add.f32%f5,",
        "fma.rn.f32%f6,",
        "fma.rn.f32%f7,",
        "mul.f32%f8,",
        "div.full.ftz.f32%f9,",
        "min.f32%f10,",
        "add.f64%fd1,",
    }
    assert plain_arithmetic("mul.f32 %f1, %f2, %f3;", {"mul.f32"}) == set()


@needs_nvcc
def test_kernels_compute_with_denormals_flushed_and_nothing_fused():
    """Plain operators keep denormals on a GPU: such kernels' results would differ from a CPU's.

    A fused product and sum are rounded once instead of twice.
    """
    texts = ptx("compute_80")
    plain = {
        name: plain_arithmetic(text, EXACT.get(name, frozenset())) for name, text in texts.items()
    }
    assert {name: found for name, found in plain.items() if found} == {}
    assert sum(text.count(".rn.ftz.f32") for text in texts.values()) > 20


@needs_nvcc
def test_kernels_that_are_placed_early_wait_before_they_touch_memory():
    """Else they would read memory that the previous kernel still writes.

    The emulator cannot show this, because it runs one kernel after the other.
    """
    (source,) = [source for source in SOURCES if source.name == "select_cuda.cu"]
    (text,) = ptx("compute_90", [source]).values()
    waits = {}
    for kernel in text.split(".entry ")[1:]:
        name, body = kernel.split("(", 1)
        order = re.findall(r"griddepcontrol\.wait|(?:ld|st|atom|red)\.global", body)
        waits[name] = order[0] == "griddepcontrol.wait"
    names = ("add_and_list", "narrow", "tally", "emit")
    assert all(waits[name] == any(one in name for one in names) for name in waits), waits
    assert len(waits) == 3 * (4 + len(names))  # Types; a sample, an addition of each form


@pytest.mark.exhaustive
@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_kernels_keep_all_in_registers(architecture):
    """A spill or an indexed array lies in memory, whose speed limits these kernels.

    Nor may ptxas warn: processors of some of these hold fewer threads than others.
    """
    command = nvcc("-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-o", "/dev/null")

    def messages(source):
        done = subprocess.run([*command, str(source)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    in_memory = {}
    for name, text in of_each(SOURCES, messages).items():
        assert "warning" not in text, text
        kernels = text.count("Compiling entry function")
        assert kernels > 0, name
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", text)
        if frames != [("0", "0", "0")] * kernels:
            in_memory[name] = text
    assert in_memory == {}
