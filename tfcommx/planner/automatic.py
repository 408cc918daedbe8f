"""`Scheme("auto")`: which plans are worth a trial beside plain Horovod's.

    links, profile known           one ranking of all schemes, by the predicted step
    the time of computing unknown  two rankings: exchange alone; as much computing as exchange

What nobody has measured is assumed; so predictions propose two plans, and measured steps decide.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tfcommx.planner.choose import Candidate, candidates, name_of
from tfcommx.planner.plan import Gradient, make_plan, scheme_of
from tfcommx.planner.prices import sub_profile
from tfcommx.simulator.assumptions import Assumptions, measured_time
from tfcommx.simulator.step import IDEAL
from tfcommx.terms import (
    AUTO,
    NOMINAL,
    PLAIN,
    Links,
    Plan,
    PlanError,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)

# Bytes of gradients from which something is tried: of less, latencies decide, and plain Horovod,
# which merges all it finds, has the fewest
LEAST_BYTES = 2**18
# A plan is tried if its predicted step takes at most this share of plain Horovod's
WORTH = 0.97
# With a profile a prediction of at most this share is clear: nothing else is tried
CLEAR = 0.8
# Plans tried beside plain Horovod's
TRIED = 2
# The shortest format of selected entries: theirs, unless a scheme names another one than the
# default. What rounding loses stays in the residual
SHORTER_WIRE = "block16/float16"
# Seconds of computing that vanish beside any exchange
NO_TIME = 1e-9


class PlanRequest(NamedTuple):
    """What plans are made of, besides the schemes."""

    # In forward order
    gradients: Sequence[Gradient]
    topology: Topology
    # "average" or "sum" over the ranks
    operation: str = "average"
    # None: not measured
    links: Links | None = None
    # None: not measured
    profile: Profile | None = None

    def plan(self, schemes: Mapping[str, Scheme], reduce_to_root: bool = False) -> Plan:
        """Plan schemes that name their routes; `reduce_to_root` as make_plan has it."""
        return make_plan(
            self.gradients,
            schemes,
            self.topology,
            self.operation,
            self.links or NOMINAL,
            reduce_to_root=reduce_to_root,
            profile=self.profile,
        )


class _Ranking(NamedTuple):
    """All schemes under one assumption of what computing takes, the fastest first."""

    profile: Profile
    candidates: list[Candidate]
    # Of a step by plain Horovod
    plain_s: float

    def share(self, scheme: Scheme) -> float:
        """Return a scheme's step over plain Horovod's; 1 for one that is not ranked."""
        found = [one.timeline.step_s for one in self.candidates if one.scheme == scheme]
        return found[0] / self.plain_s if found else 1.0

    @property
    def worth(self) -> list[Candidate]:
        """Those that are predicted to be faster than plain Horovod."""
        return [one for one in self.candidates if one.timeline.step_s <= WORTH * self.plain_s]


class Proposal(NamedTuple):
    """A plan that is worth a trial."""

    # The scheme in a few words
    name: str
    plan: Plan
    # Its predicted step over plain Horovod's: the larger one, if computing takes no time, and if it
    # takes as long as the exchange
    share: float

    @property
    def is_clear(self) -> bool:
        """Is it fast enough to be taken without a trial, where none can be held?"""
        return self.share <= CLEAR


def find_auto(schemes: Mapping[str, Scheme]) -> Scheme | None:
    """Return the scheme "auto" of a mapping; None if there is none.

    **Raises:** PlanError for two different ones, and for one beside a scheme with momentum.
    """
    found = {scheme for scheme in schemes.values() if scheme.route == AUTO}
    if len(found) > 1:
        raise PlanError(
            'Patterns may share one Scheme("auto"): what is chosen is measured for all of them '
            f"together. Received {len(found)} different ones, for "
            f"{[name for name, scheme in schemes.items() if scheme.route == AUTO]}. Name routes "
            "for some of them."
        )
    if found and any(scheme.momentum for scheme in schemes.values()):
        raise PlanError(
            "A scheme with `momentum` keeps a velocity, which plans that take turns cannot share. "
            'Received one beside Scheme("auto"). Name routes for all patterns.'
        )
    return found.pop() if found else None


def auto_as_plain(schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Return the schemes with plain Horovod's, which is always tried, in the place of "auto".

    >>> auto_as_plain({"*": Scheme("auto")})["*"] == Scheme()
    True
    """
    auto = find_auto(schemes)
    return dict(schemes) if auto is None else _with_auto_as(schemes, _plain_scheme(auto))


def _with_auto_as(schemes: Mapping[str, Scheme], chosen: Scheme) -> dict[str, Scheme]:
    return {
        pattern: chosen if scheme.route == AUTO else scheme for pattern, scheme in schemes.items()
    }


def _plain_scheme(auto: Scheme) -> Scheme:
    return Scheme(bucket_bytes=auto.bucket_bytes, block_bytes=auto.block_bytes)


def _require_auto(schemes: Mapping[str, Scheme]) -> Scheme:
    auto = find_auto(schemes)
    if auto is None:
        raise PlanError(f'A Scheme("auto") is required among them. Received {dict(schemes)}.')
    return auto


