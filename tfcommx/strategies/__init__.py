"""Strategies: who updates the weights, and when they are exchanged.

    synchronous     gradients are exchanged, every rank applies them: the identity, as Horovod does
    root            gradients are reduced to rank 0, which applies them and broadcasts the weights
    rebroadcast     as synchronous, and every few steps rank 0's weights go to all ranks
    sharded         each rank updates 1/p of the weights, and pulls the others' parts
    weight_averaging   each rank applies its own gradients; every few steps weights are averaged,
                    or moved by an outer optimizer
    elastic_averaging  each rank trains its own weights, pulled towards a centre; no rank waits
    step_ahead      each node's weights contain its unsent updates

    >>> import tfcommx as cx
    >>> cx.strategies.strategy_of("root")
    Root()
    >>> cx.strategies.Rebroadcast(every=5)
    Rebroadcast(every=5)

To add one: write one file with a frozen dataclass that inherits from `strategy.Strategy`, whose
fields are its options, and a subclass of `strategy.StrategyRun`. Both base classes are synchronous
training; override the methods that differ. Add a row to `STRATEGIES` in table.py; list it above.
The laws in tests/strategies run over the table: after a step all ranks hold the same weights (or,
if the strategy lets them drift, equal weights when it reports so), and a mismatch between ranks is
refused.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For the reference of the interface, which is made without an import
    from tfcommx.strategies.averaging.strategy import WeightAveraging
    from tfcommx.strategies.easgd.strategy import ElasticAveraging
    from tfcommx.strategies.sharded.strategy import Sharded
    from tfcommx.strategies.step_ahead import StepAhead
    from tfcommx.strategies.strategy import CommonState, Strategy, StrategyRun, Update
    from tfcommx.strategies.synchronous import Rebroadcast, Root, Synchronous
    from tfcommx.strategies.table import STRATEGIES, strategy_of

# Name -> module. Loaded at the first use, because the process that holds the centre of elastic
# averaging loads no TensorFlow.
_PUBLIC = {
    "CommonState": "strategy",
    "ElasticAveraging": "easgd.strategy",
    "Rebroadcast": "synchronous",
    "Root": "synchronous",
    "STRATEGIES": "table",
    "Sharded": "sharded.strategy",
    "StepAhead": "step_ahead",
    "Strategy": "strategy",
    "StrategyRun": "strategy",
    "Synchronous": "synchronous",
    "Update": "strategy",
    "WeightAveraging": "averaging.strategy",
    "strategy_of": "table",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
