"""The laws of a wire format."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfcommx.terms import SPARSE_WIRES, Sparse
from tfcommx.terms.checks import check_name, is_member
from tfcommx.testing import laws
from tfcommx.testing.laws import require
from tfcommx.wire import codec, formats

BUFFERS = 3


def check_wire(name: str) -> None:
    """Hold a wire format to its laws, on every sparse route.

    Args:
        name: of `terms.SPARSE_WIRES`, or "module:MEMBER", an object of a class that derives from
            `wire.base.WireFormat`.

    **Ranks:** none: everything runs in this process. **Cost:** some seconds.
    **Raises:** LawBroken; PlanError for a name that is none.
    """
    if not is_member(name):
        check_name("wire format", name, SPARSE_WIRES)
    for k, size in ((1, 1), (10, 10), (7, 1000), (100, 1000), (700, 70_000)):
        _check_buffers(name, k, size)
    laws.check_on_sparse_routes(repr(name), selection="exact", wire=name)


def _check_buffers(name: str, k: int, size: int) -> None:
    """Check single buffers: what is written, its length, and what is read of several."""
    where = f"{name!r}, {k} of {size} entries"
    numbers, written = np.random.default_rng(0), []
    for number in range(BUFFERS):
        given = (numbers.normal(size=k) * 10.0 ** numbers.integers(-5, 6, k)).astype(np.float32)
        if number == 1:
            given[numbers.integers(k)] = np.nan
        indices = np.sort(numbers.choice(size, k, replace=False)).astype(np.int32)
        written.append(_check_rounded(name, Sparse(tf.constant(indices), given, size), where))
    words = formats.size_bytes(k, size, name) // 4
    laws.check_traces(
        lambda values: tf.ensure_shape(
            codec.encode(Sparse(written[0].indices, values, size), name), [words]
        ),
        where,
        (k,),
    )
    buffers = [codec.encode(one, name) for one in written]
    require(
        all(one.dtype == tf.int32 and one.shape == (words,) for one in buffers),
        "A buffer must be int32 words, as many as `words` counts.",
        where,
        f"{[(one.dtype.name, *one.shape) for one in buffers]} came, and {words} are counted.",
    )
    read = codec.decode(tf.concat(buffers, 0), k, size, name)
    for found, part in zip(read, ("indices", "values"), strict=True):
        expected = np.concatenate([getattr(one, part) for one in written])
        require(
            np.array_equal(found, expected, equal_nan=part == "values"),
            f"The {part} that were written must be read.",
            where,
            "Others came.",
        )


def _check_rounded(name: str, given: Sparse, where: str) -> Sparse:
    """Check what is written of a buffer's values, and what is left of them; return the former."""
    sparse, left = codec.rounded(given, name)
    came, sent = np.asarray(given.values), np.asarray(sparse.values)
    rest, finite = np.zeros_like(came) if left is None else np.asarray(left), np.isfinite(came)
    require(
        np.array_equal((sent + rest)[finite], came[finite]),
        "What is written plus the rest must be what came, exactly.",
        where,
        "It is not.",
    )
    require(
        not np.isfinite(sent[~finite]).any() and not rest[~finite].any(),
        "NaN and Inf must stay so, and leave nothing.",
        where,
        f"{sent[~finite].tolist()} is written, and {rest[~finite].tolist()} left.",
    )
    again = np.asarray(codec.rounded(sparse, name)[0].values)
    require(
        np.array_equal(again, sent, equal_nan=True),
        "Rounded values must be written as they are.",
        where,
        "They are rounded once more.",
    )
    return sparse
