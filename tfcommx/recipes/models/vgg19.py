"""VGG-19: sixteen convolutions, and three dense layers with most of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    import keras

# Convolutions of each of the five stages; filters double up to eight times the width
STAGES = (2, 2, 4, 4, 4)


class Vgg19(RecipePart):
    """VGG-19, configuration E.

    **Source:** Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
    Recognition" (2015), table 1; initial weights of He et al. (2015), which make
    pre-training of parts unnecessary.
    """

    name: Literal["vgg19"] = "vgg19"
    # Pixels of a side in every phase, fixed because the dense layers have weights for each position
    resolution: int = Field(224, ge=32)
    # Number of filters of the first stage
    width: int = Field(64, ge=1)
    # Number of outputs of each of the two hidden dense layers
    hidden: int = Field(4096, ge=1)
    # Share of the hidden outputs that is set to zero in training
    dropout: float = Field(0.5, ge=0, lt=1)

    def build(self, inputs: int, outputs: int) -> keras.Model:
        import keras
        from keras import layers

        pictures = flow = keras.Input((self.resolution, self.resolution, inputs))
        for stage, count in enumerate(STAGES):
            for number in range(count):
                flow = layers.Conv2D(
                    self.width * min(2**stage, 8),
                    3,
                    padding="same",
                    activation="relu",
                    kernel_initializer="he_normal",
                    name=f"stage{stage + 1}_{number + 1}",
                )(flow)
            flow = layers.MaxPooling2D(name=f"stage{stage + 1}_pool")(flow)
        flow = layers.Flatten(name="flat")(flow)
        for number in (1, 2):
            flow = layers.Dense(
                self.hidden,
                activation="relu",
                kernel_initializer="he_normal",
                name=f"hidden{number}",
            )(flow)
            flow = layers.Dropout(self.dropout, name=f"drop{number}")(flow)
        start = keras.initializers.RandomNormal(stddev=0.01)
        # Float32 also in mixed precision, because the loss needs its range
        logits = layers.Dense(outputs, kernel_initializer=start, dtype="float32", name="logits")
        return keras.Model(pictures, logits(flow), name="vgg19")
