"""`tfcommx cache warm`, `status` and `drop`, as they are typed."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import warm_ranks
from launching import QUICK, ROOT

import tfcommx as cx
from tfcommx.cli.cache import _fill
from tfcommx.cli.main import main
from tfcommx.core import DataError
from tfcommx.data.disk import Disk
from tfcommx.data.slab import Slab
from tfcommx.data.slab_files import prefix, slab_state
from tfcommx.data.sources import find_source


def start(*words):
    command = [sys.executable, "-m", "tfcommx.cli.main", "cache", *map(str, words)]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(alone=True)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*words):
    process = start(*words)
    printed, said = process.communicate(timeout=120)
    return process.returncode, printed, said


def test_warm_status_and_drop(tmp_path, monkeypatch):
    photos, memory, disk = tmp_path / "photos", tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    for kind in "ab":
        (photos / kind).mkdir(parents=True)
        for n in range(35):
            picture = tf.io.encode_jpeg(np.full((40, 30, 3), n, np.uint8)).numpy()
            (photos / kind / f"{n}.jpg").write_bytes(picture)
    (photos / "b" / "broken.jpg").write_bytes(b"not a picture")

    status, _, said = run("warm", photos, "--memory", memory)
    assert status == 2 and "--disk FOLDER, or --hold" in said
    # Takes no shared memory, because no process would use it
    status, printed, said = run("warm", photos, "--memory", "/proc", "--disk", disk)
    assert status == 0 and "70 of 71 samples on disk" in printed and "broken.jpg" in said, said
    holding = start("warm", photos, "--memory", memory, "--disk", disk, "--store", 20, "--hold")
    printed = []
    for line in holding.stdout:
        printed.append(line)
        if "until this command" in line:
            break
    assert any("70 of 71 samples" in line for line in printed), [*printed, holding.stderr.read()]
    options = ("--memory", memory, "--disk", disk)
    _, listed, _ = run("status", *options)
    assert (
        "70 of 71 samples" in listed
        and "in use" in listed
        and str(photos) in listed
        and ": 70 samples" in listed
    )
    _, removed, _ = run("drop", "--memory", memory)
    assert removed == "" and len(list(memory.iterdir())) == 1  # a living process holds it
    holding.send_signal(signal.SIGTERM)
    assert "broken.jpg" in holding.communicate(timeout=60)[1] and holding.returncode == 0
    assert list(memory.iterdir()) == []

    damaged = memory / f"{prefix()}x.slab"
    damaged.touch(0o600)
    damaged.write_bytes(b"no slab")
    # As in most languages' locales: a name that is no UTF-8 ended the list
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    slab = Slab(memory / f"{prefix()}y.slab", "k", 4, lambda: 10**5, {"source": "\udcffphotos"})
    _, listed, said = run("status", *options)
    assert "no slab" in listed and "\\udcffphotos" in listed, said
    slab.close()
    _, removed, _ = run("drop", *options)
    assert removed.count("removed") == 2 and list(memory.iterdir()) == list(disk.iterdir()) == []


def test_samples_that_the_disk_does_not_take_are_not_counted(tmp_path, capsys):
    """All samples that were read were "on disk", though nothing could be written there."""
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for n in range(3):
        picture = tf.io.encode_jpeg(np.full((4, 4, 3), n, np.uint8)).numpy()
        (tmp_path / "photos" / "a" / f"{n}.jpg").write_bytes(picture)
    (tmp_path / "file").touch()
    for disk, count in (("file", 0), ("disk", 3)):
        room = dict(memory=tmp_path, memory_bytes=1, partial=True)
        cache = cx.DataCache(tmp_path / "photos", disk=tmp_path / disk, **room)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _fill(cache, cx.init(), False)
        cache.close()
        assert f" {count} of 3 samples on disk" in capsys.readouterr().out


@pytest.mark.extended
@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_warm_on_the_nodes_of_a_launch(tmp_path, slots):
    memory = tmp_path / "memory"
    memory.mkdir()
    for n in range(40):
        (tmp_path / "photos" / str(n % 2)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / str(n % 2) / f"{n}.jpg").write_bytes(
            tf.io.encode_jpeg(np.full((40, 30, 3), n, np.uint8)).numpy()
        )
    words = [
        "horovodrun",
        "-np",
        str(2 * slots),
        "--gloo",
        "-H",
        f"localhost:{slots},127.0.0.1:{slots}",
        sys.executable,
        "-m",
        "tfcommx.cli.main",
        "cache",
        "warm",
        str(tmp_path / "photos"),
        "--memory",
        str(memory),
        "--hold",
        "--seed",
        "5",
    ]
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": QUICK,
        **warm_ranks.environment(),
    }
    with subprocess.Popen(
        words, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as launch:
        lines, held = [], 0
        for line in launch.stdout:
            lines.append(line)
            held += "until this command" in line
            if held == 2 * slots:
                break
        slabs = sorted(memory.glob("*.slab"))
        shares = [slab_state(slab)[:2] for slab in slabs]
        launch.send_signal(signal.SIGTERM)
        lines += launch.communicate(timeout=60)[0]
    assert held == 2 * slots and shares == [(40, 20), (40, 20)], lines
    assert [slab.stem[-2:] for slab in slabs] == ["-0", "-1"] and list(memory.iterdir()) == [], (
        lines
    )


@pytest.mark.parametrize(
    "words",
    [
        ("warm", "/nope", "--hold"),
        ("status", "--memory", "/nope"),
        ("status", "--disk", "/nope"),
        ("drop", "--memory", "/nope"),
        ("drop", "--disk", "/nope"),
    ],
)
def test_a_folder_that_does_not_exist_is_named_in_one_line(words, tmp_path, monkeypatch, capsys):
    elsewhere = () if "--memory" in words else ("--memory", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["tfcommx", "cache", *words, *elsewhere])
    with pytest.raises(SystemExit) as ended:
        main()
    printed, said = capsys.readouterr()
    assert (ended.value.code, printed) == (2, "")
    assert said.startswith("tfcommx: ") and "/nope" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("./nope", r"^(?!.*TensorFlow).*\bnope\b"),
        (__file__, r"^(?!.*TensorFlow).*test_cache_command\.py"),
        ("photos/train", "'photos/train': Dataset photos"),
        ("imagenette/nope", "BuilderConfig nope"),
        ("imagenette/160px-v2:9.9.9", r"'9\.9\.9'.*only: 1\.0\.0"),
    ],
)
def test_a_source_that_does_not_exist_is_named_in_one_line(text, named):
    with pytest.raises(DataError, match=named) as error:
        find_source(text, "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("command", ["status", "drop"])
def test_the_home_is_expanded(command, tmp_path, monkeypatch, capsys):
    """A shell leaves `--disk=~/disk` as it is, and the command listed and removed nothing."""
    level = Disk(tmp_path / "disk", "key", 5)
    level.write(3, 1, b"picture")
    level.close()
    (tmp_path / "memory").mkdir()
    slab = Slab(tmp_path / "memory" / f"{prefix()}y.slab", "k", 4, lambda: 10**5)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        sys, "argv", ["tfcommx", "cache", command, "--memory=~/memory", "--disk=~/disk"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    slab.close()
    listed = capsys.readouterr().out
    assert not ended.value.code and str(level.folder) in listed
    assert (str(slab.path) in listed) == (command == "status")
