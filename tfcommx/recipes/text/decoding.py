"""Greedy decoding: always the most probable next word."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfcommx.recipes.text.vocabulary import BEGIN, END, PADDING

# Words that a translation may have beyond its source's (Vaswani et al. 2017, section 6.1)
MORE = 50


def greedy_decoder(model: keras.Model, more: int = MORE) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that translates a batch with the model's current weights.

    Args:
        model: maps {"source", "target"} to logits [n, words, vocabulary]. If it has the layers
            `decoded` and `words` (as `recipes.models.transformer`), only the last word's logits are
            computed.
        more: words that a translation may have beyond its source's, >= 0; longer ones are cut.
            Padding does not count, so a translation does not depend on the rest of its batch.

    Returns:
        A function of source int32 [n, words] to translations int32 [n, longest], filled with END.

    **Cost:** the model once for each word of the longest translation, on all words before it.
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
    """Return int32 [n], the largest number of words of each source's translation."""
    return tf.math.count_nonzero(source != PADDING, axis=1, dtype=tf.int32) + more


def next_logits(model: keras.Model) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Return a function of (source, words so far) to the next word's logits [n, vocabulary]."""
    if not {"decoded", "words"} <= {layer.name for layer in model.layers}:

        def of_whole(source: tf.Tensor, said: tf.Tensor) -> tf.Tensor:
            return model({"source": source, "target": said}, training=False)[:, -1]

        return of_whole
    # A model that begins at the encoder's output would be faster, but building it adds nodes to the
    # graph of layers, and Keras can no longer save the whole model
    inputs = {tensor.name: tensor for tensor in model.inputs}
    body = keras.Model(inputs, model.get_layer("decoded").output)
    words = model.get_layer("words")

    def of_last(source: tf.Tensor, said: tf.Tensor) -> tf.Tensor:
        decoded = body({"source": source, "target": said}, training=False)
        return words(decoded[:, -1], reverse=True)

    return of_last
