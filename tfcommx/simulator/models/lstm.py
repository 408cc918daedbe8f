"""The language model of the papers on merged gradients: two LSTM layers of 1,500 units on PTB.

Source: Zaremba et al., "Recurrent Neural Network Regularization" (2014), section 4.1, the large
model; Shi et al. (2020), table V, count its 11 tensors: each layer has two biases.
"""

from __future__ import annotations

from tfcommx.terms import Layer, LayerTable

VOCABULARY, UNITS, LAYERS = 10000, 1500, 2


def lstm_ptb(words: int = 35) -> LayerTable:
    """Return the layers for pieces of text of `words` words."""
    layers = [Layer("embedding", 0, (("words", (VOCABULARY, UNITS)),))]
    gates = 4 * UNITS
    for number in range(1, LAYERS + 1):
        kernels = (("kernel", (gates, UNITS)), ("recurrent_kernel", (gates, UNITS)))
        biases = (("bias", (gates,)), ("recurrent_bias", (gates,)))
        layers.append(Layer(f"lstm{number}", 2 * gates * UNITS * words, kernels + biases))
    top = (("kernel", (VOCABULARY, UNITS)), ("bias", (VOCABULARY,)))
    layers.append(Layer("classes", VOCABULARY * UNITS * words, top))
    return LayerTable("lstm_ptb", tuple(layers), f"a piece of {words} words")
