"""Changes to this process's interpreter: uncaught exceptions, `sys.exit`, environment, its end.

docs/explanation/what-it-changes.md lists each change, its caller and its reason.
"""

import builtins
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# Receives the previous hook, which prints the exception, and the arguments of any hook
Handler = Callable[[Hook, type[BaseException], BaseException, TracebackType | None], object]


def handle_uncaught(handle: Handler) -> None:
    """Call `handle` for an uncaught exception of the main thread."""
    sys.excepthook = functools.partial(handle, sys.excepthook)


def isolated(module: str) -> list[str]:
    """Return the words that run a module's `main` without the user's environment and packages."""
    # Because these may run any code when Python starts. Without them `tfcommx` is not found.
    path = str(Path(__file__).resolve().parents[2])
    program = f"import sys; sys.path.insert(0, {path!r}); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", program]


class ExitStatus:
    """The future exit status of this process, which Python does not expose."""

    def __init__(self) -> None:
        self._code: object = None
        self._exit = sys.exit

    def watch(self) -> None:
        """Record the argument of `sys.exit`, `exit` and `quit` from now on."""

        @functools.wraps(self._exit)
        def exit(code: str | int | None = None) -> NoReturn:
            # In another thread `sys.exit` ends that thread alone
            if threading.current_thread() is threading.main_thread():
                self._code = code
            self._exit(code)

        # `exit` and `quit` are built-ins; a SystemExit that is raised directly is not seen
        sys.exit = exit
        for name in ("exit", "quit"):
            setattr(builtins, name, exit)

    def get(self) -> int:
        """Return the status with which the process would end now: that of the last `sys.exit`.

        1 for a message in place of a status, and after an uncaught exception.
        """
        # Python sets it when it prints an uncaught exception
        if hasattr(sys, "last_value"):
            return 1
        if self._code is None or isinstance(self._code, int):
            return int(self._code or 0)
        return 1


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables; restore the previous ones, so that no later launch has these."""
    before = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ |= settings
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ |= before


def end_at_once(status: int) -> NoReturn:
    """End the process without the interpreter's shutdown, which would wait for lost ranks."""
    # `os._exit` does not flush them. Python has None in place of a closed one
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