def is_worth_a_trial(schemes: Mapping[str, Scheme], asked: PlanRequest) -> bool:
    """Tell whether there is anything to choose: several ranks, and enough gradients."""
    mine = _of_auto(schemes, asked.gradients)
    size = sum(gradient.entries for gradient in mine)
    return asked.topology.size > 1 and 4 * size >= LEAST_BYTES


def propose(
    schemes: Mapping[str, Scheme], asked: PlanRequest, messages: bool = False
) -> list[Proposal]:
    """Return the plans that are worth a trial, the most promising first; plain Horovod's excluded.

    >>> asked = PlanRequest([Gradient("w", (4096, 512), "float32")], Topology(4, 1))
    >>> [found.name for found in propose({"*": Scheme("auto", "mstopk", 0.01)}, asked)][:1]
    ['allgather + allreduce, threshold, block16/float16']

    Args:
        schemes: pattern -> scheme; one of them is "auto".
        asked: what else is known.
        messages: can the launch send messages between two ranks? An MPI launch can.

    Returns:
        At most TRIED; none if no scheme is predicted to be faster.

    **Cost:** a plan and a simulated step for each scheme; some seconds for a model of 500
    variables. **Raises:** PlanError for a profile of another model, or one without times.
    """
    given = asked.profile
    rankings: list[_Ranking] = []
    if given is not None:
        assumptions = Assumptions(selection=measured_time(given))
        rankings.append(_ranking(given, schemes, asked, assumptions, messages))
    else:
        seconds = NO_TIME
        for _ in range(2):
            assumed = _assumed(asked.gradients, seconds)
            rankings.append(_ranking(assumed, schemes, asked, IDEAL, messages))
            seconds = rankings[0].plain_s
    first = rankings[0]
    clear = first.candidates[0].timeline.step_s <= CLEAR * first.plain_s
    count = 1 if given is not None and asked.links is not None and clear else TRIED
    seen = [asked.plan(auto_as_plain(schemes)).buckets]
    found: list[Proposal] = []
    for profile, candidate in _in_order(rankings):
        if len(found) == count:
            break
        chosen = _with_auto_as(schemes, candidate.scheme)
        plan = asked._replace(profile=profile).plan(chosen)
        if plan.buckets not in seen:
            seen.append(plan.buckets)
            share = max(ranking.share(candidate.scheme) for ranking in rankings)
            found.append(Proposal(_words(candidate.scheme), plan, share))
    return found


def _of_auto(schemes: Mapping[str, Scheme], gradients: Sequence[Gradient]) -> list[Gradient]:
    return [one for one in gradients if scheme_of(one.path, schemes).route == AUTO]


def _assumed(gradients: Sequence[Gradient], seconds: float) -> Profile:
    """Return a profile in which each entry takes equally long, a third of it forward."""
    rows = tuple(reversed(gradients))
    ends = itertools.accumulate(row.entries for row in rows)
    total, backward = sum(row.entries for row in rows), 2 / 3 * seconds
    variables = tuple(
        VariableProfile(row.path, row.shape, row.dtype, ready_s=backward * end / total)
        for row, end in zip(rows, ends, strict=True)
    )
    return Profile("assumed", variables, seconds / 3, backward, batch=1)


def _ranking(
    profile: Profile,
    schemes: Mapping[str, Scheme],
    asked: PlanRequest,
    assumptions: Assumptions,
    messages: bool,
) -> _Ranking:
    """Predict all schemes for the variables whose scheme is chosen."""
    auto = _require_auto(schemes)
    shorter = auto.selection != "all" and auto.wire == PLAIN
    mine = sub_profile(list(reversed(_of_auto(schemes, asked.gradients))), profile)
    ranked = candidates(
        mine,
        asked.topology,
        asked.links or NOMINAL,
        dataclasses.replace(
            auto, route=Scheme().route, wire=SHORTER_WIRE if shorter else auto.wire
        ),
        messages,
        assumptions,
        thorough=asked.profile is not None,
    )
    plain = next(one for one in ranked if one.scheme == _plain_scheme(auto))
    return _Ranking(profile, ranked, plain.timeline.step_s)


def _in_order(rankings: Sequence[_Ranking]) -> Iterator[tuple[Profile, Candidate]]:
    """Yield what is predicted to be faster: the best of each ranking, then other routes, then all.

    A second plan by the first one's route would fail where that route does.
    """
    best = [one.worth[0].scheme.route for one in rankings if one.worth]
    for ranking in rankings:
        yield from ((ranking.profile, one) for one in ranking.worth[:1])
    for ranking in rankings:
        others = [one for one in ranking.worth if one.scheme.route not in best]
        yield from ((ranking.profile, one) for one in others)
    for ranking in rankings:
        yield from ((ranking.profile, one) for one in ranking.worth)


def _words(scheme: Scheme) -> str:
    wire = "" if scheme.wire == PLAIN else f", {scheme.wire}"
    return f"{name_of(scheme)}{wire}"
