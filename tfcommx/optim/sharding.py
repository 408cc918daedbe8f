"""Sharding: one optimizer's shards on this rank, and their state as a whole."""

import zlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import ConfigurationError
from tfcommx.strategies.sharded.shards import Shards
from tfcommx.strategies.sharded.strategy import ShardedRun
from tfcommx.strategies.strategy import StrategyRun

# State by attribute of the optimizer, then by variable in forward order; None: it has none
WholeState = dict[str, list[np.ndarray | None]]


class Sharding:
    """The shards of one optimizer on this rank."""

    def __init__(
        self, variables: Sequence[keras.Variable], shards: Shards, comm: Comm, group: str
    ) -> None:
        """Keep the whole variables, in forward order, and their shards over a group of ranks."""
        self.variables, self.shards = list(variables), shards
        self.comm, self.group = comm, group
        # The run of the strategy, from the first step on
        self.run: ShardedRun | None = None
        # True if a step may begin with the pull
        self.can_pull_first = False
        # State of each shard, by attribute of the optimizer
        self.slots: dict[str, list[keras.Variable | None]] = {}
        # Step count at which the whole state was gathered, and the state on rank 0
        self._gathered: tuple[int, WholeState] | None = None
        # Checksums of this rank's part of it at that step
        self._digest: list[int] = []
        # Step count at which this rank has loaded a state, and the state, until all ranks have it
        self._loaded: tuple[int, WholeState] | None = None

    def attach(self, run: StrategyRun, names: Sequence[str]) -> None:
        """Attach a run of the strategy to the shards. **Ranks:** all."""
        assert isinstance(run, ShardedRun), "only Sharded makes shards"
        # Ranks may have agreed on other names since the build
        self.shards.rename(names)
        self.run = run
        run.attach(self.shards)

    @property
    def state(self) -> list[keras.Variable]:
        """The optimizer's state of the shards, which no other rank has."""
        return [array for slot in self.slots.values() for array in slot if array is not None]

    def gather_state(self, steps: int) -> None:
        """Gather the whole state on rank 0, for a file, unless it has not changed since.

        **Ranks:** all, outside of traced code. **Cost:** a pass over this rank's state and a small
        exchange on the host; then the state is sent once, and rank 0 keeps it in memory.
        """
        self._loaded_at(steps)  # Frees the memory of an old one
        # At an epoch's end the state is asked for twice. An optimizer without state has an empty
        # digest, so the number of steps counts, too
        digest = [zlib.crc32(array.numpy().tobytes()) for array in self.state]
        is_current = self._gathered is not None and self._gathered[0] == steps
        # One rank alone may have loaded another state, and a caller may have set it
        if all(self.comm.gather_objects(is_current and self._digest == digest)):
            return
        gathered = self.shards.gather(self.slots, self.comm, self.group)
        paths = list(self.shards.weights)
        state = {name: [array.get(path) for path in paths] for name, array in gathered.items()}
        self._gathered, self._digest = (steps, state), digest

    def gathered_at(self, steps: int) -> WholeState:
        """Return the whole state, if it was gathered at this step, on rank 0.

        **Raises:** ConfigurationError otherwise.
        """
        if self._gathered is None or self._gathered[0] != steps or self.comm.rank:
            raise ConfigurationError(
                'With strategy="sharded" each rank has a part of the optimizer\'s state, and rank '
                f"0 writes the whole after all ranks have gathered it. Rank {self.comm.rank} "
                f"wants to write it after step {steps}. Call cx.consolidate(optimizer) on all "
                "ranks after the last step, then model.save on rank 0; BroadcastState does it at "
                "the end of each epoch."
            )
        return self._gathered[1]

    def load_state(self, whole: WholeState, steps: int) -> None:
        """Take this rank's shards of a whole state; keep it for `share_loaded` until a step."""
        self._set_state(whole)
        self._loaded = (steps, whole)

    def _set_state(self, whole: WholeState) -> None:
        by_path: dict[str, dict[str, np.ndarray]] = {}
        for name, arrays in whole.items():
            pairs = zip(self.shards.weights, arrays, strict=True)
            by_path[name] = {path: array for path, array in pairs if array is not None}
        self.shards.set_slots(self.slots, by_path)

    def _loaded_at(self, steps: int) -> WholeState | None:
        """Return the state that this rank has loaded at this step; forget an older one."""
        if self._loaded is not None and self._loaded[0] != steps:
            self._loaded = None
        return self._loaded and self._loaded[1]

    def share_loaded(self, root: int, steps: int) -> None:
        """Give all ranks their shards of the state that rank `root` has loaded at this step.

        A state that was loaded before the last step is not shared: it is older than the shards'.

        **Ranks:** all, outside of traced code.
        """
        own = self._loaded_at(steps)
        # Attribute -> shape and dtype of each array; None: this rank has loaded no state
        own_forms: dict[str, list[tuple[tuple[int, ...], str] | None]] | None = None
        if own is not None:
            own_forms = {
                name: [None if part is None else (part.shape, part.dtype.name) for part in arrays]
                for name, arrays in sorted(own.items())
            }
        # The root's forms decide on all ranks which broadcasts follow, because the others may have
        # loaded nothing
        forms = self.comm.gather_objects(own_forms)[root]
        if forms is not None:
            state: WholeState = {}
            for name, rows in forms.items():
                state[name] = [None] * len(rows)
                for position, form in enumerate(rows):
                    if form is None:
                        continue
                    # Forms are received from the rank that has loaded a state
                    loaded = own if self.comm.rank == root else None
                    local = np.zeros(*form) if loaded is None else loaded[name][position]
                    received = self.comm.broadcast(
                        tf.constant(local), root, f"tfcommx/loaded/{name}/{position}"
                    )
                    state[name][position] = received.numpy()
            self._set_state(state)
        self._loaded = None
