"""StepGuard: refuses steps that would fail, hang or let ranks drift apart."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.collectives.comm import Comm, WatchedSum
from tfcommx.collectives.unwrapped import allow_plain_optimizers
from tfcommx.core import ConfigurationError
from tfcommx.keras_internals.exchange import StepUnderWay
from tfcommx.keras_internals.names import VariableNames, path_of
from tfcommx.keras_internals.step import compiled_by_xla
from tfcommx.optim.requested_plan import ExchangeSettings
from tfcommx.runtime.replica_guard import ReplicaGuard


class StepGuard:
    """The current step of a wrapped optimizer, and the conditions it must meet."""

    def __init__(self, comm: Comm, settings: ExchangeSettings, names: VariableNames) -> None:
        strategy = settings.strategy
        self._comm, self._names, self._in_lock_step = comm, names, strategy.in_lock_step
        interval = settings.check_replicas_every if strategy.in_lock_step else None
        self.replicas = ReplicaGuard(comm, interval, strategy.keeps_weights_equal)
        # Mode of an outer LossScaleOptimizer: "none" exists, "local" (each alone) or "agreed"
        self.loss_scale = "none"
        self._not_finite = WatchedSum(comm, "finite", "the agreement on finite gradients")
        if settings.sender is not None:
            self._numbers = WatchedSum(comm, "numbers", "a sum for an optimizer that sends momenta")
        self.step = StepUnderWay()

    @contextlib.contextmanager
    def open_step(self) -> Iterator[None]:
        """Enter a step that has exchanged nothing yet; open its scope."""
        self.step.exchange_ran = False
        # A user's class may call other optimizers in its step
        with allow_plain_optimizers(), contextlib.ExitStack() as self.step.scope:
            yield

    @tf.autograph.experimental.do_not_convert
    def begin(self, variables: Sequence[keras.Variable], built: Sequence[keras.Variable]) -> None:
        """Record the next gradients' variables; name all that the optimizer was built for.

        **Raises:** ConfigurationError for settings that fail or hang later: XLA, and a loss scale
        decided by each rank alone; for a variable with two gradients.
        """
        self.step.variables = tuple(variables)
        counts = Counter(map(id, variables))
        repeated = next((variable for variable in variables if counts[id(variable)] > 1), None)
        if repeated is not None:
            raise ConfigurationError(
                "A step must have one gradient for each variable. Received "
                f"{counts[id(repeated)]} for {path_of(repeated)!r}. Pass each variable once: a "
                "layer that two parts of a model share is in the lists of both."
            )
        # In the order of the build, because numbers of repeated paths must not depend on which
        # variables have gradients first
        self._names.of([*built, *variables])
        if compiled_by_xla():
            raise ConfigurationError(
                "Horovod's collectives cannot be compiled by XLA. Received jit_compile=True "
                "(Keras's 'auto' turns it on with a GPU). Call model.compile(..., "
                "jit_compile=False), or add the callback BroadcastState."
            )
        if self.loss_scale == "local" and self._comm.topology.size > 1:
            raise ConfigurationError(
                "A LossScaleOptimizer outside of the wrapped optimizer decides on each rank alone "
                "whether to take a step. Wrap it: "
                "DistributedOptimizer(LossScaleOptimizer(optimizer)), or add the callback "
                "BroadcastState. (MultiOptimizer, which looks the same from inside, cannot hold "
                "wrapped optimizers.)"
            )

    @tf.autograph.experimental.do_not_convert
    def finite_on_all_ranks(self, finite: tf.Tensor) -> tf.Tensor:
        """Return True if `finite` (bool) holds on every rank, if ranks take their steps together.

        **Ranks:** all. **Cost:** one allreduce of 4 bytes.
        """
        if self._comm.topology.size == 1 or not self._in_lock_step:
            return finite
        failures = tf.reshape(tf.cast(tf.logical_not(finite), tf.float32), [1])
        return tf.equal(self._not_finite(failures)[0], 0)

    @tf.autograph.experimental.do_not_convert
    def mean_over_ranks(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return the mean of a float32 vector over the ranks, with the same bits on each.

        **Ranks:** all. **Cost:** one allreduce of the vector.
        """
        # Needed even for equal vectors, because processors may reduce equal variables in another
        # order
        ranks = self._comm.topology.size
        return numbers if ranks == 1 else self._numbers(numbers) / ranks

    @tf.autograph.experimental.do_not_convert
    def check_exchange_ran(self, optimizer: str) -> None:
        """Refuse a step that bypassed `exchange`. **Raises:** ConfigurationError."""
        if not self.step.exchange_ran:
            raise ConfigurationError(
                f"A wrapped optimizer must take its step as Keras's own do. {optimizer!r} has "
                "taken it without an exchange: it hands the gradients on, as "
                "keras.optimizers.MultiOptimizer does, or has its own step, or Keras's "
                f"own step differs in this version, {keras.__version__}. Wrap one of Keras's, or "
                "one for each part of the model in your own training step."
            )


def require_no_replicas() -> None:
    """Refuse a scope whose variables have replicas, which each rank's exchange does not know."""
    scope = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    if scope is None or isinstance(scope, tf.distribute.OneDeviceStrategy):
        return
    if process.current().topology.size > 1:
        raise ConfigurationError(
            "On several ranks each process trains one replica, outside of tf.distribute's scopes. "
            f"Received the scope of a {type(scope).__name__}. Make model and optimizer outside of "
            "`strategy.scope()`: the launcher starts a process for each GPU."
        )
