"""Choose a plan for `Scheme("auto")`: from an earlier run, by prediction, or by a trial.

    choice cached by an earlier run? -> its plan
    few steps follow? -> plain Horovod; with a budget the proposal by nominal links
    otherwise   links: given, cached, or measured now -> rank 0 proposes -> trial -> cached
                too few steps for a trial? -> the proposal if it is clear and the links' spread is
                                              small, or plain Horovod

If plain Horovod exceeds the budget, the first proposal replaces it in the trial.

Rank 0 alone reads, proposes and writes; it broadcasts the results. Its measurements and its choice
are in files for the next run:

    folder/choice-<SHA-256 of the key>.json    {"key": its dependencies, "value": {...}}

`ExpectedRun` is the expected number of remaining steps: a choice must pay within them.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

import tfcommx
from tfcommx.collectives.comm import Comm
from tfcommx.core import (
    NO_COMPRESSION,
    Links,
    Plan,
    PlanError,
    Scheme,
    TfcommxError,
    log,
    reading,
    write_text,
)
from tfcommx.launch.launcher import cache_folder, launcher
from tfcommx.measure.links import probe
from tfcommx.planner.automatic import (
    PlanRequest,
    auto_as_plain,
    find_auto,
    is_worth_a_trial,
    propose,
    rules_out_plain,
)
from tfcommx.routes import read_plan
from tfcommx.runtime.executor import PlanExecutor, agree_on_plan
from tfcommx.runtime.gradient_state import Executor
from tfcommx.runtime.trial import LEAST_ROUNDS, STEPS, TrialExecutor, TrialRounds
from tfcommx.strategies.strategy import Strategy
from tfcommx.strategies.synchronous import Synchronous

T = TypeVar("T")


def read(kind: str, key: object) -> dict[str, Any] | None:
    """Return the value cached under an equal key; None if there is none, or the file is damaged."""
    try:
        path = _path(kind, key)
        if not path.exists():
            return None
        with reading("A measurement that was kept", path, "It is measured again."):
            record = json.loads(path.read_text())
            if record["crc"] != _crc(record["value"]):
                raise ValueError("a wrong checksum")
            return dict(record["value"])
    except (OSError, TfcommxError) as error:
        log.warning("An earlier measurement cannot be read, and is made again: %s", error)
    return None


def write(kind: str, key: object, value: dict[str, Any]) -> None:
    """Write a measurement over the previous one; if that fails, log a warning and continue."""
    try:
        record = {"key": key, "value": value, "crc": _crc(value)}
        write_text(_path(kind, key), json.dumps(record, indent=1))
    # Any of them, because this is rank 0 alone, and the others would wait for it
    except (OSError, TfcommxError) as error:
        log.warning(
            "A measurement cannot be written, and later runs will make it again: %s.", error
        )


def _crc(value: object) -> int:
    # Keys are sorted, because equal values may have been filled in another order
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _path(kind: str, key: object) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest}.json"


# Largest share of the remaining steps that a trial may take
SHARE = 0.02
# Least number of steps in which anything is measured, predicted or tried
FEW = 50


class ExpectedRun(NamedTuple):
    """Facts about the remaining steps; None for each that is unknown.

    >>> [ExpectedRun(steps).trial_steps for steps in (500, 10**6, None)]
    [10, 18, 18]
    """

    # Number of steps that the optimizer will take, >= 0
    steps: int | None = None
    # Number of steps of an epoch, >= 0
    steps_of_epoch: int | None = None
    # Samples of a rank in a step, as set for the whole run or read from the traced step
    batch: int | None = None
    # True if set for the whole run, of which a fit is a part
    whole_run: bool = False
    # True if a measured choice is cached for other runs
    keeps_choice: bool = True
    # The optimizer's count of steps when `steps` was set, >= 0
    at: int = 0

    @property
    def trial_steps(self) -> int:
        """The steps that a trial may take."""
        return STEPS if self.steps is None else min(STEPS, int(SHARE * self.steps))

    @property
    def is_short(self) -> bool:
        """True if there are too few steps to spend anything on a choice."""
        return self.steps is not None and self.steps < FEW

    def key(self, batch: int | None) -> dict[str, int | None]:
        """Return the part of a cached choice's key that depends on the run.

        If the batch is unknown, the steps of an epoch replace it, because they change with it.

        >>> ExpectedRun(100, 10, 32).key(None), ExpectedRun(100, 10).key(None), ExpectedRun().key(8)
        ({'batch': 32}, {'batch': None, 'steps_of_epoch': 10}, {'batch': 8})

        Args:
            batch: samples of a profile, which take precedence.
        """
        samples = self.batch if batch is None else batch
        return {"batch": samples} | (
            {"steps_of_epoch": self.steps_of_epoch} if samples is None else {}
        )


PLAIN_HOROVOD = "plain Horovod"
# Increased when a trial decides by another rule or between other plans: this voids cached choices
TRIAL = 2
# Quick measurement before the first step: bytes that each rank sends, bytes received through a port
# before a time counts, rounds that count. These are 9 MB through each port; longer rows, with 14
# MB, took some 6 % of a training of 100 steps at 80 Mbit/s
SIZES, STEADY, REPEATS = (1024, 262144), 2**20, 3
# Largest spread of links that are cached, and by which a prediction is clear, because the margin of
# CLEARLY_FASTER is as large. Between processes of a busy machine the spread is often above 1
MOST_SPREAD = 0.25


def executor_for(
    schemes: Mapping[str, Scheme],
    asked: PlanRequest,
    comm: Comm,
    strategy: Strategy,
    expected: ExpectedRun,
) -> Executor:
    """Return the executor for these schemes, "auto" perhaps among them.

    **Ranks:** all, outside of traced code, with equal arguments, but for `expected`, of which rank
    0's counts. **Cost:** see DistributedOptimizer. **Raises:** PlanError for schemes that cannot be
    carried out, and for a profile of another model.
    """
    plain = asked.plan(auto_as_plain(schemes), strategy.reduces_to_root)
    strategy.check(plain)
    auto = find_auto(schemes)
    if auto is None:
        return PlanExecutor(plain, comm)
    # First, because ranks with other models would take different ways through the collectives
    # below, and wait for each other
    agree_on_plan(plain, comm)
    synchronous = isinstance(strategy, Synchronous)
    lossless = auto.selection == "all" and auto.compression == NO_COMPRESSION
    if not synchronous and not (lossless and auto.budget is None):
        raise PlanError(
            'A Scheme("auto") with a selection, a compression or a budget needs the strategy '
            f'"synchronous". Received {auto.selection!r}, {auto.compression!r} and budget='
            f"{auto.budget} with {strategy}. Name a route."
        )
    must_fit = rules_out_plain(schemes, asked.topology)
    # With another strategy than Synchronous a lossless "auto" is plain Horovod
    if not synchronous or not (must_fit or is_worth_a_trial(schemes, asked)):
        return PlanExecutor(plain, comm)
    # Ranks may expect different numbers of steps, as where one alone has a callback, but must begin
    # trials of one length. A tuple, because objects travel as plain data
    of_root = ExpectedRun._make(comm.gather_objects(tuple(expected))[0])
    return _choose_or_try(schemes, asked, comm, plain, of_root)


def _choose_or_try(
    schemes: Mapping[str, Scheme],
    request: PlanRequest,
    comm: Comm,
    plain: Plan,
    expected: ExpectedRun,
) -> Executor:
    cluster = _cluster(comm)
    key = _cache_key(schemes, request, cluster, expected)
    record = _on_rank_0(comm, lambda: read("choice", key))
    # Four rounds of two plans, in a short run, must not decide for a million steps
    if record is not None and record["of_trial"] >= expected.trial_steps:
        announce(comm, f"{record['chosen']}, as measured in a run before. {record['said']}")
        return PlanExecutor(read_plan(record["plan"]), comm)
    must_fit = rules_out_plain(schemes, request.topology)
    tries = not expected.is_short and is_worth_a_trial(schemes, request)
    if expected.is_short and not must_fit:
        announce(
            comm, f"{PLAIN_HOROVOD}: {expected.steps} steps follow, too few to measure anything."
        )
        return PlanExecutor(plain, comm)
    if request.links is None and tries:
        request = request._replace(links=links_of(comm, cluster))
    written = _on_rank_0(
        comm,
        lambda: [
            # No prediction is clear for links that were assumed or whose measurements vary
            (
                proposal.name,
                proposal.plan.to_json(),
                proposal.is_clear and _are_steady(request.links),
            )
            for proposal in propose(schemes, request, comm.messages.possible)
        ],
    )
    if not written:
        announce(comm, f"{PLAIN_HOROVOD}: nothing is predicted to be faster.")
        return PlanExecutor(plain, comm)
    # The number of plans that can take their least rounds
    fit = expected.trial_steps // LEAST_ROUNDS
    if must_fit and (fit < 2 or len(written) == 1 or not tries):
        name, text, _ = written[0]
        announce(comm, f"{name}, which is predicted to be the fastest within the budget.")
        return PlanExecutor(read_plan(text), comm)
    if fit < 2:
        return PlanExecutor(_plan_by_prediction(written[0], plain, comm, expected), comm)
    proposals = [(name, read_plan(text)) for name, text, _ in written]
    # In the order of their predictions, so that a short run tries the most promising ones
    tried = (proposals if must_fit else [(PLAIN_HOROVOD, plain), *proposals])[:fit]
    names, plans = [name for name, _ in tried], [plan for _, plan in tried]

    def decided(rounds: TrialRounds) -> None:
        assert rounds.chosen is not None
        times = [
            f"{name} {1e3 * mean:.1f} ms" if (mean := rounds.mean(plan)) else name
            for plan, name in enumerate(names)
        ]
        details = f"Mean step in a trial of {rounds.steps}: {'; '.join(times)}."
        chosen = names[rounds.chosen]
        announce(comm, f"{chosen}. {details}")
        if comm.rank == 0 and expected.keeps_choice:
            value = {"chosen": chosen, "said": details, "plan": plans[rounds.chosen].to_json()}
            write("choice", key, value | {"of_trial": expected.trial_steps})

    return TrialExecutor(plans, comm, decided, expected.trial_steps)


def _plan_by_prediction(
    proposal: tuple[str, str, bool], plain: Plan, comm: Comm, expected: ExpectedRun
) -> Plan:
    """Return the first proposal (name, plan, whether it is clear), or plain Horovod's plan."""
    name, text, is_clear = proposal
    why = (
        f"A trial takes {2 * LEAST_ROUNDS} steps or more, and {SHARE:.0%} of the {expected.steps} "
        f"that follow are {expected.trial_steps}"
    )
    if is_clear:
        announce(comm, f"{name}, by prediction. {why}.")
        return read_plan(text)
    announce(comm, f"{PLAIN_HOROVOD}. {why}; no other is predicted to be clearly faster.")
    return plain


