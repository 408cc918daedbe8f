"""Mixin of optimizers that update this rank's shards in place of the weights.

apply -> unscale -> accumulate (whole) -> [push: shards of the gradients] -> clip -> decay
      -> update of the shards, with state only for them -> [pull] -> EMA of the shards
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils.tracking import no_automatic_dependency_tracking

from tfcommx.core import CheckpointError, ConfigurationError
from tfcommx.keras_internals.optimizers import plain_copy, slots_of
from tfcommx.keras_internals.step import ExchangesGradients

# Keras optimizers whose update of an entry depends on that entry alone
ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Lion",
    "Adadelta",
    "Ftrl",
)

# Optimizers of Keras and of tfcommx whose update of a variable depends on that variable alone
OF_VARIABLES = ("Adafactor", "Lamb", "Muon")
OURS = ("tfcommx>LAMB", "tfcommx>LARS")


def require_shardable(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimizer that may update shards differently. **Raises:** ConfigurationError."""
    cls = type(optimizer)
    of_keras = cls is getattr(keras.optimizers, cls.__name__, None)
    if of_keras and cls.__name__ in ELEMENTWISE + OF_VARIABLES:
        return
    if keras.saving.get_registered_name(cls) not in OURS:
        raise ConfigurationError(
            'strategy="sharded" needs an optimizer that is known to update each entry, or each '
            f"variable, by itself: {', '.join(ELEMENTWISE + OF_VARIABLES)} of Keras, or LARS or "
            f"LAMB of tfcommx.optimizers. Received {cls.__name__} of {cls.__module__}. Take one of "
            'these, or strategy="synchronous".'
        )


