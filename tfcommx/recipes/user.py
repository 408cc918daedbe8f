"""A user's own model, data set, task or optimizer in a recipe, named `module:function`.

The module is found on Python's path or in the folder where the run starts, and loaded when training
starts: reading a recipe only checks that there is such a module.

    model: {name: "shop.models:build_net", width: 64}

calls `shop.models.build_net(inputs=..., outputs=..., width=64)`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, field_validator

from tfcommx.recipes.families import Data, DataRank, Objective
from tfcommx.recipes.reader import RecipeError

if TYPE_CHECKING:
    import keras

FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class UserFunction(BaseModel):
    """A user's function, and the settings to call it with."""

    model_config = ConfigDict(extra="allow", frozen=True)

    # module:function
    name: str

    @field_validator("name")
    @classmethod
    def _is_there(cls, name: str) -> str:
        if not FORM.fullmatch(name):
            raise ValueError(f"module:function is required. Received {name!r}.")
        _look_here()
        top = name.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(top) is None:
            raise ValueError(
                f"There is no module {top!r} on Python's path or in {Path.cwd()}. Start the run in "
                "the folder that holds it, or set PYTHONPATH."
            )
        return name

    def call(self, **given: Any) -> Any:
        """Call the function with what the run gives it and with the settings.

        **Raises:** RecipeError if there is no such function.
        """
        _look_here()
        module, _, name = self.name.partition(":")
        function: Callable[..., Any] | None = None
        if importlib.util.find_spec(module) is not None:
            function = getattr(importlib.import_module(module), name, None)
        if function is None:
            raise RecipeError(f"The module {module!r} has no function {name!r}.")
        return function(**given, **(self.model_extra or {}))


class UserModel(UserFunction):
    """`function(inputs, outputs, **settings)` returns a Keras model with logits."""

    def build(self, inputs: int, outputs: int) -> keras.Model:
        return self.call(inputs=inputs, outputs=outputs)


class UserDataset(UserFunction):
    """`function(place, **settings)` returns `recipes.families.Data`, as `open_arrays` does."""

    def fetch(self) -> None:
        """Do nothing: the function downloads what it needs."""

    def build(self, place: DataRank) -> Data:
        data: Data = self.call(place=place)
        return data


class UserTask(UserFunction):
    """`function(data, **settings)` returns a `recipes.families.Objective`."""

    def build(self, data: Data) -> Objective:
        objective: Objective = self.call(data=data)
        return objective


class UserOptimizer(UserFunction):
    """`function(**settings)` returns a Keras optimizer; each step sets its learning rate."""

    @property
    def momentum(self) -> float:
        """Momentum as the settings have it; 0 if they have none of this name."""
        return float((self.model_extra or {}).get("momentum", 0.0))

    def build(self) -> keras.optimizers.Optimizer:
        return self.call()


def _look_here() -> None:
    """Put the current folder at the end of Python's path."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
