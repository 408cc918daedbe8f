"""Inception-v3, with its auxiliary classifier.

Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2016), table 1
and figures 5 to 8; widths of the branches and of the auxiliary classifier as in torchvision.
"""

from __future__ import annotations

from tfcommx.simulator.models.builder import Builder
from tfcommx.simulator.models.inception_v4 import FLAT, TALL, Step, module
from tfcommx.terms import LayerTable

REDUCTION_A: list[list[Step]] = [
    [(384, 3, "/2")],
    [(64, 1), (96, 3), (96, 3, "/2")],
    ["pool/2"],
]
REDUCTION_B: list[list[Step]] = [
    [(192, 1), (320, 3, "/2")],
    [(192, 1), (192, FLAT), (192, TALL), (192, 3, "/2")],
    ["pool/2"],
]
# Of the modules: filters after pooling, and inside the branches of seven
POOLED, SEVENS = (32, 64, 64), (128, 160, 160, 192)


def inception_v3(pixels: int = 299) -> LayerTable:
    """Return the layers for images of pixels x pixels."""
    model = Builder(pixels, 3)
    model.convolve("stem1", 32, 3, stride=2, valid=True, norm=True)
    model.convolve("stem2", 32, 3, valid=True, norm=True)
    model.convolve("stem3", 64, 3, norm=True)
    model.pool(3, 2, valid=True)
    model.convolve("stem4", 80, 1, norm=True)
    model.convolve("stem5", 192, 3, valid=True, norm=True)
    model.pool(3, 2, valid=True)
    for number, pooled in enumerate(POOLED, start=1):
        module(model, f"a{number}", _a(pooled))
    module(model, "reduction_a", REDUCTION_A)
    for number, inner in enumerate(SEVENS, start=1):
        module(model, f"b{number}", _b(inner))
    _auxiliary(model.branch())
    module(model, "reduction_b", REDUCTION_B)
    for number in (1, 2):
        _module_c(model, f"c{number}")
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("inception_v3", f"an image of {pixels} x {pixels}")


def _a(pooled: int) -> list[list[Step]]:
    return [[(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], ["pool", (pooled, 1)]]


def _b(inner: int) -> list[list[Step]]:
    long: list[Step] = [(inner, 1), (inner, TALL), (inner, FLAT), (inner, TALL), (192, FLAT)]
    return [[(192, 1)], [(inner, 1), (inner, FLAT), (192, TALL)], long, ["pool", (192, 1)]]


def _module_c(model: Builder, name: str) -> None:
    """Add a module whose two middle branches part at their ends."""
    one, short, long, pooled = (model.branch() for _ in range(4))
    one.convolve(f"{name}/1", 320, 1, norm=True)
    short.convolve(f"{name}/2a", 384, 1, norm=True)
    long.convolve(f"{name}/3a", 448, 1, norm=True)
    long.convolve(f"{name}/3b", 384, 3, norm=True)
    pooled.convolve(f"{name}/4", 192, 1, norm=True)
    ends = [one, pooled]
    for number, branch in ((2, short), (3, long)):
        for kind, kernel in (("flat", (1, 3)), ("tall", (3, 1))):
            end = branch.branch()
            end.convolve(f"{name}/{number}_{kind}", 384, kernel, norm=True)
            ends.append(end)
    model.join(ends)


def _auxiliary(model: Builder) -> None:
    model.pool(5, 3, valid=True)
    model.convolve("auxiliary/conv1", 128, 1, norm=True)
    model.convolve("auxiliary/conv2", 768, 5, valid=True, norm=True)
    model.dense("auxiliary/classes", 1000)
