"""Quiet start-up: environment variables for TensorFlow and Horovod, and TensorFlow's import."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import tempfile

from tfcommx.comm.rank_lines import without_start_up_messages


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
