"""Samples from TFRecord files: ImageNet's usual 1024 + 128 shards, prepared TensorFlow Datasets."""

import hashlib
import os
import re
import struct
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfcommx.core import ConfigurationError, DataError, check_whole, local_path
from tfcommx.core.files import others_wait
from tfcommx.data.sources.source import SampleError, key_of
from tfcommx.kernels.crc32c import crc32c

# Names of ImageNet's classes
IMAGENET_CLASSES = tuple(map(str, range(1000)))
# Length of the record and its masked CRC, before the record and the masked CRC of the record
_FRAME = struct.Struct("<QI")


def _masked_crc(data: bytes) -> int:
    crc = crc32c(data)
    # Rotated and shifted, as the format has it, because a CRC over other CRCs is weak
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def scan(path: str | os.PathLike[str]) -> np.ndarray:
    """Return byte offset, length and stored CRC of every record of a TFRecord file, int64 [n, 3].

    **Cost:** one read of 16 bytes per record: its CRC, and the frame of the next one.
    **Raises:** SampleError if the CRC of a length is wrong, if the file ends inside a record,
    or is not a TFRecord file.
    """
    rows, at = [], 0
    # Without a buffer, because only 16 bytes of each record are read
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        frame = os.pread(file.fileno(), _FRAME.size, 0)
        while at < size:
            length, crc = _FRAME.unpack(frame) if len(frame) == _FRAME.size else (size, None)
            # A wrong length would lead into the middle of a record, and from there to any byte
            if crc is not None and crc != _masked_crc(frame[:8]):
                raise SampleError(
                    f"{path} has a damaged length at byte {at}: it is damaged, or no TFRecord "
                    "file, or one with compression (GZIP, ZLIB), without which it must be written"
                )
            end = at + _FRAME.size + length + 4
            if end > size:
                raise SampleError(
                    f"{path} ends inside the record at byte {at}: it is cut off or no "
                    "uncompressed TFRecord file"
                )
            # The CRC of this record, and the frame of the next one
            following = os.pread(file.fileno(), 4 + _FRAME.size, end - 4)
            rows.append((at + _FRAME.size, length, int.from_bytes(following[:4], "little")))
            at, frame = end, following[4:]
    return np.array(rows, np.int64).reshape(-1, 3)


def _scanned(file: str) -> np.ndarray:
    try:
        return scan(file)
    except OSError as error:
        raise DataError(
            f"TFRecord files that can be read are required. {file}: {error.strerror}. Name the "
            "files, sorted(glob.glob(...)), and check the path and its mount."
        ) from error


def _warn_of_repeated(files: Sequence[str], digests: Sequence[str]) -> None:
    """Warn of files with the same records, such as one that two patterns match, or a link."""
    first: dict[str, str] = {}
    pairs = []
    for file, digest in zip(files, digests, strict=True):
        if digest in first:
            pairs.append((first[digest], file))
        elif digest:  # Not a file without records
            first[digest] = file
    if pairs:
        warnings.warn(
            f"{pairs[0][1]} has the records of {pairs[0][0]}, so an epoch has them twice; in all "
            f"{len(pairs)} files repeat another's. List each file once.",
            stacklevel=3,
        )


@dataclass(frozen=True)
class ImageFeatures:
    """Features of an image and its label in a tf.train.Example; the defaults are ImageNet's."""

    # Name of the feature with the encoded image
    image: str = "image/encoded"
    # Name of the feature with the label
    label: str = "image/class/label"
    # Label of class 0 in the files; ImageNet's files count from 1
    first_label: int = 1
    # Names of the labels; empty if unknown
    classes: tuple[str, ...] = ()
    # Channels of the decoded pixels, in [1, 4]
    channels: int = 3

    def __post_init__(self) -> None:
        check_whole("first_label", self.first_label)
        if check_whole("channels", self.channels, least=1) > 4:
            raise ConfigurationError(f"`channels` must be in [1, 4]. Received {self.channels}.")


