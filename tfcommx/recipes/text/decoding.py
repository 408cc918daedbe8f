"""Greedy decoding: the most probable word, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfcommx.recipes.text.vocabulary import BEGIN, END, PADDING

# Words that a translation may have more than its source (Vaswani et al. 2017, section 6.1)
MORE = 50


def greedy_decoder(model: keras.Model, more: int = MORE) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return what translates a batch with the model as it is when it is called.

    Args:
        model: takes {"source", "target"}, returns logits [n, words, vocabulary]. Has it the layers
            `decoded` and `words` (as `recipes.models.transformer`), then only the last word's
            logits are computed.
        more: words that a translation may have more than its source, >= 0; then it is cut. Padding
            does not count, so a translation does not depend on the sentences beside it.

    Returns:
        A function of source int32 [n, words] to translations int32 [n, longest], each up to END;
        one that was cut has END behind it if others are longer.

    **Cost:** the model once for each word of the longest translation, on all words before.
    """
    logits_of = next_logits(model)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def decode(source: tf.Tensor) -> tf.Tensor:
        limits = most_words(source, more)
        said = tf.fill([tf.shape(source)[0], 1], BEGIN)

        def go_on(said: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
            return ~tf.reduce_all(ended)

        def say(said: tf.Tensor, ended: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            word = tf.argmax(logits_of(source, said), axis=-1, output_type=tf.int32)
            word = tf.where(ended, END, word)
            cut = tf.shape(said)[1] >= limits
            return tf.concat([said, word[:, None]], axis=1), ended | (word == END) | cut

        shapes = [tf.TensorShape([None, None]), tf.TensorShape([None])]
        said, _ = tf.while_loop(go_on, say, [said, limits < 1], shape_invariants=shapes)
        return said[:, 1:]

    return decode


def most_words(source: tf.Tensor, more: int) -> tf.Tensor:
    """Return int32 [n]: how many words the translation of each source [n, words] may have."""
    return tf.math.count_nonzero(source != PADDING, axis=1, dtype=tf.int32) + more


def next_logits(model: keras.Model) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return what gives the logits [n, vocabulary] of the word after those that were said."""
    if not {"decoded", "words"} <= {layer.name for layer in model.layers}:

        def of_whole(source: tf.Tensor, said: tf.Tensor) -> tf.Tensor:
            return model({"source": source, "target": said}, training=False)[:, -1]

        return of_whole
    # A model that began at the encoder's output would be faster, but Keras then adds nodes to the
    # graph of layers, and cannot save the whole model any more
    inputs = {tensor.name: tensor for tensor in model.inputs}
    body = keras.Model(inputs, model.get_layer("decoded").output)
    words = model.get_layer("words")

    def of_last(source: tf.Tensor, said: tf.Tensor) -> tf.Tensor:
        decoded = body({"source": source, "target": said}, training=False)
        return words(decoded[:, -1], reverse=True)

    return of_last
