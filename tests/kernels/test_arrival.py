"""A number that waits for tensors waits for their contents where ops end when they are queued."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfcommx.kernels.traced import after


def optimized() -> dict[str, tuple[str, list[str]]]:
    """Return the graph that runs: name -> (type, inputs), of a variable set after two tensors."""
    variable = tf.Variable(0, dtype=tf.int64)

    @tf.function(autograph=False)
    def step(first: tf.Tensor, second: tf.Tensor, number: tf.Tensor) -> None:
        variable.assign(after(number, [tf.square(first), tf.square(second)]))

    context.context().enable_run_metadata()
    try:
        step(tf.ones([5]), tf.ones([3]), tf.constant(3, tf.int64))
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_run_metadata()
    assert int(variable) == 3
    (nodes,) = (
        {node.name: (node.op, list(node.input)) for node in one.post_optimization_graph.node}
        for one in graphs
        if any(node.op == "Square" for node in one.post_optimization_graph.node)
    )
    return nodes


def test_an_entry_of_the_contents_is_read() -> None:
    """TensorFlow replaces an op that only waits for a copy by one that waits for the op before."""
    nodes = optimized()
    seen, (ahead,) = set(), ([name for name, (op, _) in nodes.items() if op == "AssignVariableOp"],)
    by_data, squares = list(ahead), {name for name, (op, _) in nodes.items() if op == "Square"}
    while by_data:
        name = by_data.pop()
        seen.add(name)
        by_data += [one.split(":")[0] for one in nodes[name][1] if not one.startswith("^")]
    assert len(squares) == 2
    assert len(squares & seen) == 1
    # It comes after all tensors: the entry's own inputs wait for them
    waits, stack = set(), list(ahead)
    while stack:
        name = stack.pop()
        if name not in waits:
            waits.add(name)
            stack += [one.removeprefix("^").split(":")[0] for one in nodes[name][1]]
    assert squares <= waits


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "bool"])
def test_the_number_is_as_it_was_whatever_the_tensors_hold(dtype: str) -> None:
    floats = tf.as_dtype(dtype).is_floating
    for contents in ([], [0.0], [float("nan"), 1.0] * floats, [float("-inf")] * floats):
        tensors = [tf.zeros([0], dtype), tf.cast(tf.constant(contents), dtype)]
        for number in (tf.constant(1, tf.int64), tf.constant(1.7e9, tf.float64)):
            assert after(number, tensors).numpy() == number.numpy()
