"""AlexNet, with the two groups of convolutions 2, 4 and 5.

Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks" (2012),
section 3.5, in one column: 96, 256, 384, 384 and 256 filters.
"""

from __future__ import annotations

from tfcommx.simulator.models.builder import Builder
from tfcommx.terms import LayerTable


def alexnet(pixels: int = 227) -> LayerTable:
    """Return the layers for images of pixels x pixels."""
    model = Builder(pixels, 3)
    model.convolve("conv1", 96, 11, stride=4, valid=True, bias=True)
    model.pool(3, 2, valid=True)
    model.convolve("conv2", 256, 5, groups=2, bias=True)
    model.pool(3, 2, valid=True)
    model.convolve("conv3", 384, 3, bias=True)
    model.convolve("conv4", 384, 3, groups=2, bias=True)
    model.convolve("conv5", 256, 3, groups=2, bias=True)
    model.pool(3, 2, valid=True)
    model.dense("dense6", 4096)
    model.dense("dense7", 4096)
    model.dense("classes", 1000)
    return model.table("alexnet", f"an image of {pixels} x {pixels}")
