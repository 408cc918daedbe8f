"""Tasks of the recipes, one a file: loss, metrics and scores of a network.

To add one: write a file with a frozen `RecipePart` that satisfies `recipes.families.Task` (its
settings, a `name` and `build`), and with the `recipes.families.Objective` that it builds; add a row
here. TensorFlow is imported inside its functions only, because reading a recipe must not load it.
"""

from tfcommx.recipes.families import Task
from tfcommx.recipes.tasks.classify import Classify
from tfcommx.recipes.tasks.translate import Translate

TASKS: dict[str, type[Task]] = {"classify": Classify, "translate": Translate}
