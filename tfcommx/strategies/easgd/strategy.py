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

**Source:** Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD" (NIPS 2015),
Algorithms 1 (EASGD) and 2 (EAMSGD), asynchronous. We differ: the elastic step follows the gradient
step instead of sharing its point, and by default the rank does not wait for the force. With Keras's
SGD(momentum=..., nesterov=True) it is EAMSGD, except that Keras keeps the weights at the point
where the gradient is taken, and the exchange takes place there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from tfcommx.collectives.comm import Comm
from tfcommx.core import (
    MPI_LAUNCH,
    ConfigurationError,
    Plan,
    check_name,
    check_number,
    check_whole,
)
from tfcommx.launch.launcher import CENTRE_LAUNCH
from tfcommx.runtime.executor import only_plan
from tfcommx.runtime.gradient_state import Executor
from tfcommx.strategies.easgd.run import CHIEF, ElasticRun
from tfcommx.strategies.strategy import Strategy

log = logging.getLogger("tfcommx")

# Alpha up to which a delayed force is stable while learning rate x curvature is at most 1
STABLE_DELAYED = 2 / 3
# A blocking exchange is stable up to here, at any learning rate at which the rank alone is
STABLE_BLOCKING = 1.0
SERVERS = ("thread", "extra_rank", "sharded")
STATISTICS = ("average", "own")


@dataclass(frozen=True)
class ElasticAveraging(Strategy):
    """Train each rank alone and pull it, every few steps, towards a centre that all share.

    >>> import tfcommx as cx
    >>> cx.strategies.ElasticAveraging(every=4)
    ElasticAveraging(every=4, beta=0.9, alpha=None, blocking=False, statistics='average', \
server='thread')

    It needs messages, and ranks that may end while others continue: `tfcommx run --mpi
    --mpi-args=--enable-recovery ...`. Without `--enable-recovery` Open MPI ends all ranks if one
    dies.

    If a rank ends or dies, the others continue to train; if a server dies, all end and name it.
    With "sharded" every rank is a server. With "extra_rank" no rank that trains is one, so each may
    die.

    The force is computed from the weights of d steps ago. Per direction of curvature h, with
    r = 1 - (1 - learning rate x h)^d, it is stable if alpha <= (4 - 2r)/(4 - r): the paper's
    condition for round-robin exchanges, with r in place of its learning rate. For r up to 1
    that is alpha <= 2/3. A blocking exchange is stable for alpha <= 1. A larger alpha causes a
    warning.

    Weights that are not finite are not sent: the centre leaves them out, with a warning.

    **Ranks:** all, with equal options. **Cost:** 8 bytes an entry per exchange (16 in float64),
    all of them through the server's link; on the server a thread that makes four passes over the
    weights per exchange. With "sharded" each of p ranks has 1/p of that traffic and work, in p
    messages each way per exchange. With "extra_rank" one more process, without TensorFlow.
    **Raises:** ConfigurationError for options out of range.
    """

    # Steps between two exchanges of a rank, an integer >= 1: the paper's period tau, for which it
    # tries 1 to 64; Theano-MPI found 1 best on 8 GPUs
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

    def moving_rate(self, ranks: int) -> float:
        """Return alpha for a number of ranks: `alpha` if set, else beta / ranks.

        >>> ElasticAveraging().moving_rate(3)
        0.3
        """
        return self.beta / ranks if self.alpha is None else self.alpha

    def check(self, plan: Plan) -> None:
        """Refuse a plan that differs from plain Horovod: no gradients are exchanged.

        **Raises:** ConfigurationError.
        """
        for bucket in plan.buckets:
            exchanges_differently = bucket.selection != "all" or bucket.momentum or bucket.clip_norm
            if exchanges_differently or bucket.route != "allreduce" or bucket.wire != "plain":
                raise ConfigurationError(
                    f"{self.__class__.__name__} exchanges whole weights and no gradients. Received "
                    f"a scheme with route={bucket.route!r}, selection={bucket.selection!r}, "
                    f"wire={bucket.wire!r} for {bucket.variables[0]!r}. Leave `scheme` out."
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
        comm, alpha = executor.comm, self.moving_rate(executor.comm.topology.size)
        if not comm.messages.possible:
            raise ConfigurationError(
                "Elastic averaging sends messages between two ranks, which need an MPI launch: "
                f"{MPI_LAUNCH} --mpi-args=--enable-recovery. Received a Gloo launch."
            )
        if (
            self.server == "extra_rank"
            and comm.messages.centre_rank is None
            and comm.topology.size > 1
        ):
            raise ConfigurationError(
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
        averages = self.statistics == "average"
        return ElasticRun(
            only_plan(executor), self.servers(comm), alpha, self.every, self.blocking, averages
        )

    def servers(self, comm: Comm) -> list[int]:
        """Return the ranks that hold the centre, each a range of it."""
        everyone, centre = list(range(comm.topology.size)), comm.messages.centre_rank
        by_name = {"thread": everyone[:1], "sharded": everyone}
        return by_name.get(self.server, [] if centre is None else [centre])
