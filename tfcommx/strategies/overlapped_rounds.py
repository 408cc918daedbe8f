"""Rounds of weight averaging that travel while steps are taken.

    step         t                 t + 1   ...   t + overlap
    weights w    snapshot = w      w + u1        start + (w - snapshot)
    thread       [ exchange of the snapshot; start moves ]

A rank's updates of the steps between, w - snapshot, stay in its weights, and the next round sends
them: each update is sent once.

**Source:** Douillard et al., "Streaming DiLoCo with Overlapping Communication" (2025), section 2.2:
we differ in that they mix start weights and w, half and half, which drops half of those updates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfcommx.kernels.untraced import untraced
from tfcommx.strategies.background import BackgroundCalls
from tfcommx.strategies.outer_optimizer import StartWeights
from tfcommx.terms import Plan

# (fragment, its weights) -> done when the fragment's start weights have moved
ExchangeRound = Callable[[Plan, Mapping[str, tf.Tensor]], object]


class OverlappedRounds:
    """One round after another, each of a fragment, in a thread.

    Args:
        weights: variable path -> variable.
        starts: start weights of the same variables.
        fragments: plans whose variables are parts of them.
        exchange: exchanges a fragment and moves its start weights. **Ranks:** all.

    **Cost:** memory for one copy of the weights.
    """

    def __init__(
        self,
        weights: Mapping[str, tf.Variable],
        starts: StartWeights,
        fragments: Sequence[Plan],
        exchange: ExchangeRound,
    ) -> None:
        self._weights, self._starts, self._fragments = weights, starts, fragments
        traced = not tf.executing_eagerly()
        with untraced():
            self._snapshots = {
                path: tf.Variable(tf.zeros_like(weight), trainable=False, name="tfcommx_snapshot")
                for path, weight in weights.items()
            }
            calls = [functools.partial(self._exchange, exchange, one) for one in fragments]
            if traced:  # As the steps are: so buckets overlap
                calls = [tf.function(call).get_concrete_function() for call in calls]
        self._background = BackgroundCalls(calls)

    @tf.autograph.experimental.do_not_convert
    def _exchange(self, exchange: ExchangeRound, fragment: Plan) -> None:
        exchange(fragment, {path: self._snapshots[path] for path in fragment.paths})

    def begin(self, number: int) -> None:
        """Send a fragment as its weights are now; go on."""
        copies = [
            self._snapshots[path].assign(self._weights[path], read_value=False)
            for path in self._fragments[number].paths
        ]
        self._background.begin(number, copies)

    def finish(self, number: int) -> None:
        """Wait for the round of a fragment; continue from its start weights."""
        with tf.control_dependencies([self._background.wait()]):
            for path in self._fragments[number].paths:
                weight = self._weights[path]
                since = tf.convert_to_tensor(weight) - self._snapshots[path]
                weight.assign(self._starts[path] + since)

    def finish_now(self) -> None:
        """Do so with the round that is under way, if one is. Outside of traced code."""
        if self._background.under_way is not None:
            self.finish(self._background.under_way)

    def settle(self) -> None:
        """Let the round that is under way end; its average waits for its step."""
        self._background.settle()
