"""Checks the output of scripts/verify/check_cuda.cu."""

from __future__ import annotations

import json


def check_contract(output: str, cases: int) -> None:
    """Require no failure in so many cases, and that all kernels were timed on verified results."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    check, *timed = map(json.loads, lines)
    assert check["failures"] == 0 and check["cases"] > cases
    names = {row["name"] for row in timed}
    assert {"residual_add", "mstopk", "exact", "round", "keep", "encode", "decode"} < names
    assert {"merge", "dense_write_float16", "dense_add_bfloat16", "norms", "lars"} < names
    assert {"low_bits_write_1", "low_bits_add_8", "low_bits_read_4"} < names
    assert all(row["verified"] and row["bytes"] > 0 for row in timed)
