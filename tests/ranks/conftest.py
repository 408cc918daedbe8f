"""Tests in this folder run on any number of ranks: one under pytest, more under horovodrun."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tfcommx as cx

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
# Tests compare results of several ranks with those of one, closer than 10 bits of mantissa
tf.config.experimental.enable_tensor_float_32_execution(False)
if tf.config.list_physical_devices("GPU"):
    # Tests compare two trainings bit by bit; a GPU adds gradients in an order that varies
    tf.config.experimental.enable_op_determinism()
    tf.random.set_seed(0)  # TensorFlow then requires one


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose for `make test`; `make test-all` runs all tests on one rank and on two.

    One rank alone cannot differ from another, so it runs the tests marked `one_rank`, which do not
    compare ranks, and those of routes. Launches run all others.
    """
    launched = "TFCOMMX_TEST_NODE_SIZE" in os.environ  # set by launching.run_tests
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        of_routes = item.path.name == "test_routes.py" and item.get_closest_marker("every_launch")
        alone = item.get_closest_marker("one_rank")
        if alone if launched else not (alone or of_routes):
            item.add_marker("exhaustive")


def pytest_runtest_logfinish() -> None:
    """Under a launcher, free a test's objects before the next one begins, on all ranks at once.

    Left to Python, the graphs and files of dozens of tests are freed together, at a different point
    on each rank: that takes longer than one after the other, and all ranks wait for it. The
    remaining objects are TensorFlow's, and are excluded from later collections, because looking
    through them took a third of a second per test.

    Keras counts layers to name them. Some tests build a model on one rank alone, after which the
    same model would have another name on each rank.
    """
    if "TFCOMMX_TEST_NODE_SIZE" not in os.environ:
        return
    gc.disable()
    keras.utils.clear_session()  # It collects, too
    gc.freeze()


@pytest.fixture(scope="session")
def comm() -> cx.collectives.comm.Comm:
    """Return the real Comm of this process.

    NODE_SIZE in the test's environment says how many ranks stand for a node.
    """
    size = os.environ.get("TFCOMMX_TEST_NODE_SIZE")
    return cx.init(node_size=int(size) if size else None)


@pytest.fixture(autouse=True)
def _no_warnings_of_traces() -> Iterator[None]:
    """Tests require that nothing is logged, and TensorFlow counts a step's traces by its `id`.

    A step that has the `id` of other tests' steps has their traces, too, of which it then warns.
    """
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    yield
    logger.setLevel(level)


@pytest.fixture
def folder(comm: cx.collectives.comm.Comm, tmp_path: Path) -> Path:
    """A folder that all ranks see."""
    return Path(comm.gather_objects(str(tmp_path))[0])
