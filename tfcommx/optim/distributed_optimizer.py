"""DistributedOptimizer: any Keras 3 optimizer, with its gradients exchanged just before it clips
and applies them.

    fit / apply_gradients -> apply -> unscale -> accumulate -> [exchange over the ranks] -> clip ->
    update -> [share] -> EMA

The wrapped optimizer is an instance of a subclass that carries its base's name and module and adds
nothing to its variables or its config. So a saved model holds the plain optimizer and loads with
and without tfcommx.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfcommx.comm import process
from tfcommx.optim.exchanger import Exchanger
from tfcommx.terms import NOMINAL, OPERATIONS, Links, Plan, PlanError, Scheme, check_name


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    scheme: Scheme | Mapping[str, Scheme] | None = None,
    op: str = "average",
    plan: Plan | None = None,
    links: Links | str | Path | None = None,
    update: str = "all",
    broadcast_every: int = 0,
) -> keras.optimizers.Optimizer:
    """Wrap a Keras optimizer so that every rank applies the gradients of all ranks.

    Works in `model.fit` and in custom loops (`apply_gradients`, `apply`), with clipping, EMA,
    gradient accumulation (one exchange per accumulated step) and LossScaleOptimizer, whose skipped
    steps are agreed between the ranks. Sparse gradients, as of embeddings, become dense: what came
    for the same row is added first. Keras alone does not, and Adam then squares each part.

    Args:
        optimizer: any Keras optimizer; its state, where it has some, is copied.
        scheme: how gradients travel; a Scheme for all variables, or a mapping from patterns of
            variable paths (as in file names, the first match counts) to Schemes. None: everything,
            by Horovod's allreduce.
        op: "average" or "sum" over the ranks.
        plan: a plan made before, in place of the one that the scheme and what follows give.
        links: what messages cost on this cluster, or the file of it that `tfcommx probe` wrote;
            None: nominal ones.
        update: "all": every rank applies the gradients. "root": rank 0 alone, which then broadcasts
            the weights; the others' momentum and the like stay as they began, and a checkpoint of
            rank 0 has the whole state.
        broadcast_every: with update "all", steps after which rank 0's weights are broadcast; 0:
            never. The bits are the same on all ranks anyway, unless the ranks' processors compute
            the update differently.

    Returns:
        A new optimizer of a subclass of the same class. `optimizer.exchanger` holds the residuals
        and the counters.

    **Ranks:** all, with equal arguments; the plan is agreed on the first step.
    **Raises:** RuntimeError before init(). PlanError for a scheme that cannot be carried out,
    momentum in both the scheme and the optimizer, or an optimizer wrapped twice.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise PlanError(
            "A Keras optimizer is required, such as keras.optimizers.SGD(0.1). Received "
            f"{optimizer!r}."
        )
    if not isinstance(plan, Plan | None):
        raise PlanError(f"`plan` must be a tfcommx.Plan or None. Received {plan!r}.")
    inner = (
        optimizer.inner_optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        else optimizer
    )
    if isinstance(inner, ExchangesGradients):
        raise PlanError(
            f"A plain optimizer is required. Received {optimizer.name!r}, which is wrapped "
            "already. Wrap it once."
        )
    check_name("op", op, OPERATIONS)
    links = NOMINAL if links is None else links if isinstance(links, Links) else Links.read(links)
    own_momentum = getattr(inner, "momentum", 0.0) or getattr(inner, "beta_1", 0.0)
    exchanger = Exchanger(
        process.current(),
        Scheme() if scheme is None else scheme,
        op,
        plan,
        own_momentum,
        links=links,
        update=update,
        broadcast_every=broadcast_every,
    )
    wrapped = _copy(inner, ExchangesGradients)
    wrapped.exchanger = exchanger
    if inner is not optimizer:
        wrapped = _copy(optimizer, AgreedLossScale, inner_optimizer=wrapped)
        wrapped.exchanger, exchanger.loss_scale = exchanger, "agreed"
    _take_state(wrapped, optimizer)
    return wrapped