class TFRecords:
    """Records with an encoded image and an integer label, in uncompressed TFRecord files.

    Reading a record with a label below `first_label`, or beyond the classes if they are known,
    raises SampleError. The key is made of the files' names, the CRCs of all records, the features
    and the classes, so it is that of any copy. When a record is read, it is checked against the CRC
    that it had at creation.

    Args:
        files: one file, or several in the order that numbers the samples.

    **Cost:** at creation, a scan over all records' frames, 16 files at a time.
    **Raises:** SampleError for a broken file; DataError if there is no record; ConfigurationError
    for other `features`.
    """

    shape: tuple[int, int] | None = None

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        features: ImageFeatures | None = None,
    ) -> None:
        self.files = [
            str(file) for file in ([files] if isinstance(files, str | os.PathLike) else files)
        ]
        self.features = ImageFeatures() if features is None else features
        if not isinstance(self.features, ImageFeatures):
            raise ConfigurationError(
                "`features` must be ImageFeatures, such as ImageFeatures('image', 'label', 0). "
                f"Received {features!r}."
            )
        self.classes = tuple(self.features.classes)
        self.channels = self.features.channels
        # Threads, because a scan mostly waits for the file system
        with ThreadPoolExecutor(16) as pool:
            rows = list(pool.map(_scanned, self.files))
        self._starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        # With an empty table, because NumPy refuses to concatenate an empty list
        self._rows = np.concatenate([*rows, np.zeros((0, 3), np.int64)])
        self.count = len(self._rows)
        self.name = f"{self.files[0]} and {len(self.files) - 1} more" if self.files else "no files"
        if not self.count:
            raise DataError(
                f"TFRecord files with records are required. Received {len(self.files)} files "
                f"without any: {self.name}. Check the path and the pattern."
            )
        facts = [
            # A digest of the offsets, lengths and CRCs of the records
            (Path(file).name, len(table), hashlib.sha256(table.tobytes()).hexdigest())
            for file, table in zip(self.files, rows, strict=True)
        ]
        _warn_of_repeated(self.files, [digest if records else "" for _, records, digest in facts])
        names = self.features.image, self.features.label, self.features.first_label
        self.key = key_of(("tfrecords", *names, *self.classes, *facts))
        self.contents = {
            f"{number}. file": f"{name}, {records} records ({digest[:8]})"
            for number, (name, records, digest) in enumerate(facts, 1)
        }

    def _find(self, sample: int) -> tuple[str, int]:
        # From the right, because a file without records begins where the next one does
        file = int(np.searchsorted(self._starts, sample, "right")) - 1
        return self.files[file], sample - int(self._starts[file])

    def read(self, sample: int) -> tuple[bytes, int]:
        """Return (encoded image, label)."""
        import tensorflow as tf

        data = self._record(sample)
        try:
            features = tf.train.Example.FromString(data).features.feature
        except Exception as error:  # Protobuf's class differs between its implementations
            raise SampleError(f"no tf.train.Example: {error}") from error
        names = self.features
        image = features[names.image].bytes_list.value
        label = features[names.label].int64_list.value
        if len(image) != 1 or len(label) != 1:
            # Without those that the two lookups have added, which have no kind
            kinds = {name: value.WhichOneof("kind") for name, value in features.items()}
            stored = [
                f"{name} ({len(getattr(features[name], kind).value)} {kind.removesuffix('_list')})"
                for name, kind in sorted(kinds.items())
                if kind
            ]
            raise SampleError(
                f"one image {names.image!r} of bytes and one label {names.label!r} of int64 are "
                f"required, the record has the features {', '.join(stored) or 'none'}"
            )
        number = label[0] - names.first_label
        if number < 0 or (self.classes and number >= len(self.classes)):
            end = f", {names.first_label + len(self.classes)})" if self.classes else ", ...)"
            raise SampleError(
                f"a label in [{names.first_label}{end} is required, the record has {label[0]}; "
                "`first_label` says what class 0 is called"
            )
        return image[0], number

    def _record(self, sample: int) -> bytes:
        start, length, crc = self._rows[sample].tolist()
        with open(self._find(sample)[0], "rb", buffering=0) as file:
            data = os.pread(file.fileno(), length, start)
        if len(data) != length:
            raise SampleError(
                f"the file was cut: {len(data)} of {length} bytes of the record exist"
            )
        if crc != _masked_crc(data):
            raise SampleError("the record is damaged, or changed since the start: its CRC is wrong")
        return data

    def where(self, sample: int) -> str:
        """Return the origin of a sample, for messages: a record of a file."""
        file, record = self._find(sample)
        return f"{file} record {record}"


def imagenet(folder: str | os.PathLike[str], split: str = "train") -> TFRecords:
    """Return ImageNet's samples from a folder of shards such as `train-00000-of-01024`.

    The names may end with `.tfrecord` or `.tfrecords`.

    Args:
        folder: the folder of all shards of the split.
        split: prefix of their names, `train` or `validation`.

    Returns:
        A source with labels 0 to 999, whose names are these numbers, because the files hold no
        others. Reading a record of another class raises SampleError.

    **Raises:** errors of TFRecords; DataError if a shard is missing.
    """
    name = re.compile(rf"{re.escape(split)}-(\d+)-of-(\d+)(?:\.tfrecords?)?")
    # Sorted, because a folder has no order, and all nodes must number samples alike
    paths = sorted(Path(folder).glob(f"{split}-*-of-*"))
    matches = {file: match for file in paths if (match := name.fullmatch(file.name))}
    files = list(matches)
    if not files:
        raise DataError(
            f"Shards with names such as {split}-00000-of-01024 are required. {folder} has none. "
            "Check the folder, or name the files yourself: TFRecords(files)."
        )
    numbers = [tuple(map(int, match.groups())) for match in matches.values()]
    total = numbers[0][1]
    if numbers != [(n, total) for n in range(len(files))] or len(files) != total:
        missing = next((n for n in range(total) if (n, total) not in numbers), None)
        problem = "Not all are of the same set"
        if missing is not None:
            problem = f"{split}-{missing:05d}-of-{total:05d} is missing"
        raise DataError(
            f"All shards of one set, {total}, are required. {folder} has {len(files)} of {split}. "
            f"{problem}. Add missing shards, remove other files, or name the files "
            "yourself: TFRecords(files)."
        )
    return TFRecords(files, ImageFeatures(classes=IMAGENET_CLASSES))


