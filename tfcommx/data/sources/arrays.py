"""Samples from arrays in memory."""

from __future__ import annotations

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
        images: uint8 [n, h, w, c], or [n, h, w] for one channel.
        labels: integers [n].

    **Cost:** one hash over the images.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        classes: tuple[str, ...] = (),
        name: str = "arrays",
    ) -> None:
        images, labels = np.asarray(images), np.asarray(labels)
        if images.ndim == 3:
            images = images[..., None]
        if (
            images.dtype != np.uint8
            or images.ndim != 4
            or not 1 <= images.shape[3] <= 4
            or labels.shape != images.shape[:1]
        ):
            raise DataError(
                "Images uint8 [n, h, w, c] with c in [1, 4] and labels [n] are required. "
                f"Received {images.dtype} {list(images.shape)} and {list(labels.shape)}. "
                "Convert the images, or give one label for each."
            )
        with np.errstate(invalid="ignore"):
            integers = labels.astype(np.int64) if labels.dtype.kind in "biuf" else None
        if integers is None or np.any(integers != labels):
            raise DataError(
                "Labels that are whole numbers of 64 bits are required. Received "
                f"{labels.dtype}, such as {labels[:1].tolist()}. Convert them."
            )
        self.images, self.labels = images, integers
        self.classes, self.name = tuple(classes), name
        self.count, self.channels = len(images), images.shape[3]
        self.shape: tuple[int, int] | None = images.shape[1:3]
        digest = hashlib.sha256(np.ascontiguousarray(images).data if images.size else b"")
        digest.update(self.labels.tobytes())
        self.key = key_of(("arrays", images.shape, digest.hexdigest()))
        self.contents = {"images and labels": f"uint8 {list(images.shape)} ({self.key[:8]})"}

    def read(self, sample: int) -> tuple[np.ndarray, int]:
        """Return (pixels uint8 [h, w, c], label)."""
        return self.images[sample], int(self.labels[sample])

    def where(self, sample: int) -> str:
        """Return the origin of a sample, for messages."""
        return f"{self.name}[{sample}]"
