"""Data sets of the recipes: one a file, or a few that share their settings.

To add one: write a frozen `RecipePart` that satisfies `recipes.families.Dataset` (its own settings,
a `name` and `build`), and add a row here. Data sets of pictures derive from `PictureDataset` and
build `Pictures` from two sources. TensorFlow is imported inside functions only, because reading a
recipe must not load it.
"""

from tfcommx.recipes.datasets.fashion_mnist import FashionMnist
from tfcommx.recipes.datasets.picture_files import (
    ArrayFile,
    ClassFolders,
    ImageNet,
    TensorFlowDataset,
)
from tfcommx.recipes.datasets.translations import Catalogues, TensorFlowTranslations, TextFiles
from tfcommx.recipes.families import Dataset

DATASETS: dict[str, type[Dataset]] = {
    "fashion_mnist": FashionMnist,
    "imagenet": ImageNet,
    "folder": ClassFolders,
    "tfds": TensorFlowDataset,
    "arrays": ArrayFile,
    "text_files": TextFiles,
    "tfds_translate": TensorFlowTranslations,
    "catalogues": Catalogues,
}
