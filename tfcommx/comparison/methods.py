"""A method: a name, and its changes of a recipe. Methods are read from YAML."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from tfcommx.core import check_name
from tfcommx.recipes.reader import RecipeError, RecipePart, error_lines, read_mapping
from tfcommx.recipes.recipe import Recipe

SHIPPED = Path(__file__).with_name("methods.yaml")
# Pattern of a method's name, restricted because it is part of file names
NAME = re.compile(r"\w[\w.-]*$")


class Method(RecipePart):
    """A way to train a recipe, as differences from the recipe.

    >>> method = Method(about="1 %", scheme={"route": "allgather"}, also={"optimizer.momentum": 0})
    >>> method.settings([3, 2])[0]
    'phases.0.scheme={"route": "allgather"}'
    """

    # Description, in a few words
    about: str
    # Scheme of all phases; None: the recipe's phases stay unchanged
    scheme: dict[str, Any] | None = None
    # Densities of the first epochs, continued from phase to phase
    warm_up: tuple[float, ...] = ()
    # Name of the optimizer that a recipe must have; None: any
    optimizer: str | None = None
    # Strategy, which says how weights are updated; None: the recipe's
    strategy: dict[str, Any] | None = None
    # Other fields of the recipe, such as optimizer.momentum -> values
    also: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _warm_up_has_a_scheme(self) -> Method:
        if self.warm_up and self.scheme is None:
            raise ValueError(
                "warm_up needs a scheme, whose densities it replaces in the first epochs. Received "
                f"{list(self.warm_up)}. Add scheme: {{...}} to the method."
            )
        return self

    def settings(self, epochs: Sequence[int]) -> list[str]:
        """Return the changes of a recipe in the form that `tfcommx train --set` accepts."""
        changes, rising = [], list(self.warm_up)
        for number, count in enumerate(epochs if self.scheme is not None else ()):
            densities, rising = rising[:count], rising[count:]
            changes.append(f"phases.{number}.scheme={json.dumps(self.scheme)}")
            changes.append(f"phases.{number}.warm_up={json.dumps(densities)}")
        if self.strategy is not None:
            changes.append(f"strategy={json.dumps(self.strategy)}")
        return [*changes, *(f"{field}={json.dumps(value)}" for field, value in self.also.items())]


def read_methods(words: Sequence[str] = ()) -> dict[str, Method]:
    """Return methods by name.

    Args:
        words: names of shipped methods, and YAML files, of which all methods are taken; empty: all
            shipped ones. A later method replaces an earlier one of the same name.

    **Raises:** RecipeError for an unknown name, with the nearest known one, or for a file that
    does not hold methods.
    """
    shipped = _read(SHIPPED)
    methods: dict[str, Method] = {}
    for word in words or shipped:
        if Path(word).suffix in (".yaml", ".yml"):
            methods |= _read(Path(word))
            continue
        try:
            check_name("method", word, shipped)
        except ValueError as error:
            raise RecipeError(f"{error} A file's name must end with .yaml.") from error
        methods[word] = shipped[word]
    return methods


@functools.cache
def _read(path: Path) -> dict[str, Method]:
    tree = read_mapping(path, "The methods")
    if not all(NAME.match(str(name)) for name in tree):
        raise RecipeError(
            f"{path}: a mapping of names of methods, of letters, digits, `_`, `.` and `-`, is "
            f"required. Received {str(tree)[:80]!r}."
        )
    methods: dict[str, Method] = {}
    for name, fields in tree.items():
        try:
            methods[str(name)] = Method.model_validate(fields)
        except ValidationError as error:
            lines = [f"{path}: {line}" for line in error_lines(error, str(name))]
            raise RecipeError("\n".join(lines)) from error
    return methods


def fitting(methods: Mapping[str, Method], recipe: Recipe, named: bool) -> dict[str, Method]:
    """Return the methods that apply to a recipe, by its optimizer and its number of epochs.

    **Raises:** RecipeError for a method that needs another recipe, if the user `named` it.
    """
    missing = {name: _missing(method, recipe) for name, method in methods.items()}
    for name, needs in missing.items():
        if needs and named:
            raise RecipeError(f"The method {name!r} needs a recipe with {needs}")
    return {name: method for name, method in methods.items() if not missing[name]}


def _missing(method: Method, recipe: Recipe) -> str:
    """Return the method's unmet requirement of the recipe, and a remedy; "" if it has none."""
    optimizer = getattr(recipe.optimizer, "name", None)
    if method.optimizer not in (None, optimizer):
        return (
            f"the optimizer {method.optimizer!r}. Received one with "
            f"{optimizer or 'your own optimizer'!r}. Leave the method out."
        )
    if len(method.warm_up) > recipe.epochs:
        return (
            "an epoch for each density of its warm_up, because the last ones would be left out. "
            f"Received {recipe.epochs} epochs for {list(method.warm_up)}. Shorten warm_up, or "
            "leave the method out."
        )
    return ""


def check_names_a_route(recipe: Recipe) -> None:
    """Refuse a method's recipe whose route is `auto`. **Raises:** RecipeError."""
    if any(scheme.route == "auto" for scheme in recipe.scheme_of_epoch()):
        raise RecipeError(
            "A comparison needs schemes that name a route. Received 'auto', which would choose by "
            "the links of this machine, and its bytes with them. Name the route that it would "
            "choose, or leave the method out."
        )
