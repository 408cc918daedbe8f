"""ResNet-50, with the stride in the 3 x 3 convolution (version 1.5).

Source: He et al., "Deep Residual Learning for Image Recognition" (2016), table 1.
"""

from __future__ import annotations

from tfcommx.simulator.models.builder import Builder
from tfcommx.terms import LayerTable


def resnet50(pixels: int = 224) -> LayerTable:
    """Return the layers for images of pixels x pixels."""
    model = Builder(pixels, 3)
    model.convolve("conv1", 64, 7, stride=2, norm=True)
    model.pool(3, 2)
    for stage, (blocks, filters) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=2):
        for block in range(blocks):
            _block(model, f"conv{stage}_{block + 1}", filters, block == 0, stage > 2)
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("resnet50", f"an image of {pixels} x {pixels}")


def _block(model: Builder, name: str, filters: int, first: bool, halves: bool) -> None:
    stride = 2 if first and halves else 1
    main, shortcut = model.branch(), model.branch()
    main.convolve(f"{name}/reduce", filters, 1, norm=True)
    main.convolve(f"{name}/middle", filters, 3, stride=stride, norm=True)
    main.convolve(f"{name}/expand", 4 * filters, 1, norm=True)
    if first:
        shortcut.convolve(f"{name}/shortcut", 4 * filters, 1, stride=stride, norm=True)
    model.join([main])
