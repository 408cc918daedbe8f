"""Every route and wire format on real ranks: the sum, its bits, its bytes.

Several buckets are in flight in one graph.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from drawing import case
from gpu_placement import by_the_host, int32_operations, operations, without_gpu_kernel

import tfcommx as cx
from tfcommx import routes
from tfcommx.collectives import mpi
from tfcommx.collectives.comm import Comm
from tfcommx.core.wire_formats import CODE_BITS, DENSE_CODES, SPARSE_FORMATS
from tfcommx.measure import links
from tfcommx.planner.check import check_scheme
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.routes import messages as transfers
from tfcommx.routes import pipeline
from tfcommx.routes.hitopk import HitopkOptions
from tfcommx.runtime.executor import PlanExecutor

SHAPES = {f"layer{i}/kernel": (50 + i, 41) for i in range(6)}
CODED = [
    *(name for name, form in SPARSE_FORMATS.items() if form.values in CODE_BITS),
    *DENSE_CODES,
]
SOME_WIRES = {"float16", "bfloat16", "int4", "pair32", "elias/int4"}
WAYS = [
    cx.Scheme(route, wire=wire, dense_below=8, bucket_bytes=9000, block_bytes=4096)
    for route, row in routes.ROUTES.items()
    for wire in row.wires
]
WAYS.append(dataclasses.replace(WAYS[0], route="torus", peer_route="pipeline"))


def of_launches() -> list[Any]:
    """Run each route in each launch, and some wire formats on one of their routes on two ranks.

    A wire format depends neither on the launcher nor on nodes; law 2 tries all of them on all
    routes, on threads.
    """
    seen: set[str] = set()
    marked = []
    for scheme in reversed(WAYS):  # Routes of two levels come last
        way = scheme.route + scheme.peer_route
        if way not in seen:
            marks: Any = pytest.mark.every_launch
        else:
            some = scheme.wire in SOME_WIRES and scheme.wire not in seen
            marks = () if some else pytest.mark.exhaustive
        marked.append(
            pytest.param(
                scheme, marks=marks, id=f"{scheme.route}-{scheme.wire}-{scheme.peer_route}"
            )
        )
        seen |= {way, scheme.wire}
    return marked[::-1]


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Return integers over 64, less than 8 bits long.

    No format rounds them, except codes, and sums are exact in any order.
    """
    numbers = np.random.default_rng([rank, step])
    return {
        path: (numbers.integers(-60, 61, shape) / 64).astype(np.float32)
        for path, shape in SHAPES.items()
    }