class UpdatesShards(ExchangesGradients):
    """Mixed into an optimizer's class: state and update of this rank's shards alone."""

    gradient_accumulation_steps: int | None

    @property
    def whole_variables(self) -> list[keras.Variable] | None:
        """The weights that it was built for; None before `build`."""
        sharding = self.exchanger.sharding
        return None if sharding is None else sharding.variables

    def build(self, variables: list[keras.Variable]) -> None:
        """Create the shards of these variables, and the state of the shards."""
        if self.built:
            return
        # By name, because this class is generated, and has the name of the plain one
        needs_whole = type(self).__name__ not in ELEMENTWISE
        # Also without `weight_decay`, because Muon has a weight decay of another name
        decaying = self.weight_decay is not None or needs_whole
        # By TensorFlow's variables, as Keras does
        decays = [decaying and self._use_weight_decay(variable.value) for variable in variables]
        sharding = self.exchanger.make_sharding(variables, decays, needs_whole)
        shards = sharding.shards.variables
        if decaying:
            for shard, decays_too in zip(shards, sharding.shards.decays, strict=True):
                # In Keras's cache of decisions, because a shard has neither the name nor the
                # identity by which a user has excluded a variable
                self._exclude_from_weight_decay_cache[self._var_key(shard)] = decays_too
        # A rank accumulates whole gradients, which are exchanged once a step
        steps = self.gradient_accumulation_steps
        self.gradient_accumulation_steps = None
        try:
            super().build(shards)
        finally:
            self.gradient_accumulation_steps = steps
        sharding.slots = slots_of(self)
        for position, variable in enumerate(variables):
            # `apply` receives whole variables, which Keras looks up here
            self._trainable_variables_indices[self._var_key(variable)] = position
        if steps:
            self._add_accumulators(variables)
        # Not with accumulation, because a pull at a step's beginning does not know of it
        sharding.can_pull_first &= not steps

    # Without tracking, because Keras treats a list on an optimizer as part of its state, which has
    # these variables already
    @no_automatic_dependency_tracking
    def _add_accumulators(self, variables: list[keras.Variable]) -> None:
        self._accumulated_gradients = [
            self.add_variable_from_reference(variable, name="gradient_accumulator")
            for variable in variables
        ]

    def apply(
        self, grads: list[tf.Tensor | None], trainable_variables: list[keras.Variable] | None = None
    ) -> Any:
        """Take a step of all variables that the optimizer was built for."""
        if trainable_variables is None and self.built:
            trainable_variables = self.whole_variables
        try:
            return super().apply(grads, trainable_variables)
        finally:
            # A later step may begin without a pull
            if self.exchanger is not None and self.exchanger.sharding is not None:
                self.exchanger.sharding.shards.pulls_first = False

    def _clip_exchanged(self, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        """Clip by norms of whole variables, of which other ranks have parts."""
        if not (self.clipnorm or self.global_clipnorm):
            return super()._clip_exchanged(grads)
        squares = self.exchanger.sharding.run.squares(grads)
        limit = self.clipnorm or self.global_clipnorm
        # `global_clipnorm` has one factor for all variables, by the norm of all
        if not self.clipnorm:
            total = tf.add_n(list(squares.values()))
            # NaN if the norm is infinite, as in Keras, where a factor of 0 would go unnoticed
            squares = dict.fromkeys(squares, total + (total - total))
        factors = {
            path: limit / tf.maximum(tf.sqrt(square), limit) for path, square in squares.items()
        }
        scaled: list[tf.Tensor] = self.exchanger.sharding.shards.scale(grads, factors)
        return scaled

    def _apply_weight_decay(self, variables: list[keras.Variable]) -> None:
        super()._apply_weight_decay(self.exchanger.sharding.shards.variables)

    def _backend_update_step(
        self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable], learning_rate: Any
    ) -> None:
        shards = self.exchanger.sharding.shards.variables
        super()._backend_update_step(grads, shards, learning_rate)

    def _update_model_variables_moving_average(
        self, trainable_variables: list[keras.Variable]
    ) -> None:
        # A step that only accumulates gradients has not taken the shards from the weights
        if self.gradient_accumulation_steps:
            self.exchanger.sharding.shards.take_from_weights()
        super()._update_model_variables_moving_average(trainable_variables)

    def _overwrite_model_variables_with_average_value(self, variables: Any) -> None:
        sharding = self.exchanger.sharding
        super()._overwrite_model_variables_with_average_value(sharding.shards.variables)
        if sharding.run is None:  # The first eager step, which only accumulates
            self.exchanger.pull_shards()
        elif not sharding.shards.pulls_first:
            sharding.run.pull("average")

    def swap_averages(self) -> None:
        """Swap the shards of weights and moving averages, and the weights with them.

        **Ranks:** all, outside of traced code.
        """
        self.exchanger.sharding.shards.take_from_weights()
        super().swap_averages()
        self.exchanger.pull_shards()

    # --- files, and copies of plain optimizers ---------------------------------------------

    def whole_values(self) -> list[np.ndarray]:
        """Return the values that the plain optimizer would save, from the state gathered before.

        **Raises:** ConfigurationError if no state was gathered since the last step.
        """
        # Called by Keras on one rank, which cannot gather the state now
        sharding = self.exchanger.sharding
        plain = self._plain()
        if sharding is None:  # Not built: no state
            return [variable.numpy() for variable in self.variables]
        gathered = sharding.gathered_at(int(self._iterations))
        arrays = {
            # An empty variable is in no shard of whole variables
            id(variable): variable.numpy() if array is None else array
            for name, slot in slots_of(plain).items()
            for variable, array in zip(slot, gathered[name], strict=True)
            if variable is not None
        }
        arrays |= {
            id(plain_variable): variable.numpy() for variable, plain_variable in self._pairs(plain)
        }
        return [arrays[id(variable)] for variable in plain.variables]

    def import_state(self, plain: keras.optimizers.Optimizer) -> None:
        """Load the state of a plain optimizer that was built for the same whole variables."""
        for variable, plain_variable in self._pairs(plain):
            variable.assign(plain_variable)
        self.exchanger.sharding.load_state(
            {
                name: [None if variable is None else variable.numpy() for variable in slot]
                for name, slot in slots_of(plain).items()
            },
            int(self._iterations),
        )

    def _plain(self) -> keras.optimizers.Optimizer:
        """Create the plain optimizer, built for the whole variables."""
        plain = plain_copy(self)
        if self.whole_variables is not None:
            plain.build(self.whole_variables)
        return plain

    def _pairs(
        self, plain: keras.optimizers.Optimizer
    ) -> list[tuple[keras.Variable, keras.Variable]]:
        """Return (variable here, variable of `plain`) for all state that is not sharded."""
        rests: list[list[keras.Variable]] = []
        for optimizer in (self, plain):
            accumulated = getattr(optimizer, "_accumulated_gradients", [])
            excluded = {id(variable) for slot in slots_of(optimizer).values() for variable in slot}
            excluded |= {id(variable) for variable in accumulated}
            rest = [variable for variable in optimizer.variables if id(variable) not in excluded]
            rests.append([*rest, *accumulated])
        return list(zip(*rests, strict=True))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        """Write to a tf.train.Checkpoint whose shards it has."""
        return {"shards_of": tf.constant([self.exchanger.rank, self.exchanger.ranks])}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        """Refuse a tf.train.Checkpoint of another rank. **Raises:** CheckpointError."""
        if not tf.executing_eagerly():
            return
        rank, ranks = restored_tensors["shards_of"].numpy().tolist()
        if (rank, ranks) != (self.exchanger.rank, self.exchanger.ranks):
            raise CheckpointError(
                'With strategy="sharded" a tf.train.Checkpoint has the shards of one rank. '
                f"Received those of rank {rank} of {ranks} on rank {self.exchanger.rank} of "
                f"{self.exchanger.ranks}. Let each rank write and read a separate file, or call "
                "cx.checkpoint.save and restore, which serve any number of ranks."
            )

    def save_own_variables(self, store: dict[str, Any]) -> None:
        """Save the values that the plain optimizer would save. **Raises:** as `whole_values`."""
        for position, value in enumerate(self.whole_values()):
            store[str(position)] = value

    def load_own_variables(self, store: dict[str, Any]) -> None:
        """Load this rank's shards from the values of a plain optimizer."""
        plain = self._plain()
        plain.load_own_variables(store)  # Keras warns if the number of variables differs
        if len(store.keys()) == len(plain.variables) and self.built:
            self.import_state(plain)
