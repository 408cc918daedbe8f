"""BroadcastState: all ranks start from the same weights, state and settings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import keras

from tfcommx.callbacks.average import EpochMetrics
from tfcommx.callbacks.choose_again import expect_steps
from tfcommx.collectives import process
from tfcommx.core import ConfigurationError
from tfcommx.keras_internals import (
    begin_train_steps_with,
    finalize_layers,
    layers_of,
    replace_train_function,
    restore_train_step,
    seed_generators,
    steps_of,
    unlisted,
)
from tfcommx.optim.broadcast import broadcast_variables
from tfcommx.optim.centre import begin_centre, take_centre
from tfcommx.optim.layers import SyncBatchNormalization
from tfcommx.optim.replica_forms import require_equal_forms, require_equal_optimizers
from tfcommx.optim.replica_outputs import batch_and_again, require_equal_outputs
from tfcommx.optim.step_boundary import (
    begin_step,
    can_pull_first,
    consolidate,
    consolidate_weights,
)
from tfcommx.optim.wrapped import (
    accumulated,
    agree_on_loss_scale,
    agree_on_names,
    exchanger_in,
    optimizers_elsewhere,
    trains_alone,
    wrapped_optimizers,
)

log = logging.getLogger("tfcommx")

# Between the seeds of two ranks: more than models have generators, which Keras may number
SEED_STEP = 1_000_003


class BroadcastState(keras.callbacks.Callback):
    """Start all ranks from the same point: weights, optimizer state, names, loss scale; no XLA.

    Seeds, as of dropout, follow from those of rank `root`, each rank's own: ranks that drop the
    same entries learn less from a batch.

    What Keras builds in the first training step only, as layers without an input shape, is
    broadcast after that step, with all else: the step was taken with gradients from different
    weights, but afterwards all ranks have rank `root`'s. To begin with the same weights, or with
    those that one rank alone has loaded, build the model before `fit`.

    With a strategy that leaves weights incomplete or unequal between steps, it makes them whole
    before each evaluation and at each epoch's end, before what comes behind it saves them; with
    "sharded" the pulls overlap the forward pass while it is there.

    At each epoch's end it replaces the metrics by those over the samples of all ranks, so that what
    comes behind it in the list (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint) decides alike on
    all ranks. Keras shows no callback the others: BroadcastState cannot tell whether AverageMetrics
    is there. Put it first.

    With ElasticAveraging metrics stay each rank's own, ranks may take unequal numbers of steps, and
    at the end of `fit` each waits for the others, and all have the centre. A model with layers that
    only the first step builds is refused.

    Variables are paired by position, so it compares how the ranks have made their models: the names
    that the user gave, classes, settings, vocabularies. Then each rank calls the model once on rank
    `root`'s first batch, in inference mode, and outputs and loss are compared: what a layer keeps
    outside of variables, such as a constant of random numbers, may differ under equal weights.
    Layers that derive constants from their weights, as Normalization, derive them again.

    Sums of gradients that are being accumulated stay, and residuals: each rank has its own. Wrapped
    optimizers that the model holds beside that of `compile`, as a GAN has two, count as that one
    does: attributes of the model or of its layers, also in dicts, lists and objects of your own. A
    warning names one that takes steps and is held elsewhere.

    >>> import tfcommx as cx
    >>> callbacks = [cx.callbacks.BroadcastState()]

    Args:
        root: the rank whose state all begin with.
        compare: compare how the models were made, and what they compute.

    **Ranks:** all. **Cost:** one broadcast per variable, once; twice if a layer was not built; the
    first batch is sent to all ranks, for one forward pass outside of a graph; one small exchange on
    the host, an epoch.
    **Raises:** ConfigurationError if ranks would wait for each other forever: with unequal numbers
    of steps in an epoch, unequal first epochs or unequal last ones. ConfigurationError if the
    models differ.
    """

    def __init__(self, root: int = 0, compare: bool = True) -> None:
        super().__init__()
        self.root, self.compare = root, compare
        # Whether the outputs of this run are still to be compared
        self.uncompared = False
        # Whether a layer is unbuilt: it is broadcast after the first step
        self.unbuilt = False
        # Whether an epoch has begun in this run
        self.begun = False
        # Metrics over the samples of all ranks
        self.metrics = EpochMetrics()
        # Optimizers that the model does not hold -> their steps before this run, or when named
        self._elsewhere: dict[keras.optimizers.Optimizer, int] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare what all ranks are about to do, and broadcast what is built."""
        params = self.params or {}
        built = [layer.built for layer in layers_of(self.model)]
        everyone = process.current().gather_objects(
            (params.get("steps"), params.get("epochs"), built)
        )
        steps, epochs, builts = zip(*everyone, strict=True)
        for optimizer in wrapped_optimizers(self.model):
            exchanger_in(optimizer).consolidate()
        self.unbuilt, self.begun = not all(map(all, builts)), trains_alone(self.model)
        if not self.begun:
            _require_equal(
                steps,
                "take the same number of steps in an epoch",
                "Give all ranks equally many batches, or pass the same `steps_per_epoch`.",
            )
            _require_equal(epochs, "train until the same epoch", "Pass the same `epochs`.")
        waiting = [
            one.path for one in layers_of(self.model) if isinstance(one, SyncBatchNormalization)
        ]
        if waiting and self.begun:
            raise ConfigurationError(
                "With strategy=ElasticAveraging ranks take steps of their own, and no layer may "
                f"wait for the others. Received SyncBatchNormalization ({', '.join(waiting)}). Use "
                "keras.layers.BatchNormalization."
            )
        if self.unbuilt and self.begun:
            raise ConfigurationError(
                "With strategy=ElasticAveraging all ranks must begin with the same weights. "
                "Received a model with layers that only the first step builds. Call it on a "
                "batch before `fit`."
            )
        self.uncompared = self.compare
        if self.compare:
            require_equal_forms(self.model)
        self._prepare_optimizers()
        self._turn_off_xla()
        if not self.unbuilt or all(theirs == built for theirs in builts):
            self._broadcast()
        # What the first step builds is equal after it.
        self._arm_guards(not self.unbuilt)
        if all(map(all, builts)):
            self._begin_steps_with_pulls()
        self.metrics.begin_run(self.model)
        self._elsewhere = {one: steps_of(one) for one in optimizers_elsewhere(self.model)}

    def _begin_steps_with_pulls(self) -> None:
        """Let steps begin with the pulls of shards, where there are such."""
        restore_train_step(self.model)  # A `fit` that ended with an exception has left its step
        found = [one for one in wrapped_optimizers(self.model) if can_pull_first(one)]

        def begin(data: Any) -> None:
            for optimizer in found:
                begin_step(optimizer, data)

        if found:
            begin_train_steps_with(self.model, begin)

    def _prepare_optimizers(self) -> None:
        """Agree on a loss scale that Keras made; build what can be built."""
        for optimizer in wrapped_optimizers(self.model):
            scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            if scales_loss and exchanger_in(optimizer).guard.loss_scale == "local":
                agree_on_loss_scale(optimizer)
            if optimizer is self.model.optimizer and not optimizer.built and not self.unbuilt:
                optimizer.build(self.model.trainable_variables)

    def _turn_off_xla(self) -> None:
        if self.model.jit_compile:
            log.warning(
                "jit_compile is turned off: Horovod's collectives cannot be compiled by XLA."
            )
            self.model.jit_compile = False
            self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Compare the first epoch."""
        if not self.begun:
            self._compare_first(epoch)
            for optimizer in wrapped_optimizers(self.model):
                expect_steps(optimizer, self.params, epoch)

    # Not on_train_batch_end: for it, Keras waits after every step.
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast, before the second step, what the first one has built; compare outputs."""
        if self.unbuilt and batch:
            self._broadcast_built()
        if self.uncompared and not self.unbuilt:
            self._compare_in_next_step()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast what the first step has built, if the epoch had one alone; average metrics."""
        if self.unbuilt:
            self._broadcast_built()
        else:
            self._compare_outputs(None)  # This rank had no batch; others wait for it
        for optimizer in wrapped_optimizers(self.model):
            consolidate(optimizer)
        self._name_optimizers_elsewhere()
        if not trains_alone(self.model):
            self.metrics.end_epoch(self.model, logs)

    def _name_optimizers_elsewhere(self) -> None:
        """Warn once of each optimizer that has taken steps and that the model does not hold."""
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

    def on_test_begin(self, logs: Any = None) -> None:
        """Make the weights whole. A rank that does not evaluate meets the others at the end."""
        self.metrics.begin_evaluation(self.model)
        for optimizer in wrapped_optimizers(self.model):
            consolidate_weights(optimizer)

    def on_test_end(self, logs: Any = None) -> None:
        """Copy what the metrics have summed up. Local: not every rank evaluates."""
        self.metrics.end_evaluation(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the first epoch, if this rank had none to train; steps are as they were."""
        self.metrics.end_run(logs)
        if not self.begun:
            self._compare_first(None)
        self._compare_outputs(None)
        restore_train_step(self.model)
        take_centre(self.model)

    def _compare_in_next_step(self) -> None:
        """Compare outputs when the next step asks for its batches, which it then gets."""
        model = self.model

        def compare_and_train(train: Any, iterator: Any) -> Any:
            restore()
            batch = None
            if process.rank() == self.root and model.distribute_strategy.num_replicas_in_sync == 1:
                batch, iterator = batch_and_again(iterator, model.steps_per_execution)
            self._compare_outputs(batch)
            return train(iterator)

        restore = replace_train_function(model, compare_and_train)

    def _compare_outputs(self, batch: Any) -> None:
        """Compare outputs, once in a run. **Ranks:** all, also those that have no batch."""
        if self.uncompared:
            self.uncompared = False
            require_equal_outputs(self.model, batch, self.root)

    def _compare_first(self, epoch: int | None) -> None:
        self.begun = True
        _require_equal(
            process.current().gather_objects(epoch),
            "begin at the same epoch",
            "Pass the same `initial_epoch`; restore the same backup or checkpoint on every rank.",
        )

    def _broadcast_built(self) -> None:
        self.unbuilt = False
        for optimizer in wrapped_optimizers(self.model):
            if exchanger_in(optimizer).sharding is None:
                # A round that began with each rank's own weights ends here
                exchanger_in(optimizer).consolidate()
        self._broadcast()
        self._arm_guards(True)

    def _arm_guards(self, armed: bool) -> None:
        for optimizer in wrapped_optimizers(self.model):
            exchanger_in(optimizer).guard.replicas.arm(armed)

    def _broadcast(self) -> None:
        """Broadcast weights and optimizers' state; give each rank seeds of its own."""
        each_ranks_own: set[int] = set()
        state: list[keras.Variable] = []
        for optimizer in wrapped_optimizers(self.model):
            each_ranks_own |= {id(variable) for variable in accumulated(optimizer).values()}
            if sharding := exchanger_in(optimizer).sharding:
                each_ranks_own |= {id(variable) for variable in sharding.state}
                sharding.share_loaded(self.root)
            state += [*optimizer.variables, *unlisted(optimizer).values()]
        agree_on_names(self.model, self.root)  # While the order is that of the whole model
        broadcast_variables(
            [
                variable
                for variable in (*self.model.variables, *state)
                if id(variable) not in each_ranks_own
            ],
            self.root,
        )
        finalize_layers(self.model)
        if self.compare:
            require_equal_optimizers(self.model)
        if process.rank() != self.root:
            self._move_seeds(process.rank() - self.root)
        begin_centre(self.model)

    def _move_seeds(self, away: int) -> None:
        for generator in seed_generators(self.model):
            seed, count = generator.state.numpy()
            generator.state.assign([(int(seed) + away * SEED_STEP) % 2**31, count])


def _require_equal(values: Sequence[Any], what: str, remedy: str) -> None:
    if len(set(values)) > 1:
        raise ConfigurationError(
            f"Every rank must {what}. Received {list(values)} on ranks 0 to {len(values) - 1}. "
            f"{remedy}"
        )
