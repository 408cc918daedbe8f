"""Values on the command line that a user does not mean."""

from __future__ import annotations

import pytest
import typer

from tfcommx.cli.main import app
from tfcommx.core import ConfigurationError


def call(*words: str) -> None:
    app(list(words), standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("simulate", "--nodes", "4,000"), "4,000"),
        (("simulate", "--between-gbit", "25Gbit"), "25Gbit"),
        (("train", "recipe.yaml", "-np", "0"), "0"),
        (("train", "recipe.yaml", "--minutes", "1:30"), "1:30"),
        (("run", "-np", "two", "--", "python", "train.py"), "two"),
        (("cache", "warm", "photos", "--store", "160px"), "160px"),
    ],
)
def test_a_refused_number_is_named(words: tuple[str, ...], value: str) -> None:
    """The error was `unable to parse string as an integer`, without the string."""
    with pytest.raises(typer.BadParameter) as caught:
        call(*words)
    assert repr(value) in caught.value.format_message()


@pytest.mark.parametrize(
    "words",
    [
        ("train", "recipe.yaml", "--output", ""),
        ("train", ""),
        ("report", ""),
        ("cache", "status", "--memory", ""),
        ("simulate", "--json", ""),
    ],
)
def test_an_empty_path_is_refused(words: tuple[str, ...]) -> None:
    """It was the current folder, as after `--output "$UNSET"`."""
    with pytest.raises(ConfigurationError, match=r"''|'\.'"):
        call(*words)


def test_a_probe_does_not_write_its_figure_over_its_links() -> None:
    with pytest.raises(ConfigurationError, match=r"`--output` .*links\.png"):
        call("probe", "--output", "links.png")


def test_an_almost_endless_step_is_no_line_of_300_digits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call("simulate", "--throughput", "1e-300")
    assert max(map(len, capsys.readouterr().out.splitlines())) < 150
