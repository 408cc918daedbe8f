"""Ranks as actors of a real Ray cluster of two nodes on this host."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import tfcommx.ray
from tfcommx.core import ConfigurationError, LaunchError


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes with places for two workers each."""
    reason = "Ray is not installed: pip install 'ray>=2.40'"
    # This folder is called ray, too, and would do for `import ray`
    utils = pytest.importorskip("ray.cluster_utils", reason=reason, exc_type=ImportError)
    import ray

    nodes = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address)
    # Workers do not find this file; of a user's script, which is __main__, Ray sends the function
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()
    nodes.shutdown()


def train(fault: str = "") -> tuple[int, str, str]:
    """Train for some steps; return rank, topology and a hash of the weights."""
    import keras
    import numpy as np

    import tfcommx as cx

    comm = cx.init(node_size=2)  # Ray's two nodes have one host name
    if fault and comm.rank == 2:
        raise ValueError(fault)
    if fault:
        time.sleep(600)
    keras.utils.set_random_seed(comm.rank)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(64)])
    scheme = cx.Scheme("hitopk", "mstopk", 0.05, dense_route="torus")
    optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.05), scheme)
    model.compile(optimizer, loss="mse", jit_compile=False)
    random = np.random.default_rng(comm.rank)
    inputs, labels = random.normal(size=(64, 8)), random.normal(size=(64, 64))
    model.fit(inputs, labels, callbacks=[cx.callbacks.BroadcastState()], verbose=0)
    whole = b"".join(weight.tobytes() for weight in model.get_weights())
    topology = f"{comm.topology.nodes} x {comm.topology.slots}"
    return comm.rank, topology, hashlib.sha256(whole).hexdigest()


@pytest.mark.exhaustive
def test_ranks_of_a_node_are_consecutive_and_end_with_the_same_weights(cluster: None) -> None:
    found = tfcommx.ray.run(train, 4, workers_per_node=2)
    assert [rank for rank, _, _ in found] == [0, 1, 2, 3]
    assert {topology for _, topology, _ in found} == {"2 x 2"}
    assert len({weights for _, _, weights in found}) == 1


@pytest.mark.exhaustive
def test_the_rank_that_fails_is_named_and_the_others_end(cluster: None) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)Rank 2 of 4 .*on purpose"):
        tfcommx.ray.run(train, 4, args=("on purpose",), workers_per_node=2)
    assert time.monotonic() - start < 200


@pytest.mark.exhaustive
def test_places_that_the_cluster_does_not_have_are_named(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfcommx.ray, "START_SECONDS", 2.0)
    with pytest.raises(LaunchError, match=r"\b3\b.*\bCPU\b"):
        tfcommx.ray.run(train, 6, workers_per_node=2)


@pytest.mark.parametrize(
    ("workers", "each", "received"),
    [
        (0, None, r"`num_workers`.*\b0\b"),
        (4, 3, r"workers_per_node\b.*\b4\b.*\b3\b"),
        (4, 0, r"`workers_per_node`.*\b0\b"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    workers: int, each: int | None, received: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfcommx.ray, "_ray", lambda: None)
    with pytest.raises(ConfigurationError, match=received):
        tfcommx.ray.run(train, workers, workers_per_node=each)


def test_a_drivers_environment_does_not_make_ranks_of_another_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `environment=dict(os.environ)` in a job of torchrun each rank trained alone."""

    class Worker:
        """An actor whose call returns its variables."""

        free_port = SimpleNamespace(remote=lambda: 7)
        call = SimpleNamespace(remote=lambda variables, train: tuple(variables.items()))

    ray = SimpleNamespace(
        get=lambda found: found,
        wait=lambda waiting: (waiting[:1], waiting[1:]),
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    places = [tfcommx.ray.WorkerLocation("node", "10.0.0.1", "")] * 2
    own = {"WORLD_SIZE": "1", "MASTER_ADDR": "far", "HOROVOD_RANK": "3", "TFCOMMX_SECRET": "own"}
    found = tfcommx.ray._call(ray, [Worker(), Worker()], places, train, (), own | {"MINE": "1"})
    for rank, variables in enumerate(map(dict, found)):
        assert variables.pop("TFCOMMX_SECRET") != "own"
        assert variables == {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "7",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MINE": "1",
        }


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with contextlib.suppress(KeyError):
        monkeypatch.delitem(sys.modules, "ray.util")
    with pytest.raises(LaunchError, match=r"pip install 'ray>=2\.40'"):
        tfcommx.ray.run(train, 2)
