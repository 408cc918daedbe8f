"""ChooseAgain: make `Scheme("auto")` choose another plan if the network has changed.

calls of Keras   |-- every --|-- every --|-- every --|-- every --|-- every --|
mean seconds         usual      as usual    25 % off    25 % off    25 % off
messages            measured    measured                twice off   twice off   -> plans take turns

Steps, and single messages, vary with any load of the machines. A change of the network shows in the
fastest of many messages, in each measurement, and in the same direction as in the steps. A plan
that sends few bytes hides a faster network, because its steps hardly depend on the network.

`expect_steps` gives "auto" the number of following training steps, as far as `fit` knows.
"""

import time
import weakref
from typing import Any

import keras

from tfcommx.collectives import process
from tfcommx.core import check_whole
from tfcommx.keras_internals.models import trace_again
from tfcommx.keras_internals.optimizers import steps_of
from tfcommx.measure.links import WATCHED, fastest_message
from tfcommx.optim.automatic import SHARE, announce, links_of
from tfcommx.optim.wrapped import exchanger_in, steps_of_update, wrapped_optimizers
from tfcommx.runtime.trial import STEPS, TrialExecutor
from tfcommx.strategies.strategy import StrategyRun


def expect_steps(
    optimizer: keras.optimizers.Optimizer,
    params: dict[str, Any] | None,
    epoch: int,
    end: int | None = None,
) -> None:
    """Give "auto" the number of following steps, unless a recipe has set it for the whole run.

    Args:
        params: `params` of a callback, as set by `fit`.
        epoch, end: the epoch that begins, and the next one with another scheme; None: none.
    """
    requested = exchanger_in(optimizer).requested
    if requested.expected_run.whole_run:
        return
    steps, epochs = (params or {}).get("steps"), (params or {}).get("epochs")
    follow = None  # Replaces the number of an earlier `fit`, which no longer holds
    if steps is not None and epochs is not None:
        last = epochs if end is None else min(end, epochs)
        follow = steps * (last - epoch) // steps_of_update(optimizer)
    requested.expected_run = requested.expected_run._replace(
        steps=follow, at=steps_of(optimizer), steps_of_epoch=steps
    )


# Factor by which changed steps are longer or shorter
DRIFT = 1.25
# The same for messages between nodes, CHANGES times: at a load of 19 on two processors about 4 of
# 20 measurements, each the fastest of 8, were beyond this. A network that changes by less seldom
# makes another plan the fastest.
MESSAGE_DRIFT = 2.0
# Consecutive means, and consecutive measurements of messages, that must have changed
IN_A_ROW, CHANGES = 2, 3
# Measurements after a choice, of which the fastest is compared with later ones: all are beyond
# MESSAGE_DRIFT in one of 125 runs on a busy machine
USUAL_MESSAGES = 3
# Largest share of the time for measurements while steps take the usual time
WATCHING = SHARE / 4


