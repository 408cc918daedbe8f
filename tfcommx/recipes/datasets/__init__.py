"""Data sets of the recipes: one a file.

To add one: write a file with a `Cached` class that satisfies `recipes.base.Dataset` (its own
settings, a `name`, `fetch`, `build`, `serving`, `batches`, `test_inputs`), and add a row here.
TensorFlow is imported inside its functions only: reading a recipe must not load it.
"""

from tfcommx.recipes.base import Dataset
from tfcommx.recipes.datasets.fashion_mnist import FashionMnist

DATASETS: dict[str, type[Dataset]] = {"fashion_mnist": FashionMnist}
