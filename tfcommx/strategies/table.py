"""The table of strategies, and the strategy that a user asks for."""

import dataclasses

from tfcommx.core import ConfigurationError, check_name, is_member, load_member
from tfcommx.strategies.averaging.strategy import WeightAveraging
from tfcommx.strategies.easgd.strategy import ElasticAveraging
from tfcommx.strategies.sharded.strategy import Sharded
from tfcommx.strategies.step_ahead import StepAhead
from tfcommx.strategies.strategy import Strategy
from tfcommx.strategies.synchronous import Rebroadcast, Root, Synchronous

# Name -> class. A strategy whose options all have defaults can be requested by name.
STRATEGIES: dict[str, type[Strategy]] = {
    "synchronous": Synchronous,
    "root": Root,
    "rebroadcast": Rebroadcast,
    "sharded": Sharded,
    "weight_averaging": WeightAveraging,
    "elastic_averaging": ElasticAveraging,
    "step_ahead": StepAhead,
}


def strategy_of(asked: str | Strategy) -> Strategy:
    """Return the requested strategy, given by name, as an instance, or as "module:MEMBER".

    **Raises:** ConfigurationError for an unknown name, with the nearest one, and for an object that
    is no strategy.
    """
    if isinstance(asked, str) and not is_member(asked):
        return STRATEGIES[check_name("strategy", asked, STRATEGIES)]()
    member = load_member("strategy", asked, Strategy) if is_member(asked) else asked
    # A class has the members of the protocol, too
    is_instance = dataclasses.is_dataclass(member) and not isinstance(member, type)
    if is_instance and isinstance(member, Strategy):
        return member
    raise ConfigurationError(
        f"`strategy` must be one of {', '.join(STRATEGIES)}, or an instance such as "
        f"tfcommx.strategies.Rebroadcast(every=5). Received {member!r}."
    )
