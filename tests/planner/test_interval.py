"""The interval of a prediction: known errors of predictions, and the spread that the probe saw."""

from __future__ import annotations

import pytest

from tfcommx.core import NOMINAL, Profile, Scheme, Topology
from tfcommx.planner.predict import MISSES, Misses, Setting, interval
from tfcommx.simulator import models


def test_the_interval_by_hand() -> None:
    """2 s of computing and 1 s of exchange that may take half, or half as long again."""
    misses = Misses(0.5, 1.5, 1.25)
    assert interval(2.0, 1.0, misses=misses) == (2.5, 2 * 1.25 + 1.5)
    # A spread of 1 / 1.645 is 1 at the ends; both reasons together are the root of their squares
    wide = interval(2.0, 1.0, 1 / 1.645, misses)
    assert wide == pytest.approx((2.0, 2.5 + 1 + 1.25**0.5))


def test_a_prediction_is_within_its_interval_which_a_probe_that_varied_widens() -> None:
    profile = Profile.from_throughput(models.get("resnet50"), 250.0, batch=64)
    found = [
        Setting(profile, Topology(8, 4), NOMINAL._replace(spread=spread)).predict(Scheme())
        for spread in (0.0, 0.3)
    ]
    calm, varied = (one.interval for one in found)
    assert varied.low < calm.low < found[0].step_s < calm.high < varied.high
    assert found[0].row()["step_seconds_low"] == calm.low


def test_what_may_beat_what() -> None:
    """Exchange of 1 s may beat one of a little less, and not one of a tenth."""
    profile = Profile.from_throughput(models.get("vgg16"), 250.0, batch=64)
    setting = Setting(profile, Topology(8, 1), NOMINAL)
    dense = setting.predict(Scheme(merging="single"))
    sparse = setting.predict(Scheme("allgather", "mstopk", 0.001, merging="single"))
    assert sparse.may_beat(dense) and dense.may_beat(dense)
    assert not dense.may_beat(sparse)


def test_the_misses_are_those_of_numbers_that_were_published() -> None:
    """A prediction is missed both ways, and computing only takes longer."""
    assert MISSES.message_low < 1 < MISSES.message_high and MISSES.compute_high > 1
