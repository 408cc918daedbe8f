"""The laws of each family: compressions, routes, rules, strategies and wire formats."""

import keras
import numpy as np
import tensorflow as tf

from tfcommx import compression, routes, selection
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import (
    DENSE_CODES,
    NARROW,
    NOMINAL,
    SPARSE_WIRES,
    ConfigurationError,
    Scheme,
    Sparse,
    Topology,
)
from tfcommx.core.checks import check_name, is_member
from tfcommx.keras_internals.optimizers import copy_with
from tfcommx.keras_internals.shards import UpdatesShards
from tfcommx.keras_internals.step import ExchangesGradients
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.requested_plan import ExchangeSettings
from tfcommx.optim.step_boundary import consolidate
from tfcommx.routes.route import SparseRoute
from tfcommx.strategies.strategy import Strategy
from tfcommx.strategies.table import strategy_of
from tfcommx.testing import laws
from tfcommx.testing.laws import require
from tfcommx.wire import codec, formats

# Tolerance relative to the largest entry, for rounded products of float32
ROUNDING = 2e-5


def check_compression(name: str) -> None:
    """Check the laws of a compression.

    Args:
        name: such as "powersgd/2", or "module:MEMBER", an object of a class that derives from
            `compression.compression.Compression`.

    **Ranks:** none: all ranks are threads of this process. **Cost:** some seconds.
    **Raises:** LawBroken; ConfigurationError for a name of no compression.
    """
    member = compression.get(name)
    shapes = list(laws.SHAPES.values())
    start, sizes = member.first_state(shapes), member.state_sizes(shapes)
    require(
        start.shape == (sum(sizes),) and len(sizes) == len(shapes),
        "`first_state` must have the entries that `state_sizes` counts for each variable.",
        repr(name),
        f"{start.shape} and {sizes} came for {shapes}.",
    )
    if not member.sums(shapes):  # The laws would hold, because nothing is compressed
        raise ConfigurationError(
            f"A compression that shortens the gradients of the shapes {shapes} is required. "
            f"Received {name!r}, whose `sums` are empty. Check one with smaller parts."
        )
    laws.check_traces(
        lambda state, *gradients: member.run(gradients, state, lambda vector: vector),
        repr(name),
        start.shape,
        *shapes,
    )
    for route in ("allreduce", "asa", "torus"):  # One level and two
        scheme = Scheme(route, compression=name, bucket_bytes=10**6)
        for topology in (*laws.ONE_LEVEL, *laws.TWO_LEVELS):
            plan = laws.plan_of(scheme, topology)
            where = f"{name!r} on {route!r}, {topology.nodes} x {topology.slots} ranks"
            require(
                topology.size == 1 or any(bucket.compresses for bucket in plan.buckets),
                "Fewer entries must travel than without it.",
                where,
                f"`sums` counts {member.sums(shapes)} for {shapes}.",
            )
            logs = laws.play(plan, laws.whole_numbers)
            laws.check_conservation(logs, where, ROUNDING)
            laws.check_agreement(laws.play(plan, laws.normal_numbers), where)
            laws.check_count(plan, logs, where)
        laws.check_non_finite(plan, where)
        laws.check_continues(plan, where)


def check_route(name: str) -> None:
    """Check the laws of a route, in every format that it writes.

    Args:
        name: of the table, or "module:MEMBER", an object of a class that derives from
            `routes.route.DenseRoute` or `routes.route.SparseRoute`.

    **Ranks:** none: all ranks are threads of this process. **Cost:** some seconds.
    **Raises:** LawBroken; ConfigurationError for a name of no route.
    """
    route = routes.get(name)
    is_sparse = isinstance(route, SparseRoute)
    selection, density = ("exact", 0.1) if is_sparse else ("all", 1.0)
    for wire in route.wires:
        scheme = Scheme(name, selection, density, wire=wire, dense_below=8, bucket_bytes=2000)
        # No residual keeps the rounding error of an engine that adds in 16 bits
        loss = ROUNDING if wire in DENSE_CODES else 1e-2 if wire in NARROW else 0.0
        for topology in (*laws.ONE_LEVEL, *laws.TWO_LEVELS):
            plan = laws.plan_of(scheme, topology)
            where = f"{name!r} writing {wire!r}, {topology.nodes} x {topology.slots} ranks"
            logs = laws.play(plan, laws.whole_numbers)
            laws.check_conservation(logs, where, tolerance=loss)
            laws.check_agreement(laws.play(plan, laws.normal_numbers), where)
            laws.check_count(plan, logs, where)
            for bucket in plan.buckets:
                seconds = routes.of(bucket).seconds(bucket, topology, NOMINAL)
                require(
                    bool(np.isfinite(seconds) and (seconds > 0 or topology.size == 1)),
                    "A price must be > 0 seconds.",
                    where,
                    f"{seconds!r} came.",
                )
        laws.check_non_finite(plan, where)
        laws.check_continues(plan, where)


