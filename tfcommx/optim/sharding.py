"""What a wrapped optimizer knows of its shards: the weights, the strategy at work, whole state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.strategies import ShardedRun, Shards, StrategyRun
from tfcommx.terms import NOMINAL, PlanError

# State by attribute of the optimizer, then by variable in forward order
WholeState = dict[str, list[np.ndarray]]


class Sharding:
    """The shards of one optimizer on this rank."""

    def __init__(self, variables: Sequence[keras.Variable], shards: Shards, comm: Comm) -> None:
        """Keep the whole variables, in forward order, and their shards."""
        self.variables, self.shards, self.comm = list(variables), shards, comm
        # The strategy at work, from the first step on
        self.run: ShardedRun | None = None
        # Whether a step may begin with the pull
        self.may_begin = False
        # What the optimizer keeps of each shard, by attribute
        self.slots: dict[str, list[keras.Variable]] = {}
        # Steps at which the whole state was gathered, and the state on rank 0
        self._gathered: tuple[int, WholeState] | None = None
        # What this rank has loaded, until all ranks have it
        self._loaded: WholeState | None = None

    @staticmethod
    def make(
        exchanger: Any, variables: Sequence[keras.Variable], decays: Sequence[bool]
    ) -> Sharding:
        """Make this rank's shards of the variables, by the exchanger's plan, strategy and links.

        Local: what ranks must agree on, they compare at the first step.
        """
        strategy, links = exchanger.settings.strategy, exchanger.settings.links or NOMINAL
        plan, weights = exchanger.plan_of(variables), exchanger.weights_of(variables)
        shards = strategy.make_shards(plan, weights, decays, exchanger.comm.rank, links)
        return Sharding(variables, shards, exchanger.comm)

    def attach(self, run: StrategyRun, names: Sequence[str]) -> None:
        """Let a run of the strategy work on the shards. **Ranks:** all."""
        self.shards.rename(names)
        self.run = run
        run.attach(self.shards)

    @property
    def state(self) -> list[keras.Variable]:
        """The optimizer's state of the shards, which no other rank has."""
        return [variable for slot in self.slots.values() for variable in slot]

    def gather_state(self, steps: int) -> None:
        """Gather the whole state on rank 0, for a file.

        Args:
            steps: that the optimizer has taken.

        **Ranks:** all, outside of traced code. **Cost:** an all-gather of the state; on rank 0 its
        memory until the next one.
        """
        whole: WholeState = {}
        shapes = self.shards.shapes
        for name in sorted(self.slots):
            found: dict[str, np.ndarray] = {}
            for segment, shard in zip(self.shards.segments, self.slots[name], strict=True):
                flat = self.comm.all_gather(
                    shard.value.read_value(), "world", f"state/{name}/{segment.name}", counted=False
                )
                if self.comm.rank == 0:
                    parts = segment.unflatten(flat, shapes)
                    found |= {path: part.numpy() for path, part in parts.items()}
            whole[name] = [found[path] for path in shapes] if self.comm.rank == 0 else []
        self._gathered = (steps, whole)

    def gathered_at(self, steps: int) -> WholeState:
        """Return the whole state, if it was gathered at this step, on rank 0.

        **Raises:** PlanError otherwise.
        """
        if self._gathered is None or self._gathered[0] != steps or self.comm.rank:
            raise PlanError(
                'With strategy="sharded" each rank has a part of the optimizer\'s state, and rank '
                f"0 writes the whole after all ranks have gathered it. Rank {self.comm.rank} "
                f"wants to write it after step {steps}. Call cx.settle(optimizer) on all ranks "
                "after the last step, then model.save on rank 0; BroadcastState does it at the end "
                "of each epoch."
            )
        return self._gathered[1]

    def set_state(self, whole: WholeState) -> None:
        """Take this rank's shards of a whole state, and keep it until `share_loaded`."""
        for name, slot in self.slots.items():
            tensors = dict(zip(self.shards.weights, whole[name], strict=True))
            for segment, shard in zip(self.shards.segments, slot, strict=True):
                parts = {path: tf.constant(tensors[path]) for path in segment.paths}
                shard.assign(segment.shard_of(parts, self.comm.rank))
        self._loaded = whole

    def share_loaded(self, root: int) -> None:
        """Give all ranks their shards of the state that rank `root` has loaded, if it has.

        **Ranks:** all, outside of traced code.
        """
        if self.comm.gather_objects(self._loaded is not None)[root]:
            mine, whole = self._loaded, {}
            for name, slot in sorted(self.slots.items()):
                whole[name] = []
                for place, variable in enumerate(self.variables):
                    value = (
                        np.zeros(variable.shape, slot[0].dtype)
                        if mine is None
                        else (mine[name][place])
                    )
                    received = self.comm.broadcast(
                        tf.constant(value), root, f"tfcommx/loaded/{name}/{place}"
                    )
                    whole[name].append(received.numpy())
            self.set_state(whole)
        self._loaded = None
