"""tfcommx: gradient exchange for Horovod and Keras 3 over slow networks."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. Loaded on first use, so that planning and the command line's help
# need no TensorFlow.
_PUBLIC = {
    "init": "tfcommx.comm.init",
    "rank": "tfcommx.comm.process",
    "size": "tfcommx.comm.process",
    "local_rank": "tfcommx.comm.process",
    "local_size": "tfcommx.comm.process",
    "is_chief": "tfcommx.comm.process",
    "allow_plain_optimizers": "tfcommx.comm.unwrapped",
    "Scheme": "tfcommx.terms",
    "Topology": "tfcommx.terms",
    "Plan": "tfcommx.terms",
    "PlanError": "tfcommx.terms",
    "DistributedOptimizer": "tfcommx.optim.distributed_optimizer",
    "broadcast_variables": "tfcommx.optim.broadcast",
    "consolidate": "tfcommx.optim.step_boundary",
    "metrics_over_ranks": "tfcommx.optim.metrics_over_ranks",
    "begin_step": "tfcommx.optim.step_boundary",
    "take_centre": "tfcommx.optim.centre",
    "parallel_operator": "tfcommx.optim.parallel_operator",
    "DataCache": "tfcommx.data.cache.cache",
    "BatchSpec": "tfcommx.data.cache.batch_spec",
    "profile": "tfcommx.measure.profile",
}
_MODULES = {
    "callbacks": "tfcommx.optim.callbacks",
    "checkpoint": "tfcommx.optim.checkpoint",
    "layers": "tfcommx.optim.layers",
    "optimizers": "tfcommx.optim.optimizers",
    "strategies": "tfcommx.strategies",
    "testing": "tfcommx.testing",
}

# Old name -> new name; both work until 1.0
_RENAMED = {"settle": "consolidate"}

__all__ = [*_PUBLIC, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(
            f"{name} is called {new} now; the old name works until 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return __getattr__(new)
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'tfcommx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
