"""Augment: cut, resize, mirror and normalise images. The definition in plain Python and TensorFlow.

`tfcommx.data.batches` calls the native ops on a slab, or this module if there is no library. The
windows are exact; the pixels of the native op (ops/kernels/augment.h) agree within 1/255 per value.

**Source:** random-resized-crop of He et al. and the Inception papers as torchvision draws it: ten
attempts, then a centre crop. The crops of `tf.image.sample_distorted_bounding_box` are smaller
(with the same bounds, 0.38 of the area of a 375 x 500 picture in the mean, ours 0.43), because it
draws the crop's height uniformly, and not its area. After its last attempt it takes the whole
image.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from tfcommx.kernels.draws import uniform


class CropRule(NamedTuple):
    """Parameters of the draw of windows."""

    # "random", "center" or "whole"
    crop: str = "whole"
    # Mirror every second sample, left-right
    flip: bool = False
    # Lowest and highest area of the crop / area of the image, in (0, 1]
    area: tuple[float, float] = (0.08, 1.0)
    # Lowest and highest width / height, > 0
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    # Side of the centre crop / short side of the image, in (0, 1]
    center: float = 0.875
    # Seed of the draws, any int
    seed: int = 0


class Window(NamedTuple):
    """Pixels of the image that are kept; `flip` is 1 if they are mirrored, otherwise 0."""

    top: int
    left: int
    height: int
    width: int
    flip: int = 0


def window_of(rule: CropRule, epoch: int, sample: int, height: int, width: int) -> Window:
    """Draw the window of one sample of height x width pixels; a pure function of its arguments.

    >>> window_of(CropRule(crop="center", center=0.5), epoch=0, sample=7, height=100, width=200)
    Window(top=25, left=75, height=50, width=50, flip=0)
    """
    flip = int(rule.flip and uniform(rule.seed, epoch, sample, 0) < 0.5)
    if rule.crop == "whole":
        return Window(0, 0, height, width, flip)
    if rule.crop == "center":
        side = round(min(height, width) * rule.center)
        return _centered(side, side, height, width, flip)
    return _random_window(rule, epoch, sample, height, width, flip)


def _centered(h: int, w: int, height: int, width: int, flip: int) -> Window:
    h, w = min(max(h, 1), height), min(max(w, 1), width)
    return Window((height - h) // 2, (width - w) // 2, h, w, flip)


def _random_window(
    rule: CropRule, epoch: int, sample: int, height: int, width: int, flip: int
) -> Window:
    # The native op holds its bounds as float32.
    area_low, area_high, aspect_low, aspect_high = (
        float(np.float32(bound)) for bound in (*rule.area, *rule.aspect)
    )
    for attempt in range(10):
        # Draw 0 is the flip's. The native op numbers draws alike, so that both cut the same window
        area, aspect, down, right = (
            uniform(rule.seed, epoch, sample, 1 + 4 * attempt + k) for k in range(4)
        )
        area = height * width * (area_low + area * (area_high - area_low))
        aspect = math.exp(
            math.log(aspect_low) + aspect * (math.log(aspect_high) - math.log(aspect_low))
        )
        # Ties go to the even number, as by `lrint` in the native op
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Window(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w, flip)
    if width / height < aspect_low:
        return _centered(round(width / aspect_low), width, height, width, flip)
    if width / height > aspect_high:
        return _centered(height, round(height * aspect_high), height, width, flip)
    return Window(0, 0, height, width, flip)


def augment_definition(
    image: Any,
    window: Window,
    size: tuple[int, int],
    dtype: Any,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Any:
    """Cut, resize, mirror and normalise one image.

    Args:
        image: uint8 [h, w, c].
        size: height and width of the result, pixels.
        dtype: uint8 (values 0 to 255, rounded; mean and std unused), float16, bfloat16 or float32.
        mean, std: mean and standard deviation per channel, of values in [0, 1].

    Returns:
        dtype [*size, c]: (value / 255 - mean) / std.
    """
    import tensorflow as tf

    dtype = tf.as_dtype(dtype)
    cut = image[window.top : window.top + window.height, window.left : window.left + window.width]
    resized = tf.image.resize(cut, size, method="bilinear", antialias=False)
    if window.flip:
        resized = tf.reverse(resized, axis=[1])
    if dtype == tf.uint8:
        return tf.cast(tf.floor(resized + 0.5), tf.uint8)
    return tf.cast((resized / 255.0 - tf.constant(mean)) / tf.constant(std), dtype)