def tfds(
    name: str, split: str = "train", data_dir: str | os.PathLike[str] | None = None
) -> TFRecords:
    """Return a split of an image classification data set of TensorFlow Datasets.

    Args:
        name: name of the builder, optionally with configuration and version:
            `imagenette/160px-v2`.
        split: a complete split, such as `train`.
        data_dir: folder of prepared data sets; None: the default of TensorFlow Datasets.

    **Cost:** an unprepared data set is downloaded and prepared by one process of each machine,
    while the others wait.
    **Raises:** DataError for unknown data sets and splits, data sets without images and labels,
    file formats other than TFRecord, and a download that fails.
    """
    builder = prepared(name, data_dir)
    features = _image_features(builder, name)
    return TFRecords(_files_of(builder, name, split), features)


def builder_of(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """Return the builder of a data set of TensorFlow Datasets. **Raises:** DataError."""
    try:
        import tensorflow_datasets

        return tensorflow_datasets.builder(name, data_dir=data_dir)
    except Exception as error:  # Also the builder's own, and an AssertionError of a version
        # Only the first line, because names follow it
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise DataError(
            f"A data set that TensorFlow Datasets can load is required. Received {name!r}: "
            f"{reason}. Check its name, or, if a folder was meant, its path."
        ) from error


def prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """Return the builder of a data set of TensorFlow Datasets, prepared.

    One process of each machine downloads and prepares it, while the others wait.

    **Raises:** DataError if that fails, as without a network or on a full disk.
    """
    builder = builder_of(name, data_dir)
    folder = local_path("data_dir", builder.data_dir)
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with others_wait(folder.parent / ".tfcommx-lock"):
                # Made again, because a builder reads the files of another process at its start only
                builder = builder_of(name, data_dir)
                builder.download_and_prepare()
    except Exception as error:  # Network, checksum, archive, or the builder's own
        # By a process whose lock this one does not see, as on another node
        if folder.exists():
            return builder_of(name, data_dir)
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise DataError(
            f"A data set that is prepared, or can be downloaded, is required. Received {name!r}, "
            f"not prepared in {folder}: {type(error).__name__}: {reason}. Prepare it "
            "where there is a network and room, by `tfds build`, and copy that folder to each node."
        ) from error
    return builder


def _image_features(builder: Any, name: str) -> ImageFeatures:
    """Return the features of the images and labels of a prepared data set, or refuse it."""
    import tensorflow_datasets

    keys, features = builder.info.supervised_keys, builder.info.features
    if (
        keys is None
        or not isinstance(features[keys[0]], tensorflow_datasets.features.Image)
        or not isinstance(features[keys[1]], tensorflow_datasets.features.ClassLabel)
    ):
        raise DataError(
            f"A data set of images and class labels is required. {name} has the features "
            f"{features} and the supervised keys {keys}. Choose another, or give its samples as "
            "arrays."
        )
    image, label = keys
    if features[image].dtype != np.uint8:
        raise DataError(
            f"Images of 8 bits a channel (uint8) are required. Those of {name} are "
            f"{np.dtype(features[image].dtype)}, and decoding would keep the upper 8 bits. Scale "
            "them, and give them as arrays or as files."
        )
    # A data set may leave the number of its channels open
    channels = features[image].shape[-1] or 3
    return ImageFeatures(image, label, 0, tuple(features[label].names), channels)


def _files_of(builder: Any, name: str, split: str) -> list[str]:
    if split not in builder.info.splits:
        raise DataError(
            f"Unknown split {split!r} of {name}. Known: "
            f"{', '.join(sorted(builder.info.splits))}. Give a whole split."
        )
    if builder.info.file_format.value != "tfrecord":
        raise DataError(
            f"The file format tfrecord is required. {name} is prepared as "
            f"{builder.info.file_format.value}. "
            "Prepare it with file_format='tfrecord' in another data_dir."
        )
    files: list[str] = builder.info.splits[split].filepaths
    return files
