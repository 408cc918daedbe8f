"""`tfcommx train`: train a model by a recipe.

With `-np` it starts itself on several ranks like `tfcommx run`; Ctrl-C saves first.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from tfcommx.cli import restart_options
from tfcommx.cli.environment import load_tensorflow
from tfcommx.cli.parameters import Changes
from tfcommx.cli.restart_options import RestartOptions
from tfcommx.cli.run import carry_out
from tfcommx.core import LaunchError, Links
from tfcommx.launch.commands import is_local
from tfcommx.launch.horovodrun import NO_ROOM, Launch, discard_unread_output
from tfcommx.launch.hosts import Host, parse_hosts, ranks_on
from tfcommx.launch.launcher import launcher
from tfcommx.launch.supervision import supervision
from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.recipe import read as read_recipe
from tfcommx.report.dry_run import read_alone, show_dry_run
from tfcommx.report.terminal import show_run
from tfcommx.supervisor.supervisor import USER_ERROR, StopSignal
from tfcommx.training.stop_requests import STOP_FILE

# Number of a generation -> command line of `tfcommx`
TrainWords = Callable[[int], list[str]]
# Age of a file `stop`, in seconds, from which it belongs to an earlier run: more than a launcher,
# which may have written it, needs to start rank 0
STALE_SECONDS = 60.0


def launch_train(
    restart: RestartOptions | None,
    hosts: list[Host],
    ranks: int | None,
    words: TrainWords,
    folder: Path,
    saves: bool,
) -> None:
    """Run `tfcommx train` on the hosts until its ranks end; with `restart` under a supervisor.

    **Raises:** LaunchError if a rank fails, or a supervised run cannot continue; SystemExit after a
    user's error.
    """

    def make_launch(chosen: list[Host], generation: int = 0) -> Launch:
        command = [sys.executable, "-m", "tfcommx", *words(generation)]
        if sys.stdout.isatty():  # The ranks' output is a pipe
            command += ["--terminal", os.ttyname(sys.stdout.fileno())]
        # Not its messages about a dead rank, because the launcher names that rank
        os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
        return Launch(tuple(chosen), tuple(command))

    try:
        if restart is not None:
            restart.supervise(hosts, "-H", ranks, make_launch, LaunchStopper(folder))
            return
        launch = make_launch(ranks_on(hosts, ranks, "-H"))
        advice = "Add --resume to continue from the last checkpoint."
        if failure := carry_out(launch, LaunchStopper(folder, saves), advice):
            raise LaunchError(str(failure), USER_ERROR if failure.status == USER_ERROR else 1)
    except LaunchError as error:
        if error.status == USER_ERROR:  # A rank has printed it
            sys.exit(USER_ERROR)
        raise


class LaunchStopper(StopSignal):
    """Asks the ranks to save and stop, by the file `stop`, when this process receives a signal.

    A second signal, or the first if they do not save, ends them.
    """

    def __init__(self, folder: Path, saves: bool = True) -> None:
        super().__init__()
        self.file, self.saves = folder / STOP_FILE, saves
        # The file of an earlier run
        with contextlib.suppress(NotADirectoryError):  # The ranks refuse the folder
            self.file.unlink(missing_ok=True)

    def ask(self, number: int, frame: FrameType | None) -> None:
        again, self.number = self.number, self.number or number
        if self.running is None:  # A supervisor waits for hosts, and checks `number`
            return
        if again or not self.saves:
            self.running.terminate()
            return
        with contextlib.suppress(OSError):  # Such as a full disk, in front of the request
            print("Saving before the run stops. Once more ends it at once.", file=sys.stderr)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()
        except OSError:
            self.running.terminate()


@restart_options.add_options
def train(
    config: Annotated[
        Path, typer.Argument(help="Recipe, a YAML file such as configs/fashion_mnist.yaml.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default runs/NAME of the recipe.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue after the last checkpoint in the run's folder.")
    ] = False,
    settings: Changes = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", "-np", min=1, help="Start this many ranks, here or on -H."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("-H", "--hosts", help="Start ranks on these hosts, such as node1:4,node2:4."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Save and stop after that time; exit status 0.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=NUMBER.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Take a few steps of every phase on synthetic data; predict the run."
        ),
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Folder of a --dry-run in one process: for the scaling efficiency."),
    ] = None,
    terminal: Annotated[str | None, typer.Option(hidden=True)] = None,
    show_report: Annotated[bool, typer.Option("--report/--no-report", hidden=True)] = True,
    *,
    restart: restart_options.RestartOptions,
) -> None:
    """Train a model by a recipe.

    On one machine: `tfcommx train CONFIG --processes 4`. On several: `tfcommx train CONFIG -H
    node1:4,node2:4`, or by another launcher. SIGTERM, SIGINT or SIGUSR1 to any rank, or a file
    `stop` in the run's folder, make it save and stop.
    """
    changes = [*(settings or []), *([] if seed is None else [f"seed={seed}"])]
    recipe = read_recipe(config, changes)
    folder = output or Path("runs") / recipe.name
    # Not on other ranks, whose hosts may not have the folder, because rank 0 writes the report
    alone = () if baseline is None or launcher().rank else tuple(read_alone(baseline))
    if processes or hosts is not None or restart.wanted:
        # This process shows the report, because it knows the terminal's width
        words = ["train", str(config), "--output", str(folder), "--no-report"]
        words += [word for change in changes for word in ("--set", change)]
        words += ["--dry-run"] * dry_run
        words += [] if baseline is None else ["--baseline", str(baseline)]
        began = time.monotonic()

        def in_generation(number: int) -> list[str]:
            # Without --resume for later ones, because with it they would load another run's
            # checkpoint if this run was lost before its first save
            passed = (time.monotonic() - began) / 60 if number else 0.0
            limit = [] if minutes is None else ["--minutes", str(max(0.0, minutes - passed))]
            return [*words, *["--resume"] * resume, *limit]

        if hosts is not None:
            available = parse_hosts(hosts)
        elif processes or not restart.host_discovery_script:
            available = [Host("localhost", processes or restart.max_np or restart.min_np or 1)]
        else:
            available = []
        # Before the ranks start, if one of them would read the file here
        if recipe.links is not None and any(is_local(host.name) for host in available):
            Links.read(recipe.links)
        supervisor = restart if restart.wanted and not dry_run else None
        launch_train(supervisor, available, processes, in_generation, folder, saves=not dry_run)
        # A run stopped in its first epoch has no report; a dry run has printed one already
        if (folder / "summary.json").exists() and not dry_run:
            show_report_of(folder)
    elif dry_run:
        dry_run_here(recipe, folder)
    else:
        options = {"resume": resume, "minutes": minutes, "terminal": terminal, "alone": alone}
        if train_here(recipe, folder, options) and show_report:
            show_report_of(folder)


def show_report_of(folder: Path) -> None:
    """Show a run's report; on a full disk only its command, because the training has ended well."""
    try:
        show_run(folder)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        text = f"tfcommx: The report cannot be printed: {error}. See `tfcommx report {folder}`."
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        discard_unread_output()


def dry_run_here(recipe: Recipe, folder: Path) -> None:
    load_tensorflow()
    from tfcommx import is_chief
    from tfcommx.training.dry_run import dry_run

    result = dry_run(recipe, folder)
    if is_chief():
        show_dry_run(result)


def train_here(recipe: Recipe, folder: Path, options: dict[str, Any]) -> bool:
    """Train in this process; return True if it has a report to show."""
    forget_earlier_stop(folder)
    load_tensorflow()
    from tfcommx import is_chief
    from tfcommx.training.train import TrainOptions
    from tfcommx.training.train import train as run

    summary = run(recipe, folder, TrainOptions(**options))
    return bool(is_chief()) and bool(summary["rows"])


def forget_earlier_stop(folder: Path) -> None:
    """Remove an earlier run's file `stop`, which that run did not live to read."""
    # A supervised run is one run in all generations, and its LaunchStopper has removed the file
    if supervision() is not None:
        return
    file = folder / STOP_FILE
    with contextlib.suppress(OSError):
        # No other rank reads the file
        if launcher().rank == 0 and time.time() - file.stat().st_mtime > STALE_SECONDS:
            file.unlink()
            print(f"tfcommx: {file} was for an earlier run, and is removed.", file=sys.stderr)
