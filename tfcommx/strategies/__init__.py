"""Strategies: who updates the weights, and when they are exchanged.

    synchronous     gradients are exchanged, every rank applies them: the identity, as Horovod does
    root            gradients are reduced to rank 0, which applies them and broadcasts the weights
    rebroadcast     as synchronous, and every few steps rank 0's weights go to all ranks
    sharded         each rank updates 1/p of the weights, and pulls the others' parts
    weight_averaging   each rank applies its own gradients; every few steps weights are averaged,
                    or moved by an outer optimizer
    elastic_averaging  each rank trains its own weights, pulled towards a centre; nobody waits

    >>> import tfcommx as cx
    >>> cx.strategies.strategy_of("root")
    Root()
    >>> cx.strategies.Rebroadcast(every=5)
    Rebroadcast(every=5)

To add one: write one file with a frozen dataclass that inherits from `strategy.Strategy`, whose
fields are its options, and a subclass of `strategy.StrategyRun`; both are synchronous training, and
the new ones override what differs. Add a row to `STRATEGIES`; list it above. The laws in
tests/strategies run over the table: after a step all ranks hold the same weights (or, if it lets
them drift, become equal when it says so), and a mismatch between ranks is refused.
"""

from __future__ import annotations

import dataclasses

from tfcommx.core import ConfigurationError, check_name, is_member, load_member
from tfcommx.strategies.averaging.strategy import WeightAveraging
from tfcommx.strategies.easgd.run import ElasticRun
from tfcommx.strategies.easgd.strategy import ElasticAveraging
from tfcommx.strategies.sharded.run import ShardedRun
from tfcommx.strategies.sharded.shards import Shards
from tfcommx.strategies.sharded.strategy import Sharded
from tfcommx.strategies.strategy import (
    CommonState,
    Strategy,
    StrategyRun,
    Update,
    agree_on_strategy,
)
from tfcommx.strategies.synchronous import Rebroadcast, Root, Synchronous

# Name -> class. Those whose options all have defaults can be asked for by name.
STRATEGIES: dict[str, type[Strategy]] = {
    "synchronous": Synchronous,
    "root": Root,
    "rebroadcast": Rebroadcast,
    "sharded": Sharded,
    "weight_averaging": WeightAveraging,
    "elastic_averaging": ElasticAveraging,
}

__all__ = [
    "STRATEGIES",
    "CommonState",
    "ElasticAveraging",
    "ElasticRun",
    "Rebroadcast",
    "Root",
    "Sharded",
    "ShardedRun",
    "Shards",
    "Strategy",
    "StrategyRun",
    "Synchronous",
    "Update",
    "WeightAveraging",
    "agree_on_strategy",
    "strategy_of",
]


def strategy_of(asked: str | Strategy) -> Strategy:
    """Return the strategy that is asked for, by name, as an instance, or as "module:MEMBER".

    **Raises:** ConfigurationError for an unknown name, with the nearest one, and for what is no
    strategy.
    """
    if is_member(asked):
        outside: Strategy = load_member("strategy", asked, Strategy)
        return outside
    if isinstance(asked, str):
        return STRATEGIES[check_name("strategy", asked, STRATEGIES)]()
    is_instance = dataclasses.is_dataclass(asked) and not isinstance(asked, type)
    if is_instance and isinstance(asked, Strategy):
        return asked
    raise ConfigurationError(
        f"`strategy` must be one of {', '.join(STRATEGIES)}, or an instance such as "
        f"tfcommx.strategies.Rebroadcast(every=5). Received {asked!r}."
    )
