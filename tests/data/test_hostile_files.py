"""Files of users, damaged at random: each reader answers with the project's error, and names it."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tfcommx.checkpoint.files import Head, memory_model_name, residuals_name
from tfcommx.checkpoint.place import SnapshotFolder, head_array
from tfcommx.core import NOMINAL, Links, Profile, TfcommxError, Topology
from tfcommx.data.disk import Disk
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import prefix, reserved_bytes, slab_state
from tfcommx.data.sources import SampleError, TFRecords
from tfcommx.data.sources.decode import decode
from tfcommx.measure.horovod_timeline import read_timeline
from tfcommx.recipes.datasets.fashion_mnist import read_idx
from tfcommx.recipes.datasets.picture_files import ArrayFile
from tfcommx.recipes.datasets.translations import LinePairs, catalogue_pairs
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.text.corpus import open_corpora
from tfcommx.report.dry_run import read_alone
from tfcommx.report.summary import REQUIRED
from tfcommx.report.summary import read as read_summary

# How long each reader is tried.
SECONDS = 4.0
# A damaged file is refused by one of these.
ERRORS = (TfcommxError,)


class Reader:
    """A kind of file: how it is written, which of its files is damaged, how it is read."""

    # Whether the error must name the file: the caller of `decode` and others adds it
    names = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self) -> list[Path]:
        raise NotImplementedError

    def read(self, path: Path) -> None:
        raise NotImplementedError


class Records(Reader):
    def write(self) -> list[Path]:
        path = self.folder / "a.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for n in range(3):
                image = tf.io.encode_png(np.full((3, 4, 3), n, np.uint8)).numpy()
                feature = {
                    "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[n + 1])
                    ),
                }
                features = tf.train.Features(feature=feature)
                writer.write(tf.train.Example(features=features).SerializeToString())
        return [path]

    def read(self, path: Path) -> None:
        source = TFRecords(path)
        for n in range(source.count):
            try:
                source.read(n)
            except SampleError as error:  # As the filler says it
                raise SampleError(f"{source.where(n)}: {error}") from error


class Arrays(Reader):
    def write(self) -> list[Path]:
        images, labels = np.zeros((4, 2, 2), np.uint8), np.arange(4)
        entries = dict(train_images=images, train_labels=labels)
        np.savez(self.folder / "plain.npz", **entries, test_images=images, test_labels=labels)
        np.savez_compressed(
            self.folder / "packed.npz", **entries, test_images=images, test_labels=labels
        )
        return [self.folder / "plain.npz", self.folder / "packed.npz"]

    def read(self, path: Path) -> None:
        settings = ArrayFile(file=path, memory=self.folder)
        settings.build(DataRank(Topology(1, 1), 0)).close()


class Idx(Reader):
    def write(self) -> list[Path]:
        path = self.folder / "a.gz"
        path.write_bytes(gzip.compress(struct.pack(">4B2I", 0, 0, 8, 2, 3, 4) + bytes(12)))
        return [path]

    def read(self, path: Path) -> None:
        read_idx(path, (3, 4))


class Lines(Reader):
    def write(self) -> list[Path]:
        for name in "ab":
            (self.folder / name).write_text("eins\nzwei äöü\ndrei\n" * 5, encoding="utf-8")
        return [self.folder / "a", self.folder / "b"]

    def read(self, path: Path) -> None:
        list(LinePairs(self.folder / "a", self.folder / "b"))


class Messages(Reader):
    def write(self) -> list[Path]:
        path = self.folder / "de.mo"
        head = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n != 1);"
        texts = [("", head), ("open file", "Datei öffnen"), ("one\0more", "eins\0mehr")]
        at, tables, data = 28 + 16 * len(texts), [b"", b""], b""
        for side in (0, 1):
            for pair in texts:
                text = pair[side].encode()
                tables[side] += struct.pack("<II", len(text), at + len(data))
                data += text + b"\0"
        places = 28, 28 + 8 * len(texts)
        magic = struct.pack("<7I", 0x950412DE, 0, len(texts), *places, 0, 0)
        path.write_bytes(magic + b"".join(tables) + data)
        return [path]

    def read(self, path: Path) -> None:
        list(catalogue_pairs(path))


class Corpora(Reader):
    def write(self) -> list[Path]:
        for name in "ab":
            lines = [f"the {n} dogs and {n} cats" for n in range(60)]
            (self.folder / name).write_text("\n".join(lines), encoding="utf-8")
        self.read(self.folder)
        return [path for path in (self.folder / "kept").rglob("*") if path.is_file()]

    def read(self, path: Path) -> None:
        pairs = LinePairs(self.folder / "a", self.folder / "b")
        words, *corpora = open_corpora(pairs, pairs, 60, self.folder / "kept")
        for corpus in corpora:
            for n in range(min(len(corpus.source), 5)):
                corpus.source[n], corpus.target[n]
        words.encode(["the dogs"])


class Pictures(Reader):
    names = False

    def write(self) -> list[Path]:
        image, paths = Image.radial_gradient("L").resize((20, 30)), []
        for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
            for mode in ("L", "RGB", "P", "RGBA", "CMYK", "I;16"):
                out = io.BytesIO()
                try:
                    (image if mode == "I;16" else image.convert("RGB")).convert(mode).save(
                        out, form
                    )
                except (OSError, ValueError):
                    continue  # Not of this format
                paths.append(self.folder / f"{mode.replace(';', '')}.{form}")
                paths[-1].write_bytes(out.getvalue())
        return paths

    def read(self, path: Path) -> None:
        pixels = decode(path.read_bytes(), 3, 8, 10**6)
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


class Level(Reader):
    def write(self) -> list[Path]:
        level = Disk(self.folder, "key", 8)
        for sample in range(8):
            level.write(sample, sample, bytes([sample]) * 40)
        level.close()
        return list(level.folder.iterdir())

    def read(self, path: Path) -> None:
        level = Disk(self.folder, "key", 8)
        for sample in range(8):
            got = level.read(sample)
            assert got is None or got == (bytes([sample]) * 40, sample)
        level.close()


class Slabs(Reader):
    def write(self) -> list[Path]:
        path = self.folder / f"{prefix()}a.slab"
        path.unlink(missing_ok=True)
        slab = Slab(path, "k", 8, lambda: 40_000, {"source": "s"})
        for sample in range(4):
            slab.put(sample, sample, np.full((5, 4, 3), sample, np.uint8))
        content = path.read_bytes()
        slab.close()
        path.touch(0o600)
        path.write_bytes(content)
        return [path]

    def read(self, path: Path) -> None:
        import fcntl
        import os

        other = os.open(path, os.O_RDONLY)  # It has a living owner, so it is not removed
        fcntl.flock(other, fcntl.LOCK_SH)
        try:
            reserved_bytes(path)
            slab = Slab(path, "k", 8, lambda: 40_000, {"source": "s"})
            try:
                for sample in range(8):
                    slab.get(sample)
                    slab.intact(sample)
                    slab.put(sample, 1, np.zeros((3, 3, 3), np.uint8))
                slab.holes()
                slab_state(path)
            finally:
                slab.close()
        finally:
            os.close(other)


class Snapshots(Reader):
    """Snapshots of a supervised run in memory: `held` deletes damaged files and raises nothing."""

    def write(self) -> list[Path]:
        place = SnapshotFolder(self.folder / "memory", Path("run"))
        place.make()
        head = Head(3, 0, 1, step=4, notes={"run": "a run"})
        place.write(memory_model_name(3), {"weight0": np.arange(100.0)})
        place.write(residuals_name(3, 0), {"head": head_array(head), "own0": np.zeros(9)})
        return sorted(place.path.iterdir())

    def read(self, path: Path) -> None:
        SnapshotFolder(self.folder / "memory", Path("run")).held()


class Json(Reader):
    file = "a.json"

    def content(self) -> Any:
        raise NotImplementedError

    def write(self) -> list[Path]:
        path = self.folder / self.file
        path.write_text(json.dumps(self.content()))
        return [path]


class Summary(Json):
    file = "summary.json"

    def content(self) -> Any:
        return dict.fromkeys(REQUIRED, 1)

    def read(self, path: Path) -> None:
        read_summary(self.folder)


class DryRun(Json):
    file = "dry_run.json"

    def content(self) -> Any:
        return {"ranks": 1, "phases": [{"throughput": 3.0}]}

    def read(self, path: Path) -> None:
        read_alone(self.folder)


class LinksFile(Json):
    def content(self) -> Any:
        return {"links": NOMINAL.to_dict(), "points": {"inside": [[1, 2]]}}

    def read(self, path: Path) -> None:
        Links.read(path)


class Timeline(Json):
    def content(self) -> Any:
        return [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "gradient"}},
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 1, "pid": 1},
            {"ph": "X", "name": "0", "ts": 2, "pid": 1, "dur": 0},
            {"ph": "E", "ts": 5, "pid": 1},
            {"ph": "B", "name": "ALLREDUCE", "ts": 6, "pid": 1},
            {"ph": "E", "ts": 9, "pid": 1, "args": {"dtype": "float32", "shape": "[3, 4]"}},
        ]

    def read(self, path: Path) -> None:
        read_timeline(path)


class ProfileFile(Json):
    def content(self) -> Any:
        row = {"name": "v", "shape": [2, 3], "dtype": "float32"}
        return {"model": "m", "forward": 0.1, "variables": [row]}

    def read(self, path: Path) -> None:
        Profile.read(path)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the file cut, changed, moved, repeated or filled up."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(9):
            case 0:
                del data[at:]
            case 1:
                del data[at : at + chance.randrange(1, 20)]
            case 2:
                data[at:at] = chance.randbytes(chance.randrange(1, 20))
            case 3:
                data[at:at] = data[:at]
            case 4:
                data[at : at + 8] = struct.pack("<q", chance.choice([-1, 2**63 - 1, -(2**63), 0]))
            case 5:
                data[at : at + 4] = struct.pack(">I", chance.choice([0, 2**32 - 1, 2**31, 7]))
            case 6 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 7:
                data[at:at] = chance.choice([b"[" * 100_000, b"\xff\xfe", b"\0" * 64, b"1e999"])
            case _ if data:
                data[at % len(data)] = chance.choice(b'0123456789"[]{}:,-.e\n\r\\\0\xff')
    return bytes(data)


READERS = [
    *(Records, Arrays, Idx, Lines, Messages, Corpora, Pictures, Level, Slabs),
    *(Summary, DryRun, LinksFile, Timeline, ProfileFile, Snapshots),
]


def cases(content: dict[Path, bytes], chance: random.Random) -> Iterator[tuple[Path, bytes]]:
    """Return files with damaged contents, first the ones that users meet: empty, cut, another."""
    for path, whole in content.items():
        for plain in (b"", whole[:-1], whole[: len(whole) // 2], b"<html>not found</html>\n"):
            yield path, plain
    while True:
        path = chance.choice(list(content))
        yield path, damaged(content[path], chance)


def try_reader(reader: Reader, seconds: float, seed: int) -> int:
    """Damage the files of a reader for some seconds; return how many it has refused."""
    content = {path: path.read_bytes() for path in reader.write()}
    modes = {path: path.stat().st_mode for path in content}
    refused, end = 0, time.monotonic() + seconds
    for path, changed in cases(content, random.Random(seed)):
        for each, whole in content.items():
            each.touch(modes[each] & 0o777)
            each.write_bytes(changed if each == path else whole)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(path)
        except ERRORS as error:
            refused += 1
            assert not reader.names or str(path.parent) in str(error), (seed, path, changed, error)
        except Exception as error:
            error.add_note(f"seed {seed}, {path}: {changed[:2000]!r}")
            raise
        if time.monotonic() > end:
            return refused
    return refused


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, kind: Callable[[Path], Reader]) -> None:
    """BadZipFile, EOFError, OverflowError, RecursionError were raised without a file's name."""
    refused = try_reader(kind(tmp_path), SECONDS, random.randrange(2**32))
    assert refused > 0 or kind in (Level, Snapshots)
