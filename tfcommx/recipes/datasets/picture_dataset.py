"""Settings of every data set of pictures, for storage in the data cache and for batches."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tfcommx.data.options import BatchSpec
from tfcommx.data.sources.source import MAX_PIXELS
from tfcommx.recipes.reader import RecipePart

# Mean and standard deviation of red, green and blue in ImageNet's training pixels, in parts of
# 255, as in torchvision
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PictureDataset(RecipePart):
    """Settings for keeping pictures in the data cache and for making batches of them."""

    # Channels of the pictures; None: known only once they are open
    channels: ClassVar[int | None] = None

    # Folder of shared memory that holds one copy for all ranks of a node
    memory: Path = Path("/dev/shm")
    # Folder on a local disk that keeps copies of files from a slow file system; None: no copies
    disk: Path | None = None
    # Short side of the kept pictures, in pixels: the largest resolution of the run divided by the
    # crop's share of the side. None: their original size
    store: int | None = Field(None, ge=1)
    # Largest number of pixels of a picture, limited because a small file can decode to more than
    # the memory holds
    max_pixels: int = Field(MAX_PIXELS, ge=1)
    # Share of each node's images that is redistributed before each epoch except the first, sent
    # from memory to memory. If > 0, no batch is loaded ahead across the end of an epoch
    reshuffle_fraction: float = Field(0.0, ge=0, le=1)
    # Unreadable pictures: "raise" ends the run, "skip" leaves them out
    on_error: Literal["raise", "skip"] = "raise"
    # Crop in training: "random" (random-resized-crop), "center" or "whole"
    crop: Literal["random", "center", "whole"] = "whole"
    # Area of the random crop over that of the picture
    area: tuple[float, float] = (0.08, 1.0)
    # Width over height of the random crop
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    # Mirror each image left to right with probability 1/2
    flip: bool = True
    # Crop in evaluation: "center" or "whole"
    test_crop: Literal["center", "whole"] = "whole"
    # Side of the centre crop over the short side of the picture
    test_center: float = Field(0.875, gt=0, le=1)
    # Resolution in evaluation over that in training; > 1 suits random crops in training, because
    # objects are smaller in whole pictures than in these crops
    test_scale: float = Field(1.0, gt=0)
    # Normalization: pixels are served as (pixel / 255 - mean) / std. One number for all channels,
    # or one for each; empty: none
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = (1 / 255,)
    # Type of the served pixels; float16 and bfloat16 halve the bytes for mixed precision
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _makes_batches(self) -> Self:
        """Refuse values that no batch can have here, because ranks make the first one."""
        # One number is for all channels
        several = [len(values) for values in (self.mean, self.std) if len(values) > 1]
        channels = self.channels or max(several, default=1)
        self.train_spec(1, 1, channels).check_channels(channels)
        return self

    def train_spec(self, batch: int, resolution: int, channels: int) -> BatchSpec:
        """Return the specification of training batches."""
        options = {"crop": self.crop, "flip": self.flip, "area": self.area, "aspect": self.aspect}
        return self._spec(batch, resolution, channels, **options)

    def test_spec(self, batch: int, resolution: int, channels: int) -> BatchSpec:
        """Return the specification of evaluation batches: every picture once, in order."""
        resolution = round(resolution * self.test_scale)
        crop = {"crop": self.test_crop, "center": self.test_center}
        return self._spec(batch, resolution, channels, shuffle=False, drop_remainder=False, **crop)

    def _spec(self, batch: int, resolution: int, channels: int, **options: Any) -> BatchSpec:
        mean, std = (v * channels if len(v) == 1 else v for v in (self.mean, self.std))
        return BatchSpec(batch, resolution, dtype=self.dtype, mean=mean, std=std, **options)
