"""Starts `tfcommx train` on several ranks as `tfcommx run` does; Ctrl-C saves first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tfcommx.cli.elastic_options import Elastic, supervise
from tfcommx.cli.environment import quiet_horovod
from tfcommx.comm.allocation import Host
from tfcommx.comm.horovodrun import Launch, LaunchError, Running, on_end_signals
from tfcommx.comm.rank_lines import RankLines
from tfcommx.comm.remote_hosts import RemoteHosts
from tfcommx.elastic.supervisor import USER_ERROR
from tfcommx.training.signals import STOP_FILE

# Words of `tfcommx` in each generation
TrainWords = Callable[[int], list[str]]


def launch_train(hosts: list[Host], words: list[str], folder: Path, saves: bool = True) -> None:
    """Run `tfcommx WORDS...` on several ranks until they end.

    The first SIGINT (Ctrl-C), SIGTERM or SIGHUP asks the ranks to save and stop, by the file `stop`
    in the run's folder; the second one ends them. horovodrun alone would kill them 5 s after the
    first.

    Args:
        hosts: with a rank on every slot.
        words: command and options of `tfcommx`; `--terminal` is added if there is a terminal.
        folder: of the run.
        saves: whether the ranks save when they are asked to stop; else the first signal ends them.

    **Raises:** LaunchError if a rank fails; SystemExit after a user's error.
    """
    running = Running(Launch(tuple(hosts), train_command(words)))
    stop = Stop(running, folder, saves)
    on_end_signals(stop.ask)
    lines = RankLines()
    status = running.wait(lines)
    if stop.number:
        sys.exit(128 + stop.number)
    if status:
        refuse(running, status, lines)


def train_command(words: list[str]) -> tuple[str, ...]:
    """Return the command of every rank; messages of Horovod about dead ranks are silenced."""
    if sys.stdout.isatty():
        words = [*words, "--terminal", os.ttyname(sys.stdout.fileno())]
    quiet_horovod()
    return (sys.executable, "-m", "tfcommx.cli.main", *words)


def supervise_train(
    elastic: Elastic, hosts: list[Host], ranks: int | None, words: TrainWords, folder: Path
) -> None:
    """Run `tfcommx train` under a supervisor; signals save and end it, as in `launch_train`.

    Args:
        elastic: the options of the supervisor.
        hosts: of -H; empty: those that the script names.
        ranks: -np, or None.
        words: command and options of `tfcommx`.
        folder: of the run.

    **Raises:** LaunchError if the run cannot go on; SystemExit after a user's error.
    """

    def make_launch(chosen: list[Host], generation: int) -> Launch:
        return Launch(tuple(chosen), train_command(words(generation)))

    options = elastic.options(ranks)
    try:
        supervise(
            elastic.source(hosts, "-H", ranks),
            options,
            RemoteHosts(),
            make_launch,
            Stop(None, folder),
        )
    except LaunchError as error:
        if error.status == USER_ERROR:  # A rank has printed it
            sys.exit(USER_ERROR)
        raise


def refuse(running: Running, status: int, lines: RankLines) -> None:
    """End a launch that has failed.

    **Raises:** LaunchError; SystemExit with status 2 if a rank printed a user error.
    """
    first = lines.failure()
    if first and first.status == USER_ERROR:
        sys.exit(USER_ERROR)
    advice = "Add --resume to continue from the last checkpoint."
    raise LaunchError(str(running.failed(status, lines, advice)))


class Stop:
    """Ends a launch when this process gets a signal."""

    def __init__(self, running: Running | None, folder: Path, saves: bool = True) -> None:
        self.running, self.file, self.saves = running, folder / STOP_FILE, saves
        # The first signal; 0: none
        self.number = 0
        # An earlier run's
        self.file.unlink(missing_ok=True)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Ask the ranks to save and stop; end them the second time, or if they do not save."""
        again, self.number = self.number, self.number or number
        if self.running is None:  # A supervisor waits for hosts, and looks at `number`
            return
        if again or not self.saves:
            self.running.terminate()
            return
        print("Saving before the run stops. Once more ends it at once.", file=sys.stderr)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()
        except OSError:
            self.running.terminate()
