"""Proposes plans for `Scheme("auto")`: those that may be faster than plain Horovod's.

    compute time measured       one ranking of all schemes, by the predicted step
    compute time not measured   two rankings: exchange alone; as much computing as exchange

Predictions only propose two plans; measured steps decide between them and plain Horovod's. A budget
leaves plain Horovod out where its bytes do not fit.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from tfcommx.core import (
    AUTO,
    NOMINAL,
    Links,
    Plan,
    PlanError,
    Profile,
    Scheme,
    Topology,
    VariableProfile,
)
from tfcommx.planner.budget import SentBytes, least_lossy
from tfcommx.planner.choose import ROUTES_FOR_OPTIMAL, candidates, ranked
from tfcommx.planner.plan import Gradient, make_plan, matches, plan_in_fragments, scheme_of
from tfcommx.planner.predict import Prediction, Setting, describe
from tfcommx.planner.prices import sub_profile
from tfcommx.simulator.assumptions import Assumptions, measured_time

# Least bytes of gradients for a trial. With fewer, latencies decide, and plain Horovod has the
# fewest because it merges all pending gradients.
MIN_BYTES = 2**18
# Largest predicted step of a plan worth a trial, as a share of plain Horovod's.
WORTH_A_TRIAL = 0.97
# Largest predicted step of a clearly faster plan, as a share of plain Horovod's: it is taken where
# no trial can be held. Predictions are off by 4 to 10 % in the median (decision 7).
CLEARLY_FASTER = 0.8
# Most plans tried with plain Horovod's: each has a separate graph and residuals.
MAX_TRIALS = 3
# Most without a measured profile and measured links, where predictions are only of the exchange.
MAX_GUESSES = 2
# Seconds of computing that are negligible against any exchange.
NO_TIME = 1e-9


class PlanRequest(NamedTuple):
    """The inputs of a plan, except for the schemes."""

    # In forward order
    gradients: Sequence[Gradient]
    topology: Topology
    # "average" or "sum" over the ranks
    operation: str = "average"
    # None: not measured
    links: Links | None = None
    # None: not measured
    profile: Profile | None = None
    # Groups of variables with separate buckets, >= 1, as `fragments` makes them
    fragments: int = 1
    # True if the optimizer has a momentum, which amplifies the noise of 2 and 1 bits
    has_momentum: bool = False

    def plan(
        self,
        schemes: Mapping[str, Scheme],
        reduce_to_root: bool = False,
        only: Set[str] | None = None,
    ) -> Plan:
        """Plan schemes that name their routes.

        Args:
            only: paths of the gradients that the plan is for; None: all.
        """

        def make(gradients: Sequence[Gradient]) -> Plan:
            return make_plan(
                gradients,
                self._schemes_of(gradients, schemes),
                self.topology,
                self.operation,
                self.links or NOMINAL,
                reduce_to_root=reduce_to_root,
                profile=self.profile,
            )

        planned = [gradient for gradient in self.gradients if only is None or gradient.path in only]
        return plan_in_fragments(planned, self.fragments, make)

    def _schemes_of(
        self, gradients: Sequence[Gradient], schemes: Mapping[str, Scheme]
    ) -> dict[str, Scheme]:
        """Leave out schemes whose patterns match gradients of other plans or fragments alone."""
        # One that matches nothing at all stays with the first gradient: make_plan warns
        first = list(gradients[:1]) == list(self.gradients[:1])

        def match(group: Sequence[Gradient], pattern: str) -> bool:
            return any(matches(gradient.path, pattern) for gradient in group)

        return {
            pattern: scheme
            for pattern, scheme in schemes.items()
            if match(gradients, pattern) or (first and not match(self.gradients, pattern))
        }


class _Ranking(NamedTuple):
    """Predictions of all schemes for one assumed or measured compute time, the fastest first."""

    profile: Profile
    candidates: list[Prediction]
    # Seconds of a step by plain Horovod
    plain_s: float
    # True if one of them must be taken, because plain Horovod exceeds the budget
    must_choose: bool

    def share(self, scheme: Scheme) -> float:
        """Return a scheme's step over plain Horovod's; 1 for one that is not ranked."""
        steps_s = [candidate.step_s for candidate in self.candidates if candidate.scheme == scheme]
        return steps_s[0] / self.plain_s if steps_s else 1.0

    @property
    def worth(self) -> list[Prediction]:
        """Candidates predicted to be faster than plain Horovod; all if that is ruled out."""
        if self.must_choose:
            return self.candidates
        limit_s = WORTH_A_TRIAL * self.plain_s
        return [candidate for candidate in self.candidates if candidate.step_s <= limit_s]


class Proposal(NamedTuple):
    """A plan that is worth a trial."""

    # Short text of the scheme
    name: str
    plan: Plan
    # Its predicted step over plain Horovod's; if compute was not measured, the larger of the two
    # rankings' shares.
    share: float

    @property
    def is_clear(self) -> bool:
        """True if it is fast enough to be taken where no trial can be held."""
        return self.share <= CLEARLY_FASTER


def find_auto(schemes: Mapping[str, Scheme]) -> Scheme | None:
    """Return the scheme "auto" of a mapping; None if there is none.

    **Raises:** PlanError for two different ones, and for one together with a scheme with momentum.
    """
    automatic = {scheme for scheme in schemes.values() if scheme.route == AUTO}
    if len(automatic) > 1:
        raise PlanError(
            'Patterns may share one Scheme("auto"): its choice is measured for all of them '
            f"together. Received {len(automatic)} different ones, for "
            f"{[name for name, scheme in schemes.items() if scheme.route == AUTO]}. Name routes "
            "for some of them."
        )
    if automatic and any(scheme.momentum for scheme in schemes.values()):
        raise PlanError(
            "A scheme with `momentum` keeps a velocity, which plans that take turns cannot share. "
            'Received one beside Scheme("auto"). Name routes for all patterns.'
        )
    return automatic.pop() if automatic else None


def auto_as_plain(schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Replace "auto" by plain Horovod's scheme, which is always tried.

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


def rules_out_plain(schemes: Mapping[str, Scheme], topology: Topology) -> bool:
    """Return True if "auto" has a budget that plain Horovod's bytes between nodes exceed.

    >>> rules_out_plain({"*": Scheme("auto", budget=0.3)}, Topology(2, 1))
    True
    """
    # A budget of 1 is exactly plain Horovod's bytes
    return _budget(find_auto(schemes), topology) not in (None, 1)


def _budget(auto: Scheme | None, topology: Topology) -> float | None:
    """Return the budget of "auto"; None on one node, which sends nothing to others."""
    return None if auto is None or topology.nodes == 1 else auto.budget


def is_worth_a_trial(schemes: Mapping[str, Scheme], asked: PlanRequest) -> bool:
    """Return True if there is a choice to make: several ranks, and enough gradients."""
    size = sum(gradient.entries for gradient in _of_auto(schemes, asked.gradients))
    return asked.topology.size > 1 and 4 * size >= MIN_BYTES


def propose(
    schemes: Mapping[str, Scheme], asked: PlanRequest, messages: bool = False
) -> list[Proposal]:
    """Return the plans that are worth a trial, the most promising first; plain Horovod's excluded.

    >>> asked = PlanRequest([Gradient("w", (4096, 512), "float32")], Topology(4, 1))
    >>> [choice.name for choice in propose({"*": Scheme("auto", "mstopk", 0.01)}, asked)][:1]
    ['allgather mstopk 0.01 + allreduce, elias/int8, threshold']

    Args:
        schemes: pattern -> scheme; one of them is "auto".
        asked: the other inputs of the plans.
        messages: can the launch send messages between two ranks? An MPI launch can.

    Returns:
        At most MAX_TRIALS, and only those that may be the fastest within the intervals of the
        predictions. None if no scheme is predicted to be faster. With a budget that rules plain
        Horovod out at least one, within the budget.

    **Cost:** a plan and a simulated step for each scheme; some seconds for a model of 500
    variables. **Raises:** PlanError for a profile of another model, or one without times, and for
    a budget that nothing fits.
    """
    measured_profile = asked.profile
    auto = find_auto(schemes)
    if auto is None:
        raise PlanError(f'A Scheme("auto") is required among them. Received {dict(schemes)}.')
    fitting = None
    if _budget(auto, asked.topology) is not None:
        sent = SentBytes(_of_auto(schemes, asked.gradients), asked.topology)
        # The least lossy ones within the budget
        fitting = least_lossy(auto, sent, asked.has_momentum)

    def ranking(profile: Profile) -> _Ranking:
        return _ranking(profile, auto, schemes, asked, messages, fitting)

    first = ranking(measured_profile or _assumed(asked.gradients, NO_TIME))
    rankings = [first]
    if measured_profile is None:
        rankings.append(ranking(_assumed(asked.gradients, first.plain_s)))
    measured = measured_profile is not None and asked.links is not None
    # Plain Horovod's plan is tried in any case, and an equal plan would only lengthen the trial
    seen = [asked.plan(auto_as_plain(schemes)).buckets]
    proposals: list[Proposal] = []
    for profile, candidate in _in_order(rankings):
        if len(proposals) == (MAX_TRIALS if measured else MAX_GUESSES):
            break
        if measured and not candidate.may_beat(first.candidates[0]):
            continue
        chosen = _with_auto_as(schemes, candidate.scheme)
        plan = asked._replace(profile=profile).plan(chosen)
        if plan.buckets not in seen:
            seen.append(plan.buckets)
            share = max(ranking.share(candidate.scheme) for ranking in rankings)
            proposals.append(Proposal(describe(candidate.scheme), plan, share))
    return with_unique_names(proposals)


def with_unique_names(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Add the number of buckets to equal names: one scheme, planned for two compute times.

    Plans of as many buckets differ in their sizes, so the size of the first one is added too.
    """
    unique = list(proposals)
    for detail in ("{count} buckets", "the first of {megabytes:.2f} MB"):
        names = [proposal.name for proposal in unique]
        for number, proposal in enumerate(unique):
            if names.count(proposal.name) > 1:
                buckets = proposal.plan.buckets
                megabytes = buckets[0].padded_bytes / 1e6
                text = detail.format(count=len(buckets), megabytes=megabytes)
                unique[number] = proposal._replace(name=f"{proposal.name}, {text}")
    return unique


