"""Refuse arguments of Horovod's DistributedOptimizer, and say what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tfcommx.terms import PlanError

P = ParamSpec("P")
R = TypeVar("R")

_ACCUMULATE = (
    "Give the optimizer that is wrapped Keras's `gradient_accumulation_steps`, which averages over "
    "the passes, as Horovod's average_aggregated_gradients=True does."
)
_BUCKETS = "Leave it out: plans have buckets, whose size is a scheme's `bucket_bytes`."
_DEVICES = "Leave it out: gradients are exchanged on the device that has them."
_LOCAL = "Wrap an optimizer for the shared variables, and use a plain one for those that are local."
# Argument of Horovod -> what to do
INSTEAD = {
    "compression": 'Give a scheme with a 16-bit wire: scheme=tfcommx.Scheme(wire="float16").',
    "backward_passes_per_step": _ACCUMULATE,
    "average_aggregated_gradients": _ACCUMULATE,
    "sparse_as_dense": "Leave it out: gradients of embeddings are made dense before they travel.",
    "gradient_predivide_factor": 'Leave it out: op="average" divides the sum.',
    "groups": _BUCKETS,
    "num_groups": _BUCKETS,
    "process_set": "There is none: all ranks exchange gradients.",
    "device_dense": _DEVICES,
    "device_sparse": _DEVICES,
    "name": "Leave it out: the optimizer keeps its name.",
    "use_locking": "Leave it out: Keras 3 has none.",
    "local_layers": _LOCAL,
    "scale_local_gradients": _LOCAL,
}
# hvd.Average, Sum, Adasum, Min, Max and Product are the numbers from 0.
_OPERATIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def refuse_horovod_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that takes Horovod's place refuse its arguments in words, before it runs.

    **Raises:** PlanError that says what to write instead.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if found := next((name for name in kwargs if name in INSTEAD), None):
            raise PlanError(
                f"tfcommx.DistributedOptimizer has no `{found}`. {INSTEAD[found]} All arguments of "
                "Horovod: docs/how-to/move-from-horovod.md."
            )
        _check_operation(kwargs.get("op"))
        return function(*args, **kwargs)

    return checked


def _check_operation(operation: object) -> None:
    if not isinstance(operation, int) or not 0 <= operation < len(_OPERATIONS):
        return
    name = _OPERATIONS[operation]
    remedy = (
        f'Write op="{name.lower()}".'
        if name in ("Average", "Sum")
        else "Horovod has none for Keras either. In a custom loop: hvd.DistributedGradientTape."
    )
    raise PlanError(f'`op` must be "average" or "sum". Received hvd.{name}. {remedy}')