def announce(comm: Comm, what: str) -> None:
    """Log on rank 0 how gradients travel from now on."""
    if comm.rank == 0:  # A warning: Python shows no lower level by default
        log.warning("How gradients travel: %s", what)


def _on_rank_0(comm: Comm, work: Callable[[], T]) -> T:
    """Return the result of `work` on rank 0; if it fails there, raise on all ranks."""
    value: Any = None
    error: Exception | None = None
    if comm.rank == 0:
        try:
            value = work()
        except Exception as failed:
            error = failed
    message = error and (
        str(error) if isinstance(error, PlanError) else f"Rank 0 failed: {error!r}."
    )
    value, message = comm.gather_objects((value, message))[0]
    # Raised after the gather, in which the other ranks wait
    if message is not None:
        raise error or PlanError(message)
    result: T = value
    return result


def _cluster(comm: Comm) -> dict[str, Any]:
    """Return the key of the cluster and the programs on it."""
    engine = launcher().kind
    if tf.config.list_logical_devices("GPU"):
        engine = f"{engine} on GPUs{', by NCCL' * comm.by_nccl}"
    return {
        # Links and choices of other hosts do not apply, although their number may be the same
        "hosts": comm.gather_objects(platform.node()),
        "topology": dataclasses.asdict(comm.topology),
        "engine": engine,
        "versions": {
            "tfcommx": tfcommx.__version__,
            "trial": TRIAL,
            "tensorflow": tf.__version__,
            "horovod": importlib.metadata.version("horovod"),
        },
    }


