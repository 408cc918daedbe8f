"""Every optimizer of the recipes can be built, with and without weight decay."""

import keras
import pytest

from tfcommx.recipes.optimizers import OPTIMIZERS


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_built_at_rate_0(name, decay):
    settings = OPTIMIZERS[name](weight_decay=decay)
    optimizer = settings.build()
    assert float(optimizer.learning_rate) == 0 and (optimizer.weight_decay or 0) == decay
    assert 0 < settings.momentum < 1
    # Biases and normalisation are left as they are
    weight, bias = (keras.Variable([1.0, 2.0], name=name) for name in ("kernel", "bias"))
    optimizer.build([weight, bias])
    optimizer.learning_rate = 0.1
    optimizer.apply([keras.ops.zeros(2), keras.ops.zeros(2)])
    assert bias.numpy().tolist() == [1, 2]
    assert (weight.numpy().tolist() == [1, 2]) == (decay == 0)
