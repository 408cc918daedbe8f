"""Plans of schemes with a merging: the papers' five named methods, and the simulator's view."""

from __future__ import annotations

import dataclasses

import pytest

from tfcommx import routes
from tfcommx.core import (
    Bucket,
    ConfigurationError,
    Link,
    Links,
    PlanError,
    Profile,
    Scheme,
    Topology,
)
from tfcommx.planner import merging
from tfcommx.planner.merging.merging import finish_s
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.planner.prices import prices_of
from tfcommx.simulator import models
from tfcommx.simulator.assumptions import IDEAL, Assumptions, sorting_time
from tfcommx.simulator.step import simulate, stages_of

FOUR = Topology(4, 1)
SLOW = Links(Link(1e-5, 1e-10, 1e-11), Link(1e-3, 8e-9, 1e-11))
PROFILE = Profile.from_throughput(models.get("resnet50"), 100, batch=16)
GRADIENTS = [Gradient(row.name, row.shape, row.dtype) for row in reversed(PROFILE.variables)]
# Shi et al. (2020), table I; every tensor is sparse there, and MGS-SGD merges 8,192 entries
ALL = {"selection": "exact", "density": 0.001, "dense_below": 0}
PAPER = {
    "P-SGD": Scheme("allreduce", merging="each"),
    "TopK-SGD": Scheme("allgather", merging="single", **ALL),
    "LAGS-SGD": Scheme("allgather", merging="each", **ALL),
    "MGS-SGD": Scheme("allgather", merging="threshold", bucket_bytes=4 * 8192, **ALL),
    "OMGS-SGD": Scheme("allgather", merging="omgs", **ALL),
}


def plan_of(scheme: Scheme, **more: object) -> object:
    return make_plan(GRADIENTS, {"*": scheme}, FOUR, links=SLOW, profile=PROFILE, **more)


def test_the_papers_five_methods_are_schemes_with_a_merging() -> None:
    """As here: tensors of one dimension stay dense, and have separate buckets."""
    plans = {name: plan_of(scheme) for name, scheme in PAPER.items()}
    count = {
        name: sum(bucket.route == scheme.route for bucket in plans[name].buckets)
        for name, scheme in PAPER.items()
    }
    kernels = sum(len(gradient.shape) > 1 for gradient in GRADIENTS)
    assert count["P-SGD"] == 161 and count["LAGS-SGD"] == kernels == 54
    assert count["TopK-SGD"] == 1 and 1 < count["OMGS-SGD"] < count["MGS-SGD"] < 54
    for plan in plans.values():
        assert sum(len(bucket.variables) for bucket in plan.buckets) == 161


@pytest.mark.parametrize("name", merging.MERGINGS)
def test_a_plan_is_a_pure_function_and_survives_json(name: str) -> None:
    profile = Profile.from_throughput(models.get("lstm_ptb"), 100, batch=16)
    gradients = [Gradient(row.name, row.shape, row.dtype) for row in reversed(profile.variables)]
    scheme = {"*": Scheme("hitopk", "mstopk", 0.01, dense_route="torus", merging=name)}
    plan, again = (
        make_plan(gradients, scheme, FOUR, links=SLOW, profile=profile) for _ in range(2)
    )
    assert plan == again == routes.read_plan(plan.to_json())
    assert simulate(plan, profile, SLOW).step_s > profile.compute_s


@pytest.mark.parametrize("route", ["allreduce", "torus", "asa", "pipeline", "allgather", "hitopk"])
def test_the_optimal_merging_has_the_shortest_simulated_step(route: str) -> None:
    """One stream of gradients: the solver minimizes their simulated step."""
    rows = tuple(row for row in PROFILE.variables if len(row.shape) > 1)
    profile = dataclasses.replace(PROFILE, variables=rows)
    gradients = [Gradient(row.name, row.shape, row.dtype) for row in reversed(rows)]
    sparse = {"selection": "exact", "density": 0.001} if route in routes.SPARSE else {}
    assumptions = Assumptions(selection=sorting_time(2e-10), engine_s=1e-4, selection_on="beside")
    steps = {}
    for name in merging.MERGINGS:
        scheme = Scheme(route, dense_below=0, merging=name, **sparse)
        plan = make_plan(
            gradients,
            {"*": scheme},
            FOUR,
            links=SLOW,
            profile=profile,
            assumptions=assumptions,
        )
        steps[name] = simulate(plan, profile, SLOW, assumptions).step_s
    assert min(steps.values()) == pytest.approx(steps["optimal"], rel=1e-9), steps
    assert steps["each"] > steps["optimal"]


