"""What the commands set before TensorFlow and Horovod are loaded, and how they load TensorFlow."""

from __future__ import annotations

import gc
import os
import sys
import tempfile

from tfcommx.comm.rank_lines import without_start_up_messages


def quiet_tensorflow() -> None:
    """Let TensorFlow and absl print no messages while they run; call it before they are loaded.

    Processes that are started from here inherit it: horovodrun loads TensorFlow too. Errors still
    come as exceptions. If the user has set TF_CPP_MIN_LOG_LEVEL, that level stays.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def load_tensorflow() -> None:
    """Import TensorFlow without its start-up messages, and without garbage collection meanwhile.

    On processors where oneDNN is on by default it says so whatever the level is. What else is
    written meanwhile, by any thread, is shown afterwards. Looking for garbage among the 300,000
    objects that the import makes, and keeps, would be a sixth of its time.
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
    """Let Horovod print no messages of its own if a rank is gone; the launcher names that rank.

    If the user has set HOROVOD_LOG_LEVEL, that level stays.
    """
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")
