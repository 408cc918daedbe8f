"""The check at the first use of a GPU finds a wrong bit of each kernel; a CPU stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from drawing import squares

from tfcommx.core.wire_formats import CODE_BITS, DENSE_CODES
from tfcommx.kernels import (
    dense,
    device,
    lars,
    loader,
    low_bits,
    select,
    sparse,
    wire,
    wire_codes,
)

# A call of a kernel: its arguments
Call = tuple[Any, ...]


def any_call(call: Call) -> bool:
    return True


def says(word: str | bool) -> Callable[[Call], bool]:
    return lambda call: any(type(part) is type(word) and part == word for part in call)


def selects(rule: str, dtype: str) -> Callable[[Call], bool]:
    """Return True if a call selects by a rule from gradients of a type."""
    return lambda call: says(rule)(call) and call[0].dtype.name == dtype


def many(call: Call) -> bool:
    return call[0].shape[0] > 10**6


def flipped(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor with the lowest bit of its last entry changed."""
    numbers = tensor.numpy().copy()
    last = numbers.reshape(-1)[-1:]
    last.view(f"u{last.dtype.itemsize}")[:] ^= 1
    return tf.constant(numbers)


def wrong(result: Any, call: Call, place: int | str) -> Any:
    """Change a bit of a part of the result, or of a variable among the arguments."""
    if isinstance(place, str):
        arguments = [one for part in call for one in (part if isinstance(part, list) else [part])]
        variables = [one for one in arguments if isinstance(one, tf.Variable)]
        variable = variables[{"first": 0, "last": -1}[place]]
        variable.assign(flipped(variable.read_value()))
        return result
    if isinstance(result, tf.Tensor):
        return flipped(result)
    parts = [flipped(part) if number == place else part for number, part in enumerate(result)]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


def calls(make: Callable[..., tuple[Any, ...]], drawn: list[Any]) -> list[Any]:
    """Return the parameters of the test below for cases of tests/drawing.py."""
    return [pytest.param(*make(*one.values), marks=one.marks) for one in drawn]


@pytest.mark.parametrize(
    ("module", "kernel", "when", "place"),
    [
        *calls(
            lambda rule, dtype, place: (select, "select", selects(rule, dtype), place),
            squares(["exact", "mstopk"], ["float32", "float16", "bfloat16"], [0, 1]),
        ),
        *calls(
            lambda rule, place, dtype: (
                (select, "select_with_residual", selects(rule, dtype), place)
            ),
            # The last places: the residual, the velocity
            squares(["exact", "mstopk"], [0, 1, "first", "last"], ["float16", "bfloat16"]),
        ),
        *((select, "select_with_residual", many, place) for place in (0, 1, "first")),
        *((dense, "write", says(dtype), 0) for dtype in ("float16", "bfloat16")),
        *((dense, "write", says(dtype), "first") for dtype in ("float16", "bfloat16")),
        *((dense, "add", says(dtype), 0) for dtype in ("float16", "bfloat16")),
        *calls(
            lambda kernel, wire_name, place: (low_bits, kernel, says(wire_name), place),
            squares(["write", "add_and_write"], list(DENSE_CODES), [0, "first"]),
        ),
        *((low_bits, "read", says(wire_name), 0) for wire_name in DENSE_CODES),
        *((lars, "lars_update", says(nesterov), "first") for nesterov in (False, True)),
        *((lars, "lars_update", says(nesterov), "last") for nesterov in (False, True)),
        *((wire_codes, "round_values", says(dtype), 0) for dtype in CODE_BITS),
        *((wire_codes, "round_values", says(dtype), 1) for dtype in CODE_BITS),
        *((wire, "encode", says(f"elias/{dtype}"), 0) for dtype in CODE_BITS),
        *((wire, "decode", says(f"elias/{dtype}"), 1) for dtype in CODE_BITS),
        *((wire, "decode", says("block16/float16"), place) for place in (0, 1)),
        (sparse, "keep", any_call, "first"),
        (sparse, "merge", any_call, 0),
        (lars, "squared_norms", any_call, 0),
    ],
)
def test_a_wrong_bit_of_a_kernel_is_found(
    module: Any,
    kernel: str,
    when: Callable[[Call], bool],
    place: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the rules, types and kernels many were never compared, nor a warp's second strip."""
    real, spoilt = getattr(module, kernel), []

    def on_a_broken_device(*call: Any, **more: Any) -> Any:
        # Its results come first, the CPU's then
        result = real(*call, **more)
        if spoilt or not when(call):
            return result
        spoilt.append(wrong(result, call, place))
        return spoilt[0]

    monkeypatch.setattr(module, kernel, on_a_broken_device)
    if when is not many:
        monkeypatch.setattr(device, "MANY_STRIPS", 1_000)
    with pytest.raises(loader.NativeLibraryError, match=r"/cpu:0\b.*TFCOMMX_CUDA=0"):
        device.compare_with_cpu("/cpu:0")
    assert spoilt


def test_a_warp_of_every_gpu_takes_a_second_strip() -> None:
    """A GPU of 188 processors is the largest so far; the sources have the other numbers."""
    text = (loader.SOURCES / "kernels" / "select_cuda.cu").read_text()
    shared = (loader.SOURCES / "kernels" / "select_band_cuda.h").read_text()
    assert "kReadingBlocks = 8," in text and "kMostBlocks = 2048;" in text
    assert "kStrip = 1024" in text + shared
    assert device.MANY_STRIPS > 188 * 8 * 8 * 1024


def test_equal_kernels_pass_and_a_zeros_sign_counts() -> None:
    device.compare_with_cpu("/cpu:0")
    assert device._differ(np.float32([0.0]), np.float32([-0.0]))


def test_a_kernel_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise tf.errors.InternalError(None, None, "no kernel image is available")

    monkeypatch.setattr(dense, "add", failing)
    with pytest.raises(loader.NativeLibraryError, match="kernel image"):
        device.compare_with_cpu("/cpu:0")
