"""Elastic averaging: each rank trains its own weights, tied to a common centre as by springs.

    rank 0   server thread: centre        no rank waits for another:
    rank 0   steps . . . . . . . .        a slow one exchanges less often,
    rank 1   steps . . . . . . . .        one that is gone is not missed
    rank 2   steps   .   .   .   .

    server="thread"       the centre is a thread's of rank 0
    server="sharded"      each rank's thread has an equal range of it
    server="extra_rank"   one more process has it, which does not train

Every few steps a rank sends its weights x to the server and receives the force alpha (x - centre),
which pulls the rank towards the centre and the centre towards the rank. Nothing else travels, and
the centre is what is trained: at the end of `fit` all ranks have it.

**Source:** Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD" (NIPS 2015),
Algorithms 1 (EASGD) and 2 (EAMSGD), asynchronous. We differ: the elastic step follows the gradient
step instead of sharing its point, and by default the rank does not wait for the force. With Keras's
SGD(momentum=..., nesterov=True) it is EAMSGD, except that Keras keeps the weights at the point
where the gradient is taken, and the exchange takes place there.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.comm.centre_server import CentreServer, cut
from tfcommx.comm.launcher import CENTRE_LAUNCH
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies.base import StrategyRun
from tfcommx.strategies.centre import END_SECONDS, Worker
from tfcommx.terms import MPI_LAUNCH, Plan, PlanError, check_name, check_whole
from tfcommx.terms.checks import plain_number

log = logging.getLogger("tfcommx")

CHIEF = 0  # The rank whose weights the centre begins with
# Alpha up to which a delayed force is stable while learning rate x curvature is at most 1
STABLE_DELAYED = 2 / 3
# A blocking exchange is stable up to here, at any learning rate at which the rank alone is
STABLE_BLOCKING = 1.0
SERVERS = ("thread", "extra_rank", "sharded")
STATISTICS = ("average", "own")


@dataclass(frozen=True)
class ElasticAveraging:
    """Train each rank by itself and pull it, every few steps, towards a centre that all share.

    >>> import tfcommx as cx
    >>> cx.strategies.ElasticAveraging(every=4)
    ElasticAveraging(every=4, beta=0.9, alpha=None, blocking=False, statistics='average', \
server='thread')

    It needs messages, and ranks that may end while others go on: `tfcommx run --mpi
    --mpi-args=--enable-recovery ...`. Without `--enable-recovery` Open MPI ends all ranks if one
    dies.

    A rank that ends or dies leaves the others training; if a server dies, all end and name it. With
    "sharded" every rank is a server. With "extra_rank" none is that trains, so each may die.

    The force is taken from weights as they were d steps ago. Per direction of curvature h, with
    r = 1 - (1 - learning rate x h)^d, it is stable if alpha <= (4 - 2r)/(4 - r): the paper's
    condition for round-robin exchanges, with r in the place of its learning rate. For r up to 1
    that is alpha <= 2/3. A blocking exchange is stable for alpha <= 1. Larger ones are warned of.

    Weights that are not finite are not sent: the centre leaves them out, with a warning.

    **Ranks:** all, with equal options. **Cost:** 8 bytes an entry per exchange (16 in float64),
    all of them through the server's link; there a thread that does four passes over the weights per
    exchange. With "sharded" each of p ranks carries and does 1/p of that, in p messages each way
    per exchange. With "extra_rank" one more process, without TensorFlow.
    **Raises:** PlanError for options out of range.
    """

    # Steps between two exchanges of a rank, an integer >= 1: the paper's period tau, for which it
    # tries 1 to 64; Theano-MPI found 1 best on 8 GPUs
    every: int = 10
    # p times the moving rate, > 0; 0.9 as in the paper's experiments
    beta: float = 0.9
    # The moving rate itself, > 0; None: beta / p with p ranks. Theano-MPI: 0.5 on 8 GPUs
    alpha: float | None = None
    # Wait for each force; False: go on, and apply it when it is there
    blocking: bool = False
    # What layers keep beside what they train, such as batch norm's means, at the end of `fit`:
    # "average" over the ranks, or each rank's "own"
    statistics: str = "average"
    # Where the centre is: in a "thread" of rank 0; "sharded": an equal range of it in a thread of
    # each rank; in an "extra_rank", a process that `tfcommx centre` makes of the launch's last
    server: str = "thread"

    keeps_weights_equal: ClassVar[bool] = False
    updates_alike: ClassVar[bool] = False
    reduces_to_root: ClassVar[bool] = False
    shards_weights: ClassVar[bool] = False
    # Ranks take steps, and whole epochs, without each other
    in_lock_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("every", "beta", "alpha"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        if check_whole("every", self.every) < 1:
            raise PlanError(
                f"`every` must be an integer >= 1, in steps. Received {self.every!r}. 10 is the "
                "default."
            )
        for name in ("beta", "alpha"):
            value = getattr(self, name)
            if (name, value) == ("alpha", None):
                continue
            if not isinstance(value, int | float) or not 0 < value < np.inf:
                raise PlanError(f"`{name}` must be a finite number > 0. Received {value!r}.")
        check_name("statistics", self.statistics, STATISTICS)
        check_name("server", self.server, SERVERS)

    def moving_rate(self, ranks: int) -> float:
        """Return alpha for so many ranks: beta / p, if it was not given.

        >>> ElasticAveraging().moving_rate(3)
        0.3
        """
        return self.beta / ranks if self.alpha is None else self.alpha

    def check(self, plan: Plan) -> None:
        """Refuse a plan that exchanges gradients in a way of its own. **Raises:** PlanError."""
        for bucket in plan.buckets:
            own = bucket.selection != "all" or bucket.momentum or bucket.clip_norm
            if own or bucket.route != "allreduce" or bucket.wire != "plain":
                raise PlanError(
                    f"{self.__class__.__name__} exchanges whole weights and no gradients. Received "
                    f"a scheme with route={bucket.route!r}, selection={bucket.selection!r}, "
                    f"wire={bucket.wire!r} for {bucket.variables[0]!r}. Leave `scheme` out."
                )
        if plan.operation != "average":
            raise PlanError(
                f"{self.__class__.__name__} exchanges no gradients. Received op="
                f"{plan.operation!r}. Leave `op` out."
            )

    def start(self, executor: PlanExecutor) -> ElasticRun:
        """Get ready for the steps of one plan; the exchange begins with the first step.

        **Raises:** PlanError without an MPI launch, and for "extra_rank" without one whose last
        process is `tfcommx centre`'s.
        """
        comm, alpha = executor.comm, self.moving_rate(executor.comm.topology.size)
        if not comm.has_messages:
            raise PlanError(
                "Elastic averaging sends messages between two ranks, which need an MPI launch: "
                f"{MPI_LAUNCH} --mpi-args=--enable-recovery. Received a Gloo launch."
            )
        if self.server == "extra_rank" and comm.centre_rank is None and comm.topology.size > 1:
            raise PlanError(
                "server='extra_rank' needs a launch whose last process holds the centre: "
                f"{CENTRE_LAUNCH}. Received one of {comm.topology.size} ranks that all train."
            )
        limit = STABLE_BLOCKING if self.blocking else STABLE_DELAYED
        if comm.topology.size > 1 and alpha > limit and comm.rank == CHIEF:
            log.warning(
                "alpha = %g is more than %.3g, up to which a %s exchange is stable%s. Lower alpha "
                "(or beta, which is alpha times the number of ranks).",
                alpha,
                limit,
                "blocking" if self.blocking else "delayed",
                "" if self.blocking else " while learning rate x curvature is at most 1",
            )
        return ElasticRun(executor, self, alpha)

    def servers(self, comm: Comm) -> list[int]:
        """Return the ranks that hold the centre, each a range of it."""
        everyone = list(range(comm.topology.size))
        return {"thread": everyone[:1], "sharded": everyone}.get(self.server, [comm.centre_rank])


class ElasticRun(StrategyRun):
    """The strategy at work on one plan."""

    def __init__(self, executor: PlanExecutor, strategy: ElasticAveraging, alpha: float) -> None:
        super().__init__(executor)
        self._strategy, self._alpha = strategy, alpha
        self._comm = executor.comm
        self._weights: Mapping[str, tf.Variable] = {}
        self._worker: Worker | None = None
        self._server: CentreServer | None = None
        # Between the beginning of a training and its end; then the server has a thread
        self._trains = False
        self._serving: threading.Thread | None = None
        self._stopped = threading.Event()
        self._servers = strategy.servers(self._comm)
        # Step at which the last snapshot was sent
        self._sent_at = int(executor.steps.numpy())

    def exchange(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return this rank's own gradients; count the step."""
        # The run that finds no more data carries out what does not wait for data: no step
        with tf.control_dependencies(list(gradients.values())[-1:]):
            self.executor.steps.assign_add(1)
        return dict(gradients)

    # What follows is a graph already, also in a caller's loop.
    @tf.autograph.experimental.do_not_convert
    def update(
        self,
        apply: Callable[[], None],
        gradients: Sequence[tf.Tensor],
        weights: Mapping[str, tf.Variable],
        state: Sequence[tf.Variable] = (),
    ) -> None:
        """Apply this rank's update; exchange with the centre if it is time."""
        if self._comm.topology.size > 1 and not self._weights:
            with tf.init_scope():
                self._open(weights)
        apply()
        if self._comm.topology.size == 1:
            return
        with tf.device("/cpu:0"):
            # Steps as they are after this one, whose gradients they have waited for
            steps = self.executor.steps.read_value()
            if self._strategy.blocking:
                tf.cond(steps % self._strategy.every == 0, self._exchange_now, lambda: None)
                return
            receives, sends = tf.numpy_function(self._turn, [steps], [tf.bool, tf.bool])
            tf.cond(receives, self._receive, lambda: None)
            tf.cond(sends, self._send, lambda: None)

    def weights_are_equal(self) -> bool:
        """Return False: they are not, before the end of the training."""
        return False

    # --- the exchange, in the graph -----------------------------------------------------

    def _exchange_now(self) -> None:
        def exchange(snapshot: np.ndarray) -> np.ndarray:
            self._serve()
            return self._worker.exchange(snapshot)

        self._pull(tf.numpy_function(exchange, [self._flat()], self._dtype))

    def _receive(self) -> None:
        self._pull(tf.numpy_function(self._worker.take, [], self._dtype))

    def _send(self) -> None:
        def begin(snapshot: np.ndarray) -> np.ndarray:
            self._serve()
            self._worker.begin(snapshot)
            return np.int64(0)

        tf.numpy_function(begin, [self._flat()], tf.int64)

    def _turn(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell whether a force is applied in this step, and whether a snapshot is sent."""
        receives = self._worker.arrived()
        sends = steps - self._sent_at >= self._strategy.every
        sends = bool(sends and (receives or not self._worker.waits))
        if sends:
            self._sent_at = int(steps)
        return np.bool_(receives), np.bool_(sends)

    @property
    def _dtype(self) -> tf.DType:
        """The dtype in which weights travel: exact for all that Keras trains in."""
        wide = any(one.dtype == tf.float64 for one in self._weights.values())
        return tf.float64 if wide else tf.float32

    def _sizes(self) -> list[int]:
        return [one.shape.num_elements() for one in self._weights.values()]

    def _flat(self) -> tf.Tensor:
        parts = [
            tf.reshape(tf.cast(one.read_value(), self._dtype), [-1])
            for one in self._weights.values()
        ]
        return tf.concat(parts, axis=0)

    def _pull(self, force: tf.Tensor) -> None:
        """Subtract the force from the weights."""
        sizes = self._sizes()
        parts = tf.split(tf.ensure_shape(force, [sum(sizes)]), sizes)
        for one, part in zip(self._weights.values(), parts, strict=True):
            one.assign_sub(tf.cast(tf.reshape(part, one.shape), one.dtype), read_value=False)

    # --- the beginning and the end ------------------------------------------------------

    def _open(self, weights: Mapping[str, tf.Variable]) -> None:
        """Open the messages, and the centre. **Ranks:** all."""
        self._weights = dict(weights)
        comm, extra = self._comm, self._strategy.server == "extra_rank"
        messages = comm.open_centre_messages() if extra else comm.open_own_messages()
        dtype = np.dtype(self._dtype.as_numpy_dtype)
        parts = cut(sum(self._sizes()), self._servers)
        self._worker = Worker(messages, comm.rank, parts, dtype, comm.departures)
        if comm.rank in self._servers:
            self._server = CentreServer(messages, range(comm.topology.size), comm.departures)
        self._set_centre()
        atexit.register(self._worker.stop)

    def _set_centre(self) -> None:
        """Let the centre begin with rank 0's weights. **Ranks:** all."""
        self._start_serving()
        if self._comm.rank == CHIEF:
            self._worker.start(self._alpha, self._flat().numpy())
        self._comm.gather_objects("the centre is set")
        self._serve()

    def _serve(self) -> None:
        """Let ranks leave from now on, and on a server's rank a thread answer.

        After the end of a training, if it has not begun anew: it goes on from the centre.
        """
        if not self._trains:
            self._trains = True
            self._comm.departures.allow(self._servers)
            self._start_serving()

    def _start_serving(self) -> None:
        if self._server is None or self._serving is not None:
            return
        self._stopped.clear()
        self._serving = threading.Thread(
            target=self._server.run, args=(self._stopped,), name="tfcommx-centre", daemon=True
        )
        self._serving.start()
        # MPI must not be taken down under it
        atexit.register(self._stop_serving)

    def _stop_serving(self) -> None:
        if self._serving is not None:
            self._stopped.set()
            self._serving.join(END_SECONDS)
            self._serving = None
            atexit.unregister(self._stop_serving)

    def begin(self) -> None:
        """Set the centre to rank 0's weights, as at the beginning of another `fit`.

        **Ranks:** all, with equal weights, outside of traced code.
        """
        if self._worker is None:
            return
        if self._worker.waits:
            self._worker.take()
        self._trains = False  # An error may have ended the training before
        self._comm.departures.forbid()
        self._comm.gather_objects("no force is under way")
        self._set_centre()
        self._sent_at = int(self.executor.steps.numpy())

    def centre(self) -> dict[str, np.ndarray] | None:
        """Return the centre as it is now, by variable; None if no training is under way.

        **Ranks:** any, outside of traced code; it waits for the servers only.
        """
        return self._by_variable(self._worker.read()) if self._trains else None

    def end(self, statistics: np.ndarray | None = None) -> np.ndarray:
        """Wait until all ranks have ended their training; set the weights to the centre.

        Args:
            statistics: float64, of this rank, equally many on all; None: there are none.

        Returns:
            Their averages over the ranks.

        **Ranks:** all that still train, outside of traced code. From then on a rank that ends
        without a word makes the others end, as in every training.
        """
        mine = np.zeros(0) if statistics is None else statistics
        if self._worker is None:
            return mine
        self._serve()  # Since the end before this rank may have exchanged nothing
        final = self._worker.end(mine)
        self._stop_serving()
        if self._server is not None:
            self._server.finish()
        self._trains = False
        for path, value in self._by_variable(final.centre).items():
            self._weights[path].assign(tf.cast(value, self._weights[path].dtype))
        self._comm.departures.forbid()
        return final.statistics if self._strategy.statistics == "average" else mine

    def _by_variable(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(flat, np.cumsum(self._sizes())[:-1])
        return {
            path: part.reshape(one.shape)
            for (path, one), part in zip(self._weights.items(), parts, strict=True)
        }


def in_lock_step(strategy: object) -> bool:
    """Tell whether the ranks take every step together, as with all strategies but this one."""
    return bool(getattr(strategy, "in_lock_step", True))
