"""Change, for a while, the first epoch, the train function and the train step of `fit`.

And find the callbacks of `fit`.

`fit` calls `train_function(iterator)`, which is traced and calls `train_step(data)` once or
`steps_per_execution` times.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras

from tfcommx.keras_internals.models import trace_again

# A model's `train_function`: takes batches from an iterator, returns logs
TrainFunction = Callable[[Iterator[Any]], Any]


def callbacks_of_fit() -> list[keras.callbacks.Callback]:
    """Return all callbacks of the `fit` that calls this, those of lists, too.

    In the order in which `fit` calls them; none outside of `on_train_begin` and `set_model`.
    """
    # Keras tells no callback about the others. The list that calls this one is on the stack
    frame: FrameType | None = sys._getframe()
    called_by: keras.callbacks.CallbackList | None = None
    while frame is not None and frame.f_code.co_name != "fit":
        caller = frame.f_locals.get("self")
        calls = frame.f_code.co_name in ("on_train_begin", "set_model")
        if calls and isinstance(caller, keras.callbacks.CallbackList):
            called_by = caller
        frame = frame.f_back
    return [] if called_by is None else _flat(called_by)


def _flat(callbacks: keras.callbacks.CallbackList) -> list[keras.callbacks.Callback]:
    flat: list[keras.callbacks.Callback] = []
    for callback in callbacks.callbacks:
        is_list = isinstance(callback, keras.callbacks.CallbackList)
        flat += _flat(callback) if is_list else [callback]
    return flat


def class_weight_of_fit() -> str:
    """Return the `class_weight` of the `fit` that calls this, as text; None's outside of one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "fit":
        frame = frame.f_back
    weights = None if frame is None else frame.f_locals.get("class_weight")
    if not isinstance(weights, dict):
        return repr(weights)
    # As Python's numbers, because one rank's may be NumPy's
    return repr({int(label): float(weight) for label, weight in sorted(weights.items())})


def averages_in_weights(callback: keras.callbacks.Callback) -> bool:
    """Return True for a SwapEMAWeights that has set the weights to their moving averages."""
    is_swap = isinstance(callback, keras.callbacks.SwapEMAWeights)
    return is_swap and bool(callback._ema_weights_in_model)


def begin_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Make `fit` begin at an epoch (from 0), whatever its `initial_epoch`; None undoes it.

    Call it before the end of `on_train_begin`. Keras's own BackupAndRestore does the same.
    """
    model._initial_epoch = epoch


def replace_train_function(
    model: keras.Model, replacement: Callable[[TrainFunction, Iterator[Any]], Any]
) -> Callable[[], None]:
    """Call `replacement(train_function, iterator)` in the steps of `fit`; return its undoing."""
    if model.train_function is None:  # As in a loop of `train_on_batch` after `compile`
        model.make_train_function()

    def replaced(iterator: Iterator[Any]) -> Any:
        return replacement(marked.replaces, iterator)

    def restore() -> None:
        # Keras may have made another one since
        if model.train_function is replaced:
            model.train_function = marked.replaces

    marked: Any = replaced
    # Read at each call, because `trace_again` changes it
    marked.replaces = model.train_function
    model.train_function = replaced
    return restore


def restore_train_function(model: keras.Model) -> None:
    """Undo all `replace_train_function` of a model, as those of a `fit` that was interrupted."""
    while hasattr(model.train_function, "replaces"):
        model.train_function = model.train_function.replaces


def skip_steps(model: keras.Model, steps: int, see: Callable[[Any], None] | None = None) -> None:
    """Make the next steps of `fit`, a multiple of `steps_per_execution`, ignore their batches.

    Args:
        see: called with the first batch.
    """
    if not steps:
        return
    together, remaining = model.steps_per_execution, steps

    def skip(_: TrainFunction, iterator: Iterator[Any]) -> dict[str, Any]:
        nonlocal remaining
        # Read and discarded, because the iterator alone decides which batch is the next
        batches = [next(iterator) for _step in range(together)]
        if see is not None and remaining == steps:
            see(batches[0])
        remaining -= together
        if remaining <= 0:
            restore()
        return {}

    restore = replace_train_function(model, skip)


def build_metrics(model: keras.Model, batch: Any) -> None:
    """Build the metrics of `compile` as the first step with this batch would, with sums of 0.

    `batch` may also be a structure of tf.TensorSpec.
    """
    model._symbolic_build(data_batch=batch)


def begin_train_steps_with(model: keras.Model, begin: Callable[[Any], None]) -> None:
    """Call `begin(data)` at the beginning of each training step, until `restore_train_step`."""
    step, replaced = model.train_step, vars(model).get("train_step")

    def train_step(data: Any) -> Any:
        begin(data)
        return step(data)

    marked: Any = train_step
    # The instance's earlier train_step; None: the class's
    marked.replaces = replaced
    model.train_step = marked
    trace_again(model)


def restore_train_step(model: keras.Model) -> None:
    """Undo `begin_train_steps_with`, also that of a `fit` that ended with an exception."""
    step = vars(model).get("train_step")
    if not hasattr(step, "replaces"):
        return
    del model.train_step
    if step.replaces is not None:
        model.train_step = step.replaces
    # The traced function still contains the step that was replaced. A new one, not None, because
    # `fit` has made its function before `on_train_begin`, and will call it
    trace_again(model)
