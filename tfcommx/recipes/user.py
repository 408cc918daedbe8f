"""A user's own model, data set, task or optimizer in a recipe, named `module:function`.

The module must be on Python's path or in the folder where the run starts. It is loaded when
training starts; reading a recipe only checks that the module exists.

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

    # Name of the function: module:function
    name: str

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        if not FORM.fullmatch(name):
            raise ValueError(f"module:function is required. Received {name!r}.")
        _add_current_folder()
        top = name.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(top) is None:
            raise ValueError(
                f"There is no module {top!r} on Python's path or in {Path.cwd()}. Start the run in "
                "the folder that holds it, or set PYTHONPATH."
            )
        return name

    def call(self, **arguments: Any) -> Any:
        """Call the function with the arguments of the run and with the settings.

        **Raises:** RecipeError if the module has no such function.
        """
        _add_current_folder()
        module, _, name = self.name.partition(":")
        function: Callable[..., Any] | None = None
        if importlib.util.find_spec(module) is not None:
            function = getattr(importlib.import_module(module), name, None)
        if function is None:
            raise RecipeError(f"The module {module!r} has no function {name!r}.")
        return function(**arguments, **(self.model_extra or {}))


class UserModel(UserFunction):
    """`function(inputs, outputs, **settings)` returns a Keras model with logits."""

    def build(self, inputs: int, outputs: int) -> keras.Model:
        return self.call(inputs=inputs, outputs=outputs)


class UserDataset(UserFunction):
    """`function(place, **settings)` returns `recipes.families.Data`, as `open_arrays` does."""

    def fetch(self) -> None:
        """Do nothing, because the function downloads its own files."""

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
        """The setting `momentum`; 0 if there is none."""
        return float((self.model_extra or {}).get("momentum", 0.0))

    def build(self) -> keras.optimizers.Optimizer:
        return self.call()


def _add_current_folder() -> None:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
