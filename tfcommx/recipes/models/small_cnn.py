"""The network of the small image recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    import keras

# Mean and standard deviation of Fashion-MNIST's training pixels, in parts of 255
MEAN, DEVIATION = 0.286, 0.353


class SmallCnn(RecipePart):
    """A small convolutional network for any resolution; it ends in a global average."""

    name: Literal["small_cnn"] = "small_cnn"
    # Filters of the 3x3 convolutions; after each of the first two, pooling halves the sides
    filters: tuple[Annotated[int, Field(ge=1)], ...] = Field((16, 32, 64), min_length=1)
    # Number of 3x3 convolutions with a shortcut after these, with as many filters as the last
    residual: int = Field(1, ge=0)

    def build(self, inputs: int, outputs: int) -> keras.Model:
        """Build a model of float32 [n, h, w, inputs] in [0, 255] -> logits float32 [n, outputs]."""
        import keras
        from keras import layers

        pictures = keras.Input((None, None, inputs))
        flow = layers.Rescaling(1 / (255 * DEVIATION), -MEAN / DEVIATION)(pictures)
        for position, count in enumerate(self.filters):
            flow = layers.Conv2D(count, 3, padding="same", use_bias=False)(flow)
            if position < 2:
                # Pool first, because the normalisation then has a quarter of the work
                flow = layers.MaxPooling2D()(flow)
            flow = layers.ReLU()(_normalised(flow))
        for _ in range(self.residual):
            branch = layers.Conv2D(self.filters[-1], 3, padding="same", use_bias=False)(flow)
            flow = layers.Add()([flow, layers.ReLU()(_normalised(branch))])
        logits = layers.Dense(outputs, dtype="float32")(layers.GlobalAveragePooling2D()(flow))
        return keras.Model(pictures, logits, name="small_cnn")


def _normalised(flow: keras.KerasTensor) -> keras.KerasTensor:
    """Normalise with a momentum for short runs, because Keras's 0.99 would lag an epoch behind."""
    from keras import layers

    return layers.BatchNormalization(momentum=0.9)(flow)
