"""Mixins that take part in the step of a Keras optimizer.

apply -> unscale -> accumulate -> [exchange] -> clip -> [update: by the strategy] -> EMA

`ExchangesGradients` is mixed into each wrapped optimizer, `AgreedLossScale` into a
LossScaleOptimizer around it; `UpdatesTogether` updates all variables by one call. `surround_steps`
concerns the steps of all optimizers of the process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from tfcommx.core import ConfigurationError
from tfcommx.keras_internals.adam_noise import noise_factors
from tfcommx.keras_internals.exchange import Exchange
from tfcommx.keras_internals.momenta import SendsMomentum
from tfcommx.keras_internals.optimizers import (
    inner_optimizer,
    moving_averages,
    require_one_replica,
    state_of_weights,
    values_of,
)
from tfcommx.keras_internals.optimizers import trainable_variables as built_for


def compiled_by_xla() -> bool:
    """Return True if the function being traced will be compiled by XLA."""
    return not tf.executing_eagerly() and bool(
        GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


def traced_batch() -> int | None:
    """Return the length of the first input of the step that is being traced; None if unknown."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        specs = tf.nest.flatten(getattr(graph, "structured_input_signature", None))
        shapes = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
        for shape in shapes:
            if shape.rank:
                # None if the last batch of the data set may be shorter
                length: int | None = shape[0]
                return length
        graph = getattr(graph, "outer_graph", None)
    return None


class Listed(list[keras.Variable]):
    """The variables of a wrapped optimizer: a list, as in Keras 3."""

    def __call__(self) -> None:
        """Refuse a call, as of the method that Keras 2 had."""
        raise ConfigurationError(
            "`optimizer.variables` is a list in Keras 3. Received a call of it, as Horovod's "
            "elastic states (KerasState, TensorFlowKerasState) make, which need Keras 2 and are "
            "not available here. Start again from a checkpoint (cx.checkpoint), also with another "
            "number of ranks; in your own code leave out the parentheses."
        )


if TYPE_CHECKING:  # A mixin has the members of the class that it is mixed into
    from keras.optimizers import Optimizer as Mixin
else:
    Mixin = object


