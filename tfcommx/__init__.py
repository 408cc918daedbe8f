"""tfcommx: gradient exchange for Horovod and Keras 3 over slow networks."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> module, in the order of the reference. Modules are loaded on first use, because
# planning and the command line's help must not need TensorFlow.
_PUBLIC = {
    "init": "tfcommx.collectives.init",
    "rank": "tfcommx.collectives.process",
    "size": "tfcommx.collectives.process",
    "local_rank": "tfcommx.collectives.process",
    "local_size": "tfcommx.collectives.process",
    "is_chief": "tfcommx.collectives.process",
    "DistributedOptimizer": "tfcommx.optim.distributed_optimizer",
    "Scheme": "tfcommx.core",
    "broadcast_variables": "tfcommx.optim.broadcast",
    "consolidate": "tfcommx.optim.step_boundary",
    "metrics_over_ranks": "tfcommx.optim.metrics_over_ranks",
    "begin_step": "tfcommx.optim.step_boundary",
    "take_centre": "tfcommx.optim.step_boundary",
    "parallel_operator": "tfcommx.optimizers.parallel_operator",
    "profile": "tfcommx.measure.profile",
    "allow_plain_optimizers": "tfcommx.collectives.unwrapped",
    "DataCache": "tfcommx.data.cache",
    "BatchSpec": "tfcommx.data.options",
    "Topology": "tfcommx.core",
    "Plan": "tfcommx.core",
    "TfcommxError": "tfcommx.core",
    "ConfigurationError": "tfcommx.core",
    "PlanError": "tfcommx.core",
    "LaunchError": "tfcommx.core",
    "RankLostError": "tfcommx.core",
    "DataError": "tfcommx.core",
    "CheckpointError": "tfcommx.core",
}
_MODULES = {
    "callbacks": "tfcommx.callbacks",
    "checkpoint": "tfcommx.checkpoint",
    "layers": "tfcommx.optim.layers",
    "optimizers": "tfcommx.optimizers",
    "strategies": "tfcommx.strategies",
    "testing": "tfcommx.testing",
}

# Asked of tfcommx by scripts whose `import horovod.tensorflow.keras as hvd` was replaced
_HOROVODS = (
    *("allgather", "allgather_object", "allreduce", "alltoall", "broadcast", "is_homogeneous"),
    *("broadcast_object", "grouped_allgather", "grouped_allreduce", "reducescatter", "Average"),
    *("Sum", "Adasum", "Compression", "ProcessSet", "DistributedGradientTape", "cross_rank"),
    *("cross_size", "is_initialized", "join", "shutdown", "elastic", "load_model"),
    *("broadcast_global_variables", "PartialDistributedOptimizer", "SyncBatchNormalization"),
    *("mpi_built", "nccl_built", "gloo_built", "mpi_enabled", "start_timeline", "stop_timeline"),
)

__all__ = [*_PUBLIC, *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "init":
        # They register classes by which Keras loads models from files
        for module in ("layers", "optimizers"):
            importlib.import_module(_MODULES[module])
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    remedy = (
        " It is Horovod's. docs/how-to/move-from-horovod.md has what replaces it; Horovod's own "
        "collectives work beside tfcommx: `import horovod.tensorflow as hvd`."
    )
    raise AttributeError(
        f"module 'tfcommx' has no attribute {name!r}.{remedy * (name in _HOROVODS)}"
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
