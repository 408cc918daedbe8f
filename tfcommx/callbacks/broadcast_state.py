"""BroadcastState: all ranks start from the same weights, state and settings."""

import functools
import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np
import tensorflow as tf

from tfcommx.callbacks.average import AverageMetrics
from tfcommx.callbacks.beside import conflicts_of, warn_of_conflicts
from tfcommx.callbacks.choose_again import expect_steps
from tfcommx.collectives import process
from tfcommx.core import ConfigurationError, check_whole, log
from tfcommx.keras_internals.fit import (
    begin_train_steps_with,
    callbacks_of_fit,
    class_weight_of_fit,
    replace_train_function,
    restore_train_function,
    restore_train_step,
)
from tfcommx.keras_internals.models import (
    all_generators,
    assigns_weights,
    finalize_layers,
    layers_of,
    trace_again,
    untracked_variables,
)
from tfcommx.keras_internals.optimizers import has_schedule, steps_of
from tfcommx.keras_internals.step import build_early
from tfcommx.optim.broadcast import broadcast_values, require_root, set_seeds_apart
from tfcommx.optim.layers import SyncBatchNormalization
from tfcommx.optim.replica_forms import (
    require_equal_adapted,
    require_equal_forms,
    require_equal_optimizers,
)
from tfcommx.optim.replica_outputs import batch_and_again, require_equal_outputs
from tfcommx.optim.step_boundary import (
    begin_centre,
    begin_step,
    can_pull_first,
    consolidate,
    consolidate_weights,
    take_centre,
)
from tfcommx.optim.step_guard import require_no_replicas
from tfcommx.optim.wrapped import (
    agree_on_loss_scale,
    agree_on_names,
    difference_of_replicas,
    exchanger_in,
    optimizers_elsewhere,
    searching_once,
    shared_state,
    trains_alone,
    wrapped_optimizers,
)
from tfcommx.runtime.replica_guard import CAUSES, by_rank

# Model -> the wrapped optimizers that it held when its training step was last prepared
_HELD: WeakKeyDictionary[keras.Model, WeakSet[keras.optimizers.Optimizer]] = WeakKeyDictionary()
# Models whose layers were searched
_NAMED: WeakSet[keras.Model] = WeakSet()


