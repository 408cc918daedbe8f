"""Writes one snapshot beside the steps: to this host's memory, then to the mirror."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tfcommx.optim.checkpoint.files import memory_model_name, residuals_name
from tfcommx.optim.checkpoint.memory.mirror import Mirrors, Row
from tfcommx.optim.checkpoint.memory.place import Place


class Captured(NamedTuple):
    """A snapshot of this rank that is still to be written."""

    save: int
    # What this rank alone has
    own: Mapping[str, np.ndarray]
    # The model, if this rank writes it for its host; None: another rank does
    model: Mapping[str, np.ndarray] | None
    # Whether the mirror gets the model, too: nobody else writes it
    only_model: bool


class Writing:
    """A thread that writes one snapshot.

    Args:
        captured: the snapshot.
        rank: this rank.
        place: where to.
        mirror: sends a list of files to the mirror; None without one.
        keep: the save that is whole on all ranks; None: none is.
    """

    def __init__(
        self,
        captured: Captured,
        rank: int,
        place: Place,
        mirror: Callable[[list[str], list[int]], None] | None,
        keep: int | None,
    ) -> None:
        self.save = captured.save
        # Bytes and seconds of a snapshot that was written; why it was not
        self.bytes, self.seconds, self.problem = 0, 0.0, ""
        self._work = (captured, rank, place, mirror, keep)
        self._thread = threading.Thread(target=self._run, name="tfcommx-snapshot", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def _run(self) -> None:
        captured, rank, place, mirror, keep = self._work
        saves = {captured.save} | ({keep} if keep is not None else set())
        start, mirrored = time.monotonic(), [residuals_name(captured.save, rank)]
        try:
            place.make()  # Somebody may have removed it
            place.keep(saves, rank)
            if captured.model is not None:
                place.keep_models(saves)
                name = memory_model_name(captured.save)
                self.bytes += place.write(name, captured.model)
                mirrored += [name] * captured.only_model
            self.bytes += place.write(mirrored[0], captured.own)
            if mirror is not None:
                mirror(mirrored, sorted(saves))
        except Exception as error:  # Of any kind: a snapshot without a problem counts as written
            self.problem = str(error) or type(error).__name__
        finally:
            self.seconds = time.monotonic() - start
            del self._work  # The copies of the arrays


def sender(mirrors: Mirrors, to: Row, rank: int) -> Callable[[list[str], list[int]], None]:
    """Return the function that sends files of a rank to its mirror."""
    return lambda names, keep: mirrors.send(to, rank, names, keep)
