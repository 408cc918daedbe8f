"""The Transformer, base and big, with one embedding for both languages and the output.

Source: Vaswani et al., "Attention Is All You Need" (2017), sections 3 and 5.1, table 3: about
37,000 word pieces, projections of attention without bias.
"""

from __future__ import annotations

from tfcommx.simulator.models.builder import dense, normalization
from tfcommx.terms import Layer, LayerTable

VOCABULARY, BLOCKS = 37000, 6


def transformer_base(words: int = 32) -> LayerTable:
    """Return the layers of the base model for pairs of sentences of `words` word pieces each."""
    return _transformer("transformer_base", 512, words)


def transformer_big(words: int = 32) -> LayerTable:
    """Return the layers of the big model for pairs of sentences of `words` word pieces each."""
    return _transformer("transformer_big", 1024, words)


def _transformer(name: str, width: int, words: int) -> LayerTable:
    layers = [Layer("embedding", 0, (("words", (VOCABULARY, width)),))]
    for number in range(1, BLOCKS + 1):
        encoder = f"encoder{number}"
        layers += _attention(f"{encoder}/self", width, words)
        layers += _inner(encoder, width, words)
    for number in range(1, BLOCKS + 1):
        decoder = f"decoder{number}"
        layers += _attention(f"{decoder}/self", width, words)
        layers += _attention(f"{decoder}/source", width, words)
        layers += _inner(decoder, width, words)
    layers.append(Layer("classes", width * VOCABULARY * words))
    return LayerTable(name, tuple(layers), f"a pair of sentences of {words} word pieces")


def _attention(name: str, width: int, words: int) -> list[Layer]:
    projections = [
        dense(f"{name}/{kind}", width, width, times=words, bias=False)
        for kind in ("query", "key", "value", "output")
    ]
    scores = Layer(f"{name}/scores", 2 * words * words * width)
    norm = normalization(f"{name}/norm", width, width * words)
    return [*projections[:3], scores, projections[3], norm]


def _inner(name: str, width: int, words: int) -> list[Layer]:
    return [
        dense(f"{name}/inner", width, 4 * width, times=words),
        dense(f"{name}/outer", 4 * width, width, times=words),
        normalization(f"{name}/norm", width, width * words),
    ]
