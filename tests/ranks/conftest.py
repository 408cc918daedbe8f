"""Tests in this folder run on any number of ranks: one under pytest, more under horovodrun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensorflow as tf

import tfcommx as cx

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


@pytest.fixture(scope="session")
def comm() -> cx.comm.Comm:
    """Return the real Comm of this process.

    NODE_SIZE in the test's environment says how many ranks stand for a node.
    """
    size = os.environ.get("TFCOMMX_TEST_NODE_SIZE")
    return cx.init(node_size=int(size) if size else None)


@pytest.fixture
def folder(comm: cx.comm.Comm, tmp_path: Path) -> Path:
    """A folder that all ranks see."""
    return Path(comm.gather_objects(str(tmp_path))[0])