class BroadcastState(keras.callbacks.Callback):
    """Start all ranks from the same point: weights, optimizers' state, names, loss scale; no XLA.

    Put it first (docs/how-to/callbacks.md). Seeds, as of dropout and of `keras.random` without a
    seed, are derived from those of rank `root`, and differ between the ranks. Accumulated sums of
    gradients and residuals do not change: they belong to each rank. Layers that the first training
    step builds are broadcast after it.

    With a strategy that leaves weights incomplete or unequal between steps, it completes them
    before each evaluation and at each epoch's end; with "sharded", the pulls overlap the forward
    pass during `fit`. With ElasticAveraging all ranks have the centre at the end of `fit`.

    At each epoch's end it replaces the metrics by their values over the samples of all ranks, so
    that callbacks behind it (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint) decide alike on all
    ranks. If an EarlyStopping restores the weights of an earlier epoch, residuals are dropped.

    It compares the models of the ranks: the names given by the user, classes, settings,
    vocabularies and class weights, and the state of preprocessing layers that were adapted outside
    of the model. Then each rank calls the model once on rank `root`'s first batch, in inference
    mode, and outputs and loss are compared, because the state of a layer outside of variables, such
    as a constant of random numbers, may differ under equal weights. Warnings report equal first
    batches on all ranks, because the data may not be divided, and name callbacks of Keras that
    need another position, or one rank alone.

    >>> import tfcommx as cx
    >>> callbacks = [cx.callbacks.BroadcastState()]

    Args:
        root: the rank whose state all ranks begin with, in [0, size).
        compare: True to compare the models' configurations and outputs.

    **Ranks:** all. **Cost:** variables that differ between ranks are broadcast once; twice if a
    layer was not built or with Keras's BackupAndRestore; the first batch is sent to all ranks, for
    one forward pass outside of a graph; two small exchanges on the host per epoch, and at the end
    of `fit` the replica guard's comparison, of which a warning names differences.
    **Raises:** ConfigurationError if ranks would wait for each other forever: with unequal numbers
    of steps in an epoch, unequal first epochs or unequal last ones, also if one rank stops after an
    epoch. ConfigurationError if the models differ.
    """

    def __init__(self, root: int = 0, compare: bool = True) -> None:
        super().__init__()
        self.root, self.compare = check_whole("root", root), compare
        # True until the outputs of this run are compared
        self.uncompared = False
        # True while a layer is unbuilt, which is then broadcast after the first step
        self.unbuilt = False
        # True once an epoch has begun in this run
        self.begun = False
        # True if ranks train alone; stored, because it takes a search of the whole model
        self.alone = False
        # True if a rank restores a backup of Keras's BackupAndRestore in this run
        self.has_backups = False
        # True once unequal learning rates are named in this run
        self.rates_differ = False
        # Metrics over the samples of all ranks
        self.metrics = AverageMetrics()
        # Those of this run that restore the weights of their best epoch
        self._restoring: list[keras.callbacks.EarlyStopping] = []
        # The last epoch that has ended in this run
        self._epoch = 0
        # Optimizers that the model does not hold -> their steps before this run; maxsize once named
        self._elsewhere: dict[keras.optimizers.Optimizer, int] = {}

    def set_model(self, model: keras.Model) -> None:
        """Refuse a model of Keras 2, whose `fit` would miss a private method of its callbacks."""
        if any(base.__module__.startswith("tf_keras") for base in type(model).__mro__):
            raise ConfigurationError(
                f"A model of Keras 3 is required. Received {type(model).__name__}, a model of "
                "tf_keras, which is Keras 2. Build it by keras, and unset TF_USE_LEGACY_KERAS."
            )
        super().set_model(model)
        self.metrics.set_model(model)

    @searching_once
    def on_train_begin(self, logs: Any = None) -> None:
        """Compare steps, epochs and models of all ranks, and broadcast built models."""
        with self.model.distribute_strategy.scope():
            require_no_replicas()
        built = [layer.built for layer in layers_of(self.model)]
        # A `fit` that was interrupted may have left its own
        restore_train_function(self.model)
        self.alone = trains_alone(self.model)
        listed = callbacks_of_fit()
        self._restoring = [
            part
            for part in listed
            if isinstance(part, keras.callbacks.EarlyStopping) and part.restore_best_weights
        ]
        conflicts = conflicts_of(listed, BroadcastState, not self.alone)
        eagerly = bool(self.model.run_eagerly or tf.config.functions_run_eagerly())
        shares = class_weight_of_fit()
        asked = [(self.params or {}).get(name) for name in ("steps", "epochs")]
        everyone = process.current().gather_objects(
            (*asked, built, self.root, conflicts, eagerly, shares)
        )
        steps, epochs, builts, roots, all_conflicts, in_python, class_weights = zip(
            *everyone, strict=True
        )
        require_root(roots)
        if process.rank() == 0:
            warn_of_conflicts(all_conflicts)
            _name_misunderstood_layers(self.model)
        for optimizer in wrapped_optimizers(self.model):
            # A `fit` before may have left weights that are unequal or one update old, and the
            # root's are broadcast next
            exchanger_in(optimizer).consolidate()
        self.has_backups = any(
            file[0] == "BackupAndRestore" for *_, files in all_conflicts for file in files
        )
        self.unbuilt = not all(map(all, builts))
        self.begun, self.rates_differ = self.alone, False
        if not self.alone:
            _require_equal(
                steps,
                "take the same number of steps in an epoch",
                "Give all ranks equally many batches, or let their data sets `.repeat()` and pass "
                "the same `steps_per_epoch`.",
            )
            # Collectives in branches of a traced step have other names than those of an eager one
            _require_equal(
                in_python, "run its steps eagerly, or none", "Pass the same `run_eagerly`."
            )
            _require_equal(epochs, "train until the same epoch", "Pass the same `epochs`.")
        waiting = [
            part.path for part in layers_of(self.model) if isinstance(part, SyncBatchNormalization)
        ]
        if waiting and self.alone:
            raise ConfigurationError(
                "With strategy=ElasticAveraging ranks take separate steps, and no layer may "
                f"wait for the others. Received SyncBatchNormalization ({', '.join(waiting)}). Use "
                "keras.layers.BatchNormalization."
            )
        if self.unbuilt and self.alone:
            raise ConfigurationError(
                "With strategy=ElasticAveraging all ranks must begin with the same weights. "
                "Received a model with layers that only the first step builds. Call it on a "
                "batch before `fit`."
            )
        self.uncompared = self.compare
        if self.compare:
            _require_equal(
                class_weights,
                "weight the classes alike",
                "Compute `class_weight` from the labels of all ranks. "
                "BroadcastState(compare=False) trains with the difference.",
            )
            require_equal_forms(self.model)
            require_equal_adapted(self.model)
        self._prepare_optimizers()
        self._forget_step_of_other_optimizers()
        self._turn_off_xla()
        # Variables are paired by position, so built layers are broadcast now only if all ranks have
        # built the same ones
        if not self.unbuilt or all(rank_built == built for rank_built in builts):
            self._broadcast()
        # Armed later if the first step builds layers, because these are equal only after it
        self._arm_guards(not self.unbuilt)
        if all(map(all, builts)):
            self._begin_steps_with_pulls()
        self.metrics.on_train_begin()
        self._elsewhere = {part: steps_of(part) for part in optimizers_elsewhere(self.model)}

    def _begin_steps_with_pulls(self) -> None:
        """Make steps begin with the pulls of shards, for an optimizer that has shards."""
        restore_train_step(self.model)  # Because a `fit` that failed has left its step
        first, *others = wrapped_optimizers(self.model)
        # Later gradients of a step with several optimizers, as a GAN has, need the weights that an
        # earlier update has made; and a pull would undo a layer's assignment in the step
        if others or not can_pull_first(first) or assigns_weights(self.model):
            return
        begin_train_steps_with(self.model, functools.partial(begin_step, first))

    def _prepare_optimizers(self) -> None:
        """Agree on a loss scale that Keras made; build the optimizer of `compile`, if possible."""
        for optimizer in wrapped_optimizers(self.model):
            scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            # Asked in each `fit`, because a second `compile` puts a new LossScaleOptimizer around
            # the same wrapped one
            if scales_loss and exchanger_in(optimizer).guard.loss_scale == "local":
                agree_on_loss_scale(optimizer)
            # A model that is trained in a loop of the user's, without `compile`, has none
            of_compile = optimizer is getattr(self.model, "optimizer", None)
            if of_compile and not optimizer.built and not self.unbuilt:
                build_early(optimizer, self.model.trainable_variables)

    def _forget_step_of_other_optimizers(self) -> None:
        """Trace the step again if the model holds other optimizers than in its last `fit`."""
        # `compile` does that, whereas `model.optimizer = wrapped` leaves a step that was traced
        # before, which applies the gradients by the optimizer of that time
        held = WeakSet(wrapped_optimizers(self.model))
        if _HELD.get(self.model) != held:
            _HELD[self.model] = held
            trace_again(self.model)

    def _turn_off_xla(self) -> None:
        if self.model.jit_compile:
            log.warning(
                "jit_compile is turned off: Horovod's collectives cannot be compiled by XLA."
            )
            self.model.jit_compile = False
            trace_again(self.model)

    @searching_once
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Compare the epoch, so that no rank waits for one that has stopped; expect steps."""
        first = not self.begun
        self._compare_epoch(epoch)
        if first and self.has_backups and not self.unbuilt:
            # Each rank has restored its own, behind the broadcast. Those of two ranks differ if
            # ranks ended after different steps, or update apart
            self._broadcast()
        if first:
            for optimizer in wrapped_optimizers(self.model):
                expect_steps(optimizer, self.params, epoch)

    # Not on_train_batch_end, because Keras would wait for every step
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast layers that the first step has built, before the second; compare outputs."""
        if self.unbuilt and batch:
            self._broadcast_built()
        if self.uncompared and not self.unbuilt:
            self._compare_in_next_step()

    @searching_once
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast layers that the only step of the epoch has built; average metrics."""
        self._epoch = epoch
        if self.unbuilt:
            self._broadcast_built()
        else:
            self._compare_outputs(None)  # Because others wait for this rank if it had no batch
        for optimizer in wrapped_optimizers(self.model):
            consolidate(optimizer)
        self._name_optimizers_elsewhere()
        self.metrics.on_epoch_end(epoch, logs)

    def _name_optimizers_elsewhere(self) -> None:
        """Warn once about each optimizer that has taken steps and that the model does not hold."""
        for optimizer in optimizers_elsewhere(self.model):
            if steps_of(optimizer) > self._elsewhere.get(optimizer, 0):
                self._elsewhere[optimizer] = sys.maxsize
                log.warning(
                    "Rank %d: the wrapped optimizer %r trains the model, which does not hold it. "
                    "Its state is neither broadcast nor saved, and weights that differ between "
                    "exchanges stay so at an epoch's end. Make it an attribute of the model, or "
                    "an entry of a dict or a list that is one.",
                    process.rank(),
                    optimizer.name,
                )

    @searching_once
    def on_test_begin(self, logs: Any = None) -> None:
        """Complete the weights."""
        # A rank that does not evaluate meets the others at the epoch's end
        self.metrics.on_test_begin()
        for optimizer in wrapped_optimizers(self.model):
            consolidate_weights(optimizer)

    def on_test_end(self, logs: Any = None) -> None:
        self.metrics.on_test_end()

    @searching_once
    def on_train_end(self, logs: Any = None) -> None:
        """Require that no rank begins another epoch; restore the step; drop old residuals."""
        self.metrics.on_train_end(logs)
        # Otherwise ranks that begin another epoch would wait for this one, forever if its script
        # has other work
        self._compare_epoch(None)
        self._compare_outputs(None)
        restore_train_step(self.model)
        # The guard's next check may come after the end of the run
        if not self.rates_differ and (difference := difference_of_replicas(self.model)):
            log.warning("%s", difference)
        take_centre(self.model)
        self._drop_residuals_of_later_epochs()

    def _drop_residuals_of_later_epochs(self) -> None:
        """Drop residuals if an EarlyStopping replaces the weights by those of an earlier epoch."""
        # They belong to steps that it undoes, perhaps because these diverged, and a next `fit`
        # would send them
        restoring, self._restoring = self._restoring, []
        if any(
            part.best_weights is not None and part.best_epoch != self._epoch for part in restoring
        ):
            for optimizer in wrapped_optimizers(self.model):
                exchanger_in(optimizer).drop_residuals()

    def _compare_in_next_step(self) -> None:
        """Compare outputs on the first batch of the next step, which then trains on it."""
        model = self.model

        def compare_and_train(train: Any, iterator: Any) -> Any:
            # First, so that an error of the comparison leaves the training function as it was
            restore()
            batch = None
            if model.distribute_strategy.num_replicas_in_sync == 1:
                batch, iterator = batch_and_again(iterator, model.steps_per_execution)
            self._compare_outputs(batch)
            return train(iterator)

        restore = replace_train_function(model, compare_and_train)

    def _compare_outputs(self, batch: Any) -> None:
        """Compare outputs, once in a run. **Ranks:** all, also ranks without a batch."""
        if self.uncompared:
            self.uncompared = False
            require_equal_outputs(self.model, batch, self.root)

    def _compare_epoch(self, epoch: int | None) -> None:
        """Refuse another epoch than the other ranks begin; None: this rank begins no more."""
        if self.alone:
            return
        epochs, rates = zip(
            *process.current().gather_objects((epoch, self._guarded_rates())), strict=True
        )
        self._name_unequal_rates(rates)
        if self.begun:
            requirement = "stop after the same epoch (None: it begins no more)"
            remedy = (
                "Put the callback that sets `stop_training`, such as EarlyStopping, behind "
                "BroadcastState, where it sees the metrics of all ranks, and "
                "cx.callbacks.AgreeOnStop() behind it."
            )
        else:
            requirement = "begin at the same epoch"
            remedy = (
                "Pass the same `initial_epoch`; restore the same backup or checkpoint on every "
                "rank."
            )
        self.begun = True
        _require_equal(epochs, requirement, remedy)

    def _guarded_rates(self) -> list[float]:
        """Return the learning rates that the replica guard compares with those of other ranks."""
        # Those of schedules follow from the steps; Keras's MultiOptimizer has none
        return [
            float(getattr(optimizer, "learning_rate", 0.0))
            for optimizer in wrapped_optimizers(self.model)
            if exchanger_in(optimizer).settings.check_replicas_every and not has_schedule(optimizer)
        ]

    def _name_unequal_rates(self, rates: Sequence[list[float]]) -> None:
        """Warn once in a run: the guard's next check may come after its end."""
        if self.rates_differ or len({*map(len, rates)}) > 1:
            return
        for values in zip(*rates, strict=True):
            if len({*values}) > 1:
                self.rates_differ = True
                log.warning(
                    "The learning rate must be the same on all ranks, whose weights differ "
                    "otherwise. It is %s. %s",
                    by_rank(np.array(values)),
                    CAUSES["learning rate"],
                )

    def _broadcast_built(self) -> None:
        self.unbuilt = False
        for optimizer in wrapped_optimizers(self.model):
            if exchanger_in(optimizer).sharding is None:
                # Ends a round that began with unequal weights
                exchanger_in(optimizer).consolidate()
        self._broadcast()
        self._arm_guards(True)

    def _arm_guards(self, armed: bool) -> None:
        for optimizer in wrapped_optimizers(self.model):
            exchanger_in(optimizer).guard.replicas.arm(armed)

    def _broadcast(self) -> None:
        """Broadcast weights and optimizers' state; set different seeds on the ranks."""
        state = shared_state(self.model, self.root)
        agree_on_names(self.model, self.root)  # While variables have the order of the whole model
        generators = all_generators(self.model)
        # Keras's own, which serves draws without a seed, is no variable of the model
        state += [generators[-1].state]
        broadcast_values([*self.model.variables, *state], self.root)
        finalize_layers(self.model)
        if self.compare:
            require_equal_optimizers(self.model)
        set_seeds_apart([generator.state for generator in generators], self.root)
        begin_centre(self.model)


