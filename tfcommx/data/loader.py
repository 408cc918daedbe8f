"""Load a batch: load missing samples into memory, then read and augment all of them.

    check -> (read files -> native fill -> finish the rest) -> read

The steps in brackets run only if a sample is absent or damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tfcommx.data import batches
from tfcommx.data.fill import Filler
from tfcommx.data.options import BatchSpec, Options
from tfcommx.data.pipeline import weak_method
from tfcommx.data.slab import Slab
from tfcommx.data.sources.decode import stored_size
from tfcommx.data.sources.source import Source

if TYPE_CHECKING:
    import tensorflow as tf

# Samples of a step of `warming`: enough for all threads, few enough for a steady progress bar
WARM = 64


class Loader:
    """Loads batches for one process, in TensorFlow's graph."""

    def __init__(self, source: Source, slab: Slab, filler: Filler, options: Options) -> None:
        self.source, self.slab, self.filler, self.options = source, slab, filler, options
        self._read = weak_method(self, lambda loader, *args: loader.filler.read_files(*args))
        self._finish = weak_method(self, lambda loader, *args: loader.filler.finish(*args))

    def load(
        self, samples: tf.Tensor, epoch: tf.Tensor, spec: BatchSpec
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return (images spec.dtype [b, h, w, c], labels int64 [b]) of a batch."""
        import tensorflow as tf

        slab, options = self.slab, self.options
        state = batches.check(slab, samples, epoch, options.verify, options.seed)
        present = (samples, tf.zeros([0], tf.uint8), -tf.ones_like(samples))
        samples, loose, at = tf.cond(
            tf.reduce_any(state > 0), lambda: self._bring(samples, state, epoch), lambda: present
        )
        images, labels, _ = batches.read(
            slab, samples, loose, at, epoch, spec, self.source.channels, options.seed
        )
        return self._with_static_shape(images, labels, spec)

    def _bring(
        self, samples: tf.Tensor, state: tf.Tensor, epoch: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Load the samples missing by `state`, natively if possible; return as `Filler.fetch`."""
        import tensorflow as tf

        encoded, labels, level = tf.numpy_function(
            self._read, [samples, state], [tf.string, tf.int64, tf.uint8]
        )
        remaining = self._fill(encoded, samples, labels, state)
        arguments = [samples, state, remaining, epoch, encoded, labels, level]
        result = tf.numpy_function(self._finish, arguments, [tf.int64, tf.uint8, tf.int64])
        for tensor in result:
            tensor.set_shape([None])
        return tuple(result)

    def _fill(
        self, encoded: tf.Tensor, samples: tf.Tensor, labels: tf.Tensor, state: tf.Tensor
    ) -> tf.Tensor:
        channels, store = self.source.channels, self.options.store
        return batches.fill(
            self.slab, encoded, samples, labels, state, channels, store, self.options.max_pixels
        )

    def batch_bytes(self, spec: BatchSpec) -> int:
        """Return the bytes of a batch of images; 0 if their size is known only after reading."""
        import tensorflow as tf

        height, width = (spec.resolution or 0,) * 2
        if spec.resolution is None and self.source.shape is not None:
            height, width = stored_size(*self.source.shape, self.options.store)
        entry_bytes: int = tf.as_dtype(spec.dtype).size
        return spec.batch * height * width * self.source.channels * entry_bytes

    def _with_static_shape(
        self, images: tf.Tensor, labels: tf.Tensor, spec: BatchSpec
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Set the parts of the shapes that are known before a batch is loaded."""
        import tensorflow as tf

        if spec.resolution is None and self.source.shape is not None:
            size = stored_size(*self.source.shape, self.options.store)
            shape = [*size, self.source.channels]
            # Built from the shape, because a batch without samples has no images to read it from
            none = tf.zeros([0, *shape], images.dtype)
            images = tf.ensure_shape(
                tf.cond(tf.size(labels) == 0, lambda: none, lambda: images), [None, *shape]
            )
        if spec.drop_remainder and self.options.on_error == "raise":
            images = tf.ensure_shape(images, [spec.batch, *images.shape[1:]])
            labels = tf.ensure_shape(labels, [spec.batch])
        return images, labels

    def warming(self, samples: np.ndarray) -> Iterator[None]:
        """Load samples, int64 [n], into memory in `warming_steps` steps."""
        import tensorflow as tf

        check = _traced(
            lambda chunk: batches.check(self.slab, chunk, tf.constant(0, tf.int64), 0.0, 0),
            tf.int64,
        )
        fill = _traced(self._fill, tf.string, tf.int64, tf.int64, tf.uint8)
        for start in range(0, len(samples), WARM):
            chunk = samples[start : start + WARM]
            state = check(chunk)
            files, labels, level = self.filler.read_files(chunk, state)
            remaining = fill(files, chunk, labels, state)
            self.filler.finish(chunk, state, remaining, -1, files, labels, level)
            yield


def warming_steps(count: int) -> int:
    """Return the number of steps in which `Loader.warming` loads `count` samples."""
    return -(-count // WARM)


def _traced(work: Callable[..., tf.Tensor], *kinds: tf.DType) -> Callable[..., np.ndarray]:
    """Return `work` on vectors of these dtypes as a separate TensorFlow function."""
    import tensorflow as tf

    # Because TensorFlow never drops ops that are called outside of functions, nor their reference
    # to the slab
    traced = tf.function(work, autograph=False).get_concrete_function(
        *(tf.TensorSpec([None], kind) for kind in kinds)
    )
    return lambda *args: traced(*map(tf.constant, args)).numpy()