class ChooseAgain(keras.callbacks.Callback):
    """Make `Scheme("auto")` choose again if the network has changed during `fit`.

    If steps take 25 % longer or shorter than after the choice, for 2 * `every` calls of Keras,
    messages between nodes are measured. If three measurements in a row take twice as long, or half
    as long, as after the choice, plans take turns again (docs/explanation/planner.md). A plan that
    sends few bytes hides a faster network, so with such a plan messages are measured in any case.
    Put it behind BroadcastState; Standard and recipes have it. It has no effect on one node, on
    nodes with unequal numbers of slots, or if no "auto" chooses.

    >>> import tfcommx as cx
    >>> callbacks = [cx.callbacks.BroadcastState(), cx.callbacks.ChooseAgain()]

    Args:
        every: calls of Keras over which the mean is taken, >= 1; each takes `steps_per_execution`
            steps.

    **Ranks:** all, with equal arguments. **Cost:** one exchange of some bytes per `every` calls.
    Messages are measured up to three times after a choice, all in about 2 % of the time. After a
    change the training step is traced again, and a trial follows, unless too few steps are left.
    **Raises:** ConfigurationError if `every` is not an integer >= 1.
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        self.every = check_whole("every", every, least=1)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, without the strategies of a run."""
        return {name: part for name, part in vars(self).items() if name != "_runs"}

    def on_train_begin(self, logs: Any = None) -> None:
        # Calls since the last exchange, and their seconds; time of the last one's beginning
        self._calls, self._seconds, self._since = 0, 0.0, 0.0
        # The running strategies, not by `id`, which may be used again; usual seconds of a call with
        # these
        self._runs: weakref.WeakSet[StrategyRun] = weakref.WeakSet()
        self._usual: float | None = None
        # Seconds of messages, measured while calls took the usual time
        self._messages: list[float] = []
        # Consecutive unusual means, and consecutive measurements of a changed network
        self._odd, self._changes = 0, 0
        # Seconds of the last measurement, and the seconds of training since
        self._measuring, self._training = 0.0, 0.0

    # Not on_train_batch_end, because Keras would wait for every step
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Add the time since the previous call; check the mean after `every` calls."""
        time_now = time.perf_counter()
        # The time before an epoch's first step contains the evaluation and the saving of the epoch
        # before
        if batch:
            self._calls, self._seconds = self._calls + 1, self._seconds + time_now - self._since
        if self._calls == self.every:
            self._look(self._seconds / self._calls)
            self._calls, self._seconds = 0, 0.0
        self._since = time.perf_counter()

    def _look(self, mean: float) -> None:
        chosen = {
            wrapped: exchanger_in(wrapped)
            for wrapped in wrapped_optimizers(self.model)
            if exchanger_in(wrapped).requested.is_chosen
        }
        topology = process.current().topology
        if not chosen or topology.nodes == 1 or topology.uneven:
            return
        runs = {run for exchanger in chosen.values() for run in exchanger.runs.values()}
        trials = [run.executor for run in runs if isinstance(run.executor, TrialExecutor)]
        tries = any(trial.chosen is None for trial in trials)
        before, self._runs = self._runs, weakref.WeakSet(runs)
        everyone = process.current().gather_objects(
            (mean, tries or before != self._runs, list(map(_steps_left, chosen)))
        )
        # The slowest rank's, because all ranks must draw the same conclusion
        mean, steps_left = max(seconds for seconds, *_ in everyone), everyone[0][2]
        self._training += mean * self.every
        # Measured anew, because other plans and trials have other usual times
        if any(is_new for _, is_new, _ in everyone):
            self._usual = None
        elif any(steps is not None and SHARE * steps < STEPS for steps in steps_left):
            return  # Too few for another trial
        elif self._usual is None:
            self._begin(mean)
            self._messages = [self._measure()]
        else:
            self._odd = 0 if as_before(mean, self._usual, DRIFT) else self._odd + 1
            plans = [plan for run in runs for plan in run.executor.plans]
            hides = any(bucket.keeps_residual for plan in plans for bucket in plan.buckets)
            self._check(mean, hides, dict(zip(chosen, steps_left, strict=True)))

    def _check(
        self,
        mean: float,
        hides: bool,
        steps_left: dict[keras.optimizers.Optimizer, int | None],
    ) -> None:
        """Measure a message if that is due, and compare it if steps or the plan require it."""
        usual = self._odd == 0
        if usual and len(self._messages) < USUAL_MESSAGES:
            self._changes = 0
            if self._may_take(SHARE):
                self._messages.append(self._measure())
        elif usual and not hides:
            self._changes = 0
        # The second and the third follow at once, because on a slow link they would otherwise wait
        # for fifty times the seconds of a measurement
        elif (usual or self._odd >= IN_A_ROW) and (
            self._changes or self._may_take(WATCHING if usual else SHARE)
        ):
            self._compare(mean, hides, steps_left)

    def _begin(self, mean: float) -> None:
        self._usual, self._odd, self._changes = mean, 0, 0

    def _may_take(self, share: float) -> bool:
        """Return True if a measurement takes at most this share of the time."""
        return self._measuring <= share * self._training

    def _measure(self) -> float:
        """Return the seconds of a message between nodes, the same on all ranks."""
        comm, start = process.current(), time.perf_counter()
        seconds = fastest_message(comm)
        self._measuring = max(comm.gather_objects(time.perf_counter() - start))
        self._training = 0.0
        return seconds

    def _compare(
        self,
        mean: float,
        hides: bool,
        steps_left: dict[keras.optimizers.Optimizer, int | None],
    ) -> None:
        """Measure a message; if the network has changed permanently, start a trial of plans."""
        assert self._usual is not None
        # The fastest counts, because a busy machine delays single messages by up to 30 times, and
        # nothing makes them faster
        comm, usual, before = process.current(), self._usual, min(self._messages)
        latest = self._measure()
        if not has_changed(usual, mean, before, latest, hides):
            # Means as before do not replace it, because slow changes would never add up
            self._begin(mean if self._odd else usual)
            self._messages.append(latest)
            return
        self._changes += 1
        if self._changes < CHANGES:
            return
        announce(
            comm,
            f"a call takes {mean:.3g} s and took {usual:.3g} s, and the network has changed: a "
            f"message of {WATCHED // 1024} KiB between nodes takes {1e3 * latest:.3g} ms and took "
            f"{1e3 * before:.3g} ms. It is chosen again.",
        )
        links = links_of(comm, again=True)
        self._begin(mean)
        for optimizer, steps in steps_left.items():
            requested = exchanger_in(optimizer).requested
            requested.links = links
            # The choice is not kept, because the next run begins with the usual network
            requested.expected_run = requested.expected_run._replace(
                steps=steps, at=steps_of(optimizer), keeps_choice=False
            )
            # The same schemes: a switch drops the plans, and the next step plans by the new links
            exchanger_in(optimizer).switch(requested.schemes)
        trace_again(self.model)


def _steps_left(optimizer: keras.optimizers.Optimizer) -> int | None:
    """Return the number of following steps; None if unknown."""
    expected = exchanger_in(optimizer).requested.expected_run
    if expected.steps is None:
        return None
    return expected.steps - (steps_of(optimizer) - expected.at) // steps_of_update(optimizer)


def as_before(latest: float, before: float, drift: float) -> bool:
    """Return True if the times differ by less than the factor `drift`."""
    return 1 / drift < latest / before < drift


def has_changed(usual: float, mean: float, before: float, latest: float, hides: bool) -> bool:
    """Return True if messages have changed, in the same direction as the steps.

    >>> has_changed(usual=0.1, mean=0.2, before=0.002, latest=0.02, hides=True)
    True
    >>> has_changed(0.1, 0.2, 0.002, 0.0005, hides=False)  # Another cause of slow steps
    False
    >>> has_changed(0.1, 0.1, 0.002, 0.0005, hides=True)
    True

    Args:
        usual, mean: usual and present seconds of a call.
        before, latest: earlier and present seconds of a message, each the fastest of several.
        hides: True if steps may be as before on a faster network, because the plan sends few bytes.
    """
    if latest >= MESSAGE_DRIFT * before:
        return mean >= DRIFT * usual
    return MESSAGE_DRIFT * latest <= before and (hides or DRIFT * mean <= usual)
