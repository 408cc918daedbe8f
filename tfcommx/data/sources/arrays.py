"""Samples from arrays in memory."""

import hashlib

import numpy as np

from tfcommx.core import DataError
from tfcommx.data.sources.source import key_of


class Arrays:
    """Images and labels as arrays.

    >>> source = Arrays(np.zeros((10, 8, 8), np.uint8), np.arange(10) % 2)
    >>> source.count, source.channels, source.shape
    (10, 1, (8, 8))

    Args:
        images: uint8 [n, h, w, c], or [n, h, w] for one channel, with h and w >= 1.
        labels: integers [n], >= 0, and below the number of classes if these are named.
        classes: names of the labels 0, 1, ...; empty if unknown.

    **Cost:** one hash over the images.
    **Raises:** DataError for other images, labels or classes.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        classes: tuple[str, ...] = (),
        name: str = "arrays",
    ) -> None:
        if np.ma.is_masked(images) or np.ma.is_masked(labels):
            raise DataError(
                "Images and labels without masked entries are required, because the mask would be "
                "lost. Received a masked array. Leave those samples out, or give `filled(0)`."
            )
        try:
            images, labels = np.asarray(images), np.asarray(labels)
        except ValueError as error:  # Lists of images of several sizes
            raise DataError(
                f"Images of one size, and labels, are required as arrays: {error} Resize the "
                "images, or give them as files in class folders."
            ) from error
        if images.ndim == 3:
            images = images[..., None]
        if (
            images.dtype != np.uint8
            or images.ndim != 4
            or not 1 <= images.shape[3] <= 4
            or (len(images) and 0 in images.shape[1:3])
            or labels.shape != images.shape[:1]
        ):
            raise DataError(
                "Images uint8 [n, h, w, c] with h and w >= 1 and c in [1, 4], and labels [n], are "
                f"required. Received {images.dtype} {list(images.shape)} and {list(labels.shape)}. "
                "Convert images in [0, 1] by (255 * images).round().astype('uint8'), channels "
                "first by images.transpose(0, 2, 3, 1), and labels by labels[:, 0], or, of one-hot "
                "labels, by labels.argmax(1)."
            )
        # NaN and Inf become some integer, which differs from them below; NumPy would warn of that
        with np.errstate(invalid="ignore"):
            integers = labels.astype(np.int64) if labels.dtype.kind in "biuf" else None
        if integers is None or np.any(integers != labels):
            raise DataError(
                "Labels that are whole numbers of 64 bits are required. Received "
                f"{labels.dtype}, such as {labels[:1].tolist()}. Convert them."
            )
        if isinstance(classes, str):
            raise DataError(
                f"`classes` must be several names, such as ('cat', 'dog'). Received {classes!r}."
            )
        self.images, self.labels = images, integers
        self.classes, self.name = tuple(classes), name
        # NumPy has no least entry of an empty array
        least, most = (int(integers.min()), int(integers.max())) if integers.size else (0, 0)
        if least < 0 or (classes and most >= len(self.classes)):
            end = f", {len(self.classes)}), the number of classes," if self.classes else ", ...)"
            raise DataError(
                f"Labels in [0{end} are required. Received labels from {least} to {most}. Leave "
                "samples with others out, or number the classes from 0, such as by labels - 1."
            )
        self.count, self.channels = len(images), images.shape[3]
        self.shape: tuple[int, int] | None = images.shape[1:3]
        # A hash reads contiguous memory only, and slices of arrays often have gaps
        digest = hashlib.sha256(np.ascontiguousarray(images).data if images.size else b"")
        digest.update(self.labels.tobytes())
        # With the shape, because the same bytes may be images with other sides
        self.key = key_of(("arrays", images.shape, digest.hexdigest()))
        self.contents = {"images and labels": f"uint8 {list(images.shape)} ({self.key[:8]})"}

    def read(self, sample: int) -> tuple[np.ndarray, int]:
        """Return (pixels uint8 [h, w, c], label)."""
        return self.images[sample], int(self.labels[sample])

    def where(self, sample: int) -> str:
        """Return the origin of a sample, for messages."""
        return f"{self.name}[{sample}]"
