"""Facts about variables go by identity, are in no copy, and leave with the variable."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfcommx.keras_internals.names import AGREED_NAMES, ByVariable, VariableNames


@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
def test_equal_variables_have_facts_of_their_own(make: Any) -> None:
    facts: ByVariable[str] = ByVariable()
    first, second, third = make([1.0]), make([1.0]), make([1.0])
    facts[first], facts[second] = "a", "b"
    facts[second] = "c"
    assert [facts.get(one) for one in (first, second, third)] == ["a", "c", None]


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_a_copy_has_no_facts(make: Any) -> None:
    facts: ByVariable[str] = ByVariable()
    variable = keras.Variable([1.0])
    facts[variable] = "a"
    assert facts.get(make(variable)) is None
    assert facts.get(variable) == "a"


def test_a_variable_that_is_gone_leaves_and_its_number_means_nothing() -> None:
    facts: ByVariable[str] = ByVariable()
    kept = keras.Variable([1.0])
    facts[kept] = "kept"
    gc.freeze()  # Collections look through the objects of this test, not of all before it
    for number in range(20):
        variable = keras.Variable([1.0])
        assert facts.get(variable) is None  # The last one's number may be its own
        facts[variable] = str(number)
        del variable
        gc.collect()
    assert len(facts._entries) == 1 and facts.get(kept) == "kept"


def test_names_do_not_depend_on_what_was_freed() -> None:
    """Ranks collect garbage at different times."""
    names = VariableNames()
    gone, stays = (keras.Variable([1.0], name="kernel") for _ in range(2))
    assert names.of([gone, stays]) == ["kernel", "kernel#2"]
    del gone
    gc.collect()
    assert names.of([stays, keras.Variable([1.0], name="kernel")]) == ["kernel#2", "kernel#3"]


def test_names_that_are_exchanged_stay_unique() -> None:
    names = VariableNames()
    first, second, third = (keras.Variable([1.0], name=name) for name in "abb")
    names.of([first, second])
    names.rename([first, second], ["b", "a"])
    assert names.of([first, second, third]) == ["b", "a", "b#2"]
    names.rename([first, second], ["c", "d"])
    AGREED_NAMES[agreed := keras.Variable([1.0], name="z")] = "a"
    assert names.of([agreed, third]) == ["a", "b#2"]
