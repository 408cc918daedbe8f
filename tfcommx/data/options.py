"""Options of the data cache: settings of storage (Options) and of batches (BatchSpec)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfcommx.core import ConfigurationError, check_name, check_number, check_whole, local_path
from tfcommx.data.sources.source import MAX_PIXELS
from tfcommx.kernels.augment import CropRule


@dataclass(frozen=True)
class BatchSpec:
    """Settings of the batches of some epochs.

    Each call of `DataCache.dataset` has one; samples in memory serve all of them.

    >>> import tfcommx as cx
    >>> train = cx.BatchSpec(64, 128, crop="random", flip=True)
    >>> evaluate = cx.BatchSpec(64, 128, crop="center", shuffle=False, drop_remainder=False)

    **Raises:** ConfigurationError for a value out of its range.
    """

    # Samples per rank and step, >= 1
    batch: int
    # Height and width of the images, in pixels. None: their original size, equal for all
    resolution: int | None = None
    # "random" (random-resized-crop), "center" or "whole"
    crop: str = "whole"
    # Whether a random half of the samples, drawn in each epoch, is mirrored left to right
    flip: bool = False
    # Type of the images. "uint8": values from 0 to 255; `mean` and `std` are refused
    dtype: str = "float32"
    # Mean of values in [0, 1], per channel; it is subtracted. Empty: zeros
    mean: tuple[float, ...] = ()
    # Standard deviation of values in [0, 1], per channel, in (0, 10]; it divides. Empty: ones.
    # Limited because that of values from 0 to 255, about 60, would leave no contrast
    std: tuple[float, ...] = ()
    # Range of the area of the random crop over that of the image, in (0, 1]. The default is
    # torchvision's; TensorFlow's begins at 0.05
    area: tuple[float, float] = (0.08, 1.0)
    # Range of width over height of the random crop, > 0. The default is torchvision's
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    # Side of the centre crop over the short side, in (0, 1]. The default is 224 of 256
    center: float = 0.875
    # Whether the order changes each epoch. False: the order of the source, for evaluation
    shuffle: bool = True
    # True: full batches only. False: every sample, with a smaller last batch
    drop_remainder: bool = True

    def __post_init__(self) -> None:
        check_name("crop", self.crop, ("random", "center", "whole"))
        check_name("dtype", self.dtype, ("uint8", "float16", "bfloat16", "float32"))
        object.__setattr__(self, "batch", check_whole("batch", self.batch, least=1))
        if self.resolution is not None:
            resolution = check_whole("resolution", self.resolution, least=1)
            object.__setattr__(self, "resolution", resolution)
        # Arrays and lists are converted, because a spec is compared and hashed
        for name in ("mean", "std", "area", "aspect"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        for name in ("flip", "shuffle", "drop_remainder"):
            object.__setattr__(self, name, _truth(name, getattr(self, name)))
        object.__setattr__(self, "center", check_number("center", self.center, "in (0, 1]"))
        self._check_crop()
        self._check_values()

    def _check_crop(self) -> None:
        if self.resolution is None and self.crop != "whole":
            raise ConfigurationError(
                f"Crop {self.crop!r} needs a `resolution`, because crops differ in size. "
                "Received None. Give one, or crop 'whole'."
            )
        for name in ("area", "aspect"):
            if len(getattr(self, name)) != 2:
                raise ConfigurationError(
                    f"`{name}` must have a lowest and a highest value. Received "
                    f"{getattr(self, name)}."
                )
        if (
            not 0 < self.area[0] <= self.area[1] <= 1
            or not 0 < self.aspect[0] <= self.aspect[1] < math.inf
        ):
            raise ConfigurationError(
                "`area` must be ascending in (0, 1], `aspect` ascending and > 0. Received "
                f"area={self.area}, aspect={self.aspect}."
            )

    def _check_values(self) -> None:
        if self.dtype == "uint8" and (self.mean or self.std):
            raise ConfigurationError(
                "Images of dtype 'uint8' are not normalized. Received "
                f"mean={self.mean}, std={self.std}. Choose 'float32', or leave both out."
            )
        if not all(0 <= m <= 1 for m in self.mean) or not all(0 < s <= 10 for s in self.std):
            raise ConfigurationError(
                "`mean` must be in [0, 1] and `std` in (0, 10], of pixels / 255. Received "
                f"mean={self.mean}, std={self.std}. Divide those of values from 0 to 255 by 255."
            )

    def rule(self, seed: int) -> CropRule:
        """Return the rule that draws windows."""
        return CropRule(self.crop, self.flip, self.area, self.aspect, self.center, seed)

    def check_channels(self, channels: int) -> None:
        """Refuse a `mean` or `std` that has not one number for each channel.

        **Raises:** ConfigurationError.
        """
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values and len(values) != channels:
                raise ConfigurationError(
                    f"`{name}` must have one number for each of the {channels} channels. Received "
                    f"{values}. Give as many, or none."
                )


def _truth(name: str, value: Any) -> bool:
    """Return a truth value, such as NumPy's, as Python's own; refuse others, as "no" and None."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigurationError(f"`{name}` must be True or False. Received {value!r}.")
    return bool(value)


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    """Return several numbers as floats. **Raises:** ConfigurationError for anything else."""
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`{name}` must be a list of numbers. Received {values!r}. Write one number as (0.5,)."
        ) from error


