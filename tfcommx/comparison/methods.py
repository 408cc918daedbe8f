"""A method: a name, and what it changes in a recipe. Methods are read from YAML."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tfcommx.recipes.reader import (
    RecipeError,
    RecipePart,
    YamlError,
    error_lines,
    parse,
    refuse_unknown,
)
from tfcommx.recipes.recipe import Recipe

SHIPPED = Path(__file__).with_name("methods.yaml")
# A method's name is part of file names
NAME = re.compile(r"\w[\w.-]*$")


class Method(RecipePart):
    """A way to train a recipe: what differs from the recipe.

    >>> method = Method(about="1 %", scheme={"route": "allgather"}, also={"optimizer.momentum": 0})
    >>> method.settings([3, 2])[0]
    'phases.0.scheme={"route": "allgather"}'
    """

    # What it is, in a few words
    about: str
    # Of all phases; None: the recipe's phases stay as they are
    scheme: dict[str, Any] | None = None
    # Densities of the first epochs, from phase to phase
    warm_up: tuple[float, ...] = ()
    # Name of the optimizer of the recipes that it is for; None: any
    optimizer: str | None = None
    # Who updates the weights; None: as the recipe says
    strategy: dict[str, Any] | None = None
    # Other places of the recipe, such as optimizer.momentum, and their values
    also: dict[str, Any] = Field(default_factory=dict)

    def settings(self, epochs: Sequence[int]) -> list[str]:
        """Return the changes of a recipe, as `tfcommx train --set` takes them.

        Args:
            epochs: of each phase.
        """
        found, rising = [], list(self.warm_up)
        for number, count in enumerate(epochs if self.scheme is not None else ()):
            now, rising = rising[:count], rising[count:]
            found.append(f"phases.{number}.scheme={json.dumps(self.scheme)}")
            found.append(f"phases.{number}.warm_up={json.dumps(now)}")
        if self.strategy is not None:
            found.append(f"strategy={json.dumps(self.strategy)}")
        return [*found, *(f"{place}={json.dumps(value)}" for place, value in self.also.items())]


def read_methods(words: Sequence[str] = ()) -> dict[str, Method]:
    """Return methods by name.

    Args:
        words: names of shipped methods, and YAML files, of which all methods are taken; empty: all
            shipped ones. Of two with one name the later counts.

    **Raises:** RecipeError for an unknown name, with the nearest one, or a file that says something
    else.
    """
    shipped = _read(SHIPPED)
    found: dict[str, Method] = {}
    for word in words or shipped:
        if Path(word).suffix in (".yaml", ".yml"):
            found |= _read(Path(word))
            continue
        try:
            refuse_unknown([word], list(shipped), "method")
        except ValueError as error:
            raise RecipeError(f"{error} A file's name must end with .yaml.") from error
        found[word] = shipped[word]
    return found


@functools.cache
def _read(path: Path) -> dict[str, Method]:
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"The methods {path} cannot be read: {error.strerror}.") from error
    except (YamlError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(tree, dict) or not all(NAME.match(str(name)) for name in tree):
        raise RecipeError(
            f"{path}: a mapping of names of methods, of letters, digits, `_`, `.` and `-`, is "
            f"required. Received {str(tree)[:80]!r}."
        )
    found: dict[str, Method] = {}
    for name, fields in tree.items():
        try:
            found[str(name)] = Method.model_validate(fields)
        except ValidationError as error:
            lines = [f"{path}: {line}" for line in error_lines(error, str(name))]
            raise RecipeError("\n".join(lines)) from error
    return found


def fitting(methods: Mapping[str, Method], recipe: Recipe, named: bool) -> dict[str, Method]:
    """Return the methods that are for a recipe with this optimizer.

    **Raises:** RecipeError for another one, if the user `named` it.
    """
    optimizer = getattr(recipe.optimizer, "name", None)
    others = {name: one for name, one in methods.items() if one.optimizer not in (None, optimizer)}
    if others and named:
        name, method = next(iter(others.items()))
        raise RecipeError(
            f"The method {name!r} needs a recipe with the optimizer {method.optimizer!r}. Received "
            f"one with {optimizer or 'an optimizer of your own'!r}. Leave the method out."
        )
    return {name: one for name, one in methods.items() if name not in others}


def check_names_a_route(name: str, recipe: Recipe) -> None:
    """Refuse a method by `auto`. **Raises:** RecipeError."""
    if any(scheme.route == "auto" for scheme in recipe.scheme_of_epoch()):
        raise RecipeError(
            f"A comparison needs schemes that name a route. Received 'auto' in the method {name!r}:"
            " it would choose by the links of this machine, and its bytes with them. Name the "
            "route that it would choose, or leave the method out."
        )
