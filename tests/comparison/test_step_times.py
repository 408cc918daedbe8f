"""Predicted steps: of each epoch by its scheme and phase; of weight averaging by its rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tfcommx.comparison.step_times import MeasuredSteps, links_at, replaced, step_seconds
from tfcommx.core import NOMINAL, Link, Links, Profile, Topology, VariableProfile
from tfcommx.recipes.recipe import Recipe

ENTRIES = 10**6
# A step computes for .5 s; its only gradient is ready at the end
PROFILE = Profile("one", (VariableProfile("kernel", (1000, 1000), ready_s=0.3),), 0.2, 0.3, 8)
FREE = Link(0.0, 1e-15)
TWO = Topology(2, 1)
SPARSE = {"route": "allgather", "selection": "mstopk", "density": 0.01}


def recipe(*phases: dict[str, Any], **more: Any) -> Recipe:
    parts = [{"resolution": 8, **phase} for phase in phases]
    rate = {"peak": 0.1, "warm_up_epochs": 0}
    return Recipe(name="some", batch_per_rank=8, phases=parts, learning_rate=rate, **more)


def steps(one: Recipe, bandwidth: float) -> list[float]:
    links = links_at(bandwidth, Links(FREE, FREE))
    return step_seconds(one, [PROFILE] * len(one.phases), TWO, links)


def test_a_dense_step_is_computing_and_an_allreduce() -> None:
    """Two ranks send half of 4 MB twice: 32 Mbit, at 320 Mbit/s a tenth of a second."""
    assert steps(recipe({"epochs": 2}), 320e6) == pytest.approx([0.6, 0.6])


def test_each_epoch_has_its_phase_and_its_density() -> None:
    found = steps(
        recipe({"epochs": 3, "scheme": SPARSE, "warm_up": [0.5, 0.1]}, {"epochs": 1}), 3.2e6
    )
    # Entries of 8 bytes: .32 Mbit at a density of .01
    exposed = [one - 0.5 for one in found]
    assert exposed == pytest.approx([10.0, 2.0, 0.2, 10.0], rel=0.01)


def test_weights_are_averaged_after_the_update_and_nothing_hides_it() -> None:
    local = recipe({"epochs": 1}, strategy={"name": "weight_averaging", "every": 4})
    assert steps(local, 320e6) == pytest.approx([0.5 + 0.1 / 4])


def test_step_ahead_sums_and_gathers_in_the_node_as_well() -> None:
    """Half of 4 MB three times over, at 320 Mbit/s .05 s each, if residuals are kept by node."""
    slow, four = Link(0.0, 8 / 320e6), Topology(2, 2)
    for route, expected in (("hitopk", 0.15), ("allgather", 0.0), ("torus", 0.0)):
        scheme = {**SPARSE, "route": route} if route != "torus" else {"route": route}
        found = [
            step_seconds(
                recipe({"epochs": 1, "scheme": scheme}, strategy=strategy),
                [PROFILE],
                four,
                Links(slow, FREE),
            )[0]
            for strategy in ({"name": "step_ahead"}, {"name": "weight_averaging", "every": 1})
        ]
        assert found[0] - found[1] == pytest.approx(expected)


def test_rounds_end_with_their_epoch() -> None:
    """10 steps have 3 rounds of 4; and with a round each step nothing hides the exchange."""
    strategy = {"name": "weight_averaging", "every": 4}
    for every, expected in ((4, 0.5 + 0.1 * 3 / 10), (1, 0.6)):
        local = recipe({"epochs": 1}, strategy={**strategy, "every": every})
        links = links_at(320e6, Links(FREE, FREE))
        # Ready early: a synchronous step would hide the exchange
        early = dataclasses.replace(PROFILE.variables[0], ready_s=0.0)
        one = dataclasses.replace(PROFILE, variables=(early,))
        assert step_seconds(local, [one], TWO, links, [10]) == pytest.approx([expected])


def test_an_overlap_hides_as_much_as_its_steps_compute() -> None:
    """2 fragments, each with 4 steps of .5 s, hide 4 of 5 s, but not at the end of an epoch."""
    strategy = {"name": "weight_averaging", "every": 8, "fragments": 2, "overlap": 4}
    local, links = recipe({"epochs": 1}, strategy=strategy), links_at(6.4e6, Links(FREE, FREE))
    for count, expected in (([], 0.5 + 1 / 8), ([10], 0.5 + 6 / 10)):
        assert step_seconds(local, [PROFILE], TWO, links, count) == pytest.approx([expected])
    assert steps(local, 320e6) == pytest.approx([0.5])


def test_a_bandwidth_replaces_the_rate_of_links_between_nodes_alone() -> None:
    found = links_at(1e9, NOMINAL._replace(engine_s=0.5))
    assert found.between.beta_s_per_byte == pytest.approx(8e-9)
    assert found.between.alpha_s == NOMINAL.between.alpha_s and found.engine_s == 0.5
    assert found.inside == NOMINAL.inside


def test_measured_steps_replace_predicted_ones() -> None:
    """Not those of a warm-up, which a dry run leaves out."""
    one = recipe({"epochs": 2, "scheme": SPARSE, "warm_up": [0.5]}, {"epochs": 1})
    measured = {"some": MeasuredSteps((2.0, 4.0), (1.0, 1.0))}
    seconds, ratios = replaced({"some": [9.0, 1.0, 3.0]}, measured, {"some": one})
    assert seconds == {"some": [9.0, 2.0, 4.0]}
    assert ratios == {"some": pytest.approx(4 / 6)}


def test_a_warm_up_that_covers_everything_has_no_ratio() -> None:
    one = recipe({"epochs": 1, "scheme": SPARSE, "warm_up": [0.5]})
    found = replaced({"some": [9.0]}, {"some": MeasuredSteps((2.0,), (1.0,))}, {"some": one})
    assert found == ({"some": [9.0]}, {})
