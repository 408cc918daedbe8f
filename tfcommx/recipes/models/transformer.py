"""The Transformer, an encoder and a decoder, in the published sizes and smaller ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from tfcommx.core import ConfigurationError
from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    import keras

# Sizes of table 3: width, inner width, heads, dropout
SIZES = {
    "base": {"width": 512, "inner": 2048, "heads": 8, "dropout": 0.1},
    "big": {"width": 1024, "inner": 4096, "heads": 16, "dropout": 0.3},
}


class Transformer(RecipePart):
    """A Transformer for translation; both languages and the output share one embedding.

    It takes {"source": int [n, words], "target": int [n, words]}, padded with 0, and returns the
    logits of the word after each word of the target: float32 [n, words, vocabulary].

    **Source:** Vaswani et al., "Attention Is All You Need" (2017), section 3 and table 3.
    """

    name: Literal["transformer"] = "transformer"
    # Default of width, inner, heads and dropout
    size: Literal["base", "big"] = "base"
    # Number of blocks of the encoder, and of the decoder
    blocks: int = Field(6, ge=1)
    # Width of the embeddings and of each block's output
    width: int = Field(512, ge=2)
    # Width of the hidden layer in each block
    inner: int = Field(2048, ge=1)
    heads: int = Field(8, ge=1)
    # Share of each block's output, and of the embeddings, that is set to zero in training
    dropout: float = Field(0.1, ge=0, lt=1)
    # Position of the normalisation: "post", after each sum, as published, or "pre", before each
    # part, which tolerates larger learning rates
    norm: Literal["post", "pre"] = "post"

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, settings: Any) -> Any:
        if isinstance(settings, dict):
            return {**SIZES.get(str(settings.get("size")), {}), **settings}
        return settings

    @model_validator(mode="after")
    def _heads_fit(self) -> Transformer:
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads. Received {self.width} and {self.heads}."
            )
        return self

    def build(self, inputs: int, outputs: int) -> keras.Model:
        """Build the network; inputs and outputs share a vocabulary of `inputs` words.

        **Raises:** ConfigurationError for a task without such a vocabulary.
        """
        import keras
        from keras import layers, ops

        if inputs != outputs:
            raise ConfigurationError(
                "A shared vocabulary is required: as many outputs as inputs. Received "
                f"{inputs} and {outputs}. Choose the task translate, or another model."
            )
        source = keras.Input((None,), dtype="int32", name="source")
        target = keras.Input((None,), dtype="int32", name="target")
        # `Positions` multiplies by the root of the width, so embeddings begin with a deviation of 1
        words = layers.ReversibleEmbedding(
            inputs,
            self.width,
            embeddings_initializer=keras.initializers.RandomNormal(stddev=self.width**-0.5),
            name="words",
        )
        # Mask of the source without its padding, which is 0
        seen = ops.expand_dims(ops.not_equal(source, 0), 1)
        encoded = self._embedded(words, source, "encoder")
        for number in range(1, self.blocks + 1):
            name = f"encoder{number}"
            encoded = self._attended(encoded, encoded, f"{name}_self", attention_mask=seen)
            encoded = self._transformed(encoded, name)
        encoded = self._ended(encoded, "encoded")
        decoded = self._embedded(words, target, "decoder")
        for number in range(1, self.blocks + 1):
            name = f"decoder{number}"
            # Causal, because a word must not see the words that it predicts
            decoded = self._attended(decoded, decoded, f"{name}_self", use_causal_mask=True)
            decoded = self._attended(decoded, encoded, f"{name}_source", attention_mask=seen)
            decoded = self._transformed(decoded, name)
        decoded = self._ended(decoded, "decoded")
        # In float32 also with mixed precision, because 16-bit logits would round the loss
        logits = layers.Activation("linear", dtype="float32", name="logits")(
            words(decoded, reverse=True)
        )
        return keras.Model({"source": source, "target": target}, logits, name="transformer")

    def _embedded(
        self, words: keras.Layer, numbers: keras.KerasTensor, name: str
    ) -> keras.KerasTensor:
        from keras import layers

        from tfcommx.recipes.text.layers import Positions

        flow = Positions(name=f"{name}_positions")(words(numbers))
        return layers.Dropout(self.dropout, name=f"{name}_dropout")(flow)

    def _attended(
        self, flow: keras.KerasTensor, memory: keras.KerasTensor, name: str, **masks: Any
    ) -> keras.KerasTensor:
        from keras import layers

        attention = layers.MultiHeadAttention(
            self.heads, self.width // self.heads, use_bias=False, name=name
        )

        def attend(query: keras.KerasTensor) -> keras.KerasTensor:
            return attention(query, query if memory is flow else memory, **masks)

        return self._summed(flow, attend, name)

    def _transformed(self, flow: keras.KerasTensor, name: str) -> keras.KerasTensor:
        from keras import layers

        inner = layers.Dense(self.inner, activation="relu", name=f"{name}_inner")
        outer = layers.Dense(self.width, name=f"{name}_outer")
        return self._summed(flow, lambda position: outer(inner(position)), name)

    def _summed(self, flow: keras.KerasTensor, part: Any, name: str) -> keras.KerasTensor:
        """Add a part's output to the flow, with dropout and normalisation."""
        from keras import layers

        norm = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm")
        drop = layers.Dropout(self.dropout, name=f"{name}_drop")
        if self.norm == "pre":
            return layers.Add(name=f"{name}_add")([flow, drop(part(norm(flow)))])
        return norm(layers.Add(name=f"{name}_add")([flow, drop(part(flow))]))

    def _ended(self, flow: keras.KerasTensor, name: str) -> keras.KerasTensor:
        """End a stack with a layer of this name: a last normalisation if `norm` is "pre"."""
        from keras import layers

        if self.norm == "pre":
            return layers.LayerNormalization(epsilon=1e-6, name=name)(flow)
        return layers.Activation("linear", name=name)(flow)
