"""Quiet start-up of TensorFlow and Horovod; versions, for which neither is imported."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import platform
import sys
import tempfile
from importlib import metadata
from typing import Annotated

import typer

from tfcommx.launch.rank_output import without_start_up_messages


def print_any_character() -> None:
    r"""Let output show what its encoding lacks as an escape, such as \xe9, in place of an error.

    A line of a rank, or a user's path, has any character, also where the locale is ASCII.
    """
    for stream in (sys.stdout, sys.stderr):
        # A pipe has no position, which some versions of Python ask for
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def quiet_tensorflow() -> None:
    """Silence messages of TensorFlow and absl; call it before they are loaded.

    Child processes inherit it: horovodrun loads TensorFlow too. Errors still come as exceptions. A
    TF_CPP_MIN_LOG_LEVEL of the user stays.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def load_tensorflow() -> None:
    """Import TensorFlow without its start-up messages, and without garbage collection.

    Where oneDNN is on by default, TensorFlow announces it at any log level. Other output of the
    import is shown afterwards. Collecting garbage among the 300,000 objects that the import makes,
    and keeps, would take a sixth of its time.
    """
    if "tensorflow" in sys.modules or sys.stderr is None:
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    collecting = gc.isenabled()
    gc.disable()
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        finally:
            if collecting:
                gc.enable()
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            shown = without_start_up_messages(written.read().decode(errors="replace"))
            sys.stderr.write(shown)


def quiet_horovod() -> None:
    """Silence Horovod's messages about a dead rank; the launcher names that rank.

    A HOROVOD_LOG_LEVEL of the user stays.
    """
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")


# Name -> packages that may hold it; the first installed one counts
PACKAGES = {
    "tfcommx": ("tfcommx",),
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras": ("keras",),
    "Horovod": ("horovod",),
}


def versions() -> dict[str, str]:
    """Return the version of each package, or "not installed", and Python's."""
    found = {name: _version(packages) for name, packages in PACKAGES.items()}
    return {**found, "Python": platform.python_version()}


def _version(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _show(asked: bool) -> None:
    if asked:
        print("\n".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


def version(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show, is_eager=True, help="Show versions, and exit."),
    ] = False,
) -> None:
    """Take options that come before a command."""
