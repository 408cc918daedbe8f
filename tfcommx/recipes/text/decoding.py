"""Decoding by beam search; a beam of 1 is greedy, by the most probable next word."""

import math
from collections.abc import Callable

import keras
import tensorflow as tf

from tfcommx.recipes.text.vocabulary import BEGIN, END, PADDING

# Largest number of words of a translation beyond its source's (Vaswani et al. 2017, section 6.1)
MORE = 50


def next_logits(model: keras.Model) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return a function of (source, previous words) to the next word's logits [n, vocabulary]."""
    if not {"decoded", "words"} <= {layer.name for layer in model.layers}:

        def of_whole(source: tf.Tensor, prefix: tf.Tensor) -> tf.Tensor:
            return model({"source": source, "target": prefix}, training=False)[:, -1]

        return of_whole
    # A model that begins at the encoder's output would be faster. It is not used because its
    # construction adds nodes to the graph of layers, and Keras could no longer save the whole model
    inputs = {tensor.name: tensor for tensor in model.inputs}
    body = keras.Model(inputs, model.get_layer("decoded").output)
    words = model.get_layer("words")

    def of_last(source: tf.Tensor, prefix: tf.Tensor) -> tf.Tensor:
        decoded = body({"source": source, "target": prefix}, training=False)
        return words(decoded[:, -1], reverse=True)

    return of_last


State = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]


def beam_decoder(
    model: keras.Model, beam: int, length_penalty: float = 0.6, more: int = MORE
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that translates a batch with the model's current weights.

    In each step every unfinished translation is extended by every word, and the `beam` best are
    kept. They are ranked by log-probability / ((5 + words) / 6) ** length_penalty, where END counts
    as a word. A beam of 1 is greedy decoding.

    Args:
        model: maps {"source", "target"} to logits [n, words, vocabulary]. If it has the layers
            `decoded` and `words` (as `recipes.models.transformer`), only the last word's logits are
            computed.
        beam: number of translations that are kept for each sentence, >= 1.
        length_penalty: >= 0; 0 compares probabilities, which favours short translations.
        more: largest number of words of a translation beyond its source's, >= 0; longer ones are
            cut. A translation does not depend on the rest of its batch, because padding does not
            count.

    Returns:
        A function of source int32 [n, words] to translations int32 [n, longest], filled with END.

    **Cost:** one call of the model for each word of the longest translation, on `beam` times the
    sentences and all words before.
    **Source:** Wu et al., "Google's Neural Machine Translation System" (2016), section 7, without
    the coverage penalty; Vaswani et al. (2017), section 6.1: a beam of 4, a penalty of 0.6.
    """
    logits_of = next_logits(model)

    def goodness(logs: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        return logs / ((5.0 + tf.cast(lengths, tf.float32)) / 6.0) ** length_penalty

    def decode(source: tf.Tensor) -> tf.Tensor:
        sentences = tf.shape(source)[0]
        limits = tf.math.count_nonzero(source != PADDING, 1, keepdims=True, dtype=tf.int32) + more
        sources = tf.repeat(source, beam, axis=0)

        def continues(
            prefixes: tf.Tensor, logs: tf.Tensor, lengths: tf.Tensor, ended: tf.Tensor
        ) -> tf.Tensor:
            # Upper bound of an unfinished translation, because log-probabilities only fall
            hope = tf.where(ended, -math.inf, goodness(logs, limits))
            finished = tf.where(ended, goodness(logs, lengths), -math.inf)
            open_ones = tf.reduce_max(finished, axis=1) < tf.reduce_max(hope, axis=1)
            return tf.reduce_any(open_ones)

        def extend(
            prefixes: tf.Tensor, logs: tf.Tensor, lengths: tf.Tensor, ended: tf.Tensor
        ) -> State:
            rows = tf.reshape(prefixes, [sentences * beam, -1])
            # Float32 also in mixed precision, because half precision would make many sums equal
            logits = tf.cast(logits_of(sources, rows), tf.float32)
            vocabulary = tf.shape(logits)[1]
            logits = tf.reshape(logits, [sentences, beam, vocabulary])
            # A finished translation is extended by END, at no cost
            silence = tf.one_hot(END, vocabulary, on_value=0.0, off_value=-math.inf)
            words = tf.where(ended[..., None], silence, tf.nn.log_softmax(logits))
            grown = logs[..., None] + words
            lengths += tf.cast(~ended, tf.int32)
            ranked = goodness(grown, lengths[..., None])
            if beam == 1:  # Greedy: a sum with the words before could round two logits alike
                ranked = tf.where(ended[..., None], silence, logits)
            chosen = tf.math.top_k(tf.reshape(ranked, [sentences, -1]), beam).indices
            word, parents = chosen % vocabulary, chosen // vocabulary
            prefixes, lengths, ended = (
                tf.gather(state, parents, batch_dims=1) for state in (prefixes, lengths, ended)
            )
            logs = tf.gather(tf.reshape(grown, [sentences, -1]), chosen, batch_dims=1)
            ended |= (word == END) | (lengths >= limits)
            return tf.concat([prefixes, word[..., None]], 2), logs, lengths, ended

        begin = (
            tf.fill([sentences, beam, 1], BEGIN),
            # Only the first of the beam counts, because all are equal at the start
            tf.tile([[0.0] + [-math.inf] * (beam - 1)], [sentences, 1]),
            tf.zeros([sentences, beam], tf.int32),
            tf.tile(limits < 1, [1, beam]),
        )
        shapes = [tf.TensorShape([None, beam, None]), *[tf.TensorShape([None, beam])] * 3]
        prefixes, *_ = tf.while_loop(continues, extend, begin, shape_invariants=tuple(shapes))
        return prefixes[:, 0, 1:]

    # One trace for all shapes, because nearly every batch has another length
    traced: Callable[[tf.Tensor], tf.Tensor] = tf.function(
        decode, [tf.TensorSpec([None, None], tf.int32)], autograph=False
    )
    return traced