@pytest.mark.parametrize("scheme", of_launches())
def test_the_sum_of_all_ranks(comm: Comm, scheme: cx.Scheme) -> None:
    if (
        any(routes.get(name).messages for name in (scheme.route, scheme.peer_route))
        and not comm.messages.possible
    ):
        with pytest.raises(cx.PlanError, match="horovodrun --mpi"):
            check_scheme(scheme, comm.topology, comm.messages.possible)
        return
    plan = make_plan(
        [Gradient(path, shape, "float32") for path, shape in SHAPES.items()],
        {"*": scheme},
        comm.topology,
        "sum",
    )
    assert len(plan.buckets) >= 4
    running = PlanExecutor(plan, comm)

    @tf.function(autograph=False)
    def step(given: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return running.exchange(given)

    # The trace that the steps below take
    specs = {path: tf.TensorSpec(shape) for path, shape in SHAPES.items()}
    graph = step.get_concrete_function(specs).graph
    # Messages between two ranks are the host's, everything else a GPU's
    messages = routes.get(scheme.route).messages or routes.get(scheme.peer_route).messages
    alone = comm.topology.size == 1
    assert without_gpu_kernel(graph) == ({"PyFunc"} if messages and not alone else set())
    assert not by_the_host(graph)
    before = comm.traffic()
    arrived = given = dict.fromkeys(SHAPES, 0.0)
    for number in range(3):
        result = step(
            {path: tf.constant(value) for path, value in gradients(comm.rank, number).items()}
        )
        for path in SHAPES:
            total = sum(gradients(rank, number)[path] for rank in range(comm.topology.size))
            arrived = {**arrived, path: arrived[path] + result[path].numpy().astype(float)}
            given = {**given, path: given[path] + total}
            if scheme.wire not in CODED:
                np.testing.assert_array_equal(result[path], total)
    residuals = comm.gather_objects(running.export().residuals)
    for path, shape in SHAPES.items():
        kept = sum(one[path].reshape(shape).astype(float) for one in residuals if path in one)
        # Sums of codes times steps are rounded to float32
        tolerance = 1e-6 if scheme.wire in CODED else 0
        np.testing.assert_allclose(arrived[path] + kept, given[path], rtol=0, atol=tolerance)
    sent = np.mean(comm.gather_objects(np.subtract(comm.traffic(), before)), axis=0)
    expected = np.sum(
        [routes.get(bucket.route).wire_bytes(bucket, comm.topology) for bucket in plan.buckets],
        axis=0,
    )
    np.testing.assert_allclose(sent, 3 * expected, rtol=1e-9)


@pytest.mark.every_launch
def test_the_plan_in_hand_is_refused_too(comm: Comm) -> None:
    if comm.messages.possible:
        pytest.skip("takes a launcher without messages: Gloo")
    plan = make_plan(
        [Gradient("w", (8, 8), "float32")], {"*": cx.Scheme("pipeline")}, comm.topology
    )
    with pytest.raises(cx.ConfigurationError, match="horovodrun --mpi"):
        PlanExecutor(plan, comm)


@pytest.mark.every_launch
def test_messages_of_all_lengths_from_every_root(comm: Comm) -> None:
    if not comm.messages.possible or comm.topology.size == 1:
        pytest.skip("takes messages between several ranks: MPI")
    ranks = range(comm.topology.size)
    for entries in (1, 5, 70_001):
        for root in ranks:
            mine = np.full(entries, comm.rank + 1, np.float64)
            for operation in transfers.OPERATIONS:
                got = pipeline.ROUTE.carry_out(operation, mine, comm, root, block_bytes=8000)
                total = sum(rank + 1 for rank in ranks)
                expected = {
                    "broadcast": root + 1,
                    "reduce": total if comm.rank == root else comm.rank + 1,
                    "allreduce": total,
                }
                np.testing.assert_array_equal(got, np.full(entries, expected[operation]))


@pytest.mark.parametrize(
    ("selection", "way"),
    [  # `make test` has three rules, each on another way
        case(selection, way, kept=number == place)
        for number, selection in enumerate(
            ["mstopk", "exact", "dgc", "threshold", "random", "binary_search"]
        )
        for place, way in enumerate(
            [("hitopk", "dense"), ("hitopk", "pairs"), ("allgather", "dense")]
        )
    ],
)
def test_nothing_large_would_leave_a_gpu_on_its_way(
    comm: Comm, selection: str, way: tuple[str, str]
) -> None:
    """TensorFlow's own int32 kernels for GPUs mostly work in the host's memory.

    None of them may touch exchanged tensors.
    """
    route, last_step = way
    scheme = cx.Scheme(route, selection, 0.01)
    plan = make_plan([Gradient("w", (1000, 1000), "float32")], {"*": scheme}, comm.topology)
    if route == "hitopk":
        options = HitopkOptions(last_step)
        buckets = tuple(dataclasses.replace(bucket, options=options) for bucket in plan.buckets)
        plan = dataclasses.replace(plan, buckets=buckets)
    running = PlanExecutor(plan, comm)
    graph = (
        tf.function(lambda given: running.exchange({"w": given})["w"])
        .get_concrete_function(tf.TensorSpec([1000, 1000]))
        .graph
    )

    assert int32_operations(graph) or comm.topology.size == 1
    assert not by_the_host(graph)
    assert not without_gpu_kernel(graph)
    # Scalars that the kernels read on the host are made there, or the host would wait for the GPU
    scalars = [
        tensor.op
        for op in operations(graph)
        if op.type.startswith(("TfcommxSelect", "TfcommxMerge"))
        for tensor in op.inputs
        if tensor.dtype == tf.int64
    ]
    assert scalars and not [op.name for op in scalars if "CPU:0" not in op.device]


def test_what_would_leave_a_gpu_is_found() -> None:
    def step(given: tf.Tensor) -> tf.Tensor:
        squared = tf.numpy_function(np.square, [given], tf.float32, stateful=False)
        positions = tf.stack([tf.cast(given, tf.int32), tf.range(1000)])
        return tf.ensure_shape(squared, [1000]) + tf.cast(positions[0], tf.float32)

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([1000])).graph
    assert without_gpu_kernel(graph) == {"PyFuncStateless"}
    assert {"output of Range", "output of Pack", "input of StridedSlice"} <= set(by_the_host(graph))