@dataclass(frozen=True)
class Options:
    """Settings of the storage of samples: the keyword arguments of `DataCache`.

    Runs of the same data on one machine share its memory. With `reshuffle_fraction`, on more than
    one node, each run has a separate slab, because `DataCache.reshuffle` overwrites samples that
    another run would be reading.

    **Raises:** ConfigurationError for a value out of its range.
    """

    # Seed of parts, order and augmentation, in [0, 2^63)
    seed: int = 0
    # Short side of the kept images, in pixels: the largest resolution of the run. None: their
    # original size
    store: int | None = None
    # Folder of the slab, in shared memory
    memory: str = "/dev/shm"
    # Largest number of bytes of the slab. None: all available memory of the node
    memory_bytes: int | None = None
    # If memory is too small: True keeps as much as fits and reads the rest in each epoch, False
    # refuses
    partial: bool = False
    # Folder of the local disk level. None: no such level
    disk: str | None = None
    # Handling of a sample that cannot be read: "raise", or "skip" it and count it
    on_error: str = "raise"
    # Largest number of pixels of an image, >= 1, limited because a small file can decode to more
    # than the memory holds. A larger image counts as one that cannot be read
    max_pixels: int = MAX_PIXELS
    # Share of the reads from memory whose CRC is checked, in [0, 1]. Each check costs a pass over
    # the sample
    verify: float = 0.01
    # Number of threads that read and decode while memory is filled. None: the processors that the
    # launcher has bound this process to, or its share of those of the node or container
    threads: int | None = None
    # Share of each node's part, in [0, 1], that is redistributed over the nodes before each epoch
    # except the first
    reshuffle_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_name("on_error", self.on_error, ("raise", "skip"))
        object.__setattr__(self, "partial", _truth("partial", self.partial))
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        object.__setattr__(self, "max_pixels", check_whole("max_pixels", self.max_pixels, least=1))
        for name in ("store", "memory_bytes", "threads"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_whole(name, getattr(self, name), least=1))
        for name in ("memory", "disk"):  # Paths are accepted too
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(local_path(name, getattr(self, name))))
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"`seed` must be in [0, 2^63). Received {self.seed}.")
        for name in ("verify", "reshuffle_fraction"):
            check_number(name, getattr(self, name), "in [0, 1]")

    def to_agree_on(self) -> dict[str, str]:
        """Return option -> value for the options that must be equal on all ranks.

        These decide which rank serves a sample, when, and how its pixels are kept. The others may
        suit the node: its folders, its memory, its processors.
        """
        names = ("seed", "store", "max_pixels", "on_error", "reshuffle_fraction")
        return {f"option {name}": f"{getattr(self, name)}" for name in names}
