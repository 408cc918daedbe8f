"""Compare the outputs and the loss of the ranks' models on the first batch of rank 0.

Equal variables do not make equal models: a constant that a layer made of random numbers, a lookup
table, a closure or an attribute of a layer are no variables, and no rank broadcasts them.
"""

import functools
import hashlib
from collections import namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.core import ConfigurationError, log
from tfcommx.keras_internals.models import (
    bytes_of,
    call_alike,
    calls_recorded,
    constants_of,
    loss_of,
)
from tfcommx.keras_internals.optimizers import array_of
from tfcommx.optim.broadcast import checksum_of

# Largest difference of equal models, as a share of the largest output: processors of other types
# round differently, and rounding errors add up over the layers
TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "float16": 0.05, "bfloat16": 0.05}
# Entries of an output that are exchanged if digests differ, evenly spread
SAMPLE = 16384


class Result(NamedTuple):
    """Outputs and loss of one rank, or the error of computing them."""

    # Name -> digest
    digests: dict[str, str]
    # Name -> some of its entries
    samples: dict[str, np.ndarray]
    # Error message; empty if there was none
    error: str = ""


def batch_and_again(iterator: Iterator[Any], count: int) -> tuple[Any | None, Iterator[Any]]:
    """Take the first of the next `count` batches; return it, and an iterator that yields them all.

    The batch is None, and the iterator the original, if it is none of tf.data, has no batch, or
    elements other than tensors.
    """
    # With the original's element spec, so that no step is traced again
    spec = getattr(iterator, "element_spec", None)
    supported = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    if not isinstance(iterator, tf.data.Iterator) or not all(
        isinstance(part, supported) for part in tf.nest.flatten(spec)
    ):
        return None, iterator
    batches = []
    for _ in range(count):
        try:
            batches.append(next(iterator))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    if not batches:
        return None, iterator
    # Not from_generator, which changes how the whole process allocates memory (TensorFlow 2.21)
    again = functools.reduce(
        tf.data.Dataset.concatenate, [_dataset_of(batch, spec) for batch in batches]
    )
    return batches[0], iter(again)


