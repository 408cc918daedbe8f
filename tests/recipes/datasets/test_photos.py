"""Photographs and arrays: random crops in training, the whole test set once, normalised."""

import numpy as np
import pytest
import tensorflow as tf
from data_helpers import make_folder, picture

from tfcommx.core import DataError, Topology
from tfcommx.data.sources.folder import Folder
from tfcommx.recipes.datasets.picture_files import (
    ArrayFile,
    ClassFolders,
    ImageNet,
    TensorFlowDataset,
)
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.tasks.classify import Classification

ALONE = DataRank(Topology(1, 1), 0, seed=3)


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "photos" / "train", 12)
    make_folder(tmp_path / "photos" / "test", 7)
    return tmp_path / "photos"


def labels_of(batches) -> list[int]:
    return sorted(int(label) for _, labels in batches for label in labels)


def test_class_folders(folder, tmp_path):
    data = ClassFolders(folder=folder, memory=tmp_path, mean=(0.5,), std=(0.25,)).build(ALONE)
    assert (data.inputs, data.classes, data.count) == (3, ("class0", "class1", "class2"), 12)
    assert data.steps(5, 16) == 2
    for images, labels in data.train(5, 16, range(1)):
        assert images.shape == (5, 16, 16, 3) and labels.shape == (5,)
        # 128 of 255 in blue, whatever the crop; JPEG rounds
        blue = images.numpy()[..., 2]
        np.testing.assert_allclose(blue, (128 / 255 - 0.5) / 0.25, atol=0.05)
    assert labels_of(data.test(5, 24)) == [0, 0, 0, 1, 1, 2, 2]
    data.close()


def test_the_evaluation_crop_and_its_scale(folder, tmp_path):
    data = ClassFolders(folder=folder, memory=tmp_path, test_scale=1.25).build(ALONE)
    assert next(iter(data.test(2, 16)))[0].shape == (2, 20, 20, 3)
    spec = data.settings.test_spec(2, 16, 3)
    assert (spec.crop, spec.center, spec.shuffle, spec.flip) == ("center", 0.875, False, False)
    assert data.settings.train_spec(2, 16, 3).crop == "random"
    data.close()


def test_tests_need_the_classes_of_training(folder, tmp_path):
    (folder / "test" / "class3").mkdir()
    (folder / "test" / "class3" / "0.jpg").write_bytes(picture(1))
    with pytest.raises(DataError, match=r"\bclass3\b"):
        ClassFolders(folder=folder, memory=tmp_path).build(ALONE)


def test_imagenets_shards(tmp_path):
    for split, count in (("train", 8), ("validation", 4)):
        for shard in range(2):
            path = tmp_path / f"{split}-{shard:05}-of-00002"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for number in range(count):
                    writer.write(example(number, 1000 - number))
    data = ImageNet(folder=tmp_path, memory=tmp_path).build(ALONE)
    assert len(data.classes) == 1000 and data.count == 16
    assert labels_of(data.train(8, 32, range(1))) == sorted([*range(992, 1000)] * 2)
    assert labels_of(data.test(8, 32)) == sorted([*range(996, 1000)] * 2)
    data.close()


def example(number: int, label: int) -> bytes:
    feature = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[picture(number)])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def test_a_data_set_by_name(folder, tmp_path, monkeypatch):
    """The library's part is tested in tests/data/sources; here, that both splits are asked."""
    asked = []

    def tfds(name, split, data_dir):
        asked.append((name, split, data_dir))
        return Folder(folder / split)

    monkeypatch.setattr("tfcommx.data.sources.tfrecord.tfds", tfds)
    settings = TensorFlowDataset(dataset="imagenette/160px-v2", memory=tmp_path, folder=tmp_path)
    data = settings.build(ALONE)
    assert [split for _, split, _ in asked] == ["train", "test"] and data.count == 12
    data.close()


def test_arrays_in_a_file(tmp_path):
    random = np.random.default_rng(0)
    arrays = {
        "train_images": random.integers(0, 256, (10, 9, 9), dtype=np.uint8),
        "train_labels": np.arange(10) % 3,
        "test_images": random.integers(0, 256, (4, 9, 9), dtype=np.uint8),
        "test_labels": np.arange(4) % 3,
    }
    np.savez(tmp_path / "all.npz", **arrays)
    data = ArrayFile(file=tmp_path / "all.npz", memory=tmp_path, flip=False).build(ALONE)
    assert (data.inputs, data.classes) == (1, ("0", "1", "2"))
    ((images, _),) = data.test(4, 9)
    np.testing.assert_allclose(images[..., 0], arrays["test_images"], atol=1e-3)
    data.close()
    del arrays["test_labels"]
    np.savez(tmp_path / "less.npz", **arrays)
    with pytest.raises(DataError, match=r"less\.npz.*test_labels.*test_labels"):
        ArrayFile(file=tmp_path / "less.npz", memory=tmp_path).build(ALONE)
    with pytest.raises(DataError, match=r"none\.npz"):
        ArrayFile(file=tmp_path / "none.npz", memory=tmp_path).build(ALONE)


def test_top_1_and_top_5_are_counted_over_all_ranks():
    """The model's logits are its inputs; the second rank's counts are three times the first's."""
    logits = tf.constant([[9.0, 1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4, 3], [1, 2, 3, 4, 5, 6, 7]])
    labels = tf.constant([0, 4, 0])
    score = Classification(1, 7).scorer(lambda pictures, training: pictures)
    batches = tf.data.Dataset.from_tensors((logits, labels))
    assert score(batches, lambda mine: [mine]) == {
        "test_accuracy": pytest.approx(1 / 3),
        "test_top5": pytest.approx(2 / 3),
    }
    other = np.array([0, 3, 3])
    assert score(batches, lambda mine: [mine, other])["test_top5"] == pytest.approx(5 / 6)
    assert set(
        Classification(1, 4).scorer(lambda pictures, training: pictures[:, :4])(
            tf.data.Dataset.from_tensors((logits[:, :4], labels % 4)), lambda mine: [mine]
        )
    ) == {"test_accuracy"}
