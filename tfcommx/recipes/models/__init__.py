"""Models of the recipes: one a file.

To add one: write a file with a frozen `Part` that satisfies `recipes.base.Model` (its sizes, a
`name` and `build`), and add a row here. Keras is imported inside its functions only: reading a
recipe must not load it.
"""

from tfcommx.recipes.base import Model
from tfcommx.recipes.models.small_cnn import SmallCnn

MODELS: dict[str, type[Model]] = {"small_cnn": SmallCnn}
