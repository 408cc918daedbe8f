"""A user's own model, data set, task or optimizer in a recipe, named `module:function`.

The module must be on Python's path or in the folder where the run starts. It is loaded when
training starts; reading a recipe only checks that the module exists.

    model: {name: "shop.models:build_net", width: 64}

calls `shop.models.build_net(inputs=..., outputs=..., width=64)`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, field_validator

from tfcommx.recipes.families import Data, DataRank, Objective
from tfcommx.recipes.reader import RecipeError

if TYPE_CHECKING:
    import keras

# Members without which a run would fail in its middle; `counted` has its own check
DATA_MEMBERS = (
    *("inputs", "classes", "count", "redistributes"),
    *("steps", "train", "test", "report", "close"),
)
OBJECTIVE_MEMBERS = ("inputs", "outputs", "scores", "loss", "metrics", "targets", "scorer")
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
        # Only the package, because `find_spec` of a module in it would import the package
        top = name.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(top) is None:
            raise ValueError(
                f"There is no module {top!r} on Python's path or in {Path.cwd()}. Start the run in "
                "the folder that holds it, or set PYTHONPATH."
            )
        return name

    def call(self, **arguments: Any) -> Any:
        """Call the function with the arguments of the run and with the settings.

        **Raises:** RecipeError if the module has no such function, or if the function does not take
        these arguments and settings.
        """
        _add_current_folder()
        module, _, name = self.name.partition(":")
        function: Callable[..., Any] | None = None
        try:
            if importlib.util.find_spec(module) is not None:
                function = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # The module itself imports one that does not exist
        if not callable(function):
            raise RecipeError(f"The module {module!r} has no function {name!r}.")
        settings = self.model_extra or {}
        if both := sorted(arguments.keys() & settings.keys()):
            raise RecipeError(
                f"Settings of {self.name!r} must not be {', '.join(both)}, which the run gives. "
                "Rename them."
            )
        # Before the call, because a mistake inside of the function may raise a TypeError, too
        _check_takes(function, self.name, {**arguments, **settings})
        return function(**arguments, **settings)

    def _require(self, value: Any, members: Sequence[str], wanted: str) -> None:
        """Refuse a result of the function without these attributes."""
        if missing := [member for member in members if not hasattr(value, member)]:
            raise RecipeError(
                f"{self.name!r} must return {wanted}. Received {value!r:.80}, without "
                f"{', '.join(missing)}. Is a `return` missing?"
            )


def _check_takes(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not take, before it is called."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # A builtin has no signature
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise RecipeError(
            f"The settings of {name!r} in the recipe must fit the function, {name}{signature}, "
            f"which is called with {', '.join(arguments) or 'nothing'}. Received: {error}."
        ) from error


class UserModel(UserFunction):
    """`function(inputs, outputs, **settings)` returns a Keras model with logits."""

    def build(self, inputs: int, outputs: int) -> keras.Model:
        """Build the user's network. **Raises:** RecipeError if it is no Keras model."""
        import keras

        model = self.call(inputs=inputs, outputs=outputs)
        if not isinstance(model, keras.Model):
            raise RecipeError(
                f"{self.name!r} must return a Keras model. Received {model!r:.80}. Is a `return` "
                "missing?"
            )
        return model


class UserDataset(UserFunction):
    """`function(place, **settings)` returns `recipes.families.Data`, as `open_arrays` does."""

    def build(self, place: DataRank) -> Data:
        """Open the user's data set. **Raises:** RecipeError if it lacks a member of `Data`."""
        data: Data = self.call(place=place)
        self._require(data, DATA_MEMBERS, "`recipes.families.Data`, as `open_arrays` does")
        return data


class UserTask(UserFunction):
    """`function(data, **settings)` returns a `recipes.families.Objective`."""

    def build(self, data: Data) -> Objective:
        """Build the user's task. **Raises:** RecipeError if it lacks a member of `Objective`."""
        objective: Objective = self.call(data=data)
        self._require(objective, OBJECTIVE_MEMBERS, "a `recipes.families.Objective`")
        return objective


class UserOptimizer(UserFunction):
    """`function(**settings)` returns a Keras optimizer; each step sets its learning rate."""

    @property
    def momentum(self) -> float:
        """The setting `momentum`; 0 if there is none, or no number."""
        try:
            return float((self.model_extra or {}).get("momentum", 0.0))
        except (TypeError, ValueError):  # The function may give it another meaning
            return 0.0

    def build(self) -> keras.optimizers.Optimizer:
        return self.call()


def _add_current_folder() -> None:
    folder = str(Path.cwd())
    if folder not in sys.path:
        # At the end, because a file with the name of a library must not replace the library
        sys.path.append(folder)