def _dataset_of(batch: Any, spec: Any) -> tf.data.Dataset:
    """Return a dataset of one batch, whose shapes are known as far as those of `spec` are."""
    shapes = [part.shape for part in tf.nest.flatten(spec, expand_composites=True)]

    @tf.autograph.experimental.do_not_convert
    def with_shapes(*parts: tf.Tensor) -> Any:
        relaxed = [
            # It hides the batch's static shape, by which a step with batches of unknown length
            # would be traced again
            tf.compat.v1.placeholder_with_default(part, shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, relaxed, expand_composites=True)

    parts = tuple(tf.nest.flatten(batch, expand_composites=True))
    return tf.data.Dataset.from_tensors(parts).map(with_shapes)


def require_equal_outputs(model: keras.Model, batch: Any | None, root: int) -> None:
    """Refuse replicas that compute other outputs, or another loss, from the batch of rank `root`.

    The model runs in inference mode, and no Keras variable changes: neither statistics of batch
    norm nor seeds. A model whose outputs differ from call to call is not compared, and a warning
    says so.

    Args:
        model: built.
        batch: this rank's, as `fit` gives it to `train_step`; None on rank `root`, or more than
            three parts: nothing is compared.

    **Ranks:** all. **Cost:** one pass over the variables; the batch is sent to all ranks, and each
    calls the model once, outside of a graph; if the digests of the results differ twice more.
    **Raises:** ConfigurationError, on all ranks, that names the first layer which computes
    something else.
    """
    comm = process.current()
    if comm.topology.size == 1:
        return
    local = _varied_digest(batch)
    batches = comm.gather_objects((_pack(batch if comm.rank == root else None), local))
    if local and comm.rank == root and all(remote == local for _, remote in batches):
        log.warning(
            "All ranks train on the same first batch, so that they learn no more than one of them. "
            "Give each rank its part of the data, such as `dataset.shard(cx.size(), cx.rank())` "
            "or `x[cx.rank()::cx.size()]`, or separate seeds to ranks that shuffle all of it."
        )
    batch = _unpack(*batches[root][0])
    # A batch of more parts than inputs, labels and weights is for a training step of the user's,
    # which alone knows the inputs
    if batch is None or (isinstance(batch, list | tuple) and len(batch) > 3):
        return
    weights = [checksum_of(variable) for variable in model.weights]
    if any(remote != weights for remote in comm.gather_objects(weights)):
        return  # A run that continues in mid-epoch has separate statistics on each rank
    # From here on each return and branch follows from gathered values, so all ranks leave at the
    # same point
    result = _result_of(model, batch)
    everyone = comm.gather_objects((result.digests, result.error))
    errors = [error for _, error in everyone]
    if all(errors):
        # A model with a custom training step need not have a call
        if comm.rank == root and not result.error.startswith("NotImplementedError"):
            log.warning(
                "The replicas' outputs were not compared, because calling the model on a batch "
                "failed: %s BroadcastState(compare=False) leaves it out.",
                result.error,
            )
        return
    if any(errors):
        rank = next(rank for rank, error in enumerate(errors) if error)
        raise ConfigurationError(
            f"All ranks must be able to call the model on rank {root}'s first batch. Received on "
            f"rank {rank}: {errors[rank]} Build the same model on every rank."
        )
    if all(other == everyone[0] for other in everyone):
        return
    # A second call distinguishes outputs that vary from outputs that differ between ranks
    second = _result_of(model, batch, seed=1)
    varies = _differences(result, second)
    gathered = comm.gather_objects((tuple(result), varies))
    samples = [(Result._make(other), names) for other, names in gathered]
    varying = [rank for rank, (_, names) in enumerate(samples) if names]
    if varying:
        if comm.rank == root:
            log.warning(
                "The replicas' outputs were not compared, because the model gives other outputs "
                "each time it is called on the same batch (%s, on rank %d).",
                samples[varying[0]][1][0],
                varying[0],
            )
        return
    for rank, (other, _) in enumerate(samples):
        if names := _differences(samples[root][0], other):
            by = _difference(samples[root][0], other, names[0])
            difference = f" by up to {by[0]:.3g}, where the largest is {by[1]:.3g}" if by else ""
            raise ConfigurationError(
                "All ranks must compute the same from the same batch, and their variables are "
                f"equal. Received {names[0]} of rank {root}'s first batch that differs between "
                f"rank {root} and rank {rank}{difference}. {_first_layer(model, batch, root, rank)}"
            )


def _varied_digest(batch: Any) -> str:
    """Return a digest of a batch; "" for none, and for one whose samples are all alike."""
    # Made-up data, such as np.ones, are no mistake
    parts = [
        array_of(part)
        for part in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_tensor(part) or isinstance(part, np.ndarray)
    ]
    varied = any(part.ndim and np.any(part != part[:1]) for part in parts)
    return digest_of(batch) if varied else ""


def _pack(batch: Any) -> tuple[str, Any]:
    """Return a batch as plain data, which ranks can exchange: its kind and content."""
    if isinstance(batch, dict):
        return "dict", {key: _pack(part) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return "named", {"fields": list(batch._fields), "parts": [_pack(part) for part in batch]}
    if isinstance(batch, list | tuple):
        return "list" if isinstance(batch, list) else "tuple", [_pack(part) for part in batch]
    if isinstance(batch, tf.RaggedTensor):
        return "ragged", [_pack(batch.values), _pack(batch.row_splits)]
    if isinstance(batch, tf.SparseTensor):
        return "sparse", [_pack(part) for part in (batch.indices, batch.values, batch.dense_shape)]
    if batch is None:
        return "none", None
    array = array_of(batch)
    if array.dtype.hasobject:
        return "strings", (array.shape, array.ravel().tolist())
    return "tensor", array


def _unpack(kind: str, content: Any) -> Any:
    if kind == "dict":
        return {key: _unpack(*part) for key, part in content.items()}
    if kind == "named":  # Ranks without this batch do not have its class
        parts = [_unpack(*part) for part in content["parts"]]
        return namedtuple("Batch", content["fields"])(*parts)
    if kind in ("list", "tuple", "ragged", "sparse"):
        parts = [_unpack(*part) for part in content]
        if kind in ("ragged", "sparse"):
            make = tf.RaggedTensor.from_row_splits if kind == "ragged" else tf.SparseTensor
            return make(*parts)
        return parts if kind == "list" else tuple(parts)
    if kind == "none":
        return None
    if kind == "strings":
        return tf.reshape(tf.constant(content[1], tf.string), content[0])
    return tf.constant(content)


def _result_of(model: keras.Model, batch: Any, seed: int = 0) -> Result:
    inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)

    def with_loss(outputs: Any) -> dict[str, tf.Tensor]:
        # Other objects that a model returns have no value that two processes could compare
        parts = filter(tf.is_tensor, tf.nest.flatten(outputs, expand_composites=True))
        named = {f"output {number}": part for number, part in enumerate(parts)}
        if labels is not None and getattr(model, "loss", None) is not None:
            named["the loss"] = loss_of(model, inputs, labels, outputs, weights)
        return named

    try:
        named = call_alike(model, inputs, with_loss, seed)
    except Exception as error:  # Any exception: `fit` may never call the model so
        return Result({}, {}, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    arrays = {name: array_of(part) for name, part in named.items()}
    digests = {name: digest_of(array) for name, array in arrays.items()}
    samples = {name: _sample(one) for name, one in arrays.items() if not one.dtype.hasobject}
    return Result(digests, samples)


def digest_of(value: object) -> str:
    """Return a digest of the tensors in a structure; empty if it has one of a graph."""
    digest = hashlib.sha256()
    for part in tf.nest.flatten(value, expand_composites=True):
        if not tf.is_tensor(part) and not isinstance(part, np.ndarray | keras.Variable):
            continue
        if tf.is_tensor(part) and not hasattr(part, "numpy"):
            return ""
        array = array_of(part)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(bytes_of(array))
    return digest.hexdigest()


def _sample(array: np.ndarray) -> np.ndarray:
    flat = array.ravel()
    # Copied, because a view would keep the whole output in memory
    return flat[:: max(1, flat.size // SAMPLE)].copy()


def _differences(first: Result, second: Result) -> list[str]:
    """Return the names of results that differ by more than rounding."""
    if first.digests.keys() != second.digests.keys():
        return sorted(first.digests.keys() ^ second.digests.keys())
    unequal = [name for name, digest in first.digests.items() if digest != second.digests[name]]
    bounds = {name: _difference(first, second, name) for name in unequal}
    return [
        name
        for name, by in bounds.items()
        if by is None or by[0] > TOLERANCE[first.samples[name].dtype.name] * by[1]
    ]


def _difference(first: Result, second: Result, name: str) -> tuple[float, float] | None:
    """Return two results' largest difference, and largest entry; None if no floats of one shape."""
    a, b = first.samples.get(name), second.samples.get(name)
    if a is None or b is None or a.shape != b.shape or a.dtype.name not in TOLERANCE:
        return None
    a, b = a.astype(np.float64), b.astype(np.float64)
    # Equal NaN and Inf are equal
    unequal = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    with np.errstate(invalid="ignore"):
        differences = np.abs(a - b)[unequal]
    scale = float(np.max(np.abs(np.nan_to_num(a)), initial=0.0))
    largest = float(np.max(differences, initial=0.0))
    return (np.inf if np.isnan(largest) else largest), scale


def _first_layer(model: keras.Model, batch: Any, root: int, rank: int) -> str:
    """Name the first layer that computes something else, and the remedy. **Ranks:** all."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with calls_recorded(model, digest_of) as calls:
        call_alike(model, inputs, lambda outputs: None)
    rows = [(f"{layer.name!r} ({type(layer).__name__})", *digests) for layer, *digests in calls]
    constants = [constants_of(layer) for layer, _, _ in calls]
    everyone = process.current().gather_objects((rows, constants))
    (root_layers, our_constants), (rank_layers, their_constants) = everyone[root], everyone[rank]
    for position, (root_layer, rank_layer) in enumerate(
        zip(root_layers, rank_layers, strict=False)
    ):
        # Equal inputs and unequal outputs: all layers before it have computed the same
        if root_layer[1] == rank_layer[1] and root_layer[2] != rank_layer[2]:
            first, second = our_constants[position], their_constants[position]
            attributes = sorted(
                name for name in first.keys() & second.keys() if first[name] != second[name]
            )
            named = f" (its attributes {', '.join(attributes)} differ)" if attributes else ""
            return (
                f"The first layer that differs is {root_layer[0]}{named}. Something that is no "
                "variable differs there, such as a vocabulary, a constant of random numbers or an "
                "argument: make it in the same way on every rank. BroadcastState(compare=False) "
                "trains with the difference."
            )
    return (
        "No single layer differs: look at the order in which layers are called, the loss and what "
        "compile() was given. BroadcastState(compare=False) trains with the difference."
    )
