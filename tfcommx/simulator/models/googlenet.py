"""GoogLeNet, with its two auxiliary classifiers.

Source: Szegedy et al., "Going Deeper with Convolutions" (2015), table 1 and section 5.
"""

from __future__ import annotations

from tfcommx.simulator.models.builder import Builder
from tfcommx.terms import LayerTable

# Filters of a module: 1x1; 3x3 after a reduction; 5x5 after a reduction; 1x1 after pooling.
MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
# After these modules the image is halved, or an auxiliary classifier looks at it.
HALVED, CLASSIFIED = ("3b", "4e"), ("4a", "4d")


def googlenet(pixels: int = 224) -> LayerTable:
    """Return the layers for images of pixels x pixels."""
    model = Builder(pixels, 3)
    model.convolve("conv1", 64, 7, stride=2, bias=True)
    model.pool(3, 2)
    model.convolve("conv2/reduce", 64, 1, bias=True)
    model.convolve("conv2", 192, 3, bias=True)
    model.pool(3, 2)
    for name, filters in MODULES.items():
        _module(model, name, filters)
        if name in CLASSIFIED:
            _auxiliary(model.branch(), f"{name}/auxiliary")
        if name in HALVED:
            model.pool(3, 2)
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("googlenet", f"an image of {pixels} x {pixels}")


def _module(model: Builder, name: str, filters: tuple[int, ...]) -> None:
    one, three_reduced, three, five_reduced, five, pooled = filters
    a, b, c, d = (model.branch() for _ in range(4))
    a.convolve(f"{name}/1x1", one, 1, bias=True)
    b.convolve(f"{name}/3x3_reduce", three_reduced, 1, bias=True)
    b.convolve(f"{name}/3x3", three, 3, bias=True)
    c.convolve(f"{name}/5x5_reduce", five_reduced, 1, bias=True)
    c.convolve(f"{name}/5x5", five, 5, bias=True)
    d.convolve(f"{name}/pooled", pooled, 1, bias=True)
    model.join([a, b, c, d])


def _auxiliary(model: Builder, name: str) -> None:
    model.pool(5, 3, valid=True)
    model.convolve(f"{name}/conv", 128, 1, bias=True)
    model.dense(f"{name}/dense", 1024)
    model.dense(f"{name}/classes", 1000)
