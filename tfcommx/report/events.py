"""TensorBoard events of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_events(summary: dict[str, Any], folder: Path) -> None:
    """Write the epochs' numbers as TensorBoard scalars, one step per epoch."""
    import tensorflow as tf

    with tf.summary.create_file_writer(str(folder)).as_default():
        for row in summary["rows"]:
            for name in (
                "loss",
                "train_accuracy",
                "test_accuracy",
                "images_per_second",
                "resolution",
                "density",
            ):
                tf.summary.scalar(name, row[name], step=row["epoch"])
            for part, seconds in row["seconds"].items():
                tf.summary.scalar(f"seconds/{part}", seconds, step=row["epoch"])
        tf.summary.flush()
