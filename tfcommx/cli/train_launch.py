"""Starts `tfcommx train` on several ranks as `tfcommx run` does; Ctrl-C saves first."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

from tfcommx.cli.environment import quiet_horovod
from tfcommx.comm.allocation import Host
from tfcommx.comm.horovodrun import Launch, LaunchError, Running, on_end_signals
from tfcommx.comm.rank_lines import RankLines
from tfcommx.training.signals import STOP_FILE

# Exit status of a rank after an error that the user can fix
USER_ERROR = 2


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
    if sys.stdout.isatty():
        words = [*words, "--terminal", os.ttyname(sys.stdout.fileno())]
    quiet_horovod()
    command = (sys.executable, "-m", "tfcommx.cli.main", *words)
    running = Running(Launch(tuple(hosts), command))
    stop = Stop(running, folder, saves)
    on_end_signals(stop.ask)
    lines = RankLines()
    status = running.wait(lines)
    if stop.number:
        sys.exit(128 + stop.number)
    if status:
        refuse(running, status, lines)


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

    def __init__(self, running: Running, folder: Path, saves: bool = True) -> None:
        self.running, self.file, self.saves = running, folder / STOP_FILE, saves
        # The first signal; 0: none
        self.number = 0
        # An earlier run's
        self.file.unlink(missing_ok=True)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Ask the ranks to save and stop; end them the second time, or if they do not save."""
        again, self.number = self.number, self.number or number
        if again or not self.saves:
            self.running.terminate()
            return
        print("Saving before the run stops. Once more ends it at once.", file=sys.stderr)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()
        except OSError:
            self.running.terminate()
