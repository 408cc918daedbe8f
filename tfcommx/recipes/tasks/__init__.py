"""Tasks of the recipes, one a file: what a network learns.

To add one: write a file with a frozen `RecipePart` that satisfies `recipes.families.Task` (its
settings, a `name` and `build`) and what it builds, a `recipes.families.Objective`; add a row here.
TensorFlow is imported inside its functions only: reading a recipe must not load it.
"""

from tfcommx.recipes.families import Task
from tfcommx.recipes.tasks.classify import Classify
from tfcommx.recipes.tasks.translate import Translate

TASKS: dict[str, type[Task]] = {"classify": Classify, "translate": Translate}
