"""From sample indices to batches: the native ops on the slab, or their plain-TensorFlow twin where
no library was built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfcommx.data.cache.slab import Slab, pack
from tfcommx.kernels import loader
from tfcommx.kernels.augment import Rule, Window, augment_definition, window_of
from tfcommx.terms import PlanError, check_name, check_whole

CROPS = ("random", "center", "whole")
DTYPES = ("uint8", "float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Phase:
    """How the samples are served for some epochs. A new phase is a new call of `DataCache.dataset`:
    the slab stays.
    """

    # Samples per rank and step, >= 1
    batch: int
    # Height and width of the images, pixels; None: the samples' own, which must all be equal
    resolution: int | None = None
    # Random: random-resized-crop; center; whole
    crop: str = "whole"
    # PlanState-right, for every second sample
    flip: bool = False
    # uint8 gives 0 to 255 and does not normalise
    dtype: str = "float32"
    # Per channel, of values in [0, 1]; empty: zeros
    mean: tuple[float, ...] = ()
    # Per channel, > 0; empty: ones
    std: tuple[float, ...] = ()
    # Of the random crop / of the image, in (0, 1]: torchvision's default (TensorFlow's is 0.05)
    area: tuple[float, float] = (
        0.08,
        1.0,
    )
    # Width / height of the random crop, > 0: likewise
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    # Side of the centre crop / short side, in (0, 1]: 224 of 256
    center: float = 0.875
    # False: in the order of the source, for evaluation
    shuffle: bool = True
    # True: full batches only; False: every sample, the last batch smaller
    drop_remainder: bool = True

    def __post_init__(self) -> None:
        check_name("crop", self.crop, CROPS)
        check_name("dtype", self.dtype, DTYPES)
        for name in ("batch", "resolution"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_whole(name, getattr(self, name)))
        # arrays and lists too; a phase is compared and hashed
        for name in ("mean", "std", "area", "aspect"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if self.batch < 1 or (self.resolution is not None and self.resolution < 1):
            raise PlanError(
                f"`batch` and `resolution` must be >= 1. Received batch={self.batch}, "
                f"resolution={self.resolution}."
            )
        if self.resolution is None and self.crop != "whole":
            raise PlanError(
                f"Crop {self.crop!r} needs a `resolution`: crops differ in size. Received None. "
                "Give one, or crop 'whole'."
            )
        if (
            not 0 < self.area[0] <= self.area[1] <= 1
            or not 0 < self.aspect[0] <= self.aspect[1]
            or not 0 < self.center <= 1
        ):
            raise PlanError(
                "`area` must be ascending in (0, 1], `aspect` ascending and > 0, `center` in "
                "(0, 1]. "
                f"Received area={self.area}, "
                f"aspect={self.aspect}, center={self.center}."
            )
        if not all(0 <= m <= 1 for m in self.mean) or not all(0 < s < math.inf for s in self.std):
            raise PlanError(
                "`mean` must be in [0, 1] and `std` > 0, of pixels / 255. Received "
                f"mean={self.mean}, std={self.std}. Divide those of "
                "values from 0 to 255 by 255."
            )

    def rule(self, seed: int) -> Rule:
        """Return how this phase draws windows."""
        return Rule(self.crop, self.flip, self.area, self.aspect, self.center, seed)


def check(slab: Slab, indices: Any, epoch: Any, verify: float, seed: int) -> Any:
    """Return uint8 [b]: 0 where a sample is in memory, 1 where it is absent, 2 where its CRC does
    not hold.

    The CRC is looked at for a share `verify` of the samples, drawn anew each epoch.
    """
    import tensorflow as tf

    library = loader.library()
    if library is not None:
        return library.tfcommx_slab_check(
            indices=indices, epoch=epoch, path=slab.door, id=slab.id, verify=verify, seed=seed
        )

    def look(samples: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        from tfcommx.kernels.draws import uniform

        def state(sample: int) -> int:
            if slab.get(sample) is None:
                return 1
            return (
                2
                if uniform(seed ^ 0x5EED0FC5C5EED, int(epoch), sample, 0) < verify
                and not slab.intact(sample)
                else 0
            )

        return np.array([state(int(sample)) for sample in samples], np.uint8)

    state = tf.numpy_function(look, [indices, epoch], tf.uint8)
    state.set_shape(indices.shape)
    return state


def fill(
    slab: Slab,
    encoded: Any,
    samples: Any,
    labels: Any,
    state: Any,
    channels: int,
    store: int | None,
) -> Any:
    """Decode JPEGs and PNGs and put them into the slab; what fails or finds no room is left, and
    nothing is raised for it.

    Args:
      encoded: string [b]: files; what is neither is left.
      samples, labels: int64 [b].
      state: uint8 [b], of `check`; entries of 0 are passed over.
    Returns:
      uint8 [b]: 0 where this call has put the sample into the slab, 3 where another process has
      meanwhile, else its state. Without the native library, `state`.
    **Cost:** a decoding, of JPEGs at the smallest of 1, 1/2, 1/4 and 1/8 that is large enough, one
    pass for the rest of the way to `store`, one for the CRC, one copy; on TensorFlow's threads.
    """
    library = loader.library()
    if library is None:
        return state
    return library.tfcommx_slab_fill(
        encoded=encoded,
        samples=samples,
        labels=labels,
        state=state,
        path=slab.door,
        id=slab.id,
        channels=channels,
        store=store or 0,
    )


def read(
    slab: Slab,
    indices: Any,
    loose: Any,
    loose_at: Any,
    epoch: Any,
    phase: Phase,
    channels: int,
    seed: int,
) -> tuple[Any, Any, Any]:
    """Read and augment a batch.

    Args:
      indices: int64 [b].
      loose, loose_at: records (`slab.pack`) that are not in the slab, uint8 [m], and where each
      sample's begins, int64 [b]; -1: in the slab.
      epoch: int64 scalar; with `seed` and the sample's index it draws the window.
    Returns:
      images phase.dtype [b, h, w, c], labels int64 [b], windows int32 [b, 5]: top, left, height,
      width, flip.
    **Cost:** one pass over the windows and one over the result, no intermediate image; the batch is
    cut over TensorFlow's threads.
    """
    import tensorflow as tf

    size = [phase.resolution or 0] * 2
    mean, std = phase.mean or (0.0,) * channels, phase.std or (1.0,) * channels
    library = loader.library()
    if library is not None:
        return library.tfcommx_slab_read(
            indices=indices,
            loose=loose,
            loose_at=loose_at,
            epoch=epoch,
            size=tf.constant(size, tf.int32),
            T=tf.as_dtype(phase.dtype),
            path=slab.door,
            id=slab.id,
            channels=channels,
            crop=phase.crop,
            flip=phase.flip,
            area=phase.area,
            aspect=phase.aspect,
            center=phase.center,
            mean=mean,
            std=std,
            seed=seed,
        )

    def fetch(samples: np.ndarray, loose: np.ndarray, loose_at: np.ndarray, epoch: np.ndarray):
        images, labels, windows = [], [], []
        for sample, at in zip(samples.tolist(), loose_at.tolist(), strict=True):
            pixels, label = slab.get(sample) if at < 0 else unpack(loose, at)
            window = window_of(phase.rule(seed), int(epoch), sample, *pixels.shape[:2])
            images.append(
                augment_definition(
                    pixels,
                    window,
                    tuple(size) if size[0] else pixels.shape[:2],
                    phase.dtype,
                    mean,
                    std,
                ).numpy()
            )
            labels.append(label)
            windows.append(window)
        dtype = tf.as_dtype(phase.dtype).as_numpy_dtype
        empty = np.zeros((0, *size, channels), dtype)
        return (
            np.stack(images) if images else empty,
            np.array(labels, np.int64),
            np.array(windows, np.int32).reshape(-1, 5),
        )

    images, labels, windows = tf.numpy_function(
        fetch, [indices, loose, loose_at, epoch], [tf.as_dtype(phase.dtype), tf.int64, tf.int32]
    )
    images.set_shape([None, phase.resolution, phase.resolution, channels])
    labels.set_shape([None])
    windows.set_shape([None, 5])
    return images, labels, windows


def unpack(records: np.ndarray, at: int) -> tuple[np.ndarray, int]:
    """Return (pixels uint8 [h, w, c], label) of the record that starts at byte `at` of
    uint8 [m].
    """
    label, size = records[at + 8 : at + 24].view(np.int64)
    shape = records[at + 24 : at + 36].view(np.int32)
    return records[at + 64 : at + 64 + size].reshape(shape), int(label)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an image, uint8 [h, w, c], by bilinear interpolation without antialias."""
    import tensorflow as tf

    library = loader.library()
    if library is None:
        return augment_definition(
            image, Window(0, 0, *image.shape[:2]), size, "uint8", (), ()
        ).numpy()
    images, _, _ = library.tfcommx_slab_read(
        indices=[0],
        loose=np.frombuffer(pack(0, 0, image), np.uint8),
        loose_at=[0],
        epoch=0,
        size=size,
        T=tf.uint8,
        path="",
        id=0,
        channels=image.shape[2],
        crop="whole",
        flip=False,
    )
    return images[0].numpy()
