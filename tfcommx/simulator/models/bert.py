"""BERT with both heads of its pre-training; the decoder of the words shares their embedding.

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2019), section 3.
The words predicted are all words of a sentence.
"""

from __future__ import annotations

from tfcommx.simulator.models.builder import dense, normalization
from tfcommx.terms import Layer, LayerTable

VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2


def bert_base(words: int = 128) -> LayerTable:
    """Return the layers of BERT-Base for sentences of `words` word pieces."""
    return _bert("bert_base", 12, 768, words)


def bert_large(words: int = 128) -> LayerTable:
    """Return the layers of BERT-Large for sentences of `words` word pieces."""
    return _bert("bert_large", 24, 1024, words)


def _bert(name: str, blocks: int, width: int, words: int) -> LayerTable:
    tables = (("words", VOCABULARY), ("positions", POSITIONS), ("segments", SEGMENTS))
    shapes = tuple((kind, (length, width)) for kind, length in tables)
    layers = [
        Layer("embedding", 0, shapes),
        normalization("embedding/norm", width, width * words),
    ]
    for number in range(1, blocks + 1):
        layers += _block(f"block{number}", width, words)
    layers += [
        dense("pooler", width, width),
        dense("predicted/transform", width, width, times=words),
        normalization("predicted/norm", width, width * words),
        Layer("predicted", width * VOCABULARY * words, (("bias", (VOCABULARY,)),)),
        dense("next_sentence", width, 2),
    ]
    return LayerTable(name, tuple(layers), f"a sentence of {words} word pieces")


def _block(name: str, width: int, words: int) -> list[Layer]:
    return [
        *(dense(f"{name}/{kind}", width, width, times=words) for kind in ("query", "key", "value")),
        Layer(f"{name}/attention", 2 * words * words * width),
        dense(f"{name}/output", width, width, times=words),
        normalization(f"{name}/norm1", width, width * words),
        dense(f"{name}/inner", width, 4 * width, times=words),
        dense(f"{name}/outer", 4 * width, width, times=words),
        normalization(f"{name}/norm2", width, width * words),
    ]
