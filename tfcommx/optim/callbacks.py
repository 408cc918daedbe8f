"""Keras callbacks for training over several ranks. Every rank adds the same ones, in the same
order.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx import comm
from tfcommx.optim import wrap
from tfcommx.optim.broadcast import broadcast_variables
from tfcommx.optim.exchanger import by_pattern
from tfcommx.terms import PlanError, Scheme

log = logging.getLogger("tfcommx")

# between the seeds of two ranks: more than models have generators, which Keras may number
SEED_STEP = 1_000_003

NOT_WRAPPED = (
    "A wrapped optimizer is required. Compile the model with "
    "tfcommx.DistributedOptimizer(optimizer, ...)."
)


def wrapped_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the model's wrapped optimizers: that of `compile`, and those that are its attributes,
    as a GAN has two.

    **Raises:** RuntimeError where there is none.
    """
    held = {
        id(value): value
        for value in (model.optimizer, *vars(model).values())
        if isinstance(value, keras.optimizers.Optimizer)
    }
    found = [optimizer for optimizer in held.values() if exchanger_in(optimizer) is not None]
    if not found:
        raise RuntimeError(NOT_WRAPPED)
    return found


def exchanger_of(model: keras.Model) -> Any:
    """Return the exchanger of the optimizer that the model was compiled with. **Raises:**
    RuntimeError where it is not wrapped.
    """
    if (found := exchanger_in(model.optimizer)) is None:
        raise RuntimeError(NOT_WRAPPED)
    return found


def exchanger_in(optimizer: Any) -> Any:
    """Return the exchanger of an optimizer; None where it is not wrapped."""
    inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer that Keras made
    return getattr(optimizer, "exchanger", None) or getattr(inner, "exchanger", None)