def check_rule(name: str) -> None:
    """Check the laws of a selection rule.

    Args:
        name: of the table, or "module:MEMBER", whose `select` follows
            `selection.error_feedback.Selector`.

    **Ranks:** none: all ranks are threads of this process. **Cost:** some seconds.
    **Raises:** LawBroken; ConfigurationError for a name of no rule.
    """
    _check_choice(name)
    laws.check_on_sparse_routes(repr(name), selection=name)


def _check_choice(name: str) -> None:
    # A fixed seed, so that a failure can be repeated
    rule, numbers = selection.rule(name), np.random.default_rng(0)
    laws.check_traces(lambda vector: rule.select(vector, 10, seed=5)[:2], repr(name), (100,))
    for size, k in ((1, 1), (10, 10), (1000, 1), (1000, 100), (70_000, 700)):
        entries = numbers.normal(size=size).astype(np.float32)
        bad = numbers.integers(size)
        entries[bad] = np.nan
        where = f"{name!r}, k = {k} of {size} entries, one of them NaN"
        chosen, again = (rule.select(tf.constant(entries), k, seed=5) for _ in range(2))
        indices, values = chosen.indices.numpy(), chosen.values.numpy()
        require(
            indices.shape == (k,) and indices.dtype == np.int32,
            "k indices of int32 must be chosen.",
            where,
            f"{indices.shape} of {indices.dtype} came.",
        )
        require(
            bool((np.diff(indices) > 0).all() and indices[0] >= 0 and indices[-1] < size),
            "Indices must be unique, ascending and in range.",
            where,
            f"{indices[:5].tolist()} ... came.",
        )
        require(
            bool(np.array_equal(values, entries[indices], equal_nan=True)),
            "Values must be those of the vector at the indices.",
            where,
            "Others came.",
        )
        require(bad in indices, "NaN and Inf must be chosen before all else.", where, "It was not.")
        require(
            bool(np.array_equal(indices, again.indices.numpy())),
            "Equal inputs and seeds must give equal choices.",
            where,
            "Two calls differ.",
        )


def check_strategy(asked: str | Strategy, steps: int = 4) -> None:
    """Check the laws of a strategy: all ranks end with the same weights, and have moved.

    Args:
        asked: of the table, an instance, or "module:MEMBER".
        steps: with SGD and momentum, each rank with its own gradients, >= 1.

    **Ranks:** none: all ranks are threads of this process. **Cost:** a second.
    **Raises:** LawBroken; ConfigurationError for a name of no strategy.
    """
    strategy = strategy_of(asked)
    for topology in (Topology(2, 1), Topology(2, 2)):
        where = f"{asked!r}, {topology.nodes} x {topology.slots} ranks"
        first, *remaining = ThreadComm.run(
            topology, lambda comm: _weights_after(steps, strategy, comm)
        )
        for rank, weights in enumerate(remaining, 1):
            require(
                all(map(np.array_equal, weights, first)),
                "All ranks must hold the same weights once they are consolidated.",
                where,
                f"Rank {rank} holds others than rank 0.",
            )
        start = [variable.numpy() for variable in _variables()]
        require(
            # Replicas that are never updated would be equal, too
            not any(map(np.array_equal, first, start))
            and all(np.isfinite(weights).all() for weights in first),
            "Steps must move the weights, and leave them finite.",
            where,
            "They did not.",
        )


