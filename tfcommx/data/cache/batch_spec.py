"""BatchSpec: how samples are served, from the size of a batch to the type of its values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfcommx.kernels.augment import Rule
from tfcommx.terms import PlanError, check_name, check_whole

CROPS = ("random", "center", "whole")
DTYPES = ("uint8", "float16", "bfloat16", "float32")


@dataclass(frozen=True)
class BatchSpec:
    """How samples are served for some epochs.

    Another spec is another call of `DataCache.dataset`; what is in memory stays.

    >>> import tfcommx as cx
    >>> train = cx.BatchSpec(64, 128, crop="random", flip=True)
    >>> evaluate = cx.BatchSpec(64, 128, crop="center", shuffle=False, drop_remainder=False)

    **Raises:** PlanError for a value out of its range.
    """

    # Samples per rank and step, >= 1.
    batch: int
    # Height and width of the images, pixels. None: their own size, which must be the same for all.
    resolution: int | None = None
    # "random" (random-resized-crop), "center" or "whole".
    crop: str = "whole"
    # Whether every second sample, drawn anew each epoch, is mirrored left to right.
    flip: bool = False
    # Of the images. "uint8" gives values from 0 to 255, without `mean` and `std`.
    dtype: str = "float32"
    # Per channel, of values in [0, 1]; it is subtracted. Empty: zeros.
    mean: tuple[float, ...] = ()
    # Per channel, > 0, of values in [0, 1]; it divides. Empty: ones.
    std: tuple[float, ...] = ()
    # Area of the random crop over that of the image, in (0, 1]. The default is torchvision's;
    # TensorFlow's begins at 0.05.
    area: tuple[float, float] = (0.08, 1.0)
    # Width over height of the random crop, > 0. The default is torchvision's.
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    # Side of the centre crop over the short side, in (0, 1]. The default is 224 of 256.
    center: float = 0.875
    # Whether the order changes each epoch. False: the order of the source, for evaluation.
    shuffle: bool = True
    # True: full batches only. False: every sample, with a smaller last batch.
    drop_remainder: bool = True

    def __post_init__(self) -> None:
        check_name("crop", self.crop, CROPS)
        check_name("dtype", self.dtype, DTYPES)
        for name in ("batch", "resolution"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_whole(name, getattr(self, name)))
        # Arrays and lists are taken too; a spec is compared and hashed.
        for name in ("mean", "std", "area", "aspect"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        self._check_size()
        self._check_crop()
        self._check_values()

    def _check_size(self) -> None:
        if self.batch < 1 or (self.resolution is not None and self.resolution < 1):
            raise PlanError(
                f"`batch` and `resolution` must be >= 1. Received batch={self.batch}, "
                f"resolution={self.resolution}."
            )
        if self.resolution is None and self.crop != "whole":
            raise PlanError(
                f"Crop {self.crop!r} needs a `resolution`, because crops differ in size. "
                "Received None. Give one, or crop 'whole'."
            )

    def _check_crop(self) -> None:
        if (
            not 0 < self.area[0] <= self.area[1] <= 1
            or not 0 < self.aspect[0] <= self.aspect[1]
            or not 0 < self.center <= 1
        ):
            raise PlanError(
                "`area` must be ascending in (0, 1], `aspect` ascending and > 0, `center` in "
                f"(0, 1]. Received area={self.area}, aspect={self.aspect}, center={self.center}."
            )

    def _check_values(self) -> None:
        if not all(0 <= m <= 1 for m in self.mean) or not all(0 < s < math.inf for s in self.std):
            raise PlanError(
                "`mean` must be in [0, 1] and `std` > 0, of pixels / 255. Received "
                f"mean={self.mean}, std={self.std}. Divide those of values from 0 to 255 by 255."
            )

    def rule(self, seed: int) -> Rule:
        """Return how windows are drawn."""
        return Rule(self.crop, self.flip, self.area, self.aspect, self.center, seed)
