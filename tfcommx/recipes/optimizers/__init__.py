"""Optimizers of the recipes: one a file.

To add one: write a file with a frozen `Part` that satisfies `recipes.base.OptimizerRecipe` (its
settings, a `name`, `momentum` and `build`), and add a row here. Keras is imported inside its
functions only: reading a recipe must not load it.
"""

from tfcommx.recipes.base import OptimizerRecipe
from tfcommx.recipes.optimizers.adamw import AdamW
from tfcommx.recipes.optimizers.lamb import Lamb
from tfcommx.recipes.optimizers.lars import Lars
from tfcommx.recipes.optimizers.sgd import Sgd

OPTIMIZERS: dict[str, type[OptimizerRecipe]] = {
    "sgd": Sgd,
    "adamw": AdamW,
    "lars": Lars,
    "lamb": Lamb,
}
