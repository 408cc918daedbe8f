"""Optimizers of the recipes: their settings, and the functions that build them.

To add one: write a frozen `KerasRecipe` that satisfies `families.OptimizerRecipe` (its settings, a
`name`, `momentum` and `made`), and add a row to `OPTIMIZERS`. Each is built with learning rate 0,
because the run sets the rate of every step.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from tfcommx.recipes.families import OptimizerRecipe
from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    import keras

# Excluded because decay pulls weights to zero, and scales and biases have no reason to be small
NOT_DECAYED = ["gamma", "beta", "bias"]


class KerasRecipe(RecipePart):
    """An optimizer whose arguments are the fields of its recipe, except `name`."""

    # "module:class", imported in `build` because reading a recipe must not load Keras
    made: ClassVar[str]
    # True if the class decays all weights; LARS and LAMB leave out biases and scales themselves
    decays_all: ClassVar[bool] = True

    def options(self) -> dict[str, Any]:
        """Return the arguments of the optimizer."""
        options = self.model_dump(exclude={"name"})
        if self.made != AdamW.made:  # Which refuses None
            # None in place of 0, for which Keras would still read and write every weight
            options["weight_decay"] = options["weight_decay"] or None
        return options

    def build(self) -> keras.optimizers.Optimizer:
        module, _, kind = self.made.partition(":")
        optimizer = getattr(importlib.import_module(module), kind)(0.0, **self.options())
        if self.decays_all:
            optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
        return optimizer


class Sgd(KerasRecipe):
    """Stochastic gradient descent with momentum."""

    made = "keras.optimizers:SGD"

    name: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    # Share of a weight that a step subtracts at learning rate 1; biases and batch normalisation are
    # excluded
    weight_decay: float = Field(5e-4, ge=0)


class LowBitSgd(Sgd):
    """SGD with momentum that sends the momentum, in few bits, instead of the gradient."""

    made = "tfcommx.optimizers.low_bit_sgd:LowBitSGD"

    name: Literal["low_bit_sgd"] = "low_bit_sgd"  # type: ignore[assignment]
    momentum: float = Field(0.9, gt=0, lt=1)


class Lars(KerasRecipe):
    """LARS, for large batches of convolutional networks; biases and normalisation are excluded."""

    made, decays_all = "tfcommx.optimizers.lars:LARS", False

    name: Literal["lars"] = "lars"
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    # Weight decay, which is added to the gradient and included in the ratio
    weight_decay: float = Field(5e-4, ge=0)
    trust_coefficient: float = Field(0.001, gt=0)


class LowBitLars(Lars):
    """LARS that sends the momentum, in few bits, instead of the gradient."""

    made = "tfcommx.optimizers.low_bit_lars:LowBitLARS"

    name: Literal["low_bit_lars"] = "low_bit_lars"  # type: ignore[assignment]
    momentum: float = Field(0.9, gt=0, lt=1)


class AdamW(KerasRecipe):
    """Adam with decoupled weight decay; without decay it is Adam."""

    made = "keras.optimizers:AdamW"

    name: Literal["adamw"] = "adamw"
    beta_1: float = Field(0.9, ge=0, lt=1)
    # Transformers usually have 0.98, and an epsilon of 1e-9
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-7, gt=0)
    # Share of a weight that a step subtracts at learning rate 1; biases and normalisation are
    # excluded
    weight_decay: float = Field(0.004, ge=0)

    @property
    def momentum(self) -> float:
        """Momentum of the first moment."""
        return self.beta_1


class Phases(RecipePart):
    """The two phases of an optimizer that sends its momentum once second moments are frozen."""

    # Number of updates after which the second moments are frozen; None: when they change little
    freeze_after: int | None = Field(None, ge=1)
    # Wire format of gradients until then
    learning_wire: Literal["float16", "bfloat16", "int8", "int4"] = "bfloat16"


class OneBitAdam(AdamW, Phases):
    """AdamW that sends its momentum, in few bits, once its second moments are frozen."""

    made = "tfcommx.optimizers.one_bit_adam:OneBitAdam"

    name: Literal["one_bit_adam"] = "one_bit_adam"  # type: ignore[assignment]


class Lamb(AdamW):
    """LAMB, for large batches of Transformers; biases and normalisation are excluded."""

    made, decays_all = "tfcommx.optimizers.lamb:LAMB", False

    name: Literal["lamb"] = "lamb"  # type: ignore[assignment]
    # Decay of the second moment
    beta_2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-6, gt=0)
    # Share of a weight that is added to the update before the ratio is taken; biases and
    # normalisation are excluded
    weight_decay: float = Field(0.01, ge=0)


class OneBitLamb(Lamb, Phases):
    """LAMB that sends its momentum, in few bits, once its second moments are frozen."""

    made = "tfcommx.optimizers.one_bit_lamb:OneBitLAMB"

    name: Literal["one_bit_lamb"] = "one_bit_lamb"  # type: ignore[assignment]


OPTIMIZERS: dict[str, type[OptimizerRecipe]] = {
    "sgd": Sgd,
    "low_bit_sgd": LowBitSgd,
    "adamw": AdamW,
    "one_bit_adam": OneBitAdam,
    "lars": Lars,
    "low_bit_lars": LowBitLars,
    "lamb": Lamb,
    "one_bit_lamb": OneBitLamb,
}