def _of_auto(schemes: Mapping[str, Scheme], gradients: Sequence[Gradient]) -> list[Gradient]:
    return [gradient for gradient in gradients if scheme_of(gradient.path, schemes).route == AUTO]


def _assumed(gradients: Sequence[Gradient], seconds: float) -> Profile:
    """Return a profile with equal times for all entries, a third of them forward."""
    rows = tuple(reversed(gradients))
    ends = itertools.accumulate(row.entries for row in rows)
    # The backward pass has two matrix products for each one of the forward pass
    total, backward = sum(row.entries for row in rows) or 1, 2 / 3 * seconds
    variables = tuple(
        VariableProfile(row.path, row.shape, row.dtype, ready_s=backward * end / total)
        for row, end in zip(rows, ends, strict=True)
    )
    return Profile("assumed", variables, seconds / 3, backward, batch=1)


def _ranking(
    profile: Profile,
    auto: Scheme,
    schemes: Mapping[str, Scheme],
    request: PlanRequest,
    messages: bool,
    fitting: list[Scheme] | None,
) -> _Ranking:
    """Predict all schemes for the variables of "auto"; with a budget those in `fitting` alone."""
    own_gradients = _of_auto(schemes, request.gradients)
    # In backward order, as the rows of a profile
    rows, assumptions = own_gradients[::-1], Assumptions(selection=measured_time(profile))
    links = request.links or NOMINAL
    setting = Setting(sub_profile(rows, profile), request.topology, links, assumptions)
    thorough = request.profile is not None
    plain = _plain_scheme(auto)
    if fitting is not None:
        of_plain, budget = setting.predict(plain), auto.budget or 1.0
        predictions = ranked(setting, fitting, ROUTES_FOR_OPTIMAL if thorough else 0)
        # Checked again, because bytes depend on the merging, too
        limit = budget * of_plain.bytes_between
        within = [prediction for prediction in predictions if prediction.bytes_between <= limit]
        must_choose = rules_out_plain(schemes, request.topology)
        return _Ranking(profile, within, of_plain.step_s, must_choose)
    named = dataclasses.replace(auto, route=Scheme().route, budget=None)
    best_first = candidates(setting, named, messages, thorough)
    # With its own merging, because plain Horovod would not have the others
    plain_s = next(prediction.step_s for prediction in best_first if prediction.scheme == plain)
    return _Ranking(profile, best_first, plain_s, must_choose=False)


def _in_order(rankings: Sequence[_Ranking]) -> Iterator[tuple[Profile, Prediction]]:
    """Yield faster candidates: the best of each ranking, then other routes, then all."""
    best = [candidate.worth[0].scheme.route for candidate in rankings if candidate.worth]
    for ranking in rankings:
        yield from ((ranking.profile, candidate) for candidate in ranking.worth[:1])
    # Before the others, because a second plan by the first one's route would fail with it
    for ranking in rankings:
        by_other_routes = [
            candidate for candidate in ranking.worth if candidate.scheme.route not in best
        ]
        yield from ((ranking.profile, candidate) for candidate in by_other_routes)
    for ranking in rankings:
        yield from ((ranking.profile, candidate) for candidate in ranking.worth)
