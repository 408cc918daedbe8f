"""Options of the data cache: how samples are kept."""

from __future__ import annotations

from dataclasses import dataclass

from tfcommx.terms import PlanError, check_name, check_whole

ON_ERROR = ("raise", "skip")


@dataclass(frozen=True)
class Options:
    """How samples are kept.

    Runs of the same data on one machine share its memory. With `exchange`, on more than one node, a
    run has a slab of its own, as `DataCache.swap` writes to places that another would be reading.
    """

    # Of parts, order and augmentation, in [0, 2^63)
    seed: int = 0
    store: int | None = (
        # short side, pixels, at which images are kept; None: as they come. The largest of the
        # phases to come
        None
    )
    # Folder of the slab, in shared memory
    memory: str = "/dev/shm"
    # Most that the slab may take; None: what the node has
    memory_bytes: int | None = None
    # Too little memory: True keeps as much as fits and reads the rest each epoch; False refuses
    partial: bool = False
    # Folder of the local disk level; None: none
    disk: str | None = None
    # A sample that cannot be read: raise, or skip it and count it
    on_error: str = "raise"
    # Share of the reads from memory whose CRC is checked, in [0, 1]; each costs a pass over the
    # sample
    verify: float = 0.01
    # That read and decode in the fill; None: the processors of this process, or its share of the
    # node's
    threads: int | None = None
    # Share of each node's part, in [0, 1], offered to the other nodes before each epoch but the
    # first
    exchange: float = 0.0

    def __post_init__(self) -> None:
        check_name("on_error", self.on_error, ON_ERROR)
        for name in ("seed", "store", "memory_bytes", "threads"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_whole(name, getattr(self, name)))
        if not 0 <= self.seed < 2**63 or not 0 <= self.verify <= 1 or not 0 <= self.exchange <= 1:
            raise PlanError(
                "`seed` must be in [0, 2^63), `verify` and `exchange` in [0, 1]. Received "
                f"{self.seed}, {self.verify}, {self.exchange}."
            )
        for name in ("store", "memory_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"`{name}` must be >= 1 or None. Received {value}.")
