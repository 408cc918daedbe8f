"""Wrong shapes, lengths, numbers and attributes are errors, and none ends the process."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfcommx.core import Sparse
from tfcommx.core.wire_formats import DENSE_CODES
from tfcommx.data.slab import Slab
from tfcommx.data.sources.decode import pack
from tfcommx.kernels import dense, loader, low_bits, select, sparse, wire

pytestmark = pytest.mark.usefixtures("library")
REFUSED = tf.errors.InvalidArgumentError
MOST = 2**63 - 1
OPS = [
    "select",
    "select_residual",
    "select_momentum",
    "keep",
    "merge",
    "dense_write",
    "dense_add",
    "low_bits_write",
    "low_bits_add",
    "low_bits_read",
    "lars_update",
    "squared_norms",
    "stamp",
    "wire_encode",
    "wire_decode",
    "wire_round",
    "slab_check",
    "slab_read",
    "slab_fill",
]


@pytest.mark.parametrize("name", ["k", "seed"])
def test_a_vector_in_place_of_a_number_is_refused(name: str) -> None:
    """TensorFlow ended the process: "Must have a one element tensor"."""
    arguments = {"k": 1, "seed": 2, name: tf.constant([1, 2], tf.int64)}
    with pytest.raises(REFUSED, match=rf"`{name}`.*\[2\]"):
        select.select(tf.ones([4]), rule="exact", **arguments)
    residual = tf.Variable(tf.zeros([4]))
    with pytest.raises(REFUSED, match=rf"`{name}`.*\[2\]"):
        select.select_with_residual(tf.ones([4]), residual, rule="exact", **arguments)
    assert not residual.numpy().any()


def test_a_vector_in_place_of_a_size_or_an_epoch_is_refused() -> None:
    """As that of `k`."""
    vector = tf.constant([1, 2], tf.int64)
    with pytest.raises(REFUSED, match=r"`size`.*\[2\]"):
        sparse.merge(tf.constant([0]), tf.ones([1]), vector)
    with pytest.raises(REFUSED, match=r"`epoch`.*\[2\]"):
        read_picture(epoch=vector)


def picture() -> dict[str, Any]:
    """Return the arguments that read one picture that is not in a slab."""
    record = np.frombuffer(pack(0, 7, np.zeros([4, 5, 3], np.uint8)), np.uint8)
    return dict(
        indices=np.zeros(1, np.int64),
        loose=record,
        loose_at=np.zeros(1, np.int64),
        epoch=np.int64(0),
        size=np.array([2, 3], np.int32),
        T=tf.uint8,
        path="",
        id=0,
        channels=3,
        crop="whole",
        flip=False,
    )


def read_picture(**changed: Any) -> tf.Tensor:
    return loader.library().tfcommx_slab_read(**{**picture(), **changed})[0]


def test_a_batch_of_too_many_pixels_is_refused() -> None:
    """TensorFlow ended the process, because the number of values did not fit 64 bits."""
    with pytest.raises(REFUSED, match="`size`"):
        read_picture(size=[2**31 - 1, 2**31 - 1])
    side, count = 2**24, 2**14
    with pytest.raises(tf.errors.OpError):
        read_picture(size=[side, side], indices=np.zeros(count, int), loose_at=np.zeros(count, int))


def test_a_picture_with_a_side_of_many_pixels_is_refused() -> None:
    """Positions in a row of four channels did not fit 32 bits, from 2^29 pixels on."""
    side = 2**24

    def read(*shape: int) -> tf.Tensor:
        record = pack(0, 7, np.zeros(shape, np.uint8))
        return read_picture(loose=np.frombuffer(record, np.uint8), channels=1)

    assert read(side, 1, 1).shape == [1, 2, 3, 1]
    for shape in ((side + 1, 1, 1), (1, side + 1, 1)):
        with pytest.raises(tf.errors.DataLossError, match=r"\b0\b"):
            read(*shape)


@pytest.mark.parametrize("start", [2**63 - 2, 2**62, 3])
def test_a_start_beyond_the_residual_is_refused(start: int) -> None:
    """Start plus length was negative, so that entries before the residual were written."""
    residual = tf.Variable(tf.zeros([6]))
    with pytest.raises(REFUSED, match=rf"`residual`.*\b{start + 4}\b"):
        dense.write(tf.ones([4]), residual, "float16", start=start)
    words = low_bits.write(tf.ones([4]), tf.Variable(tf.zeros([4])), "int8", 4, 4)
    with pytest.raises(REFUSED, match=rf"`residual`.*\b{start + 4}\b"):
        low_bits.add_and_write(words, residual, "int8", 4, start, 4)
    assert not residual.numpy().any()


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.3, 2.0, 2.0**-127, math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_scale_that_is_no_power_of_two_is_refused(dtype: str, scale: float) -> None:
    """The residual was not the difference to the written number, or was NaN."""
    residual = tf.Variable(tf.zeros([9]))
    with pytest.raises(REFUSED, match="`scale`"):
        dense.write(tf.ones([9]), residual, dtype, scale=scale)


@pytest.mark.parametrize(
    ("scale", "reach"), [(1.0, 2.0), (0.25, 8.0), (0.25, 0.5), (0.25, 3.0), (0.25, math.nan)]
)
def test_a_reach_beyond_the_scale_is_refused(scale: float, reach: float) -> None:
    """A finite entry became infinite on the wire, and its residual, too."""
    residual = tf.Variable(tf.zeros([1]))
    with pytest.raises(REFUSED, match="`reach`"):
        dense.write(tf.constant([1e5]), residual, "float16", scale=scale, reach=reach)


@pytest.mark.parametrize("name", ["pair32", "block16/float16", "elias/int4"])
def test_numbers_of_64_bits_do_not_overflow_in_a_format(name: str) -> None:
    """Words were counted as -2, and the process ended when their buffers were counted."""
    for k in (MOST, 2**62, 2**31):
        with pytest.raises(REFUSED, match="`k`"):
            wire.decode(tf.zeros([10], tf.int32), k, 5, name)
    with pytest.raises(REFUSED, match="`size`"):
        wire.decode(tf.zeros([10], tf.int32), 2, MOST, name)
    with pytest.raises(REFUSED, match="`shards`"):
        wire.decode(tf.zeros([0], tf.int32), 2, 4, name, shards=2**62)
    entries = Sparse(tf.constant([0]), tf.ones([1]), MOST)
    with pytest.raises(REFUSED, match="`size`"):
        wire.encode(entries, name)
    with pytest.raises((REFUSED, ValueError), match="`size`"):
        tf.function(lambda: wire.encode(entries, name))()


@pytest.mark.parametrize("codes", DENSE_CODES)
def test_shards_of_64_bits_are_refused(codes: str) -> None:
    for entries in (MOST, 2**31):
        with pytest.raises(REFUSED, match="`entries`"):
            low_bits.read(tf.zeros([17], tf.int32), codes, entries)
        with pytest.raises((REFUSED, ValueError), match="`entries`"):
            tf.function(lambda n=entries: low_bits.read(tf.zeros([17], tf.int32), codes, n))()


def test_padding_before_the_first_entry_is_padding() -> None:
    """The lowest number less the entries of a shard became a large one."""
    residual = tf.Variable(tf.fill([4], 3.0))
    words = low_bits.write(tf.ones([4]), residual, "int8", 2, -(2**63))
    assert not low_bits.read(words, "int8", 2).numpy().any()
    assert residual.numpy().tolist() == [3.0] * 4


# ---- Any arguments -------------------------------------------------------------------------------


def variable(size: int) -> tf.Variable:
    return tf.Variable(tf.zeros([size]))


def vector(size: int) -> np.ndarray:
    return np.linspace(-1, 2, size, dtype=np.float32)


def valid_calls(slab: Slab) -> dict[str, dict[str, Any]]:
    """Return the arguments of a call of every op of the library."""
    indices, n = np.array([0, 2, 4], np.int32), 6
    number = np.int64
    selection = dict(gradient=vector(n), k=number(3), seed=number(1), rule="mstopk")
    states = dict(residual=variable(n).handle, velocity=variable(n).handle)
    words = wire.encode(Sparse(indices, vector(3), n), "elias/int4").numpy()
    shard = low_bits.write(tf.ones([n]), variable(n), "int4", n, n).numpy()
    of_slab = dict(path=slab.descriptor_path, id=slab.id)
    return {
        "select": selection,
        "select_residual": {**selection, "residual": states["residual"]},
        "select_momentum": {**selection, **states, "momentum": 0.5},
        "keep": dict(
            residual=variable(n).handle, indices=indices, values=vector(3), errors=vector(3)
        ),
        "merge": dict(indices=indices, values=vector(3), size=number(n), k=3),
        "dense_write": dict(
            gradient=vector(4),
            residual=variable(n).handle,
            type="float16",
            start=1,
            scale=0.25,
            reach=2.0,
        ),
        "dense_add": dict(written=np.ones(6, np.float16), type="bfloat16", parts=3, factor=0.5),
        "low_bits_write": dict(
            gradient=vector(n), residual=variable(n).handle, type="int2", entries=3, real=5
        ),
        "low_bits_add": dict(
            words=shard, residual=variable(n + 2).handle, type="int4", entries=n, start=1, real=5
        ),
        "low_bits_read": dict(words=shard, type="int4", entries=n, factor=0.5),
        "lars_update": dict(
            weights=[variable(n).handle, variable(4).handle],
            momenta=[variable(n).handle, variable(4).handle],
            gradients=[vector(n), vector(4)],
            rates=vector(2),
            decays=[0.0, 0.1],
            momentum=0.5,
            nesterov=True,
        ),
        "squared_norms": dict(tensors=[vector(n), np.ones([2, 2], np.float16)]),
        "stamp": dict(entry=vector(1)),
        "wire_encode": dict(indices=indices, values=vector(3), size=n, format="block16/float32"),
        "wire_decode": dict(words=words, k=3, size=n, shards=1, format="elias/int4"),
        "wire_round": dict(values=vector(3), type="int8"),
        "slab_check": dict(
            indices=np.array([0, 1]), epoch=number(0), verify=1.0, seed=1, **of_slab
        ),
        "slab_read": picture(),
        "slab_fill": dict(
            encoded=np.array([b"", b"\xff\xd8\xff"]),
            samples=np.array([0, 1]),
            labels=np.array([0, 1]),
            state=np.ones(2, np.uint8),
            channels=3,
            store=0,
            max_pixels=100,
            **of_slab,
        ),
    }


# Not 2^31 - 1, which is a right length of a vector: gigabytes
WHOLE = (0, 1, 2, 7, -1, 2**31, 2**33, 2**62, MOST, -(2**31) - 1, -(2**63))
REAL = (0.0, -0.0, -1.0, 0.3, 1e-45, 1e38, math.nan, math.inf, -math.inf)


def others(argument: Any, draw: random.Random) -> Iterator[Any]:
    """Yield other numbers, or tensors of other shapes and entries, of the same type."""
    if isinstance(argument, bool | str | tf.DType) or tf.is_tensor(argument):
        return
    if isinstance(argument, int):
        yield from WHOLE
    elif isinstance(argument, float):
        yield from REAL
    elif isinstance(argument, list):
        yield argument[:-1]
        yield [*argument, argument[-1]]
        for position, part in enumerate(argument):
            for other in others(part, draw):
                yield [*argument[:position], other, *argument[position + 1 :]]
    else:
        array = np.asarray(argument)
        flat = array.reshape(-1)
        for length in (0, 1, 2, flat.size - 1, flat.size + 1, 3 * flat.size):
            yield np.resize(flat, max(0, length))
        yield from (flat[0], flat[None], flat[:, None], flat.reshape([1] * 6 + [-1]))
        if array.dtype.kind in "iuf":
            limits = np.finfo(array.dtype) if array.dtype.kind == "f" else np.iinfo(array.dtype)
            for entry in (
                0,
                1,
                2,
                64,
                limits.max,
                limits.min,
                *([np.nan] * (flat.dtype.kind == "f")),
            ):
                changed = flat.copy()
                changed[draw.randrange(flat.size)] = entry
                yield changed.reshape(array.shape)


def in_graph(op: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Run the op's shape function, with known values."""
    with tf.Graph().as_default():

        def moved(argument: Any) -> Any:
            if isinstance(argument, list):
                return [moved(part) for part in argument]
            if tf.is_tensor(argument):
                return tf.compat.v1.placeholder(argument.dtype, argument.shape)
            return argument

        op(**{name: moved(argument) for name, argument in arguments.items()})