def _weights_after(steps: int, strategy: Strategy, comm: Comm) -> list[np.ndarray]:
    mixin = UpdatesShards if strategy.shards_weights else ExchangesGradients
    optimizer, weights = copy_with(mixin, keras.optimizers.SGD(0.1, momentum=0.5)), _variables()
    optimizer.exchanger = Exchanger(comm, Scheme(), ExchangeSettings(strategy=strategy))
    for step in range(steps):
        gradients = laws.normal_numbers(comm.rank, step)
        optimizer.apply([tf.constant(gradients[path]) for path in laws.SHAPES], weights)
    consolidate(optimizer)
    return [variable.numpy() for variable in weights]


def _variables() -> list[keras.Variable]:
    return [
        keras.Variable(np.ones(shape, np.float32), name=path.replace("/", "_"))
        for path, shape in laws.SHAPES.items()
    ]


BUFFERS = 3


def check_wire(name: str) -> None:
    """Check the laws of a wire format, on every sparse route.

    Args:
        name: of `core.SPARSE_WIRES`, or "module:MEMBER", an object of a class that derives from
            `wire.formats.WireFormat`.

    **Ranks:** none: all ranks are threads of this process. **Cost:** some seconds.
    **Raises:** LawBroken; ConfigurationError for a name of no wire format.
    """
    if not is_member(name):
        check_name("wire format", name, SPARSE_WIRES)
    # One entry, all entries, an odd number, and more entries than the 65,536 of a block
    for k, size in ((1, 1), (10, 10), (7, 1000), (100, 1000), (700, 70_000)):
        _check_buffers(name, k, size)
    laws.check_on_sparse_routes(repr(name), selection="exact", wire=name)


def _check_buffers(name: str, k: int, size: int) -> None:
    where = f"{name!r}, {k} of {size} entries"
    numbers, written = np.random.default_rng(0), []
    for number in range(BUFFERS):
        # They have many magnitudes, because a format may round by the largest entry
        random = (numbers.normal(size=k) * 10.0 ** numbers.integers(-5, 6, k)).astype(np.float32)
        # In one buffer only, because its NaN must leave the others as they are
        if number == 1:
            random[numbers.integers(k)] = np.nan
        indices = np.sort(numbers.choice(size, k, replace=False)).astype(np.int32)
        written.append(_check_rounded(name, Sparse(tf.constant(indices), random, size), where))
    words = formats.size_bytes(k, size, name) // 4
    laws.check_traces(
        lambda values: tf.ensure_shape(
            codec.encode(Sparse(written[0].indices, values, size), name), [words]
        ),
        where,
        (k,),
    )
    buffers = [codec.encode(entries, name) for entries in written]
    require(
        all(buffer.dtype == tf.int32 and buffer.shape == (words,) for buffer in buffers),
        "A buffer must be int32 words, as many as `words` counts.",
        where,
        f"{[(buffer.dtype.name, *buffer.shape) for buffer in buffers]} came, "
        f"and {words} are counted.",
    )
    read = codec.decode(tf.concat(buffers, 0), k, size, name)
    for decoded, part in zip(read, ("indices", "values"), strict=True):
        expected = np.concatenate([getattr(entries, part) for entries in written])
        require(
            np.array_equal(decoded, expected, equal_nan=part == "values"),
            f"The {part} that were written must be read.",
            where,
            "Others came.",
        )


def _check_rounded(name: str, entries: Sparse, where: str) -> Sparse:
    """Check the rounded values of a buffer and their rounding error; return the rounded entries."""
    sparse, error = codec.rounded(entries, name)
    values, sent = np.asarray(entries.values), np.asarray(sparse.values)
    remainder = np.zeros_like(values) if error is None else np.asarray(error)
    finite = np.isfinite(values)
    require(
        np.array_equal((sent + remainder)[finite], values[finite]),
        "The written values plus their residuals must equal the input exactly.",
        where,
        "It is not.",
    )
    require(
        not np.isfinite(sent[~finite]).any() and not remainder[~finite].any(),
        "NaN and Inf must stay so, and leave nothing.",
        where,
        f"{sent[~finite].tolist()} is written, and {remainder[~finite].tolist()} left.",
    )
    again = np.asarray(codec.rounded(sparse, name)[0].values)
    require(
        np.array_equal(again, sent, equal_nan=True),
        "Rounded values must be written as they are.",
        where,
        "They are rounded once more.",
    )
    return sparse
