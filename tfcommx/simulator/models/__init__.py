"""Models by name, as tables of layers: one family a file, and the table of all models.

A table lists the multiply-adds and the variables of each layer. `Profile.from_throughput` makes a
profile from such a table and one measured throughput, without the model.

To add one: write a function from the size of a sample to a `LayerTable`, from the architecture, in
the file of its family, which names its paper; add it to `_ALL` below; add the published numbers of
parameters and tensors to tests/simulator/test_layer_tables.py.
"""

from collections.abc import Callable

from tfcommx.core import LayerTable, check_name, check_whole
from tfcommx.simulator.models import convolutional, language

_ALL: tuple[Callable[..., LayerTable], ...] = (
    convolutional.resnet50,
    convolutional.vgg16,
    convolutional.vgg19,
    convolutional.vgg16_cifar,
    convolutional.alexnet,
    convolutional.googlenet,
    convolutional.inception_v3,
    convolutional.inception_v4,
    language.bert_base,
    language.bert_large,
    language.gpt2_xl,
    language.transformer_base,
    language.transformer_big,
    language.lstm_ptb,
)
MODELS: dict[str, Callable[..., LayerTable]] = {make.__name__: make for make in _ALL}


def get(name: str, size: int | None = None) -> LayerTable:
    """Return the layers of a model.

    >>> get("resnet50").parameters, get("resnet50").tensors
    (25557032, 161)

    Args:
        size: size of a sample, in pixels of a side or in words; None: the model's usual size.

    **Raises:** ConfigurationError for an unknown name, with the nearest known one, or a size
    that is too small.
    """
    make = MODELS[check_name("model", name, MODELS)]
    if size is None:
        return make()
    return make(check_whole("size", size, least=1))