@pytest.mark.parametrize("place", ["compute", "beside"])
@pytest.mark.parametrize("route", ["allreduce", "allgather", "hitopk"])
def test_what_solvers_minimize_is_the_simulated_step(route: str, place: str) -> None:
    """Selections of milliseconds, so that they wait for each other on a stream beside."""
    rows = tuple(row for row in PROFILE.variables if len(row.shape) > 1)
    profile = dataclasses.replace(PROFILE, variables=rows)
    gradients = [Gradient(row.name, row.shape, row.dtype) for row in reversed(rows)]
    assumptions = Assumptions(lambda entries: 0.004, place, engine_s=1e-3)
    sparse = {"selection": "exact", "density": 0.01} if route in routes.SPARSE else {}
    for name in ("each", "threshold"):
        scheme = Scheme(route, dense_below=0, merging=name, bucket_bytes=2**22, **sparse)
        plan = make_plan(gradients, {"*": scheme}, FOUR, links=SLOW, profile=profile)
        prices = prices_of(
            lambda entries, plan=plan: dataclasses.replace(
                plan.buckets[0],
                variables=("all",),
                sizes=(entries,),
                k=plan.buckets[0].k and max(1, round(0.01 * entries)),
            ),
            FOUR,
            SLOW,
            assumptions,
        )
        places = {row.name: number for number, row in enumerate(rows)}
        groups = [[places[path] for path in bucket.variables] for bucket in plan.buckets]
        step = simulate(plan, profile, SLOW, assumptions).step_s
        found = profile.forward_s + finish_s(groups, profile, prices)
        assert found == pytest.approx(step, rel=1e-9)


def test_solvers_count_what_compressing_costs() -> None:
    """A bucket of one entry is not compressed, which says nothing about longer ones."""
    dense = Bucket("", ("w",), (1,), "float32", "allreduce")
    matrix = dataclasses.replace(
        dense, sizes=(512 * 512,), shapes=((512, 512),), compression="powersgd/4"
    )
    prices = prices_of(lambda size: matrix if size > 1 else dense, FOUR, SLOW, IDEAL)
    first, *messages = stages_of(matrix, FOUR, SLOW)
    assert first.resource == "select" and prices.selection_s(matrix.size) == first.seconds > 0
    assert prices.message_s(matrix.size) == pytest.approx(sum(part.seconds for part in messages))


def test_solvers_without_what_they_need_are_refused() -> None:
    scheme = {"conv1*": Scheme(), "*": Scheme(merging="optimal")}
    with pytest.raises(PlanError, match=r"'optimal'.*'\*'"):
        make_plan(GRADIENTS, scheme, FOUR)
    untimed = Profile.of_sizes("m", PROFILE.variables)
    with pytest.raises(PlanError, match=r"'optimal'.*'\*'"):
        make_plan(GRADIENTS, scheme, FOUR, profile=untimed)
    with pytest.raises(ConfigurationError, match=r"'optimum'.*'optimal'"):
        make_plan(GRADIENTS, {"*": Scheme(merging="optimum")}, FOUR)


def test_a_profile_of_another_model_is_refused() -> None:
    other = Profile.from_throughput(models.get("vgg16"), 100, batch=16)
    with pytest.raises(PlanError, match=r"'classes/kernel'.*'vgg16'"):
        make_plan(GRADIENTS, {"*": Scheme()}, FOUR, profile=other)
    wider = [gradient._replace(shape=(3, *gradient.shape)) for gradient in GRADIENTS]
    with pytest.raises(PlanError, match=r"\(3, 1000\).*'resnet50'.*\(1000,\)"):
        make_plan(wider, {"*": Scheme()}, FOUR, profile=PROFILE)


def test_long_groups_are_closed_where_indices_end() -> None:
    """A single bucket of a sparse route holds at most `largest` entries."""
    scheme = {"*": Scheme("allgather", merging="single", **ALL)}
    plan = make_plan(GRADIENTS, scheme, FOUR, largest=3_000_000)
    sizes = [bucket.size for bucket in plan.buckets if bucket.route == "allgather"]
    assert len(sizes) > 5 and max(sizes) <= 3_000_000