def accumulated(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return the sums of gradients that each rank is accumulating, by variable; empty without
    gradient accumulation.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    sums = getattr(optimizer, "_accumulated_gradients", [])
    return (
        dict(zip(optimizer.exchanger.names_of(optimizer._trainable_variables), sums, strict=True))
        if sums
        else {}
    )


def agree_on_names(model: keras.Model, root: int) -> None:
    """Call a model's variables, in plans and checkpoints, what rank `root` calls them.

    Keras gives other paths to a model that is loaded than to one that is built, and one rank alone
    may have loaded it.
    **Ranks:** all. A model with other weights than the root's is left as it is: broadcast_variables
    refuses it.
    """
    for optimizer in wrapped_optimizers(model):
        exchanger = exchanger_in(optimizer)
        names = comm.current().gather_objects(exchanger.names_of(model.weights))[root]
        if len(names) == len(model.weights):
            exchanger.call(model.weights, names)


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Return the generators of a model's layers, such as dropout's. Keras saves none of them."""
    return list(
        {
            id(one): one for layer in model._flatten_layers() for one in layer._seed_generators
        }.values()
    )


class BroadcastState(keras.callbacks.Callback):
    """Start all ranks from the same point: weights and optimizer state of rank `root`; no XLA, one
    loss scale.

    Seeds, as of dropout, follow from those of rank `root`, each rank's own: ranks that drop the
    same entries learn less from a batch.

    What Keras builds in the first training step only, as layers without an input shape, is
    broadcast after that step, with all
    else: it was taken with gradients from different weights, but leaves all ranks with rank
    `root`'s. To begin with the same weights, or with those that one rank alone has loaded, build
    the model before `fit`.

    Sums of gradients that are being accumulated stay, and residuals: each rank has its own. Wrapped
    optimizers that are attributes of the model, as a GAN has two, count as its optimizer does.
    **Ranks:** all. **Cost:** one broadcast per variable, once; twice where a layer was not built.
    **Raises:** PlanError where ranks would wait for each other for ever: with unequal numbers of
    steps in an epoch, unequal first epochs or unequal last ones.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root
        # something is broadcast after the first step; an epoch has begun
        self.unbuilt, self.begun = False, False

    def on_train_begin(self, logs: Any = None) -> None:
        model, params = self.model, self.params or {}
        optimizers = wrapped_optimizers(model)
        built = [layer.built for layer in model._flatten_layers()]
        steps, epochs, builts = zip(
            *comm.current().gather_objects((params.get("steps"), params.get("epochs"), built)),
            strict=True,
        )
        _require_equal(
            steps,
            "take the same number of steps in an epoch",
            "Give all ranks equally many batches, or pass the same `steps_per_epoch`.",
        )
        _require_equal(epochs, "train until the same epoch", "Pass the same `epochs`.")
        self.unbuilt, self.begun = not all(map(all, builts)), False
        for optimizer in optimizers:
            if exchanger_in(optimizer).loss_scale == "local":
                wrap.agree_on_loss_scale(optimizer)
            if optimizer is model.optimizer and not optimizer.built and not self.unbuilt:
                optimizer.build(model.trainable_variables)
        if model.jit_compile:
            log.warning(
                "jit_compile is turned off: Horovod's collectives cannot be compiled by XLA."
            )
            model.jit_compile = False
            model.make_train_function(force=True)
        if not self.unbuilt or all(theirs == built for theirs in builts):
            self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self.begun:
            self._compare_first(epoch)

    # not on_train_batch_end: for it, Keras waits after every step
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.unbuilt and batch:
            self._broadcast_built()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.unbuilt:  # an epoch of one call
            self._broadcast_built()

    def on_train_end(self, logs: Any = None) -> None:
        if not self.begun:  # no epoch is left on this rank
            self._compare_first(None)

    def _compare_first(self, epoch: int | None) -> None:
        self.begun = True
        _require_equal(
            comm.current().gather_objects(epoch),
            "begin at the same epoch",
            "Pass the same `initial_epoch`; restore the same backup or checkpoint on every rank.",
        )

    def _broadcast_built(self) -> None:
        self.unbuilt = False
        self._broadcast()

    def _broadcast(self) -> None:
        optimizers = wrapped_optimizers(self.model)
        own = {
            id(variable) for optimizer in optimizers for variable in accumulated(optimizer).values()
        }
        state = [
            variable
            for optimizer in optimizers
            for variable in (*optimizer.variables, *wrap.unlisted(optimizer).values())
        ]
        agree_on_names(self.model, self.root)  # now, while the order is that of the whole model
        broadcast_variables(
            [variable for variable in (*self.model.variables, *state) if id(variable) not in own],
            self.root,
        )
        for generator in seed_generators(self.model) if comm.rank() != self.root else ():
            seed, count = generator.state.numpy()
            generator.state.assign(
                [(int(seed) + (comm.rank() - self.root) * SEED_STEP) % 2**31, count]
            )


def _require_equal(values: Sequence[Any], what: str, remedy: str) -> None:
    if len(set(values)) > 1:
        raise PlanError(
            f"Every rank must {what}. Received {list(values)} on ranks 0 to {len(values) - 1}. "
            f"{remedy}"
        )


class AgreeOnStop(keras.callbacks.Callback):
    """Stop on all ranks, after the same step, when a callback on any rank stops the training:
    TerminateOnNaN, EarlyStopping, your own.

    Without it the other ranks would wait for ever for the one that has stopped. Comes last in the
    list: it reads what the callbacks before it have decided. Not needed where all decide alike, as
    EarlyStopping does on what AverageMetrics has averaged.

    Args:
        every: steps (Keras's calls, where they are of several) after which the ranks ask each
            other, >= 1; and at each epoch's end. With more a rank that wants to stop goes on with
            the others until they ask.
    **Ranks:** all, with equal `every`. **Cost:** an allreduce of 4 bytes each time; Keras waits for
    every step.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        if not isinstance(every, Integral) or every < 1:
            raise PlanError(f"`every` must be an integer >= 1. Received {every!r}.")
        self.every, self.calls, self.wanted = every, 0, False

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls, self.wanted = 0, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls += 1
        self._agree(self.calls % self.every == 0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree(True)

    def _agree(self, ask: bool) -> None:
        self.wanted |= bool(self.model.stop_training)
        if ask:
            with tf.device("/cpu:0"):
                votes = comm.current().allreduce(
                    tf.constant([float(self.wanted)]), "world", "tfcommx/stop"
                )
            self.wanted = bool(votes[0] > 0)
        self.model.stop_training = ask and self.wanted


class AverageMetrics(keras.callbacks.Callback):
    """Replace each epoch's metrics by their average over the ranks; put it before callbacks that
    read them. **Ranks:** all.

    Metrics of several numbers, such as an F1Score of each class, are averaged number by number;
    what is no number stays.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs:
            arrays = {name: np.asarray(value) for name, value in logs.items()}
            mine = {name: array for name, array in arrays.items() if array.dtype.kind in "biuf"}
            parts = comm.current().gather_objects(mine)
            # a rank that alone validates has metrics that the others do not have
            for name, array in mine.items():
                mean = np.mean([part[name] for part in parts if name in part], axis=0)
                logs[name] = mean if array.ndim else float(mean)


class AverageBatchNorm(keras.callbacks.Callback):
    """Average what layers keep beside what they train, such as the moving statistics of batch norm,
    over the ranks.

    Done after the last step of an epoch, so that what is validated is the same model on all ranks,
    whichever ranks validate. Where Keras does not know the number of steps (`steps_per_epoch`),
    done at the epoch's end: each rank validates with its own. Trained weights of frozen layers
    stay.
    **Ranks:** all. **Cost:** one allreduce an epoch of all those weights, in float64: equal ones
    stay equal to the bit. Keras waits for every step, as it does with most callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.averaged = False  # in this epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.averaged = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # not on_test_begin: a rank that does not validate would not come
        if (steps := (self.params or {}).get("steps")) and batch + 1 >= steps:
            self._average()
            self.averaged = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.averaged:
            self._average()

    def _average(self) -> None:
        here = comm.current()
        weights = [
            weight
            for layer in self.model._flatten_layers()
            for weight in layer._non_trainable_variables
            if keras.backend.is_float_dtype(keras.backend.standardize_dtype(weight.dtype))
        ]
        if not weights or here.topology.size == 1:
            return
        flat = tf.concat(
            [tf.reshape(tf.cast(weight, tf.float64), [-1]) for weight in weights], axis=0
        )
        mean = here.allreduce(flat, "world", "tfcommx/statistics") / here.topology.size
        for weight, part in zip(
            weights, tf.split(mean, [int(np.prod(weight.shape)) for weight in weights]), strict=True
        ):
            weight.assign(tf.cast(tf.reshape(part, weight.shape), weight.dtype))


class WarmUp(keras.callbacks.Callback):
    """Raise the learning rate linearly from the rate of one rank to the full rate, over the first
    steps.

    Args:
        learning_rate: the full rate, > 0.
        steps: number of optimizer steps until it is reached, >= 1, counted by the optimizer. With
            `steps_per_execution` the rate stays for that many.
        start: the rate of the first step; None: learning_rate / number of ranks.

    **Source:** Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.
    """

    def __init__(self, learning_rate: float, steps: int, start: float | None = None) -> None:
        super().__init__()
        if learning_rate <= 0 or steps < 1:
            raise ValueError(
                f"`learning_rate` must be > 0 and `steps` >= 1. Received {learning_rate} and "
                f"{steps}."
            )
        self.learning_rate, self.steps, self.start, self.over = learning_rate, steps, start, False

    def on_train_begin(self, logs: Any = None) -> None:
        self.over = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.over:
            return
        done = int(self.model.optimizer.iterations)
        # the full rate was set, or a restored optimizer has its own
        self.over = done >= self.steps + self.model.steps_per_execution
        if not self.over:
            start = self.learning_rate / comm.size() if self.start is None else self.start
            self.model.optimizer.learning_rate = start + (self.learning_rate - start) * min(
                done / self.steps, 1.0
            )


class SwitchScheme(keras.callbacks.Callback):
    """Change how gradients travel, and the resolution of the pictures, at the start of given
    epochs; nothing owed is lost.

    Args:
        schemes: epoch (from 0) -> Scheme (or pattern -> Scheme) from this epoch on.
        resolutions: epoch -> pixels from this epoch on.
        resolution: the integer tf.Variable that the input pipeline reads; needed with
            `resolutions`.

    A run that begins at a later epoch begins with what the epochs before have set.
    **Ranks:** all, with equal arguments. **Cost:** the training step is traced again after a change
    of scheme.
    """

    def __init__(
        self,
        schemes: Mapping[int, Scheme | Mapping[str, Scheme]] | None = None,
        resolutions: Mapping[int, int] | None = None,
        resolution: tf.Variable | None = None,
    ) -> None:
        super().__init__()
        if resolutions and resolution is None:
            raise ValueError(
                "`resolution`, the variable that the input pipeline reads, is required with "
                "`resolutions`. Received None."
            )
        for epoch, change in [*(schemes or {}).items(), *(resolutions or {}).items()]:
            if not isinstance(epoch, Integral) or epoch < 0:
                raise PlanError(
                    f"Epochs must be integers >= 0. Received {epoch!r}, for {change!r}."
                )
        self.schemes, self.resolutions, self.resolution = (
            dict(schemes or {}),
            dict(resolutions or {}),
            resolution,
        )
        self.first = True  # epoch of a run

    def on_train_begin(self, logs: Any = None) -> None:
        self.first = True
        for schemes in self.schemes.values():  # refuse a bad one now, not hours later
            exchanger_of(self.model).check(schemes)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        def now(changes: Mapping[int, Any]) -> Any:
            return (
                changes.get(max((start for start in changes if start <= epoch), default=epoch))
                if self.first
                else changes.get(epoch)
            )

        if (pixels := now(self.resolutions)) is not None:
            self.resolution.assign(pixels)
        scheme, exchanger, self.first = now(self.schemes), exchanger_of(self.model), False
        if scheme is not None and exchanger.schemes != by_pattern(scheme):
            exchanger.switch(scheme)
            self.model.make_train_function(force=True)


class CompareReplicas(keras.callbacks.Callback):
    """Compare a hash of all trainable weights over the ranks at the end of every epoch.

    `identical` is True while no difference was seen. **Ranks:** all. **Raises:** RuntimeError that
    names the ranks that differ, unless `strict` is False.
    """

    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict, self.identical = strict, True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        digest = hashlib.sha256()
        for variable in self.model.trainable_variables:
            digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).tobytes())
        digests = comm.current().gather_objects(digest.hexdigest())
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            self.identical = False
            message = (
                f"All ranks must hold the same trainable weights. After epoch {epoch}, "
                f"ranks {odd} differ from rank 0."
            )
            if self.strict:
                raise RuntimeError(
                    f"{message} Was the state broadcast (BroadcastState), and are all updates "
                    "exchanged?"
                )
            log.error(message)
