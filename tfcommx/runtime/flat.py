"""Turn gradients into the flat vectors of a plan, and back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfcommx.terms import Bucket, Piece, Plan


def cut(gradients: Mapping[str, tf.Tensor], plan: Plan) -> dict[str, tf.Tensor]:
    """Return the gradients under the plan's names: some variables are cut in pieces.

    Args:
        gradients: variable path -> tensor, any shape.

    Returns:
        Name in the plan -> the tensor itself, or a flat stretch of it.
    """
    pieces = [Piece.of(name) for bucket in plan.buckets for name in bucket.variables]
    return {piece.name: _stretch(gradients[piece.path], piece) for piece in pieces}


def _stretch(tensor: tf.Tensor, piece: Piece) -> tf.Tensor:
    if piece.stop is None:
        return tensor
    return tf.slice(tf.reshape(tensor, [-1]), [piece.start], [piece.stop - piece.start])


def join(pieces: Mapping[str, tf.Tensor], whole: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Undo `cut`: paths and shapes as in `whole`."""
    parts: dict[str, list[tuple[int, tf.Tensor]]] = {}
    for name, tensor in pieces.items():
        piece = Piece.of(name)
        parts.setdefault(piece.path, []).append((piece.start, tensor))
    return {path: _joined(found, whole[path]) for path, found in parts.items()}


def _joined(parts: list[tuple[int, tf.Tensor]], whole: tf.Tensor) -> tf.Tensor:
    if len(parts) == 1:
        return parts[0][1]
    in_order = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
    return tf.reshape(tf.concat(in_order, axis=0), whole.shape)


def flatten(parts: Sequence[tf.Tensor], bucket: Bucket) -> tf.Tensor:
    """Return a bucket's tensors as one vector in its dtype, with its padding at the end.

    **Cost:** one copy; none if the bucket holds one variable of its dtype, without padding.
    """
    flat = [tf.cast(tf.reshape(part, [-1]), bucket.dtype) for part in parts]
    if bucket.padding:
        flat.append(tf.zeros([bucket.padding], bucket.dtype))
    return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]


def unflatten(flat: tf.Tensor, parts: Sequence[tf.Tensor], bucket: Bucket) -> list[tf.Tensor]:
    """Undo `flatten`: shapes and dtypes as in `parts`; the padding is dropped.

    **Cost:** none for a stretch whose ends are multiples of 64 bytes, which is not copied; others
    are.
    """
    ends = itertools.accumulate(bucket.sizes)
    # Not by tf.split, which copies all
    return [
        tf.cast(tf.reshape(tf.slice(flat, [end - size], [size]), part.shape), part.dtype)
        for size, end, part in zip(bucket.sizes, ends, parts, strict=True)
    ]