class Wrapped(Mixin):
    """Mixed into the classes of a wrapped optimizer, and of a LossScaleOptimizer around it."""

    # None until the wrap sets it; `apply` refuses an optimizer that was made from the class alone
    exchanger: Exchange = None  # type: ignore[assignment]

    @property
    def variables(self) -> Listed:
        """The optimizer's variables."""
        return Listed(super().variables)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.exchanger is None:
            plain: tuple[Any, ...] = super().__reduce__()
            return plain
        return self.exchanger.reduce_for_pickle(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> keras.optimizers.Optimizer:
        # With attributes that a pickle lacks, as in Keras
        make, arguments = self.__reduce__()
        copy: keras.optimizers.Optimizer = make(*arguments)
        return copy


class ExchangesGradients(Wrapped):
    """Mixed into an optimizer's class: exchanges gradients where Keras would clip them."""

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer sets this attribute on its inner optimizer, which is the only sign of a
        # LossScaleOptimizer that the user, or another `compile`, put around a wrapped optimizer
        if name == "loss_scale_factor" and value is None and self.exchanger is not None:
            self.exchanger.guard.loss_scale = "local"
        super().__setattr__(name, value)

    def build(self, variables: list[keras.Variable]) -> None:
        """Create the optimizer's state, as Keras does."""
        if self.use_ema:
            _swap_exactly()
        super().build(variables)

    def swap_averages(self) -> None:
        """Swap the weights and their moving averages, with all bits."""
        averages = self._model_variables_moving_average
        for variable, average in zip(self._trainable_variables, averages, strict=True):
            if average is not None:  # Keras averages no variable that gradients overwrite
                # A copy of the value, because the next line replaces it
                value = tf.identity(variable)
                variable.assign(average)
                average.assign(value)

    def apply(
        self, grads: list[tf.Tensor | None], trainable_variables: list[keras.Variable] | None = None
    ) -> Any:
        """Take a step as Keras does; refuse a step that bypassed the exchange."""
        if self.exchanger is None:
            raise ConfigurationError(
                f"{self.name!r} was made from a wrapped optimizer's class, and exchanges nothing. "
                "Make it from the plain class, such as keras.optimizers.SGD, and wrap it."
            )
        before, self.exchanger.built_early = self.exchanger.built_early, None
        if before is not None and trainable_variables is not None:
            # A list, because it is read twice
            trainable_variables = list(trainable_variables)
            _build_for_more(self, trainable_variables, before)
        with self.exchanger.guard.open_step():
            result = super().apply(grads, trainable_variables)
        # With accumulation only some eager steps exchange, while a trace contains the exchange
        accumulates = self.gradient_accumulation_steps and tf.executing_eagerly()
        if any(grad is not None for grad in grads) and not accumulates:
            self.exchanger.guard.check_exchange_ran(self.name)
        return result

    def _backend_apply_gradients(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable]
    ) -> None:
        # A caller may pass TensorFlow's variables of those that the optimizer was built for
        built = built_for(self)
        trainable_variables = [
            built[self._get_variable_index(variable)] for variable in trainable_variables
        ]
        self.exchanger.guard.begin(trainable_variables, self._trainable_variables)
        # Sparse gradients of embeddings become dense here, because the accumulators and the
        # exchange need one form
        grads = [_dense(*pair) for pair in zip(grads, trainable_variables, strict=True)]
        # Weight decay and the count of steps wait for a gradient, because in the last call of an
        # iterator, which has no data, TensorFlow still runs ops without a data dependency, on some
        # ranks and not on others
        step = self.exchanger.guard.step
        step.gradient, step.clips = grads[-1:], True
        try:
            super()._backend_apply_gradients(grads, trainable_variables)
            assert step.scope is not None, "`apply` has opened it"
            step.scope.enter_context(tf.control_dependencies(grads[-1:]))
        finally:
            step.gradient, step.variables, step.clips = (), (), False
            step.norms_of = {}

    def _apply_weight_decay(self, variables: list[keras.Variable]) -> None:
        with tf.control_dependencies(self.exchanger.guard.step.gradient):
            super()._apply_weight_decay(variables)

    def _overwrite_variables_directly_with_gradients(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable]
    ) -> Any:
        odd = [
            variable.path
            for variable in trainable_variables
            if getattr(variable, "overwrite_with_gradient", False)
        ]
        if odd and self.exchanger.ranks > 1:
            raise ConfigurationError(
                "Variables that Keras overwrites with their gradients, as float8 training has "
                f"them, are not exchanged: ranks would differ. Received {odd[0]!r}. Train without "
                "float8."
            )
        grads, remaining = super()._overwrite_variables_directly_with_gradients(
            grads, trainable_variables
        )
        # If no gradient remains, the step needs no exchange
        step = self.exchanger.guard.step
        step.exchange_ran = step.exchange_ran or not remaining
        return grads, remaining

    def _clip_gradients(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        if not self.exchanger.guard.step.clips:  # A caller clips outside a step
            return list(super()._clip_gradients(grads))
        if isinstance(self, SendsMomentum):
            variables = self.exchanger.guard.step.variables
            clip = super()._clip_gradients
            return list(self.exchange_and_clip(grads, variables, self._exchange, clip))
        return self._clip_exchanged(self._exchange(grads))

    def _exchange(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        rate, steps = tf.convert_to_tensor(self.learning_rate), self._iterations.value
        return self.exchanger.exchange(grads, rate, steps)

    def _clip_exchanged(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        return list(super()._clip_gradients(grads))

    def _backend_update_step(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable], learning_rate: Any
    ) -> None:
        apply = super()._backend_update_step
        self.exchanger.update(
            lambda: apply(grads, trainable_variables, learning_rate),
            grads,
            state_of_weights(self),
            functools.partial(noise_factors, self, trainable_variables),
        )

    def finalize_variable_values(self, var_list: list[keras.Variable]) -> None:
        """End `fit` as Keras does, after making the weights whole and equal on all ranks."""
        self.exchanger.consolidate(moving_averages(self))
        super().finalize_variable_values(var_list)


def _dense(gradient: Any, variable: keras.Variable) -> tf.Tensor:
    # A custom gradient may leave out the shape, which the update of Keras's SGD does not need
    if isinstance(gradient, tf.IndexedSlices) and gradient.dense_shape is None:
        shape = tf.constant(list(variable.shape), tf.int64)
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
    return tf.convert_to_tensor(gradient)


def build_early(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Build a wrapped optimizer before its first step, which may pass variables in addition.

    Such as those of a loss, which a model does not list. Keras builds an optimizer in its first
    step, for the variables of that step, and refuses others from then on.
    """
    inner = inner_optimizer(optimizer)
    before = frozenset(map(id, inner._variables))
    optimizer.build(list(variables))
    # The layout of shards is made for these variables, and stays
    if inner.exchanger.sharding is None:
        inner.exchanger.built_early = before


def _build_for_more(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], before: Set[int]
) -> None:
    """Build an optimizer that has taken no step again, if it lacks some of these variables.

    `before` has the ids of the optimizer's variables before it was built.
    """
    known = optimizer._trainable_variables_indices
    more = [variable for variable in variables if optimizer._var_key(variable) not in known]
    if not more:
        return
    built = [*optimizer._trainable_variables, *more]
    for variable in list(optimizer._variables):
        if id(variable) not in before:
            optimizer._untrack_variable(variable)
    known.clear()
    optimizer.built = False
    optimizer.build(built)


@functools.cache
def _swap_exactly() -> None:
    """Make Keras's SwapEMAWeights call `swap_averages` of wrapped optimizers.

    Until the process ends; for other optimizers it stays as it is.
    """
    # Keras adds and subtracts, which rounds, so that a rank that evaluates once more than the
    # others would have other weights. Where an optimizer has shards, Keras swaps these alone
    callback: Any = keras.callbacks.SwapEMAWeights
    swap = callback._tf_swap_variables

    @functools.wraps(swap)
    def swap_weights(self: Any, optimizer: keras.optimizers.Optimizer) -> None:
        if isinstance(optimizer, ExchangesGradients):
            optimizer.swap_averages()
        else:
            swap(self, optimizer)

    callback._tf_swap_variables = swap_weights


class AgreedLossScale(Wrapped):
    """Mixed into LossScaleOptimizer's class: a step is skipped by all ranks or by none."""

    def check_finite(self, grads: list[tf.Tensor | None]) -> tf.Tensor:
        """Return True if the gradients are finite on every rank."""
        return self.exchanger.guard.finite_on_all_ranks(super().check_finite(grads))

    def save_own_variables(self, store: dict[str, Any]) -> None:
        """Save as Keras does, with the inner optimizer's shards as whole variables."""
        if not hasattr(self.inner_optimizer, "whole_values"):
            super().save_own_variables(store)
            return
        # In Keras's order: the variables of the loss scale, then those of the inner optimizer
        own_values = [variable.numpy() for variable in self._variables]
        for position, value in enumerate([*own_values, *self.inner_optimizer.whole_values()]):
            store[str(position)] = value

    def load_own_variables(self, store: dict[str, Any]) -> None:
        """Load as Keras does, with the inner optimizer's shards from whole variables."""
        if not hasattr(self.inner_optimizer, "whole_values"):
            super().load_own_variables(store)
            return
        own_count = len(self._variables)
        for position, variable in enumerate(self._variables):
            variable.assign(store[str(position)])
        inner = {
            str(position - own_count): store[str(position)]
            for position in range(own_count, len(store.keys()))
        }
        self.inner_optimizer.load_own_variables(inner)


class UpdatesTogether(Mixin):
    """Mixed into an optimizer's class: one call updates all variables, weight decay included.

    The class has `update_together(gradients, variables, positions, learning_rate)`: gradients are
    dense, variables are TensorFlow's, and positions count the variables that it was built for.
    """

    # AutoGraph must not convert graph code, even inside a caller's loop
    @tf.autograph.experimental.do_not_convert
    def _backend_update_step(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable],
        learning_rate: Any,
    ) -> None:
        require_one_replica(self)
        values = values_of(trainable_variables)
        positions = [self._get_variable_index(variable) for variable in trainable_variables]
        gradients = [tf.convert_to_tensor(grad) for grad in grads]
        # In the last call of an iterator, which has no data, nothing here may run
        with tf.control_dependencies(gradients[-1:]):
            self.update_together(gradients, values, positions, learning_rate)

    def uses_weight_decay(self, variable: keras.Variable | tf.Variable) -> bool:
        """Return True unless `exclude_from_weight_decay` excludes the variable."""
        return bool(self._use_weight_decay(variable))

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Leave weight decay to `update_together`."""


# (optimizer) -> the context manager around its step
Surroundings = Callable[[keras.optimizers.Optimizer], contextlib.AbstractContextManager[None]]


@functools.cache
def surround_steps(surroundings: Surroundings) -> None:
    """Take each step in `with surroundings(optimizer)`, until the process ends.

    One of the surrounded methods often calls the other, and optimizers call other optimizers (as
    LossScaleOptimizer does), so contexts may nest. A traced step is surrounded while it is traced.
    A second call with the same function has no effect.
    """

    def surrounded(take: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(take)
        def take_surrounded(self: keras.optimizers.Optimizer, *args: Any, **kwargs: Any) -> Any:
            with surroundings(self):
                return take(self, *args, **kwargs)

        unconverted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(take_surrounded)
        return unconverted

    # Both, because a class may override either
    for name in ("apply", "apply_gradients"):
        take = getattr(keras.optimizers.Optimizer, name)
        setattr(keras.optimizers.Optimizer, name, surrounded(take))
