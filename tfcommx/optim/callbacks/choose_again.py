"""ChooseAgain: let `Scheme("auto")` choose another plan if the network has changed.

calls of Keras   |-- every --|-- every --|-- every --|-- every --|
mean seconds         usual      as usual    25 % off    25 % off    -> the links are measured
links                                                   25 % off    -> plans take turns again
"""

from __future__ import annotations

import time
from typing import Any

import keras

from tfcommx.comm import process
from tfcommx.optim.automatic import announce, links_of
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.expected_run import SHARE
from tfcommx.optim.keras_internals import steps_of
from tfcommx.optim.wrapped import exchanger_in, steps_of_update, wrapped_optimizers
from tfcommx.runtime.trial import TrialExecutor
from tfcommx.runtime.trial_rounds import STEPS
from tfcommx.terms import Link, Links, check_whole

# Steps, and messages of MESSAGE bytes, that take as many times longer or shorter have changed
DRIFT = 1.25
MESSAGE = 2**20
# Means in a row that must have changed
IN_A_ROW = 2


class ChooseAgain(keras.callbacks.Callback):
    """Let `Scheme("auto")` choose again if the network is not what it was: in `fit`.

    If steps take 25 % longer or shorter than after the choice, for 2 * `every` calls of Keras, the
    links are measured; if these have changed by as much, plans take turns again, at the same step
    on all ranks, and rank 0 says so. What the plan before has not sent is sent by the new one.
    Put it behind BroadcastState; Standard and recipes have it. Without an "auto" that chooses it
    does nothing.

    >>> import tfcommx as cx
    >>> callbacks = [cx.callbacks.BroadcastState(), cx.callbacks.ChooseAgain()]

    Args:
        every: calls of Keras whose mean counts, >= 1; each takes `steps_per_execution` steps.

    **Ranks:** all, with equal arguments. **Cost:** one exchange of some bytes for `every` calls.
    Links are measured in at most 2 % of the time. After a change the training step is traced
    again, and a trial follows; not if too few steps are left for one.
    **Raises:** PlanError if `every` is no integer >= 1.
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        self.every = check_whole("every", every, least=1)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin with nothing known."""
        # Calls since the ranks last met, and their seconds; when the last one began
        self._calls, self._seconds, self._since = 0, 0.0, 0.0
        # id of each strategy at work; with these a call usually takes that long, on these links
        self._runs: set[int] = set()
        self._usual: float | None = None
        self._links: Links | None = None
        # Means in a row that are not as usual
        self._odd = 0
        # What measuring the links took last, and the seconds of training since
        self._measuring, self._training = 0.0, 0.0
        self._told: dict[int, tuple[Any, int]] = {}

    # Not on_train_batch_end: for it, Keras waits after every step.
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count the time since the step before; every now and then, look at it."""
        now = time.perf_counter()
        if batch:
            self._calls, self._seconds = self._calls + 1, self._seconds + now - self._since
        if self._calls == self.every:
            self._look(self._seconds / self._calls)
            self._calls, self._seconds = 0, 0.0
        self._since = time.perf_counter()

    def _look(self, mean: float) -> None:
        chosen = {
            one: exchanger_in(one)
            for one in wrapped_optimizers(self.model)
            if exchanger_in(one).requested.is_chosen
        }
        if not chosen or process.size() == 1 or process.current().topology.uneven:
            return
        for optimizer, exchanger in chosen.items():
            self._note_expected(optimizer, exchanger)
        runs = {run for exchanger in chosen.values() for run in exchanger.runs.values()}
        trials = [run.executor for run in runs if isinstance(run.executor, TrialExecutor)]
        tries = any(trial.chosen is None for trial in trials)
        before, self._runs = self._runs, set(map(id, runs))
        everyone = process.current().gather_objects((mean, tries or before != self._runs))
        mean = max(seconds for seconds, _ in everyone)
        self._training += mean * self.every
        if any(is_new for _, is_new in everyone):
            self._usual = None
        elif self._usual is None:
            self._usual, self._odd = mean, 0
            (first, *_) = chosen.values()
            self._links = first.requested.links or links_of(process.current())
        elif _as_before(mean, self._usual):
            self._odd = 0
        else:
            self._odd += 1
            left = process.current().gather_objects(list(map(self._left, chosen)))[0]
            enough = all(steps is None or SHARE * steps >= STEPS for steps in left)
            if enough and self._odd >= IN_A_ROW and self._measuring <= SHARE * self._training:
                self._measure(mean, dict(zip(chosen.values(), left, strict=True)))

    def _note_expected(self, optimizer: keras.optimizers.Optimizer, exchanger: Exchanger) -> None:
        """Remember at which step it was told how many steps follow."""
        expected = exchanger.requested.expected_run
        if self._told.get(id(optimizer), (None, 0))[0] is not expected:
            self._told[id(optimizer)] = expected, steps_of(optimizer)

    def _left(self, optimizer: keras.optimizers.Optimizer) -> int | None:
        """Return how many steps follow; None if nobody knows."""
        expected, at = self._told[id(optimizer)]
        if expected.steps is None:
            return None
        return expected.steps - (steps_of(optimizer) - at) // steps_of_update(optimizer)

    def _measure(self, mean: float, left: dict[Exchanger, int | None]) -> None:
        """Measure the links; if they have changed, let the plans take turns again.

        Args:
            mean: seconds of a call.
            left: the steps that follow.
        """
        comm, before, usual = process.current(), self._links, self._usual
        start = time.perf_counter()
        links = links_of(comm, again=True)
        took = comm.gather_objects(time.perf_counter() - start)
        self._measuring, self._training = max(took), 0.0
        self._usual, self._odd = mean, 0
        if links is None or before is None or _same(links, before):
            return
        self._links = links
        announce(
            comm,
            f"a call takes {mean:.3g} s and took {usual:.3g} s, and the network has changed: "
            f"{_in_words(before)} before, {_in_words(links)} now. It is chosen again.",
        )
        for exchanger, steps in left.items():
            requested = exchanger.requested
            requested.links = links
            expected = requested.expected_run._replace(steps=steps, keeps_choice=False)
            requested.expected_run = expected
            exchanger.switch(requested.schemes)
        self.model.make_train_function(force=True)


def _as_before(now: float, before: float) -> bool:
    return 1 / DRIFT < now / before < DRIFT


def _same(one: Links, other: Links) -> bool:
    """Tell whether a message of middle size takes as long, inside nodes and between them."""

    def seconds(link: Link) -> float:
        return link.alpha_s + MESSAGE * link.beta_s_per_byte

    return _as_before(seconds(one.inside), seconds(other.inside)) and _as_before(
        seconds(one.between), seconds(other.between)
    )


def _in_words(links: Links) -> str:
    inside, between = (8e-6 / one.beta_s_per_byte for one in (links.inside, links.between))
    return f"{between:,.0f} Mbit/s between nodes and {inside:,.0f} inside"
