"""Start TensorFlow and Horovod quietly; report versions without importing either."""

import contextlib
import faulthandler
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


def open_closed_streams() -> None:
    """Open input and output that a caller has closed, such as by `>&-`, as /dev/null.

    Without this, they are None, and the next files that are opened take their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            file = os.open(os.devnull, os.O_RDWR)
            os.dup2(file, number)
            if file != number:
                os.close(file)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def print_any_character() -> None:
    r"""Print characters outside of the output's encoding as escapes, such as \xe9.

    Needed because a line of a rank, or a user's path, may have any character in an ASCII locale.
    """
    for stream in (sys.stdout, sys.stderr):
        # Suppressed, because some versions of Python require a position, which a pipe lacks
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def quiet_tensorflow() -> None:
    """Silence messages of TensorFlow and absl; call it before they are loaded.

    Child processes inherit it, because horovodrun loads TensorFlow, too. Errors still raise
    exceptions. The user's TF_CPP_MIN_LOG_LEVEL is kept.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def load_tensorflow() -> None:
    """Import TensorFlow without its start-up messages, and without garbage collection."""
    if "tensorflow" in sys.modules or sys.stderr is None:
        return
    # Text that Python has not yet written would otherwise end up in the file below
    sys.stderr.flush()
    stderr = os.dup(2)
    collecting = gc.isenabled()
    # Because it would take a sixth of the time among the 300,000 objects that the import creates
    # and keeps
    gc.disable()
    # The file descriptor, because TensorFlow announces oneDNN from C++, at any log level
    traced = faulthandler.is_enabled()
    # Because the file is lost if TensorFlow aborts the process, as on a CPU without AVX
    faulthandler.enable(stderr)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        finally:
            faulthandler.disable()
            if collecting:
                gc.enable()
            os.dup2(stderr, 2)
            if traced:
                faulthandler.enable()
            os.close(stderr)
            written.seek(0)
            shown = without_start_up_messages(written.read().decode(errors="replace"))
            sys.stderr.write(shown)


# Name -> packages that may provide it; the first installed one counts
PACKAGES = {
    "tfcommx": ("tfcommx",),
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras": ("keras",),
    "Horovod": ("horovod",),
}


def versions() -> dict[str, str]:
    """Return the version of each package, or "not installed", and Python's."""
    installed = dict.fromkeys(PACKAGES, "not installed")
    for name, packages in PACKAGES.items():
        for package in reversed(packages):
            with contextlib.suppress(metadata.PackageNotFoundError):
                installed[name] = metadata.version(package)
    return {**installed, "Python": platform.python_version()}


def _show(requested: bool) -> None:
    if requested:
        print("\n".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


def version(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show, is_eager=True, help="Show versions, and exit."),
    ] = False,
) -> None:
    """Accept options before a command."""
