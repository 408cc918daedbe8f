"""Residual networks, version 1.5, in the five published depths and smaller ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    import keras

# Depth -> blocks of the four stages, and whether a block is a bottleneck of three convolutions
DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
# A bottleneck's last convolution has four times the filters of the others
EXPANSION = 4


class ResNet(RecipePart):
    """A residual network that takes pictures of any size.

    In version 1.5 the stride of a bottleneck is in its 3x3 convolution, not in the 1x1 before it.

    **Source:** He et al., "Deep Residual Learning for Image Recognition" (2016), table 1; initial
    weights of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 5.1. The stem of stride
    1 is that of section 4.2 of He et al., for CIFAR.
    """

    name: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    # Blocks of each stage; None: those of the depth. Fewer make a smaller network
    blocks: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, min_length=1)
    # Filters of the first convolution and of the first stage; each stage doubles them
    width: int = Field(64, ge=1)
    # Factor by which the stem shrinks the sides: 4 is a 7x7 convolution of stride 2 and a pooling,
    # 2 the convolution alone, 1 a 3x3 convolution for small pictures
    stem_stride: Literal[1, 2, 4] = 4
    # Initialize the last scale of each block with zero. Large batches need this, because each block
    # then starts as the identity
    zero_gamma: bool = True
    # Share of the running statistics that a step keeps; 0.9 suits short runs
    batch_norm_momentum: float = Field(0.9, ge=0, lt=1)

    def build(self, inputs: int, outputs: int) -> keras.Model:
        import keras
        from keras import layers

        blocks, bottleneck = DEPTHS[self.depth]
        pictures = keras.Input((None, None, inputs))
        size, stride = (3, 1) if self.stem_stride == 1 else (7, 2)
        flow = self._convolved(pictures, self.width, size, stride, "stem")
        if self.stem_stride == 4:
            flow = layers.MaxPooling2D(3, 2, "same", name="stem_pool")(flow)
        for stage, count in enumerate(self.blocks or blocks):
            for number in range(count):
                stride = 2 if stage and number == 0 else 1
                block = f"stage{stage + 1}_block{number + 1}"
                flow = self._block(flow, self.width << stage, stride, bottleneck, block)
        flow = layers.GlobalAveragePooling2D(name="pool")(flow)
        start = keras.initializers.RandomNormal(stddev=0.01)
        # Float32 also in mixed precision, because the loss needs its range
        logits = layers.Dense(outputs, kernel_initializer=start, dtype="float32", name="logits")
        return keras.Model(pictures, logits(flow), name=f"resnet{self.depth}")

    def _block(
        self, flow: keras.KerasTensor, filters: int, stride: int, bottleneck: bool, name: str
    ) -> keras.KerasTensor:
        """Add two or three convolutions with a shortcut around them."""
        from keras import layers

        if bottleneck:
            last = EXPANSION * filters
            branch = self._convolved(flow, filters, 1, 1, f"{name}_1")
            branch = self._convolved(branch, filters, 3, stride, f"{name}_2")
            branch = self._convolved(branch, last, 1, 1, f"{name}_3", end=True)
        else:
            last = filters
            branch = self._convolved(flow, filters, 3, stride, f"{name}_1")
            branch = self._convolved(branch, filters, 3, 1, f"{name}_2", end=True)
        if stride > 1 or flow.shape[-1] != last:
            flow = self._convolved(flow, last, 1, stride, f"{name}_short", relu=False)
        flow = layers.Add(name=f"{name}_add")([branch, flow])
        return layers.ReLU(name=f"{name}_relu")(flow)

    def _convolved(
        self,
        flow: keras.KerasTensor,
        filters: int,
        size: int,
        stride: int,
        name: str,
        relu: bool = True,
        end: bool = False,
    ) -> keras.KerasTensor:
        """Add a convolution, its normalisation and, except at a branch's end, a ReLU."""
        import keras
        from keras import layers

        start = keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")
        flow = layers.Conv2D(
            filters, size, stride, "same", use_bias=False, kernel_initializer=start, name=name
        )(flow)
        flow = layers.BatchNormalization(
            momentum=self.batch_norm_momentum,
            epsilon=1e-5,
            gamma_initializer="zeros" if end and self.zero_gamma else "ones",
            name=f"{name}_norm",
        )(flow)
        return layers.ReLU(name=f"{name}_relu")(flow) if relu and not end else flow
