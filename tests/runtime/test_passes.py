"""Short ways through a step give the bits of the long ones: rounding errors, averages, slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Sparse, Topology
from tfcommx.kernels.sparse import keep, keep_definition
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.bucket_runner import flatten, unflatten
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.wire import codec

NAN, INF = np.float32("nan"), np.float32("inf")


@pytest.mark.parametrize(
    "values", [[0.1, 0.2, 0.3], [NAN, 0.2, INF], [0.1, NAN, 0.3], [NAN, INF, -INF]]
)
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("implementation", [keep, keep_definition])
def test_a_rounding_error_is_added_where_the_selection_has_left_zeros(
    values: list[float], traced: bool, implementation: Any
) -> None:
    """And where it has not, beside a value that is not finite, nothing changes."""
    chosen = Sparse(tf.constant([1, 4, 5]), tf.constant(values, tf.float32), 7)
    rounded, error = codec.rounded(chosen, "block16/float16")
    before = np.float32([9, 0, 8, 7, 0, 0, 6])
    before[chosen.indices.numpy()[~np.isfinite(values)]] = 5.0
    added, residual = tf.Variable(before), tf.Variable(before)
    added.scatter_add(tf.IndexedSlices(error, chosen.indices))
    run = tf.function(implementation, autograph=False) if traced else implementation
    run(residual, chosen, error)
    assert residual.numpy().tobytes() == added.numpy().tobytes()
    assert rounded.indices is chosen.indices


@pytest.mark.parametrize("index", [-1, 7])
def test_a_rounding_error_beside_the_residual_is_refused(index: int) -> None:
    chosen = Sparse(tf.constant([1, index]), tf.ones(2), 7)
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf" {index} .*\b1\b"):
        keep(tf.Variable(tf.zeros(7)), chosen, tf.zeros(2))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_average_has_the_bits_of_the_sum_times_the_factor(ranks: int) -> None:
    gradients = [Gradient("w", (40, 50), "float32"), Gradient("v", (33, 7), "float32")]
    scheme = {"*": Scheme("allgather", "mstopk", 0.2, dense_below=8)}

    def step(operation: str) -> list[dict[str, np.ndarray]]:
        plan = make_plan(gradients, scheme, Topology(ranks, 1), operation)

        def work(comm: Comm) -> dict[str, np.ndarray]:
            numbers = np.random.default_rng(comm.rank)
            given = {
                one.path: tf.constant(numbers.standard_normal(one.shape, np.float32))
                for one in gradients
            }
            result = PlanExecutor(plan, comm).exchange(given)
            return {path: one.numpy() for path, one in result.items()}

        return ThreadComm.run(plan.topology, work)

    for mean, total in zip(step("average"), step("sum"), strict=True):
        for path, whole in total.items():
            expected = whole * np.float32(1 / ranks)
            assert expected.any() and mean[path].tobytes() == expected.tobytes()


def test_unflatten_undoes_flatten_at_any_boundary() -> None:
    shapes = [(16, 4), (3,), (5, 5), (32,)]
    gradients = [Gradient(f"w{i}", shape, "float32") for i, shape in enumerate(shapes)]
    plan = make_plan(gradients, {"*": Scheme("torus")}, Topology(1, 8))
    (bucket,) = plan.buckets
    by_name = {one.path: one for one in gradients}
    parts = [tf.random.stateless_normal(by_name[n].shape, [1, 2]) for n in bucket.variables]
    assert bucket.padding
    again = unflatten(flatten(parts, bucket), parts, bucket)
    for one, other in zip(parts, again, strict=True):
        assert one.shape == other.shape and (one.numpy() == other.numpy()).all()
