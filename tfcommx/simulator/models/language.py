"""Language models: LSTM, BERT, GPT-2 and the Transformer."""

from tfcommx.core import Layer, LayerTable
from tfcommx.simulator.models.builder import dense, normalization

PTB_VOCABULARY, UNITS, LAYERS = 10000, 1500, 2


def lstm_ptb(words: int = 35) -> LayerTable:
    """Return the layers of two LSTM layers of 1,500 units on PTB, for `words` words of text.

    Source: Zaremba et al., "Recurrent Neural Network Regularization" (2014), section 4.1, the large
    model; Shi et al. (2020), table V, count its 11 tensors: each layer has two biases.
    """
    layers = [Layer("embedding", 0, (("words", (PTB_VOCABULARY, UNITS)),))]
    gates = 4 * UNITS
    for number in range(1, LAYERS + 1):
        kernels = (("kernel", (gates, UNITS)), ("recurrent_kernel", (gates, UNITS)))
        biases = (("bias", (gates,)), ("recurrent_bias", (gates,)))
        # Two products for each word: of the input, and of the state before
        layers.append(Layer(f"lstm{number}", 2 * gates * UNITS * words, kernels + biases))
    top = (("kernel", (PTB_VOCABULARY, UNITS)), ("bias", (PTB_VOCABULARY,)))
    layers.append(Layer("classes", PTB_VOCABULARY * UNITS * words, top))
    return LayerTable("lstm_ptb", tuple(layers), f"a piece of {words} words")


BERT_VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2


def bert_base(words: int = 128) -> LayerTable:
    """Return the layers of BERT-Base for sentences of `words` word pieces.

    The table has both heads of its pre-training; the decoder of the words shares their embedding.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2019), section
    3. All words of a sentence are predicted.
    """
    return _bert("bert_base", 12, 768, words)


def bert_large(words: int = 128) -> LayerTable:
    """Return the layers of BERT-Large for sentences of `words` word pieces."""
    return _bert("bert_large", 24, 1024, words)


def _bert(name: str, blocks: int, width: int, words: int) -> LayerTable:
    tables = (("words", BERT_VOCABULARY), ("positions", POSITIONS), ("segments", SEGMENTS))
    # A look-up has no multiply-adds
    shapes = tuple((kind, (length, width)) for kind, length in tables)
    layers = [Layer("embedding", 0, shapes), normalization("embedding/norm", width, width * words)]
    for number in range(1, blocks + 1):
        layers += _block(f"block{number}", width, words)
    layers += [
        dense("pooler", width, width),
        dense("predicted/transform", width, width, times=words),
        normalization("predicted/norm", width, width * words),
        Layer("predicted", width * BERT_VOCABULARY * words, (("bias", (BERT_VOCABULARY,)),)),
        dense("next_sentence", width, 2),
    ]
    return LayerTable(name, tuple(layers), f"a sentence of {words} word pieces")


def _block(name: str, width: int, words: int) -> list[Layer]:
    return [
        *(dense(f"{name}/{kind}", width, width, times=words) for kind in ("query", "key", "value")),
        # Two products: of queries with keys, and of their scores with the values
        Layer(f"{name}/attention", 2 * words * words * width),
        dense(f"{name}/output", width, width, times=words),
        normalization(f"{name}/norm1", width, width * words),
        dense(f"{name}/inner", width, 4 * width, times=words),
        dense(f"{name}/outer", 4 * width, width, times=words),
        normalization(f"{name}/norm2", width, width * words),
    ]


GPT2_VOCABULARY, GPT2_WORDS = 50257, 1024


def gpt2_xl(words: int = GPT2_WORDS) -> LayerTable:
    """Return the layers of GPT-2 of 1.5 billion parameters for texts of `words` word pieces.

    The classes share the embedding of the words. Scores of masked words are counted, too.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2:
    48 blocks of 1,600 units.
    """
    width = 1600
    tables = (("words", (GPT2_VOCABULARY, width)), ("positions", (GPT2_WORDS, width)))
    layers = [Layer("embedding", 0, tables)]
    for number in range(1, 49):
        name = f"block{number}"
        layers += [
            normalization(f"{name}/norm1", width, width * words),
            dense(f"{name}/query_key_value", width, 3 * width, times=words),
            Layer(f"{name}/attention", 2 * words * words * width),
            dense(f"{name}/output", width, width, times=words),
            normalization(f"{name}/norm2", width, width * words),
            dense(f"{name}/inner", width, 4 * width, times=words),
            dense(f"{name}/outer", 4 * width, width, times=words),
        ]
    layers += [
        normalization("norm", width, width * words),
        Layer("classes", width * GPT2_VOCABULARY * words),
    ]
    return LayerTable("gpt2_xl", tuple(layers), f"a text of {words} word pieces")


WMT_VOCABULARY, BLOCKS = 37000, 6


def transformer_base(words: int = 32) -> LayerTable:
    """Return the layers of the base model for pairs of sentences of `words` word pieces each.

    Both languages and the output share one embedding.

    Source: Vaswani et al., "Attention Is All You Need" (2017), sections 3 and 5.1, table 3: about
    37,000 word pieces, projections of attention without bias.
    """
    return _transformer("transformer_base", 512, words)


def transformer_big(words: int = 32) -> LayerTable:
    """Return the layers of the big model for pairs of sentences of `words` word pieces each."""
    return _transformer("transformer_big", 1024, words)


def _transformer(name: str, width: int, words: int) -> LayerTable:
    layers = [Layer("embedding", 0, (("words", (WMT_VOCABULARY, width)),))]
    for number in range(1, BLOCKS + 1):
        encoder = f"encoder{number}"
        layers += _attention(f"{encoder}/self", width, words)
        layers += _inner(encoder, width, words)
    for number in range(1, BLOCKS + 1):
        decoder = f"decoder{number}"
        layers += _attention(f"{decoder}/self", width, words)
        layers += _attention(f"{decoder}/source", width, words)
        layers += _inner(decoder, width, words)
    layers.append(Layer("classes", width * WMT_VOCABULARY * words))
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