@pytest.mark.every_launch
@pytest.mark.parametrize(
    ("entries", "dtype", "received"),
    [(2**30, tf.int32, r"'much'(?!.*rank \d)"), (2**28, tf.float64, r"'much'.*rank \d.*float64")],
)
def test_an_all_gather_beyond_what_engines_count_is_refused_while_tracing(
    comm: Comm, entries: int, dtype: tf.DType, received: str
) -> None:
    if comm.topology.size == 1:
        pytest.skip("takes several ranks")
    gather = tf.function(lambda words: comm.all_gather(words, "world", "much"), autograph=False)
    with pytest.raises(cx.PlanError, match=received):
        gather.get_concrete_function(tf.TensorSpec([entries], dtype))


@pytest.mark.every_launch
def test_who_waits_long_for_a_message_says_so(
    comm: Comm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not comm.messages.possible or comm.topology.size == 1:
        pytest.skip("takes messages between several ranks: MPI")
    monkeypatch.setattr(mpi, "TIMEOUT_SECONDS", 0.3)
    running = PlanExecutor(
        make_plan(
            [Gradient("w", (8, 8), "float32")],
            {"*": cx.Scheme("pipeline", dense_below=0)},
            comm.topology,
        ),
        comm,
    )
    comm.gather_objects("ready")
    if comm.rank == 1:
        time.sleep(3)
    with caplog.at_level(logging.WARNING, "tfcommx"):
        running.exchange({"w": tf.ones([8, 8])})
    assert comm.rank or any(
        "for messages of ranks [" in record.message for record in caplog.records
    )


@pytest.mark.every_launch
def test_with_the_watch_a_rank_that_is_busy_is_waited_for(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.topology.size == 1 or not comm.messages.possible:
        pytest.skip("takes messages between several ranks: MPI")
    monkeypatch.setattr(mpi, "TIMEOUT_SECONDS", 0.2)
    post, number = comm.messages._make(), np.full(1, comm.rank + 1.0)
    if comm.rank == 1:
        time.sleep(1)
        post.wait_any([post.send(np.full(1, 7.0), 0, 0)])
    elif comm.rank == 0:
        post.wait_any([post.receive(number, 1, 0)])
    assert comm.gather_objects(number.item()) == [7.0, *range(2, comm.topology.size + 1)]


@pytest.mark.every_launch
def test_a_probe_frees_its_communicators(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPI has a limited number of them, and each `auto` may measure the links again."""
    if not comm.messages.possible or comm.topology.size == 1:
        pytest.skip("takes messages between several ranks: MPI")
    opened, open_messages = [], comm.messages.open_own

    def noted(**options: Any) -> Any:
        opened.append(open_messages(**options))
        return opened[-1]

    monkeypatch.setattr(comm.messages, "open_own", noted)
    links.probe(comm, [1024, 65536], repeats=1, blocks=(), steady=1024, load=lambda: None)
    assert opened and not any(messages._world for messages in opened)
