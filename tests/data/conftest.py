"""Shared by the tests of the data cache: pictures, a folder of shared memory, other processes."""

import os
from pathlib import Path

import pytest
from data_helpers import Workers, make_folder


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "photos", 50)


@pytest.fixture
def shm(tmp_path):
    path = Path("/dev/shm") / f"tfcommx-test-{os.getpid()}-{tmp_path.name}"
    path.mkdir(exist_ok=True)
    yield path
    remaining = [file.name for file in path.iterdir()]
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert remaining == [], "a test left a slab behind"


@pytest.fixture(scope="session")
def server_of_workers():
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture
def processes(shm, server_of_workers):
    """Starts processes of a node, and kills those that the test leaves."""
    yield server_of_workers
    server_of_workers.end_started()
