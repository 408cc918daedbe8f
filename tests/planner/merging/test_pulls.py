"""Batches of pulls: the greedy algorithms as printed, and the optimum against all batches."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfcommx.core import PlanError
from tfcommx.planner.merging import pulls
from tfcommx.planner.merging.pulls import PULLS, PullTimes, execution_s, finish_s


def all_batches(layers: int) -> list[list[tuple[int, int]]]:
    """Return every way to cut the layers into batches: 2^(layers - 1)."""
    found = []
    for cuts in itertools.product((False, True), repeat=layers - 1):
        ends = [0, *(i for i, cut in enumerate(cuts, start=1) if cut), layers]
        found.append(list(itertools.pairwise(ends)))
    return found


def best_s(times: PullTimes) -> float:
    return min(finish_s(batches, times) for batches in all_batches(times.layers))


def random_times(draw: random.Random, layers: int) -> PullTimes:
    """A model in which neither pulls nor computation always wait for the other."""
    return PullTimes(
        draw.choice([0.0, 0.1, 1.0, 3.0]),
        tuple(draw.choice([0.0, 0.1, 1.0, 5.0]) * draw.random() for _ in range(layers)),
        tuple(draw.choice([0.0, 0.1, 1.0, 5.0]) * draw.random() for _ in range(layers)),
    )


seconds = st.floats(0, 5)


@given(st.floats(0, 3), st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8))
def test_optimal_is_the_best_of_all_batches(startup: float, rows: list) -> None:
    times = PullTimes(startup, *map(tuple, zip(*rows, strict=True)))
    best = best_s(times)
    assert finish_s(pulls.optimal(times), times) == pytest.approx(best, rel=1e-9, abs=1e-12)
    for name, solve in PULLS.items():
        batches = solve(times)
        assert [at for one in batches for at in range(*one)] == list(range(len(rows))), name
        assert all(start < stop for start, stop in batches), name
        assert finish_s(batches, times) >= best * (1 - 1e-9) - 1e-12, name
        # Equation 4 omits computation that outlasts the next gather, so it is never too long
        assert execution_s(batches, times) <= finish_s(batches, times) + 1e-9, name


@pytest.mark.parametrize("layers", [11, 12])
def test_optimal_is_the_best_of_all_batches_of_twelve_layers(layers: int) -> None:
    for seed in range(3):
        times = random_times(random.Random(f"{layers} {seed}"), layers)
        found = finish_s(pulls.optimal(times), times)
        assert found == pytest.approx(best_s(times), rel=1e-9)


def test_optimal_takes_the_fewest_gathers_of_equals() -> None:
    """Without computation to overlap, and without start-up time, all batches finish alike."""
    assert pulls.optimal(PullTimes(0.0, (1.0, 1.0), (0.0, 0.0))) == [(0, 2)]


def test_the_first_algorithm_as_printed() -> None:
    """By hand, with T_s = 1 and transfers of 1: a gather of n layers takes n + 1."""
    # C1 + C2 = 5 is the most that a second gather can cover: that of the 4 layers left.
    times = PullTimes(1.0, (1.0,) * 6, (2.5, 2.5, 1.5, 1.0, 1.0, 1.0))
    assert pulls.from_first(times) == [(0, 2), (2, 6)]
    # C1 + C2 = 5.5 is too much, C1 is covered by 2 layers; C2 + C3 = 4 not even by the 2 left.
    times = PullTimes(1.0, (1.0,) * 5, (2.5, 3.0, 1.0, 1.0, 1.0))
    assert pulls.from_first(times) == [(0, 1), (1, 3), (3, 5)]


def test_the_second_algorithm_as_printed() -> None:
    """By hand: the gather of layers 4 and 5 takes 5 and covers C2 + C3 = 5; that of 2 and 3 C1."""
    times = PullTimes(1.0, (1.0, 1.0, 1.0, 1.0, 3.0), (2.0, 3.0, 2.0, 2.0, 1.0))
    assert pulls.from_last(times) == [(0, 1), (1, 3), (3, 5)]


class Printed:
    """The paper's algorithms line by line, with its numbers: layers 1 to L, batches [first, last].

    Where it leaves a choice open, that of the module's docstring.
    """

    def __init__(self, times: PullTimes) -> None:
        self.times, self.last = times, times.layers

    def pull(self, first: int, last: int) -> float:
        """T_s + the sum of T_t over the layers first to last."""
        return self.times.startup_s + sum(self.times.transfer_s[i - 1] for i in span(first, last))

    def compute(self, first: int, last: int) -> float:
        return sum(self.times.compute_s[i - 1] for i in span(first, last))

    def algorithm_1(self) -> list[tuple[int, int]]:
        s1 = [(l1, l2) for l1 in span(1, self.last - 1) for l2 in span(l1 + 1, self.last)]
        s2 = [(l1, l2) for l1, l2 in s1 if self.pull(l1 + 1, l2) >= self.compute(1, l1)]
        if not s2:
            return [(1, self.last)]
        most = max(self.compute(1, l1) for l1, _ in s2)
        chosen = [(l1, l2) for l1, l2 in s2 if self.compute(1, l1) == most]
        pulls_1 = {l1: self.pull(1, l1) for l1, _ in chosen}
        before, latest = next((a, b) for a, b in chosen if pulls_1[a] == min(pulls_1.values()))
        batches = [(1, before), (before + 1, latest)]
        while latest != self.last:
            covered = self.compute(before + 1, latest)
            pulls_of = {x: self.pull(latest + 1, x) for x in span(latest + 1, self.last)}
            gaps = {x: seconds - covered for x, seconds in pulls_of.items() if seconds >= covered}
            before, latest = latest, min(gaps, key=gaps.__getitem__, default=self.last)
            batches.append((before + 1, latest))
        return batches

    def algorithm_2(self) -> list[tuple[int, int]]:
        s1 = [(a, b) for a in span(1, self.last - 1)[::-1] for b in span(0, a - 1)[::-1]]
        s2 = [(a, b) for a, b in s1 if self.pull(a + 1, self.last) >= self.compute(b + 1, a)]
        if not s2:
            return [(1, self.last)]
        most = max(self.compute(b + 1, a) for a, b in s2)
        chosen = [(a, b) for a, b in s2 if self.compute(b + 1, a) == most]
        rest = {a: self.compute(a + 1, self.last) for a, _ in chosen}
        after, first = next((a, b) for a, b in chosen if rest[a] == min(rest.values()))
        batches = [(first + 1, after), (after + 1, self.last)]
        while first != 0:
            covers = self.pull(first + 1, after)
            work = {x: self.compute(x + 1, first) for x in span(0, first - 1)[::-1]}
            gaps = {x: covers - seconds for x, seconds in work.items() if covers >= seconds}
            after, first = first, min(gaps, key=gaps.__getitem__, default=0)
            batches.insert(0, (first + 1, after))
        return batches


def span(first: int, last: int) -> range:
    return range(first, last + 1)


@pytest.mark.parametrize("seed", range(4))
def test_both_algorithms_equal_the_printed_ones(seed: int) -> None:
    """Of 100 models each, with whole numbers, so that sums are exact and ties happen."""
    draw, longest = random.Random(seed), 0
    for _ in range(100):
        count = draw.randint(2, 9)
        rows = [[draw.choice([0, 1, 2, 5]) for _ in range(count)] for _ in range(2)]
        times = PullTimes(draw.choice([0, 1, 3]), *map(tuple, rows))
        printed = Printed(times)
        for solve, expected in (
            (pulls.from_first, printed.algorithm_1()),
            (pulls.from_last, printed.algorithm_2()),
        ):
            assert [(start + 1, stop) for start, stop in solve(times)] == expected, times
            longest = max(longest, len(expected))
    assert longest > 3


def test_what_the_paper_leaves_open() -> None:
    # No pair meets constraint 5: the gather of one layer never covers a computation
    assert pulls.from_first(PullTimes(0.0, (1.0, 1.0), (9.0, 9.0))) == [(0, 2)]
    assert pulls.from_last(PullTimes(0.0, (1.0, 1.0), (9.0, 9.0))) == [(0, 2)]
    # Step one has two batches or more; later nothing covers: the remaining layers are one batch
    slow = PullTimes(0.0, (1.0, 1.0, 0.1, 0.1), (1.0, 9.0, 9.0, 9.0))
    assert pulls.from_first(slow) == [(0, 1), (1, 2), (2, 4)]
    # One layer
    assert [solve(PullTimes(1.0, (1.0,), (1.0,))) for solve in PULLS.values()] == [[(0, 1)]] * 6
    assert [solve(PullTimes(1.0, (), ())) for solve in PULLS.values()] == [[]] * 6


def test_equation_4_chooses_and_may_choose_the_slower_one() -> None:
    """It is the finish under constraint 5 only; the drawing decides in `choose`."""
    times = PullTimes(1.0, (1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    assert execution_s([(0, 1), (1, 3)], times) == (1 + 1) + (1 + 2) + (2 + 2)
    worse = 0
    for seed in range(300):
        draw = random.Random(seed)
        times = random_times(draw, draw.randint(3, 8))
        both = [pulls.from_first(times), pulls.from_last(times)]
        chosen = pulls.ibatch(times)
        assert execution_s(chosen, times) == min(execution_s(one, times) for one in both)
        worse += finish_s(chosen, times) > min(finish_s(one, times) for one in both) + 1e-9
        found = pulls.choose(times, [name for name in PULLS if name != "layers"])
        assert found.finish_s == pytest.approx(finish_s(pulls.optimal(times), times))
        assert found.ibatch_finish_s == finish_s(chosen, times)
    assert 0 < worse < 100


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_times_are_seconds(bad: float) -> None:
    with pytest.raises(PlanError, match=rf" {bad}\b"):
        PullTimes(1.0, (1.0, bad), (1.0, 1.0))
    with pytest.raises(PlanError, match=r"\b1 and 2\b"):
        PullTimes(1.0, (1.0,), (1.0, 1.0))


@pytest.mark.parametrize("seed", range(20))
def test_layer_by_layer_is_taken_wherever_it_is_as_good(seed: int) -> None:
    """By simulation: never more than 2 % behind the optimum, nor behind any other solver."""
    draw = random.Random(seed)
    times = random_times(draw, draw.randrange(1, 14))
    chosen, single = pulls.choose(times), PULLS["layers"](times)
    best = finish_s(PULLS["optimal"](times), times)
    assert chosen.finish_s == finish_s(list(chosen.batches), times) <= 1.02 * best
    as_good = finish_s(single, times) <= 1.02 * best
    assert (chosen.solver == "layers") == as_good
    assert (list(chosen.batches) == single) or not as_good
    # Asked for another solver, it is that one
    assert pulls.choose(times, ("optimal",)).finish_s == best


def test_both_cases_are_among_the_drawn_ones() -> None:
    def taken(seed: int) -> str:
        draw = random.Random(seed)
        return pulls.choose(random_times(draw, draw.randrange(1, 14))).solver

    solvers = [taken(seed) for seed in range(20)]
    assert 3 <= solvers.count("layers") <= 17


def test_the_more_a_gather_costs_the_fewer_there_are() -> None:
    """12 layers as in the benchmark: 1.2 s of pulls, .6 s of computing."""
    found = [
        pulls.choose(PullTimes(startup, (0.1,) * 12, (0.05,) * 12))
        for startup in (0.0, 0.001, 0.1, 1.0)
    ]
    assert [one.solver == "layers" for one in found] == [True, True, False, False]
    assert len(found[2].batches) > len(found[3].batches) == 1