class ExchangesGradients:
    """Mixed into an optimizer's class: exchanges gradients where Keras would clip them."""

    exchanger: Exchanger | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer sets this on the optimizer that it takes in: the only sign of a wrap
        # that we did not make.
        if (
            name == "loss_scale_factor"
            and value is None
            and self.exchanger is not None
            and self.exchanger.loss_scale == "none"
        ):
            self.exchanger.loss_scale = "local"
        super().__setattr__(name, value)

    def apply(
        self, grads: list[tf.Tensor | None], trainable_variables: list[keras.Variable] | None = None
    ) -> Any:
        if self.exchanger is None:
            raise PlanError(
                f"{self.name!r} was made from a wrapped optimizer's class, and exchanges "
                "nothing. Make it from the plain "
                "class, such as keras.optimizers.SGD, and wrap it."
            )
        self.exchanger.exchange_ran = False
        result = super().apply(grads, trainable_variables)
        # and exchanges now and then; a trace has both ways
        accumulates = self.gradient_accumulation_steps and tf.executing_eagerly()
        if any(grad is not None for grad in grads) and not accumulates:
            self.exchanger.check_exchange_ran(self.name)
        return result

    def _backend_apply_gradients(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable]
    ) -> None:
        self.exchanger.prepare_step(trainable_variables, self._trainable_variables)
        # Sparse gradients of embeddings become dense here: the accumulators and the exchange want
        # one form.
        super()._backend_apply_gradients(
            [tf.convert_to_tensor(grad) for grad in grads], trainable_variables
        )

    def _overwrite_variables_directly_with_gradients(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable]
    ) -> Any:
        odd = [
            variable.path
            for variable in trainable_variables
            if getattr(variable, "overwrite_with_gradient", False)
        ]
        if odd and self.exchanger.comm.topology.size > 1:
            raise PlanError(
                "Variables that Keras overwrites with their gradients, as float8 training has "
                "them, are not exchanged: ranks "
                f"would differ. Received {odd[0]!r}. Train without float8."
            )
        return super()._overwrite_variables_directly_with_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        return super()._clip_gradients(self.exchanger.exchange(grads))

    def _backend_update_step(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable], learning_rate: Any
    ) -> None:
        apply = super()._backend_update_step
        self.exchanger.update(lambda: apply(grads, trainable_variables, learning_rate), grads)


class AgreedLossScale:
    """Mixed into LossScaleOptimizer's class: a step is skipped by all ranks or by none."""

    exchanger: Exchanger | None = None

    def check_finite(self, grads: list[tf.Tensor | None]) -> tf.Tensor:
        return self.exchanger.all_ranks(super().check_finite(grads))


def agree_on_loss_scale(optimizer: keras.optimizers.LossScaleOptimizer) -> None:
    """Let a LossScaleOptimizer that Keras put around a wrapped optimizer agree with the other
    ranks; nothing else changes.

    Keras makes it in `model.compile` under a float16 policy. PlanState alone it decides from the
    gradients of its own rank whether to take the step, and ranks that decide differently would wait
    for each other for ever.
    """
    optimizer.__class__ = _subclass(type(optimizer), AgreedLossScale)
    optimizer.exchanger = optimizer.inner_optimizer.exchanger
    optimizer.exchanger.loss_scale = "agreed"


@functools.cache
def _subclass(base: type, mixin: type) -> type:
    """A subclass that Keras saves under its base's name."""
    made = type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__},
    )
    package, _, name = keras.saving.get_registered_name(base).rpartition(">")
    if package:
        for cls in (made, base):  # the last one is what the name loads
            keras.saving.register_keras_serializable(package, name)(cls)
    return made


def _copy(
    optimizer: keras.optimizers.Optimizer, mixin: type, **changed: Any
) -> keras.optimizers.Optimizer:
    """Make the same optimizer, without its state, as an instance of the subclass."""
    cls = _subclass(type(optimizer), mixin)
    rate = None if changed else optimizer._learning_rate
    try:
        # a schedule or a function goes over as it is: Keras need not know how to write it down
        if callable(rate):
            optimizer._learning_rate = None
        config = (
            optimizer.get_config() | changed | ({"learning_rate": rate} if callable(rate) else {})
        )
        copy = cls(**config) if changed else cls.from_config(config)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise PlanError(
            f"The optimizer {optimizer.name!r} ({type(optimizer).__name__}) is wrapped by a copy "
            "made from its get_config(), "
            f"which failed: {error} Let get_config() return all arguments of its constructor."
        ) from error
    finally:
        if callable(rate):
            optimizer._learning_rate = rate
    # Keras keeps them out of the config
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(copy, name, getattr(optimizer, name))
    return copy


def _take_state(copy: keras.optimizers.Optimizer, optimizer: keras.optimizers.Optimizer) -> None:
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and not optimizer.built:
        return _take_state(copy.inner_optimizer, inner)
    if not optimizer.built:
        return None
    # the inner one through the outer one: Keras does not list the same variables otherwise
    copy.build(optimizer._trainable_variables)
    pairs = list(zip(copy.variables, optimizer.variables, strict=True))
    pairs += [(unlisted(copy)[name], value) for name, value in unlisted(optimizer).items()]
    for ours, theirs in pairs:
        ours.assign(theirs)
    return None


def unlisted(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return, by attribute, the state that Keras neither lists nor saves, such as a product that
    Nadam keeps.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    listed = {id(variable) for variable in optimizer.variables}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, keras.Variable) and id(value) not in listed
    }
