"""TFRecord sources: numbering, labels, and files that are cut off or damaged."""

import functools
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.core import DataError
from tfcommx.data.sources.decode import decode
from tfcommx.data.sources.source import SampleError
from tfcommx.data.sources.tfrecord import ImageFeatures, TFRecords, imagenet, scan, tfds
from tfcommx.kernels.crc32c import crc32c, crc32c_definition


def write(path, numbers):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for n in numbers:
            image = tf.io.encode_png(np.full((3, 4, 3), n % 256, np.uint8)).numpy()
            feature = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[n + 1])),
            }
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
            )


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
    with pytest.raises(SampleError, match=r"train-00002-of-00003\b.*\b441\b"):
        imagenet(tmp_path)
    with pytest.raises(SampleError, match="'other'"):
        TFRecords([tmp_path / "train-00000-of-00003"], ImageFeatures(image="other")).read(0)


@pytest.mark.parametrize("repeat", [lambda a, b: None, os.link, os.symlink, shutil.copy])
def test_a_file_that_is_listed_twice_is_named(repeat, tmp_path, recwarn):
    """Its records had twice the weight of others, without a warning."""
    first, empty, second = (tmp_path / name for name in ("first", "empty", "second"))
    write(first, range(2))
    for file in (empty, tmp_path / "empty too"):
        write(file, [])
    write(second, range(2, 4))
    TFRecords([first, empty, tmp_path / "empty too", second])
    assert not recwarn.list
    again = tmp_path / "again"
    repeat(first, again)
    again = again if again.exists() else first
    with pytest.warns(UserWarning, match=f"^{again} .* {first}, .*\\b1 files"):
        assert TFRecords([first, empty, tmp_path / "empty too", second, again]).count == 6


def test_a_label_beyond_imagenets_classes_is_refused(tmp_path):
    """It trained on a target of zeros, without an error."""
    write(tmp_path / "train-00000-of-00001", [999, 1000])
    source = imagenet(tmp_path)
    assert source.read(0)[1] == 999 and len(source.classes) == 1000
    with pytest.raises(SampleError, match=r"\[1, 1001\).*\b1001\b"):
        source.read(1)


def test_a_missing_shard_is_named(tmp_path):
    for n in (0, 2):
        write(tmp_path / f"train-0000{n}-of-00003", range(n, n + 1))
    (tmp_path / "train-00001-of-00003.part").write_bytes(b"")
    with pytest.raises(DataError, match=r"\b2\b.*train-00001-of-00003\b"):
        imagenet(tmp_path)
    write(tmp_path / "train-00001-of-00003", range(1, 2))
    assert imagenet(tmp_path).count == 3
    write(tmp_path / "train-00000-of-00001", range(3))
    with pytest.raises(DataError, match=r"\b1\b.*\b4\b"):
        imagenet(tmp_path)


def test_a_flipped_bit_is_found(tmp_path):
    shard = tmp_path / "train-00000-of-00001"
    write(shard, range(4))
    good, (start, length, _) = shard.read_bytes(), scan(shard)[2].tolist()

    def flip(at):
        shard.write_bytes(good[:at] + bytes([good[at] ^ 64]) + good[at + 1 :])

    for at in (start + length - 1, start + length):  # of the record, of its CRC
        flip(at)
        damaged = imagenet(tmp_path)
        assert [damaged.read(n)[1] for n in (0, 1, 3)] == [0, 1, 3]
        with pytest.raises(SampleError, match="CRC"):
            damaged.read(2)
    for at in (start - 12, start - 1):  # of the length, of its CRC
        flip(at)
        with pytest.raises(SampleError, match=rf"{shard.name}\b.*byte {start - 12}\b"):
            imagenet(tmp_path)
    shard.write_bytes(bytes(1600))
    with pytest.raises(SampleError, match=rf"{shard.name}\b.*byte 0\b"):
        imagenet(tmp_path)


def test_the_key_is_that_of_the_contents(tmp_path):
    """Records of equal lengths in files of equal times had one key, and so one cache."""
    for name, numbers in (("a", [1, 2]), ("b", [1, 3]), ("c", [1, 2])):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "shard", numbers)
        os.utime(tmp_path / name / "shard", (0, name == "c"))
    a, b, c = (TFRecords(tmp_path / name / "shard") for name in "abc")
    assert a.key == c.key != b.key and a.contents == c.contents != b.contents
    write(tmp_path / "a" / "shard", [1, 3])
    with pytest.raises(SampleError, match="CRC"):
        a.read(1)