def _require_equal(values: Sequence[Any], requirement: str, remedy: str) -> None:
    if len(set(values)) > 1:
        raise ConfigurationError(
            f"Every rank must {requirement}. Received {list(values)} on ranks 0 to "
            f"{len(values) - 1}. {remedy}"
        )


def _name_misunderstood_layers(model: keras.Model) -> None:
    """Warn, once for each model, of layers that do not do on ranks what their user expects."""
    if model in _NAMED:
        return
    _NAMED.add(model)
    if names := untracked_variables(model):
        log.warning(
            "Layers hold TensorFlow's variables, which Keras 3 does not know: %s. `fit` does not "
            "train them, no file has them, and ranks do not begin with equal values. Make them by "
            "self.add_weight, or as keras.Variable.",
            _first_of(names),
        )
    alone = [
        layer.name
        for layer in layers_of(model)
        if getattr(layer, "synchronized", False) is True
        and not isinstance(layer, SyncBatchNormalization)
    ]
    if alone and process.current().topology.size > 1:
        log.warning(
            "BatchNormalization(synchronized=True) of Keras knows the replicas of a tf.distribute "
            "strategy, and not the ranks: %s normalize by the batch of their rank. Take "
            "cx.layers.SyncBatchNormalization().",
            _first_of(alone),
        )


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
