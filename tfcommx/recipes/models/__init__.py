"""Models of the recipes: one a file.

To add one: write a file with a frozen `RecipePart` that satisfies `recipes.families.Model` (its
sizes, a `name` and `build`), and add a row here; add its published number of parameters to
tests/recipes/test_models.py. Keras is imported inside its functions only, because reading a recipe
must not load it.
"""

from tfcommx.recipes.families import Model
from tfcommx.recipes.models.resnet import ResNet
from tfcommx.recipes.models.small_cnn import SmallCnn
from tfcommx.recipes.models.transformer import Transformer
from tfcommx.recipes.models.vgg19 import Vgg19

MODELS: dict[str, type[Model]] = {
    "small_cnn": SmallCnn,
    "resnet": ResNet,
    "vgg19": Vgg19,
    "transformer": Transformer,
}
