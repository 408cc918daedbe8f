"""Elastic averaging: each rank trains its own weights, tied to a common centre as by springs.

    rank 0   server thread: centre        no rank waits for another:
    rank 0   steps . . . . . . . .        a slow one exchanges less often,
    rank 1   steps . . . . . . . .        and the loss of one stops no other
    rank 2   steps   .   .   .   .

    server="thread"       a thread of rank 0 holds the centre
    server="sharded"      a thread of each rank holds an equal range of it
    server="extra_rank"   an additional process holds it, which does not train

Every few steps a rank sends its weights x to the server and receives the force alpha (x - centre),
which pulls the rank towards the centre and the centre towards the rank. Nothing else is sent. The
centre is the trained model: at the end of `fit` all ranks have it.

    begin   the centre starts from rank 0's weights
    steps   every few: send a snapshot of the weights; subtract the force when it has arrived
    end     wait for all ranks that still train; the weights are set to the centre

**Source:** Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD" (NIPS 2015),
Algorithms 1 (EASGD) and 2 (EAMSGD), asynchronous. We differ: the elastic step follows the gradient
step instead of sharing its point, and by default the rank does not wait for the force. With Keras's
SGD(momentum=..., nesterov=True) it is EAMSGD, except that Keras keeps the weights at the point
where the gradient is taken, and the exchange takes place there. Ma, Mao, Taylor, "Theano-MPI"
(2016), section 4: a worker and a separate server exchange by SendRecv, in the order of arrival;
that is `blocking=True, server="extra_rank"`, and `every=1, alpha=0.5` were best.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import MPI_LAUNCH, ConfigurationError, Plan, check_name, check_number, check_whole
from tfcommx.core.errors import log
from tfcommx.launch.launcher import CENTRE_LAUNCH
from tfcommx.runtime.executor import PlanExecutor, only_plan
from tfcommx.runtime.gradient_state import Executor
from tfcommx.strategies.background import END_SECONDS
from tfcommx.strategies.easgd.server import CentreServer, cut
from tfcommx.strategies.easgd.worker import EasgdWorker
from tfcommx.strategies.strategy import Strategy, StrategyRun, Update

# Alpha up to which a delayed force is stable while learning rate x curvature is at most 1. It is
# computed from the weights of d steps ago. Per direction of curvature h, with
# r = 1 - (1 - learning rate x h)^d, it is stable if alpha <= (4 - 2r)/(4 - r): the paper's
# condition for round-robin exchanges, with r in place of its learning rate. For r <= 1 that is 2/3
STABLE_DELAYED = 2 / 3
# A blocking exchange is stable up to here, at any learning rate at which the rank alone is
STABLE_BLOCKING = 1.0
SERVERS = ("thread", "extra_rank", "sharded")
# On Fashion-MNIST both were equal but for noise; averages are the same on all ranks
STATISTICS = ("average", "own")
CHIEF = 0  # The rank whose weights the centre begins with


@dataclass(frozen=True)
class ElasticAveraging(Strategy):
    """Train each rank alone and pull it, every few steps, towards a centre that all share.

    >>> import tfcommx as cx
    >>> cx.strategies.ElasticAveraging(every=4)
    ElasticAveraging(every=4, beta=0.9, alpha=None, blocking=False, statistics='average', \
server='thread')

    It needs an MPI launch: `tfcommx run --mpi --mpi-args=--enable-recovery ...`. If a rank ends or
    dies, the others continue to train; if a server dies, all end and name it. An alpha that may be
    unstable causes a warning. Weights that are not finite are not sent, with a warning.

    **Ranks:** all, with equal options. **Cost:** 8 bytes an entry per exchange (16 in float64),
    all of them through the server's link; on the server a thread that makes four passes over the
    weights per exchange. With "sharded" each of p ranks has 1/p of that traffic and work, in p
    messages each way per exchange. With "extra_rank" one more process, without TensorFlow.
    **Raises:** ConfigurationError for options out of range.
    """

    # Steps between two exchanges of a rank, an integer >= 1: the paper's period tau, for which it
    # tries 1 to 64; Theano-MPI found 1 best on 8 GPUs. At 10, three ranks on Fashion-MNIST were .4
    # points below synchronous training, with a tenth of its bytes
    every: int = 10
    # p times the moving rate, > 0; 0.9 as in the paper's experiments
    beta: float = 0.9
    # The moving rate itself, > 0; None: beta / p with p ranks. Theano-MPI: 0.5 on 8 GPUs
    alpha: float | None = None
    # Wait for each force; False: continue, and apply it when it has arrived
    blocking: bool = False
    # Layers' values that are not trained, such as batch norm's means, at the end of `fit`:
    # "average" over the ranks, or each rank's "own"
    statistics: str = "average"
    # Location of the centre: a "thread" of rank 0; "sharded": an equal range of it in a thread of
    # each rank; an "extra_rank": the launch's last process, which runs `tfcommx centre`
    server: str = "thread"

    keeps_weights_equal: ClassVar[bool] = False
    # Ranks take steps, and whole epochs, independently
    in_lock_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_whole("every", self.every, least=1))
        object.__setattr__(self, "beta", check_number("beta", self.beta, "> 0"))
        if self.alpha is not None:
            object.__setattr__(self, "alpha", check_number("alpha", self.alpha, "> 0"))
        check_name("statistics", self.statistics, STATISTICS)
        check_name("server", self.server, SERVERS)

    def check(self, plan: Plan) -> None:
        """Refuse a plan that differs from plain Horovod: no gradients are exchanged."""
        for bucket in plan.buckets:
            exchanges_differently = bucket.selection != "all" or bucket.momentum or bucket.clip_norm
            exchanges_differently = exchanges_differently or bucket.compresses
            if exchanges_differently or bucket.route != "allreduce" or bucket.wire != "plain":
                raise ConfigurationError(
                    f"{self.__class__.__name__} exchanges whole weights and no gradients. Received "
                    f"a scheme with route={bucket.route!r}, selection={bucket.selection!r}, "
                    f"compression={bucket.compression!r}, wire={bucket.wire!r} for "
                    f"{bucket.variables[0]!r}. Leave `scheme` out."
                )
        if plan.operation != "average":
            raise ConfigurationError(
                f"{self.__class__.__name__} exchanges no gradients. Received op="
                f"{plan.operation!r}. Leave `op` out."
            )

    def start(self, executor: Executor) -> ElasticRun:
        """Prepare the steps of one plan; the exchange begins with the first step.

        **Raises:** ConfigurationError without an MPI launch, and for "extra_rank" without one whose
        last process is `tfcommx centre`'s.
        """
        comm, ranks = executor.comm, executor.comm.topology.size
        alpha = self.beta / ranks if self.alpha is None else self.alpha
        if not comm.messages.possible:
            raise ConfigurationError(
                "Elastic averaging sends messages between two ranks, which need an MPI launch: "
                f"{MPI_LAUNCH} --mpi-args=--enable-recovery. Received a Gloo launch."
            )
        if self.server == "extra_rank" and comm.messages.centre_rank is None and ranks > 1:
            raise ConfigurationError(
                "server='extra_rank' needs a launch whose last process holds the centre: "
                f"{CENTRE_LAUNCH}. Received one of {ranks} ranks that all train."
            )
        limit = STABLE_BLOCKING if self.blocking else STABLE_DELAYED
        # One rank warns, because all have equal options
        if ranks > 1 and alpha > limit and comm.rank == CHIEF:
            log.warning(
                "alpha = %g is more than %.3g, up to which a %s exchange is stable%s. Lower alpha "
                "(or beta, which is alpha times the number of ranks).",
                alpha,
                limit,
                "blocking" if self.blocking else "delayed",
                "" if self.blocking else " while learning rate x curvature is at most 1",
            )
        return ElasticRun(only_plan(executor), self, alpha)

    def servers(self, comm: Comm) -> list[int]:
        """Return the ranks that hold the centre, each a range of it."""
        everyone, centre = list(range(comm.topology.size)), comm.messages.centre_rank
        by_name = {"thread": everyone[:1], "sharded": everyone}
        return by_name.get(self.server, [] if centre is None else [centre])


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
        # A daemon, because Python waits for other threads before it calls the exit hook below
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

    def __init__(self, executor: PlanExecutor, options: ElasticAveraging, alpha: float) -> None:
        super().__init__(executor)
        self._comm, self._options, self._alpha = executor.comm, options, alpha
        # The ranks that hold the centre, each a range of it
        self._servers = options.servers(executor.comm)
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

    def update(self, step: Update) -> None:
        """Apply this rank's update; exchange with the centre if an exchange is due."""
        if self._comm.topology.size > 1 and not self._weights:
            # Outside of the graph, because opening channels and setting the centre need all ranks
            # once, and not once a trace
            with tf.init_scope():
                self._open(step.weights)
        step.apply()
        if self._comm.topology.size == 1:
            return
        with tf.device("/cpu:0"):
            # Includes this step, which `exchange` has counted
            steps = self.executor.steps.read_value()
            if self._options.blocking:
                tf.cond(steps % self._options.every == 0, self._exchange_now, lambda: None)
                return
            # By Python, because only MPI knows whether a force has arrived
            receives, sends = tf.numpy_function(self._turn, [steps], [tf.bool, tf.bool])
            # First, so that the next snapshot contains the force
            tf.cond(receives, self._receive, lambda: None)
            tf.cond(sends, self._send, lambda: None)

    def weights_are_equal(self) -> bool:
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
        due = steps - self._sent_at >= self._options.every
        # One snapshot is in transit at a time: a slow server makes a rank send less often
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
        # No rank sends a snapshot before the servers have the START
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
        # A force in transit belongs to the training before, and is dropped
        if self._worker.waits:
            self._worker.take()
        self._trains = False  # An error may have ended the training before
        self._comm.membership.forbid_leaving()
        # No snapshot of the training before may reach the new centre
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

        **Ranks:** all that still train, outside of traced code.
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
        # From here on a rank that ends without a message makes the others end
        self._comm.membership.forbid_leaving()
        return averages if self._options.statistics == "average" else own_statistics

    def _by_variable(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(flat, np.cumsum(self._sizes())[:-1])
        return {
            path: part.reshape(weight.shape)
            for (path, weight), part in zip(self._weights.items(), parts, strict=True)
        }
