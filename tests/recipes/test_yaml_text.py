"""YAML is read as in version 1.2, and ambiguous text is refused."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from pydantic import ValidationError

from tfcommx.cli import simulate
from tfcommx.comparison.methods import read_methods
from tfcommx.core import ConfigurationError
from tfcommx.recipes.reader import RecipeError, RecipePart, YamlError, parse
from tfcommx.recipes.recipe import read

RECIPE = ROOT / "configs" / "fashion_mnist.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("1e3", 1000.0),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("2026-11-25", "2026-11-25"),
        ("node1:4", "node1:4"),
        ("nan", "nan"),
        ("'yes'", "yes"),
        ('"10:00"', "10:00"),
        ("!!str 010", "010"),
        ("|\n  no\n", "no\n"),
        ("{<<: {a: 1}}", {"<<": {"a": 1}}),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    assert parse(text) == value and type(parse(text)) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *("10:00", "-1:30:00.5", "010", "08", "0100", "1_000", "1_000.5", "0b11", "0x_1F"),
        *("yes", "No", "ON", "off", "{no: 1}", "[sv, no]"),
    ],
)
def test_what_yaml_1_1_reads_differently_is_refused(text: str) -> None:
    """`every_minutes=10:00` was 600, `seed=010` was 8, and `threads=yes` was 1."""
    with pytest.raises(YamlError, match=r"YAML 1\.1"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("{a: 1, a: 2}", "{1: a, 0x1: b}", "{a: {b: 1, 'b': 2}}", "{? [1] : 2}"),
        *("!!int 10:00", "!!float x", "!!bool yes", "!!timestamp 2026-01-01", "!!set {a}"),
        *("!!python/object/apply:os.getcwd []", "1e400", "9" * 5000, "a: b: c", "a\n---\nb"),
    ],
)
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(YamlError):
        parse(text)


def test_a_short_text_stays_a_small_value() -> None:
    """Nine lines of aliases, for a billion values, kept a command busy for minutes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    start = time.process_time()
    with pytest.raises(YamlError, match=r"\*a0\b"):
        parse("\n".join(lines))
    for brackets in ("[" * 100_000, "{a: " * 100_000):
        with pytest.raises(YamlError, match="recursion"):
            parse(brackets)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "setting",
    [
        *("checkpoint.every_minutes=10:00", "seed=010", "batch_per_rank=0100", "threads=yes"),
        *("phases.0.epochs=08", "threads=true", "seed=false", "phases.0.warm_up=[true]"),
        *("checkpoint.every_minutes=.inf", "optimizer.momentum=.nan", "optimizer.momentum=true"),
        "scheme=[&a 1, *a]",
    ],
)
def test_a_setting_of_a_recipe_is_no_other_number(setting: str) -> None:
    """pydantic reads `true` as 1 where a number is required, and takes infinity for one."""
    with pytest.raises(RecipeError):
        read(RECIPE, [setting])


@pytest.mark.parametrize(
    "setting",
    [
        *("seed='010'", "seed='1_000'", "batch_per_rank=64k", "seed=1,000", "threads=''"),
        *("learning_rate.peak_per_256=25%", "learning_rate.peak_per_256=nan", "seed=\u0663"),
        "model.filters=['016']",
    ],
)
def test_text_in_the_place_of_a_number_is_refused(setting: str) -> None:
    """pydantic read '010' as 10 and '1_000' as 1000, where the same without quotes is refused."""
    with pytest.raises(RecipeError, match=rf"{setting.partition('=')[0]}.* number "):
        read(RECIPE, [setting])


def test_null_is_the_default() -> None:
    assert read(RECIPE, ["threads=null"]).threads is None


def test_a_number_in_quotes_is_one_if_all_read_it_so() -> None:
    assert read(RECIPE, ["seed='12'"]).seed == 12
    assert read(RECIPE, ["learning_rate.peak_per_256='1e-3'"]).learning_rate.peak_per_256 == 0.001


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.folder=''", "variable"),
        *((f"threads={nothing}", "variable.*threads=null") for nothing in ("", " ")),
        ("SEED=1", "'seed'"),
        ("optimizer.name=SGD", "'sgd'"),
        ("learning_rate=0.1", "mapping"),
        ("phases.0=null", "mapping"),
        ("name=1.0", "quotes"),
        ("data.folder=12", "quotes"),
        ("phases=[]", "1 "),
    ],
)
def test_the_remedy_is_named(setting: str, words: str) -> None:
    """An empty path was the current folder, and SEED was said to be unknown, without `seed`."""
    with pytest.raises(RecipeError, match=words):
        read(RECIPE, [setting])


def test_a_list_with_a_wrong_number_is_not_said_to_be_too_short() -> None:
    with pytest.raises(RecipeError) as caught:
        read(RECIPE, ["model.filters=[1.5]"])
    assert len(str(caught.value).splitlines()) == 1


def test_truth_values_stay_where_they_are_allowed() -> None:
    class Mixed(RecipePart):
        either: bool | int = 0
        number: float | None = None
        several: tuple[int, ...] = ()

    assert Mixed.model_validate({"either": True, "number": None}).either is True
    for wrong in ({"number": True}, {"several": [1, False]}, {"number": math.nan}):
        with pytest.raises(ValidationError):
            Mixed.model_validate(wrong)


def test_every_file_in_yaml_is_read_so(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("nodes: 010\n")
    with pytest.raises(ConfigurationError, match=r"YAML 1\.1"):
        simulate.read_keys(file)
    with pytest.raises(RecipeError, match=r"YAML 1\.1"):
        read_methods([str(file)])
    with pytest.raises(RecipeError, match=r"YAML 1\.1"):
        read(file)
