"""Mirrors: files arrive whole; strangers and the senders of half a file leave nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tfcommx.checkpoint.files import memory_model_name, residuals_name
from tfcommx.checkpoint.mirror import PROTOCOL, Mirrors, partner
from tfcommx.checkpoint.place import SnapshotFolder
from tfcommx.launch.handshake import Handshake

HANDSHAKE = Handshake("secret", PROTOCOL, ("run", 0))


def mirrors(folder: Path, handshake: Handshake = HANDSHAKE) -> Mirrors:
    place = SnapshotFolder(folder, Path("run"))
    place.make()
    return Mirrors(handshake, folder.name, [], place)


def test_files_arrive_and_older_ones_of_that_rank_go(tmp_path: Path) -> None:
    here, there = mirrors(tmp_path / "here"), mirrors(tmp_path / "there")
    for save in range(4):
        here.place.write(residuals_name(save, 3), {"own0": np.random.default_rng(save).random(9)})
        there.place.write(residuals_name(save, 5), {"own0": np.zeros(9)})
        here.send(there.row, 3, [residuals_name(save, 3)], [save - 1, save])
    names = {path.name for path in there.place.path.iterdir()}
    assert {residuals_name(2, 3), residuals_name(3, 3)} == {n for n in names if "rank-0003" in n}
    assert len(names) == 4  # Another rank's files of these saves stay
    sent = (here.place.path / residuals_name(3, 3)).read_bytes()
    assert (there.place.path / residuals_name(3, 3)).read_bytes() == sent


def test_older_models_go_where_they_are_mirrored(tmp_path: Path) -> None:
    """With shards rank 0 alone writes the model: each snapshot stayed on the host after its own."""
    here, there = mirrors(tmp_path / "here"), mirrors(tmp_path / "there")
    for save in range(4):
        names = [residuals_name(save, 0), memory_model_name(save)]
        for name in names:
            here.place.write(name, {"weight0": np.zeros(9)})
        there.place.write(residuals_name(save, 1), {"own0": np.zeros(9)})
        here.send(there.row, 0, names, [save - 1, save])
    models = {path.name for path in there.place.path.glob("model-*")}
    assert models == {memory_model_name(2), memory_model_name(3)}
    assert len(list(there.place.path.iterdir())) == 2 + 2 + 2
    # A rank that sends no model leaves those that this host's own rank has written
    here.place.write(residuals_name(9, 3), {"own0": np.zeros(9)})
    here.send(there.row, 3, [residuals_name(9, 3)], [2, 9])
    assert len(list(there.place.path.iterdir())) == 2 + 2 + 2 + 1


def test_a_stranger_is_refused(tmp_path: Path) -> None:
    there = mirrors(tmp_path / "there")
    here = mirrors(tmp_path / "here", HANDSHAKE._replace(secret="guessed"))
    here.place.write(residuals_name(0, 3), {"own0": np.zeros(9)})
    with pytest.raises(ConnectionError, match="no answer"):
        here.send(there.row, 3, [residuals_name(0, 3)], [0])
    assert not list(there.place.path.iterdir())


@pytest.mark.parametrize("name", ["../../outside.npz", "model-1.keras"])
def test_a_name_outside_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    there = mirrors(tmp_path / "there")
    with socket.create_connection((there.row.addresses[0], there.row.port), 5) as connection:
        said = {"rank": 0, "files": [[name, 3]], "keep": []}
        HANDSHAKE.call(connection, said, time.monotonic() + 60)
        assert connection.recv(1) == b""
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_half_a_file_leaves_nothing(tmp_path: Path) -> None:
    there = mirrors(tmp_path / "there")
    with socket.create_connection((there.row.addresses[0], there.row.port), 5) as connection:
        said = {"rank": 0, "files": [[residuals_name(0, 0), 1000]], "keep": []}
        HANDSHAKE.call(connection, said, time.monotonic() + 60)
        connection.sendall(b"half")
        wait_until(lambda: any(there.place.path.iterdir()))
    wait_until(lambda: not any(there.place.path.iterdir()))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_partners_are_on_the_next_host() -> None:
    hosts = ["red"] * 2 + ["green"] * 3 + ["blue"]
    assert [partner(rank, hosts) for rank in range(6)] == [2, 3, 5, 5, 5, 0]
    assert partner(0, ["red", "red"]) is None
