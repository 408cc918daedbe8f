"""TFRecord sources: numbering, labels, and files that are cut off."""

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.data.source import SampleError, decode
from tfcommx.data.tfrecord import TFRecords, imagenet


def write(path, numbers):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for n in numbers:
            image = tf.io.encode_png(np.full((3, 4, 3), n, np.uint8)).numpy()
            feature = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[n + 1])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def test_imagenet_shards_are_numbered_in_order_and_broken_ones_named(tmp_path):
    write(tmp_path / "train-00000-of-00003", range(3))
    write(tmp_path / "train-00001-of-00003", [])
    write(tmp_path / "train-00002-of-00003", range(3, 7))
    source = imagenet(tmp_path)
    assert source.count == 7
    for n in range(7):
        data, label = source.read(n)
        assert label == n and decode(data, 3)[0, 0, 0] == n
    assert source.where(3).endswith("train-00002-of-00003 record 0")
    last = tmp_path / "train-00002-of-00003"
    last.write_bytes(last.read_bytes()[:-5])
    with pytest.raises(SampleError, match=r"train-00002-of-00003 ends inside the record"):
        imagenet(tmp_path)
    skipping = imagenet(tmp_path, skip=True)
    assert skipping.count == 3 and list(skipping.broken) == [str(last)]
    with pytest.raises(SampleError, match="'other'"):
        TFRecords([tmp_path / "train-00000-of-00003"], image="other").read(0)