@pytest.fixture(scope="module")
def slab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slab]:
    made = Slab(tmp_path_factory.mktemp("slab") / "tfcommx-a.slab", "k", 2, lambda: 10**6)
    yield made
    made.close()


def test_every_op_is_called(slab: Slab) -> None:
    library = loader.library()
    assert set(valid_calls(slab)) == set(OPS)
    found = {name for name in dir(library) if name.startswith("tfcommx_")}
    found = {name.removeprefix("tfcommx_") for name in found if "eager_fallback" not in name}
    registered = {
        name
        for name in found
        if op_def_registry.get("Tfcommx" + "".join(part.title() for part in name.split("_")))
    }
    assert registered == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_any_arguments_are_taken_or_refused(name: str, slab: Slab) -> None:
    """One or two arguments of a valid call are others; an op that crashes ends this process.

    Each call runs the kernel alone, as eager mode does, and then the shape function.
    """
    op, draw = getattr(loader.library(), f"tfcommx_{name}"), random.Random(name)
    valid = valid_calls(slab)[name]
    op(**valid)
    in_graph(op, valid)
    changes = {key: list(others(argument, draw)) for key, argument in valid.items()}
    changed = [{**valid, key: other} for key in changes for other in changes[key]]
    keys = [key for key in changes if changes[key]]
    for _ in range(100):
        changed.append(
            {**valid, **{key: draw.choice(changes[key]) for key in draw.choices(keys, k=2)}}
        )
    refused = 0
    for arguments in changed:
        for run in (lambda arguments: op(**arguments), lambda arguments: in_graph(op, arguments)):
            try:
                run(arguments)
            except (
                tf.errors.InvalidArgumentError,
                tf.errors.FailedPreconditionError,  # Another slab's number
                tf.errors.ResourceExhaustedError,
                tf.errors.DataLossError,
                ValueError,
                TypeError,
                OverflowError,
            ):
                refused += 1
    assert refused or name in ("squared_norms", "stamp")
