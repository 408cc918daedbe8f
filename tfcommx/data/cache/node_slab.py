"""Opens the slab of a node: how it is named, how large it is, what it says about itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tfcommx.comm import launcher
from tfcommx.data.cache import capacity, slab_files
from tfcommx.data.cache.disk import Disk
from tfcommx.data.cache.options import Options
from tfcommx.data.cache.slab import Slab
from tfcommx.data.sources.base import Source, key_of

# Bytes of the source's name in a slab's metadata, whose page is 4096.
NAME_BYTES = 2000
# Version of what is kept in memory: raised if decoding or the layout changes.
FORMAT = 1


def open_slab(
    source: Source, disk: Disk | None, part: np.ndarray, options: Options, node: int, own: bool
) -> Slab:
    """Open the slab of this node, or make it.

    Args:
        source: of the samples.
        disk: the local disk level, or None.
        part: the node's samples in the first epoch, int64 [n].
        options: how samples are kept.
        node: number of the node: several may stand on one machine.
        own: whether no other run may use the slab.

    **Raises:** SlabError if there is too little memory. PlanError with `own`, if the launcher gives
    the run no name.
    """
    key = key_of((FORMAT, source.key, source.count, source.channels, options.store))
    name = f"{slab_files.prefix()}{key[:16]}-{node}"
    if own:
        name += f"-{key_of((launcher.run_name(),))[:16]}"
    metadata = {"source": _end_of(source.name), "node": str(node)}

    def length() -> int:
        size, known = capacity.choose_length(source, disk, part, options, name)
        metadata.update(known)
        return size

    slab = Slab(Path(options.memory, f"{name}.slab"), key, source.count, length, metadata)
    try:
        capacity.check_length(slab, source, disk, part, options)
    except BaseException:
        slab.close()
        raise
    return slab


def _end_of(name: str) -> str:
    """Return as much of the end of a name as a slab's metadata can hold.

    JSON takes up to 12 bytes for a character.
    """
    name = name[-NAME_BYTES:]
    while len(json.dumps(name)) > NAME_BYTES:
        name = name[1:]
    return name
