"""Law 4: a step sends as many entries and bytes as its plan says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from laws_helpers import (
    COMPRESSED,
    LOSSY,
    SCHEMES,
    WIRED,
    gradients,
    plan_for,
    scheme,
    with_topologies,
)

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import PlanError, Scheme, Sparse, Topology
from tfcommx.runtime.executor import PlanExecutor


@with_topologies(COMPRESSED, first=Topology(4, 2))
def test_law_4_of_compressions(scheme: Scheme, topology: Topology) -> None:
    """A step sends the vectors that the compression counts, and nothing else."""
    plan = plan_for(scheme, topology)

    def work(comm: Comm) -> np.ndarray:
        running, start = PlanExecutor(plan, comm), comm.traffic()
        running.exchange({path: tf.constant(one) for path, one in gradients(comm.rank, 0).items()})
        return np.subtract(comm.traffic(), start)

    sent = np.mean(ThreadComm.run(topology, work), axis=0)
    expected = [routes.of(bucket).wire_bytes(bucket, topology) for bucket in plan.buckets]
    np.testing.assert_allclose(sent, np.sum(expected, axis=0), rtol=1e-12)
    whole = plan_for(dataclasses.replace(scheme, compression="none"), topology)
    dense = [routes.of(bucket).wire_bytes(bucket, topology) for bucket in whole.buckets]
    assert topology.size == 1 or sum(sent) < 0.5 * np.sum(dense)


@with_topologies(SCHEMES + WIRED + LOSSY, first=Topology(4, 2))
def test_law_4_count(scheme: Scheme, topology: Topology) -> None:
    """Exactly k entries travel, and the bytes counted equal wire_bytes()."""
    plan = plan_for(scheme, topology)

    def work(comm: Comm) -> tuple:
        running, counted, sent = PlanExecutor(plan, comm), [], []
        for bucket, runner in zip(plan.buckets, running.runners, strict=True):
            select: list[Callable[[tf.Tensor], Sparse]] = []
            if (selector := runner.selector) is not None:
                select = [
                    lambda part, selector=selector: (
                        counted.append(
                            selector.select(part, selector.seed(tf.constant(1, tf.int64)))
                        )
                        or counted[-1]
                    )
                ]
            start = comm.traffic()
            flat = tf.random.normal([bucket.padded])
            routes.get(bucket.route).run(flat, bucket, comm, runner.codec, *select)
            sent.append(np.subtract(comm.traffic(), start))
        return sent, [
            (bucket.k, sparse)
            for bucket, sparse in zip([b for b in plan.buckets if b.k], counted, strict=True)
        ]

    found = ThreadComm.run(topology, work)
    for position, bucket in enumerate(plan.buckets):
        by_rank = [sent[position] for sent, _ in found]
        expected = routes.get(bucket.route).wire_bytes(bucket, topology)
        np.testing.assert_allclose(np.mean(by_rank, axis=0), expected, rtol=1e-12)
        # Collectives count the mean, on every rank
        if not routes.get(bucket.route).needs_messages(bucket):
            np.testing.assert_array_equal(by_rank, [by_rank[0]] * topology.size)
    for _, chosen in found:
        for k, sparse in chosen:
            indices = sparse.indices.numpy()
            assert len(indices) == len(set(indices.tolist())) == k == len(sparse.values)
            assert indices.min() >= 0 and indices.max() < sparse.size


def test_float16_is_half_of_what_plain_horovod_sends() -> None:
    plan = plan_for(scheme("allreduce", wire="float16"), Topology(3, 1))

    def work(comm: Comm) -> tuple[float, float]:
        running = PlanExecutor(plan, comm)
        running.exchange({path: tf.constant(one) for path, one in gradients(0, 0).items()})
        return comm.traffic().between, running.dense_bytes_between_nodes()

    for sent, plain in ThreadComm.run(plan.topology, work):
        assert 0 < sent == pytest.approx(plain / 2)


def test_a_buffer_of_unknown_shape_is_refused_where_it_would_be_sent() -> None:
    """Its bytes are counted while tracing. A rank that is alone sends nothing."""

    def traced(comm: Comm) -> tf.Tensor:
        gather = tf.function(
            lambda entries: comm.all_gather(entries, "world", "pairs"),
            [tf.TensorSpec([None])],
            autograph=False,
        )
        return gather(tf.ones([3]))

    with pytest.raises(
        PlanError,
        match=r"\(None,\).*rank \d.*tf\.ensure_shape",
    ):
        ThreadComm.run(Topology(2, 1), traced)
    assert ThreadComm.run(Topology(1, 1), traced)[0].shape == (3,)
