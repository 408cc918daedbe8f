"""Gradients to the flat vectors of a plan, and back."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfcommx.terms import Bucket, Piece, Plan


def cut(gradients: Mapping[str, tf.Tensor], plan: Plan) -> dict[str, tf.Tensor]:
    """Return the gradients under the plan's names: some variables in pieces."""
    pieces = [Piece.of(name) for bucket in plan.buckets for name in bucket.variables]
    return {
        piece.name: gradients[piece.path]
        if piece.stop is None
        else tf.slice(
            tf.reshape(gradients[piece.path], [-1]), [piece.start], [piece.stop - piece.start]
        )
        for piece in pieces
    }


def join(pieces: Mapping[str, tf.Tensor], whole: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Undo `cut`: paths and shapes as in `whole`."""
    parts: dict[str, list[tuple[int, tf.Tensor]]] = {}
    for name, tensor in pieces.items():
        parts.setdefault(Piece.of(name).path, []).append((Piece.of(name).start, tensor))
    return {
        path: found[0][1]
        if len(found) == 1
        else tf.reshape(
            tf.concat([tensor for _, tensor in sorted(found, key=lambda part: part[0])], axis=0),
            whole[path].shape,
        )
        for path, found in parts.items()
    }


def flatten(parts: list[tf.Tensor], bucket: Bucket) -> tf.Tensor:
    flat = [tf.cast(tf.reshape(part, [-1]), bucket.dtype) for part in parts]
    if bucket.padding:
        flat.append(tf.zeros([bucket.padding], bucket.dtype))
    return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]


def unflatten(flat: tf.Tensor, parts: list[tf.Tensor], bucket: Bucket) -> list[tf.Tensor]:
    sizes = [*bucket.sizes, bucket.padding]
    pieces = tf.split(flat, sizes) if len(sizes) > 2 or bucket.padding else [flat]
    return [
        tf.cast(tf.reshape(piece, part.shape), part.dtype)
        for piece, part in zip(pieces, parts, strict=False)
    ]