def _cache_key(
    schemes: Mapping[str, Scheme],
    request: PlanRequest,
    cluster: dict[str, Any],
    expected: ExpectedRun,
) -> dict[str, Any]:
    """Return the key of a choice: all its dependencies that the optimizer knows."""
    profile = None if request.profile is None else request.profile.to_json()
    links = None if request.links is None else request.links.to_dict()
    model = hashlib.sha256(
        repr([tuple(gradient) for gradient in request.gradients]).encode()
    ).hexdigest()
    return {
        "model": model,
        "cluster": cluster,
        "operation": request.operation,
        "schemes": {pattern: dataclasses.asdict(scheme) for pattern, scheme in schemes.items()},
        "links": links,
        "has_momentum": request.has_momentum,
        "profile": profile and hashlib.sha256(profile.encode()).hexdigest(),
        **expected.key(None if request.profile is None else request.profile.batch),
    }


def links_of(
    comm: Comm, cluster: dict[str, Any] | None = None, again: bool = False
) -> Links | None:
    """Return this cluster's links: cached by an earlier run, or measured quickly and cached.

    None for nodes with unequal numbers of slots, on which nothing is measured. `again` measures
    without reading or writing the cache.

    **Ranks:** all, outside of traced code. **Cost:** about 9 MB through each port, if measured.
    """
    if comm.topology.uneven:
        return None
    cluster = cluster or _cluster(comm)
    cached = None if again else _on_rank_0(comm, lambda: read("links", cluster))
    if cached is not None:
        return Links.from_dict(cached)
    links = probe(comm, SIZES, REPEATS, blocks=(), steady=STEADY, fusion=True).links
    # Not cached: a network that changed in mid-run does not describe the start of the next run
    if comm.rank == 0 and not again and _are_steady(links):
        write("links", cluster, links.to_dict())
    return links


def _are_steady(links: Links | None) -> bool:
    """Return True if links were measured, and their measurements vary little."""
    return links is not None and links.spread <= MOST_SPREAD
