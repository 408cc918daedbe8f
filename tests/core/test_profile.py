"""A profile is checked at birth, survives being written down, and follows from a throughput."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tfcommx.core import Layer, LayerTable, Profile, TfcommxError, VariableProfile

LAYERS = LayerTable(
    "three",
    (
        Layer("first", 10, (("kernel", (3, 5)), ("bias", (5,)))),
        Layer("pool", 20),
        Layer("last", 30, (("kernel", (5, 2)),)),
    ),
)
ROWS = (
    VariableProfile("b", (4, 2), "float16", 0.25, 0.01, 0.1, selection_s=0.5, update_s=0.125),
    VariableProfile("a", (), ready_s=0.5, update_s=0.25),
)


def test_written_and_read_again() -> None:
    profile = Profile("m", ROWS, 0.5, 0.75, batch=8, steps=20, density=0.01)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.to_json().count("\n") == len(ROWS) + 2
    assert (profile.size, profile.update_s, profile.compute_s) == (9, 0.375, 1.625)
    assert profile.samples_per_second == pytest.approx(8 / 1.625)


def test_numbers_of_numpy_become_pythons_own() -> None:
    row = VariableProfile("a", (np.int64(3),), ready_s=np.float32(0.5))
    profile = Profile("m", (row,), np.float64(1), np.float64(1), batch=np.int64(4))
    assert Profile.from_json(profile.to_json()) == profile


def test_a_throughput_is_shared_out_by_operations() -> None:
    """Step of 6 s: 2 s forward; backward 2 s for `last`, then 1.33 for `pool`, 0.67 `first`."""
    profile = Profile.from_throughput(LAYERS, 2, batch=12)
    assert [row.name for row in profile.variables] == ["last/kernel", "first/bias", "first/kernel"]
    assert [row.ready_s for row in profile.variables] == pytest.approx([2, 4, 4])
    assert [row.forward_s for row in profile.variables] == pytest.approx([1, 1 / 6, 1 / 6])
    assert (profile.forward_s, profile.backward_s) == pytest.approx((2, 4))
    assert profile.samples_per_second == pytest.approx(2) and profile.steps == 0


def test_a_profile_of_sizes_has_no_times() -> None:
    assert not Profile.of_sizes("m", (VariableProfile("a", (3,)),)).timed
    assert Profile.from_throughput(LAYERS, 2, batch=1).timed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VariableProfile("a", (3,), ready_s=-1), r"ready_s .*'a'.*-1"),
        (lambda: VariableProfile("a", (3,), ready_s=float("nan")), r"ready_s .*'a'.*nan"),
        (lambda: VariableProfile("a", (3,), update_s="1"), r"update_s .*'a'.*'1'"),
        (lambda: VariableProfile("a", (2.5,)), r"shape .*'a'.*\b2\.5"),
        (lambda: VariableProfile("a", (-1,)), r"shape=\(-1,\) .*'a'"),
        (lambda: Profile("m", (ROWS[0], ROWS[0]), 1, 1, 1), r"\['b'\]"),
        (lambda: Profile("m", ROWS, 1, 0.4, 1), r"ready_s=0\.5 .*'a'.*backward_s=0\.4"),
        (lambda: Profile("m", ROWS, 1, 1, 0), "`batch`"),
        (lambda: Profile("m", ROWS, float("inf"), 1, 1), r"`forward_s`.*inf"),
        (lambda: Profile("m", ROWS, 1, 1, 1, density=0), "`density`"),
        (lambda: Profile.from_json("{}"), "KeyError: 'variables'"),
        (lambda: Profile.from_json("no"), "'no'.*JSONDecodeError"),
        (lambda: Profile.read("/nowhere/profile.json"), "/nowhere/profile.json"),
        (lambda: Profile.from_throughput(LAYERS, 0, batch=1), "`samples_per_second`"),
        (lambda: Profile.from_throughput(LAYERS, 1, batch=0), "`batch`"),
        (lambda: LayerTable("none", ()), "'none'"),
        (lambda: LayerTable("m", (*LAYERS.layers, *LAYERS.layers)), "'first', 'pool', 'last'"),
    ],
)
def test_what_is_refused_at_birth(make: object, message: str) -> None:
    with pytest.raises(TfcommxError, match=message):
        make()


def test_a_scaled_profile_keeps_what_is_not_scaled() -> None:
    row = VariableProfile("a", (3,), ready_s=1, forward_s=2, update_s=3, selection_s=4)
    scaled = Profile("m", (row,), 5, 6, 7).scaled(2, update_factor=10)
    wanted = VariableProfile("a", (3,), ready_s=2, forward_s=4, update_s=30, selection_s=4)
    assert scaled == Profile("m", (wanted,), 10, 12, 7)


def test_a_file_of_another_kind_is_named_once(tmp_path: Path) -> None:
    """The error said twice that a profile was required, with the text of the file between."""
    (tmp_path / "recipe.yaml").write_text("name: mine")
    with pytest.raises(TfcommxError, match=r"recipe\.yaml.*JSONDecodeError") as caught:
        Profile.read(tmp_path / "recipe.yaml")
    assert str(caught.value).count("Received") == 1
