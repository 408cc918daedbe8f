"""What every data set says about how the data cache holds it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tfcommx.recipes.reader import Part


class Cached(Part):
    """Settings of the data cache, which every data set of images has."""

    # Folder of shared memory that holds one copy for all ranks of a node
    memory: Path = Path("/dev/shm")
    # Share of each node's images that is redistributed before each epoch except the first, sent
    # from memory to memory. Then nothing is loaded ahead over the end of an epoch.
    reshuffle_fraction: float = Field(0.0, ge=0, le=1)
