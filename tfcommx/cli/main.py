"""The command line: `tfcommx run`, `train`, `report`, `compare`, `probe`, `plan`, and others.

TensorFlow is imported only if a command needs it, and a command's module only if it is asked for.
"""

import errno
import functools
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from tfcommx.cli import environment
from tfcommx.cli.environment import open_closed_streams, print_any_character, quiet_tensorflow
from tfcommx.cli.parameters import Command
from tfcommx.core import LaunchError, TfcommxError, local_path
from tfcommx.launch.launcher import launcher
from tfcommx.supervisor.supervisor import USER_ERROR

# Commands, each the function of its module, and click's settings. Words after the first of `centre`
# and `run` belong to another command
COMMANDS: dict[str, dict[str, Any]] = {
    "cache": {},
    "train": {},
    "report": {},
    "compare": {},
    "schema": {},
    "probe": {},
    "profile": {},
    "plan": {},
    "simulate": {},
    "machines": {},
    "explain": {},
    "doctor": {},
    "centre": {"ignore_unknown_options": True, "allow_interspersed_args": False},
    "run": {"allow_interspersed_args": False},
}
# Seconds that other ranks wait before they print an error, because rank 0 most likely has it, too,
# and the launcher ends all ranks after rank 0 has printed it
RANK_0_FIRST_SECONDS = 5.0
# Errors of the system that a user can fix, such as a full disk or a folder that is read-only
CANNOT_WRITE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EMFILE, errno.ENFILE),
    *(errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR),
    *(errno.EIO, errno.ESTALE),
)


def with_local_paths(command: Callable[..., None]) -> Callable[..., None]:
    """Refuse addresses such as gs://bucket/run before a command begins; expand `~` in its paths."""

    def local(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [local(name, item) for item in value]
        return local_path(name, value) if isinstance(value, Path) else value

    @functools.wraps(command)
    def checked(**arguments: Any) -> None:
        command(**{name: local(name, value) for name, value in arguments.items()})

    return checked


def application(*names: str) -> typer.Typer:
    """Return the command line with some commands; the modules of others are not imported.

    Args:
        names: of COMMANDS, in the order of the help.
    """
    found = typer.Typer(
        name="tfcommx",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Train with Horovod and Keras 3 on fast machines that a slow network connects.",
    )
    found.callback()(environment.version)
    for name in names:
        module = importlib.import_module(f"tfcommx.cli.{name}")
        if name == "cache":  # A group of commands
            found.add_typer(module.app)
            continue
        command = getattr(module, name)
        settings = COMMANDS[name]
        found.command(cls=Command, context_settings=settings)(with_local_paths(command))
    return found


def __getattr__(name: str) -> typer.Typer:
    """Return the whole command line as `app`."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    whole = globals()["app"] = application(*COMMANDS)
    return whole


def main() -> None:
    """Run the command line; exit status 1 if a rank has failed, or the rank's status for `run`.

    An error that the user can fix is printed without a traceback, with exit status 2; only by
    rank 0 if all ranks have it.
    """
    open_closed_streams()
    print_any_character()
    if sys.argv[1:2] not in (["centre"], ["run"]):  # These run a user's script
        quiet_tensorflow()
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        application(*([asked] if asked in COMMANDS else COMMANDS))()
    except LaunchError as error:
        tell(error)
        sys.exit(error.status)
    except TfcommxError as error:
        tell(error)
        sys.exit(USER_ERROR)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:  # An error of the program, which needs a traceback
            raise
        file = "" if error.filename is None else f" in {error.filename}"
        tell(TfcommxError(f"Room and rights are required{file}. Received: {error.strerror}."))
        sys.exit(USER_ERROR)


def tell(error: Exception) -> None:
    """Print an error that the user can fix, with the rank on ranks other than 0."""
    try:
        rank = launcher().rank
    except TfcommxError:  # Most likely `error` itself
        rank = 0
    if rank:
        time.sleep(RANK_0_FIRST_SECONDS)
    print(f"tfcommx: rank {rank}: {error}" if rank else f"tfcommx: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
