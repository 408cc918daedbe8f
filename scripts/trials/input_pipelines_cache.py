"""The DataCache, for input_pipelines.py."""

from __future__ import annotations

import numpy as np
from input_pipelines_run import AREA, ASPECT, BATCH, Epoch, Task, cycle, main

import tfcommx as cx
from tfcommx.data.sources import Folder


def read(task: Task) -> Epoch:
    source = Folder(task.photos)
    cache = cx.DataCache(source, store=task.store)
    spec = cx.BatchSpec(BATCH, task.size, "random", True, area=AREA, aspect=ASPECT)
    batches = iter(cache.dataset(spec, 0, task.epochs))
    # A view, because .numpy() copies
    views = ((np.asarray(memoryview(images)), labels.numpy()) for images, labels in batches)
    return cycle(views, source.count // BATCH)


if __name__ == "__main__":
    main({"datacache": (None, read)})
