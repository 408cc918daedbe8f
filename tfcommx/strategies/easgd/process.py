"""The process that holds the centres of elastic averaging, next to the ranks that train.

    tfcommx run -np 4 --mpi --mpi-args=--enable-recovery -- tfcommx centre -- python train.py

    ranks 0, 1, 2    python train.py       size() is 3; Horovod knows nothing of the fourth
    process 3        this file             a centre for each optimizer that sends START

`tfcommx centre` (cli/centre.py) runs this file in the launch's last process. It takes part in the
watch: training continues without ranks that die, and if this process dies, all ranks end and name
it. It ends when all ranks have sent END, or are gone.

**Cost:** without TensorFlow, some 50 MB plus the centres; each optimizer's centre stays to the end.
"""

import contextlib
import sys
import time
from collections.abc import Callable

import numpy as np

from tfcommx.collectives import mpi
from tfcommx.collectives.mpi import END
from tfcommx.collectives.point_to_point import Channel, PointToPoint
from tfcommx.core import RankLostError, log
from tfcommx.launch.interpreter import end_at_once
from tfcommx.launch.launcher import launch_interfaces, launcher, on_one_host
from tfcommx.strategies.easgd.server import LOOK_SECONDS, CentreServer
from tfcommx.watch import liveness
from tfcommx.watch.membership import Membership
from tfcommx.watch.stalls import SERVES


class CentreProcess:
    """Answers for every centre of a run, until all ranks that train have ended or are gone."""

    def __init__(self, messages: PointToPoint, ranks: int, membership: Membership) -> None:
        self._messages, self._ranks, self._membership = messages, set(range(ranks)), membership
        # The launch's last process
        self._rank = ranks
        # Ranks that have sent END, and those of them that had failed
        self._ended: set[int] = set()
        self._failed: set[int] = set()
        # The last server waits for its START
        self.servers = [self._next_server(1)]
        # True while a training is under way, in which ranks may leave
        self._trains = False

    def run(self) -> None:
        """Answer until all ranks have ended or are gone.

        **Raises:** RankLostError if all have failed or died, so that the launch fails.
        """
        while self._ranks - self._membership.gone():
            if not self.answer_next():
                # The watch may miss an end: of three ranks that were killed at once it had reported
                # one
                self._membership.find_dead()
                time.sleep(LOOK_SECONDS)
        for server in self.servers:
            server.finish()
        if self._ranks <= self._failed | (self._membership.gone() - self._ended):
            raise RankLostError("All ranks that train have failed or died; no rank has the centre.")
        if len(self.servers) == 1:
            log.warning(
                "No training has used the process that holds the centre. Give "
                "cx.strategies.ElasticAveraging(server='extra_rank'), or launch without `tfcommx "
                "centre`, and one process less."
            )

    def answer_next(self) -> bool:
        """Answer the next message of each centre; return True if any message had arrived."""
        message = self._messages.take(END)
        if message is not None:
            rank, status = message[0], int(message[1].view(np.int32)[0])
            self._ended.add(rank)
            self._membership.mark_gone(rank, "it has ended", True)
            if status:
                self._failed.add(rank)
                log.warning("Rank %d has failed: it ended with exit status %d.", rank, status)
        heard = [server.answer_next() for server in self.servers]
        # There is always one server without a centre, so that the START of another optimizer finds
        # it
        if self.servers[-1].centre is not None:
            self.servers.append(self._next_server(len(self.servers) + 1))
        trains = any(server.trains for server in self.servers)
        if trains != self._trains:
            self._trains = trains
            if trains:
                self._membership.allow_leaving({self._rank})
            else:
                self._membership.forbid_leaving()
        return message is not None or any(heard)

    def _next_server(self, number: int) -> CentreServer:
        return CentreServer(Channel(self._messages, number), self._ranks, self._membership)


def report_once(send: Callable[[bytes], object], period: float) -> None:
    """Report the activity of this process, which does not change, to its watcher."""
    with contextlib.suppress(OSError):
        send(f'at [0, "{SERVES}", ""]\n'.encode())


def main() -> None:
    """Run the process. **Ranks:** the launch's last, while the others call init()."""
    rank, membership = launcher().size, Membership()
    # Its time limit also ends this process, if a rank does not call init()
    mpi.start()
    messages = mpi.MpiPointToPoint(watched=True, lasting=False, with_centre=True)
    liveness.start(
        rank,
        membership,
        report_once,
        launch_interfaces(),
        liveness.Limits(None),
        mpi.gather_with_centre,
        on_one_host(),
        holds=", which holds the centre",
    )
    try:
        CentreProcess(messages, rank, membership).run()
    except Exception:
        # By the hook, which tells the other ranks. Then without the interpreter's shutdown: MPI's
        # waits for the ranks, until the watcher kills this process, and with --enable-recovery
        # mpirun returns 0 for a launch whose processes were all killed by signals
        sys.excepthook(*sys.exc_info())
        end_at_once(1)


if __name__ == "__main__":
    main()
