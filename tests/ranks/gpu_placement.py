"""Placement of a traced graph's ops on a GPU, as far as a machine without one can predict it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

# TensorFlow's CPU wheel does not say which of its ops have a GPU kernel. By its sources these do,
# for the types that exchanges have more than a hundred entries of: an op that is missing here has
# to be looked up there. In traces of a GPU nothing large was copied (docs/laboratory/gpu.md).
ON_GPUS = {
    *("Abs", "AddN", "AddV2", "AssignVariableOp", "Cast", "ConcatV2", "EnsureShape", "Equal"),
    *("Fill", "Greater", "Identity", "IsFinite", "Less", "LogicalNot", "Minimum", "Mul"),
    *("Placeholder", "Range", "ReadVariableOp", "Reshape", "ScatterNd", "SelectV2", "Sign"),
    *("Slice", "Split", "StridedSlice", "Sub", "Unpack"),
    # Of optimizers, the guard of replicas, and sketches
    *("AssignAddVariableOp", "AssignSubVariableOp", "Bitcast", "DivNoNan", "IdentityN", "If"),
    *("Maximum", "NotEqual", "Pack", "Pad", "PartitionedCall", "RealDiv", "Sqrt", "Square", "Sum"),
    # Of rules of selection in plain TensorFlow
    *("GatherV2", "GreaterEqual", "LogicalAnd", "Max", "Min", "Neg", "Shape", "Size"),
    *("StatelessIf", "StatelessRandomUniformIntV2", "StatelessRandomUniformV2", "StatelessWhile"),
    *("TopKV2", "Where"),
}
# These of Horovod have one if it was built with HOROVOD_GPU_OPERATIONS=NCCL
OF_HOROVOD = "Horovod"
# These of ours have one if the library was built with nvcc: tests/kernels/test_kernel_registry.py
OURS = "Tfcommx"
# More of those that take int32 from a GPU to the host; only TensorFlow's GPU wheel (2.21) has
# kernels from which it could be read.
INT32_BY_THE_HOST = {"BroadcastTo", "ClipByValue", "Pack", "Reverse", "StridedSlice"} | {
    *("PartitionedCall", "StatefulPartitionedCall")  # Functions hold it in the host's memory
}


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yield the ops of a graph and of the functions in it."""
    yield from graph.get_operations()
    for function in graph._functions.values():
        if hasattr(function, "graph"):
            yield from function.graph.get_operations()


def without_gpu_kernel(graph: tf.Graph) -> set[str]:
    """Return the types of ops on large tensors that have no GPU kernel: they run on the host."""
    return {
        op.type
        for op in _on_large(graph, _is_large)
        if op.type not in ON_GPUS and not op.type.startswith((OF_HOROVOD, OURS))
    }


def by_the_host(graph: tf.Graph) -> list[str]:
    """Return large int32 inputs and outputs that are in the host's memory if a GPU does the op."""
    return [found for op in int32_operations(graph) for found in _arguments_on_host(op)]


def int32_operations(graph: tf.Graph) -> list[tf.Operation]:
    """Return the ops on large int32 tensors, such as wire buffers."""
    return _on_large(graph, _is_large_int32)


def _on_large(graph: tf.Graph, large: Callable[[tf.Tensor], bool]) -> list[tf.Operation]:
    return [
        op
        for op in operations(graph)
        if op.type != "Const" and any(map(large, [*op.inputs, *op.outputs]))
    ]


def _is_large(tensor: tf.Tensor) -> bool:
    entries = tensor.shape.num_elements()
    return tensor.dtype != tf.resource and (entries is None or entries > 100)


def _is_large_int32(tensor: tf.Tensor) -> bool:
    return tensor.dtype == tf.int32 and _is_large(tensor)


def _arguments_on_host(op: tf.Operation) -> list[str]:
    kernels = [
        kernel
        for kernel in get_registered_kernels_for_op(op.type).kernel
        if kernel.device_type in ("GPU", "DEFAULT")
        and all(
            op.node_def.attr[rule.name].type in rule.allowed_values.list.type
            for rule in kernel.constraint
        )
    ]
    operands = [
        *zip(_spread(op, op.op_def.input_arg), op.inputs, strict=True),
        *zip(_spread(op, op.op_def.output_arg), op.outputs, strict=True),
    ]
    return [
        f"{arg.name} of {op.type}"
        for arg, tensor in operands
        if _is_large_int32(tensor)
        and (
            op.type in INT32_BY_THE_HOST
            or any(arg.name in kernel.host_memory_arg for kernel in kernels)
        )
    ]


def _spread(op: tf.Operation, args: Any) -> list[Any]:
    """Return each argument as often as it stands for tensors."""
    return [
        arg
        for arg in args
        for _ in range(
            op.get_attr(arg.number_attr)
            if arg.number_attr
            else len(op.node_def.attr[arg.type_list_attr].list.type)
            if arg.type_list_attr
            else 1
        )
    ]
