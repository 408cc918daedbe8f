"""Inception-v3 and Inception-v4."""

from __future__ import annotations

from tfcommx.core import LayerTable
from tfcommx.simulator.models.builder import Builder

# A convolution of a branch: filters and kernel; "/2": with stride 2, without padding; "V": without
# padding. "pool" and "pool/2" add no layer.
Step = tuple[int, int | tuple[int, int]] | tuple[int, int | tuple[int, int], str] | str
FLAT, TALL = (1, 7), (7, 1)

STEM_2: list[list[Step]] = [["pool/2"], [(96, 3, "/2")]]
STEM_3: list[list[Step]] = [
    [(64, 1), (96, 3, "V")],
    [(64, 1), (64, TALL), (64, FLAT), (96, 3, "V")],
]
STEM_4: list[list[Step]] = [[(192, 3, "/2")], ["pool/2"]]
A: list[list[Step]] = [
    ["pool", (96, 1)],
    [(96, 1)],
    [(64, 1), (96, 3)],
    [(64, 1), (96, 3), (96, 3)],
]
REDUCTION_A: list[list[Step]] = [
    ["pool/2"],
    [(384, 3, "/2")],
    [(192, 1), (224, 3), (256, 3, "/2")],
]
B: list[list[Step]] = [
    ["pool", (128, 1)],
    [(384, 1)],
    [(192, 1), (224, FLAT), (256, TALL)],
    [(192, 1), (192, FLAT), (224, TALL), (224, FLAT), (256, TALL)],
]
REDUCTION_B: list[list[Step]] = [
    ["pool/2"],
    [(192, 1), (192, 3, "/2")],
    [(256, 1), (256, FLAT), (320, TALL), (320, 3, "/2")],
]


def inception_v4(pixels: int = 299) -> LayerTable:
    """Return the layers of Inception-v4: 149 convolutions, each with a normalization.

    Source: Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections
    on Learning" (2017), figures 3 to 9 and table 1.
    """
    model = Builder(pixels, 3)
    model.convolve("stem1a", 32, 3, stride=2, valid=True, norm=True)
    model.convolve("stem1b", 32, 3, valid=True, norm=True)
    model.convolve("stem1c", 64, 3, norm=True)
    for number, part in enumerate((STEM_2, STEM_3, STEM_4), start=2):
        module(model, f"stem{number}", part)
    for number in range(4):
        module(model, f"a{number + 1}", A)
    module(model, "reduction_a", REDUCTION_A)
    for number in range(7):
        module(model, f"b{number + 1}", B)
    module(model, "reduction_b", REDUCTION_B)
    for number in range(3):
        _module_c(model, f"c{number + 1}")
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("inception_v4", f"an image of {pixels} x {pixels}")


def module(model: Builder, name: str, branches: list[list[Step]]) -> None:
    """Add a module: its branches start from the same image, and are joined."""
    ends = []
    for number, steps in enumerate(branches, start=1):
        branch = model.branch()
        for position, step in enumerate(steps):
            if isinstance(step, str):
                halves = step.endswith("/2")
                branch.pool(3, 2 if halves else 1, valid=halves)
                continue
            filters, kernel, kind = (*step, "")[:3]
            branch.convolve(
                f"{name}/{number}{'abcde'[position]}",
                filters,
                kernel,
                stride=2 if kind == "/2" else 1,
                valid=bool(kind),
                norm=True,
            )
        ends.append(branch)
    model.join(ends)


def _module_c(model: Builder, name: str) -> None:
    """Add a module whose last two branches split again."""
    single, pooled, short, long = (model.branch() for _ in range(4))
    pooled.convolve(f"{name}/1", 256, 1, norm=True)
    single.convolve(f"{name}/2", 256, 1, norm=True)
    short.convolve(f"{name}/3a", 384, 1, norm=True)
    long.convolve(f"{name}/4a", 384, 1, norm=True)
    long.convolve(f"{name}/4b", 448, (1, 3), norm=True)
    long.convolve(f"{name}/4c", 512, (3, 1), norm=True)
    ends = [pooled, single]
    for number, branch in ((3, short), (4, long)):
        for kind, kernel in (("flat", (1, 3)), ("tall", (3, 1))):
            end = branch.branch()
            end.convolve(f"{name}/{number}_{kind}", 256, kernel, norm=True)
            ends.append(end)
    model.join(ends)


REDUCTION_A_3: list[list[Step]] = [
    [(384, 3, "/2")],
    [(64, 1), (96, 3), (96, 3, "/2")],
    ["pool/2"],
]
REDUCTION_B_3: list[list[Step]] = [
    [(192, 1), (320, 3, "/2")],
    [(192, 1), (192, FLAT), (192, TALL), (192, 3, "/2")],
    ["pool/2"],
]
# Per module: filters after pooling, and filters inside the branches of 7-wide kernels
POOLED, SEVENS = (32, 64, 64), (128, 160, 160, 192)


def inception_v3(pixels: int = 299) -> LayerTable:
    """Return the layers of Inception-v3, with its auxiliary classifier.

    Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (2016),
    table 1 and figures 5 to 8; widths of the branches and of the auxiliary classifier as in
    torchvision.
    """
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
    module(model, "reduction_a", REDUCTION_A_3)
    for number, inner in enumerate(SEVENS, start=1):
        module(model, f"b{number}", _b(inner))
    _auxiliary(model.branch())
    module(model, "reduction_b", REDUCTION_B_3)
    for number in (1, 2):
        _module_c_3(model, f"c{number}")
    model.pool_all()
    model.dense("classes", 1000)
    return model.table("inception_v3", f"an image of {pixels} x {pixels}")


def _a(pooled: int) -> list[list[Step]]:
    return [[(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], ["pool", (pooled, 1)]]


def _b(inner: int) -> list[list[Step]]:
    long: list[Step] = [(inner, 1), (inner, TALL), (inner, FLAT), (inner, TALL), (192, FLAT)]
    return [[(192, 1)], [(inner, 1), (inner, FLAT), (192, TALL)], long, ["pool", (192, 1)]]


def _module_c_3(model: Builder, name: str) -> None:
    """Add a module whose two middle branches split at their ends."""
    single, short, long, pooled = (model.branch() for _ in range(4))
    single.convolve(f"{name}/1", 320, 1, norm=True)
    short.convolve(f"{name}/2a", 384, 1, norm=True)
    long.convolve(f"{name}/3a", 448, 1, norm=True)
    long.convolve(f"{name}/3b", 384, 3, norm=True)
    pooled.convolve(f"{name}/4", 192, 1, norm=True)
    ends = [single, pooled]
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
