"""Options of the data cache: how samples are kept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tfcommx.data.sources.base import MAX_PIXELS
from tfcommx.terms import PlanError, check_name, check_whole, local_path

ON_ERROR = ("raise", "skip")


@dataclass(frozen=True)
class Options:
    """How samples are kept: the keyword arguments of `DataCache`.

    Runs of the same data on one machine share its memory. With `reshuffle_fraction`, on more than
    one node, a run has a slab of its own, because `DataCache.reshuffle` writes over samples that
    another run would be reading.

    **Raises:** PlanError for a value out of its range.
    """

    # Of parts, order and augmentation, in [0, 2^63).
    seed: int = 0
    # Short side, pixels, at which images are kept: the largest resolution to come. None: their own
    # size.
    store: int | None = None
    # Folder of the slab, in shared memory.
    memory: str = "/dev/shm"
    # Most bytes that the slab may take. None: what the node has.
    memory_bytes: int | None = None
    # If memory is too small: True keeps as much as fits and reads the rest in each epoch, False
    # refuses.
    partial: bool = False
    # Folder of the local disk level. None: no such level.
    disk: str | None = None
    # What to do with a sample that cannot be read: "raise", or "skip" it and count it.
    on_error: str = "raise"
    # Most pixels of an image, >= 1: a small file can decode to more than the memory has. A larger
    # image is one that cannot be read.
    max_pixels: int = MAX_PIXELS
    # Share of the reads from memory whose CRC is checked, in [0, 1]. Each check costs a pass over
    # the sample.
    verify: float = 0.01
    # Threads that read and decode while memory is filled. None: the processors of this process, or
    # its share of those of the node.
    threads: int | None = None
    # Share of each node's part, in [0, 1], that is redistributed over the nodes before each epoch
    # except the first.
    reshuffle_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_name("on_error", self.on_error, ON_ERROR)
        for name in ("seed", "store", "memory_bytes", "threads", "max_pixels"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_whole(name, getattr(self, name)))
        for name in ("memory", "disk"):  # Paths are taken too
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(local_path(name, getattr(self, name))))
        if not 0 <= self.seed < 2**63:
            raise PlanError(f"`seed` must be in [0, 2^63). Received {self.seed}.")
        for name in ("verify", "reshuffle_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise PlanError(f"`{name}` must be in [0, 1]. Received {getattr(self, name)}.")
        if self.max_pixels < 1:
            raise PlanError(f"`max_pixels` must be >= 1. Received {self.max_pixels}.")
        for name in ("store", "memory_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"`{name}` must be >= 1 or None. Received {value}.")

    def to_agree_on(self) -> dict[str, str]:
        """Return option -> value of those that must be equal on all ranks.

        They decide which rank serves a sample, when, and how its pixels are kept. Others may suit
        the node: its folders, its memory, its processors.
        """
        names = ("seed", "store", "on_error", "reshuffle_fraction")
        return {f"option {name}": f"{getattr(self, name)}" for name in names}


def options_of(arguments: dict[str, Any]) -> Options:
    """Return the options of these keyword arguments.

    **Raises:** PlanError for an unknown one, with the nearest known one.
    """
    known = [field.name for field in fields(Options)]
    for name in arguments:
        check_name("option of DataCache", name, known)
    return Options(**arguments)
