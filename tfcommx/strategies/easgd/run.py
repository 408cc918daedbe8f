"""The steps of elastic averaging: begin the centre, exchange with it, take it.

begin   the centre starts from rank 0's weights
steps   every few: send a snapshot of the weights; subtract the force when it has arrived
end     wait for all ranks that still train; the weights are set to the centre
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.background import END_SECONDS
from tfcommx.strategies.easgd.server import CentreServer, cut
from tfcommx.strategies.easgd.worker import EasgdWorker
from tfcommx.strategies.strategy import StrategyRun, Update

CHIEF = 0  # The rank whose weights the centre begins with


class ServerThread:
    """The thread that answers for the centre, or a range of it, while ranks train."""

    def __init__(self, server: CentreServer) -> None:
        self._server = server
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._thread is not None:
            return
        self._stopped.clear()
        self._thread = threading.Thread(
            target=self._server.run, args=(self._stopped,), name="tfcommx-centre", daemon=True
        )
        self._thread.start()
        # The thread must end before MPI is finalized, because it calls MPI
        atexit.register(self._stop)

    def end(self) -> None:
        """Stop the thread after all ranks have received their answers."""
        self._stop()
        self._server.finish()

    def _stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join(END_SECONDS)
            self._thread = None
            atexit.unregister(self._stop)


class ElasticRun(StrategyRun):
    """The run of `ElasticAveraging` on one plan."""

    executor: PlanExecutor

    def __init__(
        self,
        executor: PlanExecutor,
        servers: Sequence[int],
        alpha: float,
        every: int,
        blocking: bool,
        averages_statistics: bool,
    ) -> None:
        """Prepare the steps; the exchange begins with the first one.

        Args:
            servers: the ranks that hold the centre, each a range of it.
            alpha: the moving rate, > 0.
            every: steps between two exchanges, >= 1.
            blocking: wait for each force; False: continue, and apply it when it has arrived.
            averages_statistics: True: average statistics such as batch norm's means at the end.
        """
        super().__init__(executor)
        self._comm, self._servers, self._alpha = executor.comm, servers, alpha
        self._every, self._blocking = every, blocking
        self._averages_statistics = averages_statistics
        self._weights: Mapping[str, tf.Variable] = {}
        self._worker: EasgdWorker | None = None
        # None on ranks that hold no range of the centre
        self._server: ServerThread | None = None
        # True between the beginning of a training and its end
        self._trains = False
        # Step at which the last snapshot was sent
        self._sent_at = int(executor.steps.numpy())

    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return this rank's own gradients; count the step."""
        # In the last call of an iterator, which has no data, TensorFlow still runs ops without a
        # data dependency; the control dependency keeps it from counting a step
        with tf.control_dependencies(list(gradients.values())[-1:]):
            self.executor.steps.assign_add(1)
        return dict(gradients)

    @tf.autograph.experimental.do_not_convert
    def update(self, step: Update) -> None:
        """Apply this rank's update; exchange with the centre if an exchange is due."""
        if self._comm.topology.size > 1 and not self._weights:
            with tf.init_scope():
                self._open(step.weights)
        step.apply()
        if self._comm.topology.size == 1:
            return
        with tf.device("/cpu:0"):
            # Includes this step, which `exchange` has counted
            steps = self.executor.steps.read_value()
            if self._blocking:
                tf.cond(steps % self._every == 0, self._exchange_now, lambda: None)
                return
            receives, sends = tf.numpy_function(self._turn, [steps], [tf.bool, tf.bool])
            tf.cond(receives, self._receive, lambda: None)
            tf.cond(sends, self._send, lambda: None)

    def weights_are_equal(self) -> bool:
        """Return False: the weights differ until the training ends."""
        return False

    # --- the exchange, in the graph -----------------------------------------------------

    def _exchange_now(self) -> None:
        def exchange(snapshot: np.ndarray) -> np.ndarray:
            self._serve()
            return self._opened().exchange(snapshot)

        self._pull(tf.numpy_function(exchange, [self._flat()], self._dtype))

    def _receive(self) -> None:
        self._pull(tf.numpy_function(self._opened().take, [], self._dtype))

    def _send(self) -> None:
        def begin(snapshot: np.ndarray) -> np.int64:
            self._serve()
            self._opened().begin(snapshot)
            return np.int64(0)

        tf.numpy_function(begin, [self._flat()], tf.int64)

    def _turn(self, steps: np.ndarray) -> tuple[np.bool_, np.bool_]:
        """Return (True if a force is applied in this step, True if a snapshot is sent)."""
        worker = self._opened()
        receives = worker.arrived()
        due = steps - self._sent_at >= self._every
        sends = bool(due and (receives or not worker.waits))
        if sends:
            self._sent_at = int(steps)
        return np.bool_(receives), np.bool_(sends)

    @property
    def _dtype(self) -> tf.DType:
        """The dtype in which weights are sent: exact for every dtype that Keras trains in."""
        wide = any(weight.dtype == tf.float64 for weight in self._weights.values())
        return tf.float64 if wide else tf.float32

    def _sizes(self) -> list[int]:
        return [weight.shape.num_elements() for weight in self._weights.values()]

    def _flat(self) -> tf.Tensor:
        parts = [
            tf.reshape(tf.cast(weight.read_value(), self._dtype), [-1])
            for weight in self._weights.values()
        ]
        return tf.concat(parts, axis=0)

    def _pull(self, force: tf.Tensor) -> None:
        """Subtract the force from the weights."""
        sizes = self._sizes()
        parts = tf.split(tf.ensure_shape(force, [sum(sizes)]), sizes)
        for weight, part in zip(self._weights.values(), parts, strict=True):
            weight.assign_sub(
                tf.cast(tf.reshape(part, weight.shape), weight.dtype), read_value=False
            )

    # --- the beginning and the end ------------------------------------------------------

    def _open(self, weights: Mapping[str, tf.Variable]) -> None:
        """Open the message channels and set the centre. **Ranks:** all."""
        self._weights = dict(weights)
        comm, extra = self._comm, self._servers == [self._comm.messages.centre_rank]
        messages = comm.messages.open_to_centre() if extra else comm.messages.open_own()
        dtype = np.dtype(self._dtype.as_numpy_dtype)
        parts = cut(sum(self._sizes()), self._servers)
        self._worker = EasgdWorker(messages, comm.rank, parts, dtype, comm.membership)
        if comm.rank in self._servers:
            everyone = range(comm.topology.size)
            self._server = ServerThread(CentreServer(messages, everyone, comm.membership))
        self._set_centre()
        atexit.register(self._worker.stop)

    def _opened(self) -> EasgdWorker:
        assert self._worker is not None, "the first update opens it"
        return self._worker

    def _set_centre(self) -> None:
        """Initialize the centre with rank 0's weights. **Ranks:** all."""
        if self._server is not None:
            self._server.start()
        if self._comm.rank == CHIEF:
            self._opened().start(self._alpha, self._flat().numpy())
        self._comm.gather_objects("the centre is set")
        self._serve()

    def _serve(self) -> None:
        """Allow ranks to leave from now on, and start the thread of a server's rank."""
        # After a training, if `begin` was not called again, the centre has its last values
        if not self._trains:
            self._trains = True
            self._comm.membership.allow_leaving(self._servers)
            if self._server is not None:
                self._server.start()

    def begin(self) -> None:
        """Set the centre to rank 0's weights, for instance at the beginning of another `fit`.

        **Ranks:** all, with equal weights, outside of traced code.
        """
        if self._worker is None:
            return
        if self._worker.waits:
            self._worker.take()
        self._trains = False  # An error may have ended the training before
        self._comm.membership.forbid_leaving()
        self._comm.gather_objects("no force is under way")
        self._set_centre()
        self._sent_at = int(self.executor.steps.numpy())

    def centre(self) -> dict[str, np.ndarray] | None:
        """Return the current centre, by variable; None if no training is under way.

        **Ranks:** any, outside of traced code; it waits for the servers only.
        """
        return self._by_variable(self._opened().read()) if self._trains else None

    def end(self, statistics: np.ndarray | None = None) -> np.ndarray:
        """Wait until all ranks have ended their training; set the weights to the centre.

        Args:
            statistics: float64, of this rank, equally many on all; None: the model has none.

        Returns:
            Their averages over the ranks, or this rank's own if they are not averaged.

        **Ranks:** all that still train, outside of traced code. From then on a rank that ends
        without a message makes the others end, as in every training.
        """
        own_statistics = np.zeros(0) if statistics is None else statistics
        if self._worker is None:
            return own_statistics
        self._serve()  # This rank may not have exchanged since the previous training ended
        centre, averages = self._worker.end(own_statistics)
        if self._server is not None:
            self._server.end()
        self._trains = False
        for path, value in self._by_variable(centre).items():
            self._weights[path].assign(tf.cast(value, self._weights[path].dtype))
        self._comm.membership.forbid_leaving()
        return averages if self._averages_statistics else own_statistics

    def _by_variable(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(flat, np.cumsum(self._sizes())[:-1])
        return {
            path: part.reshape(weight.shape)
            for (path, weight), part in zip(self._weights.items(), parts, strict=True)
        }