def test_a_label_of_another_kind_is_named(tmp_path):
    """Both required features were listed, without the reason why they are not taken."""
    image, text = (tf.train.Feature(bytes_list=tf.train.BytesList(value=[b])) for b in (b"x", b"3"))
    features = tf.train.Features(feature={"image/encoded": image, "image/class/label": text})
    with tf.io.TFRecordWriter(str(tmp_path / "shard")) as writer:
        writer.write(tf.train.Example(features=features).SerializeToString())
    with pytest.raises(SampleError, match=r"image/class/label \(1 bytes\)"):
        TFRecords(tmp_path / "shard").read(0)


def test_labels_outside_the_classes_are_named(tmp_path):
    write(tmp_path / "shard", range(3))
    # Its characters were taken for files: "Is a directory: '/'"
    assert TFRecords(str(tmp_path / "shard")).count == 3
    source = TFRecords([tmp_path / "shard"], ImageFeatures(classes=("a", "b")))
    assert source.read(1)[1] == 1
    with pytest.raises(SampleError, match=r"\[1, 3\).* 3\b"):
        source.read(2)
    with pytest.raises(SampleError, match=r"\[2, 4\).*\b1\b"):
        TFRecords([tmp_path / "shard"], ImageFeatures(first_label=2, classes=("a", "b"))).read(0)
    # And not -1 for a loss
    with pytest.raises(SampleError, match=r"\[2, \.\.\.\).*\b1\b.*`first_label`"):
        TFRecords([tmp_path / "shard"], ImageFeatures(first_label=2)).read(0)
    # Samples on the disk level are not checked again, so other classes need another key
    keys = {
        TFRecords([tmp_path / "shard"], ImageFeatures(classes=names)).key
        for names in ((), ("a", "b"), ("a", "b", "c"))
    }
    assert len(keys) == 3


@pytest.mark.parametrize("length", [0, 8, 63, 64, 5003])
def test_crc32c_of_the_library_and_of_the_reference(length):
    # The check value of CRC-32C
    assert crc32c(b"123456789") == crc32c_definition(b"123456789") == 0xE3069283
    data = os.urandom(length)
    assert crc32c(data) == crc32c_definition(data)


@functools.cache
def cached_colours():
    """Return the class of a data set, whose `made` counts how often it is prepared."""
    import tensorflow_datasets

    class CachedColours(tensorflow_datasets.core.GeneratorBasedBuilder):
        """Registers itself by its name, cached_colours."""

        made = 0

        VERSION = tensorflow_datasets.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tensorflow_datasets.features.Image(shape=(4, 3, 3)),
                "label": tensorflow_datasets.features.ClassLabel(names=["even", "odd"]),
            }
            return tensorflow_datasets.core.DatasetInfo(
                builder=self,
                features=tensorflow_datasets.features.FeaturesDict(features),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(range(9))}

        def _generate_examples(self, numbers):
            type(self).made += 1
            time.sleep(0.3)
            for n in numbers:
                yield n, {"image": np.full((4, 3, 3), n, np.uint8), "label": n % 2}

    return CachedColours


def test_ranks_that_begin_together_prepare_a_data_set_once(tmp_path):
    kind = cached_colours()
    kind.made = 0
    with ThreadPoolExecutor(3) as pool:
        sources = list(pool.map(lambda _: tfds("cached_colours", data_dir=tmp_path), range(3)))
    assert kind.made == 1
    assert len({source.key for source in sources}) == 1 and sources[0].count == 9


def test_a_data_set_that_another_node_has_prepared_meanwhile_is_taken(tmp_path, monkeypatch):
    kind = cached_colours()
    prepare = kind.download_and_prepare

    def too_late(builder):
        prepare(type(builder)(data_dir=tmp_path))
        raise FileExistsError("its folder")

    monkeypatch.setattr(kind, "download_and_prepare", too_late)
    assert tfds("cached_colours", data_dir=tmp_path).count == 9


def test_a_tensorflow_data_set_by_name(tmp_path, monkeypatch):
    # Without a network: the error of a library, and a traceback from each rank
    with monkeypatch.context() as patched:
        failure = OSError(101, "Network is unreachable")
        patched.setattr(cached_colours(), "download_and_prepare", Mock(side_effect=failure))
        with pytest.raises(DataError, match=rf"cached_colours.*{tmp_path}.*unreachable"):
            tfds("cached_colours", data_dir=tmp_path)
    source = tfds("cached_colours", data_dir=tmp_path)
    assert source.count == 9 and source.classes == ("even", "odd") and source.channels == 3
    read = [source.read(n) for n in range(9)]
    pixels = [(int(decode(data, 3)[0, 0, 0]), label) for data, label in read]
    assert sorted(pixels) == [(n, n % 2) for n in range(9)]
    with pytest.raises(DataError, match=r"'test'.*\btrain\b"):
        tfds("cached_colours", "test", tmp_path)
