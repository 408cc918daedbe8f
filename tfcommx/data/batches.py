"""The ops on a slab that make batches (check, fill, read): native, or in plain TensorFlow.

The plain definitions are used if no native library was built.
"""

import numpy as np
import tensorflow as tf

from tfcommx.data.options import BatchSpec
from tfcommx.data.slab import Slab
from tfcommx.data.sources.decode import unpack
from tfcommx.kernels import loader
from tfcommx.kernels.augment import augment_definition, window_of
from tfcommx.kernels.draws import uniform

# States of a sample besides 0 (ready): absent, in memory with a wrong CRC, and, after `fill`,
# stored by another process in the meantime
ABSENT, DAMAGED, FILLED_BY_OTHER = 1, 2, 3
# Separates the random numbers of `check` from those of windows
_CHECK_STREAM = 0x5EED0FC5C5EED


def check(slab: Slab, indices: tf.Tensor, epoch: tf.Tensor, verify: float, seed: int) -> tf.Tensor:
    """Return the state of each sample of a batch: in memory, absent or damaged.

    Args:
        indices: sample numbers, int64 [b].
        epoch: int64 scalar; each epoch draws the samples whose CRC is checked.
        verify: share of the samples whose CRC is checked, in [0, 1].
        seed: seed of that draw.

    Returns:
        uint8 [b]: 0 if a sample is in memory, ABSENT, or DAMAGED if its CRC is wrong.
    """
    library = loader.library()
    if library is not None:
        return library.tfcommx_slab_check(
            indices=indices,
            epoch=epoch,
            path=slab.descriptor_path,
            id=slab.id,
            verify=verify,
            seed=seed,
        )

    def state(sample: int, epoch: int) -> int:
        if slab.get(sample) is None:
            return ABSENT
        # A check costs a pass over the sample, so each epoch draws a few, and each epoch others
        drawn = uniform(seed ^ _CHECK_STREAM, epoch, sample, 0) < verify
        return DAMAGED if drawn and not slab.intact(sample) else 0

    def look(samples: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        return np.array([state(int(sample), int(epoch)) for sample in samples], np.uint8)

    states = tf.numpy_function(look, [indices, epoch], tf.uint8)
    # Set again, because `numpy_function` forgets shapes
    states.set_shape(indices.shape)
    return states


def fill(
    slab: Slab,
    encoded: tf.Tensor,
    samples: tf.Tensor,
    labels: tf.Tensor,
    state: tf.Tensor,
    channels: int,
    store: int | None,
    max_pixels: int,
) -> tf.Tensor:
    """Decode JPEGs and PNGs into the slab, without an error for files that fail.

    Args:
        encoded: files, string [b]; those of another format are skipped.
        samples: sample numbers, int64 [b].
        labels: int64 [b].
        state: result of `check`, uint8 [b]; samples of state 0 are skipped.
        channels: channels of the pixels, in [1, 4].
        store: short side of the kept images, in pixels; None: their original size.
        max_pixels: largest number of pixels; larger images are skipped.

    Returns:
        uint8 [b]: 0 if this call has stored the sample in the slab, FILLED_BY_OTHER if another
        process has done so in the meantime, otherwise its state. Without the native library,
        `state`.

    **Cost:** one decoding, of JPEGs at the smallest of 1, 1/2, 1/4 and 1/8 that is large enough,
    one pass to shrink the result to `store`, one for the CRC, one copy; on TensorFlow's threads.
    """
    library = loader.library()
    if library is None:
        return state
    return library.tfcommx_slab_fill(
        encoded=encoded,
        samples=samples,
        labels=labels,
        state=state,
        path=slab.descriptor_path,
        id=slab.id,
        channels=channels,
        store=store or 0,
        max_pixels=max_pixels,
    )


def read(
    slab: Slab,
    indices: tf.Tensor,
    loose: tf.Tensor,
    loose_at: tf.Tensor,
    epoch: tf.Tensor,
    spec: BatchSpec,
    channels: int,
    seed: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Read and augment a batch.

    Args:
        indices: sample numbers, int64 [b].
        loose: records (`decode.pack`) of samples that are not in the slab, uint8 [m].
        loose_at: byte offset of each sample's record in `loose`, int64 [b]; -1: in the slab.
        epoch: int64 scalar; with `seed` and the sample's index it determines the window.
        spec: settings of the batch.
        channels: channels of the pixels, in [1, 4].

    Returns:
        images spec.dtype [b, h, w, c], labels int64 [b], windows int32 [b, 5]: top, left, height,
        width, flip.

    **Cost:** one pass over the windows and one over the result, no intermediate image; the batch is
    divided among TensorFlow's threads.
    """
    side, dtype = spec.resolution, tf.as_dtype(spec.dtype)
    # A value for each channel, which the op needs; these change no pixel
    mean, std = spec.mean or (0.0,) * channels, spec.std or (1.0,) * channels
    library = loader.library()
    if library is not None:
        images, labels, windows = library.tfcommx_slab_read(
            indices=indices,
            loose=loose,
            loose_at=loose_at,
            epoch=epoch,
            size=tf.constant([side or 0] * 2, tf.int32),
            T=dtype,
            path=slab.descriptor_path,
            id=slab.id,
            channels=channels,
            crop=spec.crop,
            flip=spec.flip,
            area=spec.area,
            aspect=spec.aspect,
            center=spec.center,
            mean=mean,
            std=std,
            seed=seed,
        )
        return images, labels, windows
    rule = spec.rule(seed)

    def fetch(
        samples: np.ndarray, loose: np.ndarray, loose_at: np.ndarray, epoch: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        images, labels, windows = [], [], []
        for sample, at in zip(samples.tolist(), loose_at.tolist(), strict=True):
            held = slab.get(sample) if at < 0 else unpack(loose, at)
            # `check` has found the sample, and only a slab that is closed loses all of them
            assert held is not None, "the slab is closed"
            pixels, label = held
            window = window_of(rule, int(epoch), sample, *pixels.shape[:2])
            size = (side, side) if side else pixels.shape[:2]
            image = augment_definition(pixels, window, size, spec.dtype, mean, std)
            images.append(image.numpy())
            labels.append(label)
            windows.append(window)
        # NumPy cannot stack an empty list, as of a batch whose samples were all skipped
        empty = np.zeros((0, side or 0, side or 0, channels), dtype.as_numpy_dtype)
        return (
            np.stack(images) if images else empty,
            np.array(labels, np.int64),
            np.array(windows, np.int32).reshape(-1, 5),
        )

    images, labels, windows = tf.numpy_function(
        fetch, [indices, loose, loose_at, epoch], [dtype, tf.int64, tf.int32]
    )
    images.set_shape([None, side, side, channels])
    labels.set_shape([None])
    windows.set_shape([None, 5])
    return images, labels, windows
