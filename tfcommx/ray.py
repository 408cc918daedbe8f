"""Runs a training function on the workers of a Ray cluster.

    import tfcommx.ray

    def train(rate):
        import tfcommx as cx

        cx.init()
        ...
        return model.evaluate(...)

    results = tfcommx.ray.run(train, num_workers=8, workers_per_node=4, args=(0.1,))

Each rank is a Ray actor. The ranks meet as those of torchrun do, by variables with their
ranks, and by a secret of this launch. Needs Ray: pip install 'ray>=2.40'.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfcommx.core import ConfigurationError, LaunchError, RankLostError, check_whole
from tfcommx.launch.known_launchers import variables as of_launchers

# Seconds for all workers to be placed and started
START_SECONDS = 300.0
# Seconds for a worker that has trained to end without being killed
END_SECONDS = 10.0


class WorkerLocation(NamedTuple):
    """The node, address and GPUs of a worker."""

    # Ray's name of the node
    node: str
    address: str
    # CUDA_VISIBLE_DEVICES as Ray sets it: the GPUs that this worker has
    gpus: str


class RayWorker:
    """A rank, in a separate process; Ray makes an actor of this class."""

    def place(self) -> WorkerLocation:
        """Return the place of this process."""
        import ray

        context = ray.get_runtime_context()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return WorkerLocation(context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def free_port(self) -> int:
        """Return a TCP port at which no process listens now."""
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])

    def call(self, variables: Mapping[str, str], train: Callable[..., Any], *args: Any) -> Any:
        """Become a rank and train; return the result of the function."""
        # Ray's own processes may have variables from the launcher that started them
        for name in ("TFCOMMX_PORT", *of_launchers()):
            os.environ.pop(name, None)
        os.environ.update(variables)
        return train(*args)


def run(
    train: Callable[..., Any],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    workers_per_node: int | None = None,
    resources: Mapping[str, float] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call a function on new workers, which `cx.init()` makes the ranks of one launch.

    Args:
        train: calls `cx.init()` and trains. Ray pickles it and its result.
        num_workers: number of ranks, >= 1.
        args: of `train`, the same on all ranks.
        workers_per_node: ranks on each node, which must divide num_workers; nodes then have equally
            many, as routes that use the node's links need. None: as few nodes as possible.
        resources: the needs of one worker, in Ray's units, such as {"CPU": 4, "GPU": 1}; default
            {"CPU": 1}.
        environment: variables of all ranks, except for those that set a rank's identity.

    Returns:
        The result of each rank's call, by rank. Ranks of a node are consecutive, and those on the
        driver's own node are first.

    **Ranks:** the driver calls; `ray.init()` may have been called before. **Raises:** LaunchError
    for a missing Ray, or places that the cluster does not have within 300 s; RuntimeError that
    names the rank which failed first; then all others have been ended.
    """
    ray = _ray()
    check_whole("num_workers", num_workers, least=1)
    each = dict(resources or {"CPU": 1})
    bundles, strategy = [each] * num_workers, "PACK"
    if workers_per_node is not None:
        check_whole("workers_per_node", workers_per_node, least=1)
        if num_workers % workers_per_node:
            raise ConfigurationError(
                f"workers_per_node must divide num_workers, {num_workers}. Received "
                f"{workers_per_node}."
            )
        per_node = {name: amount * workers_per_node for name, amount in each.items()}
        # STRICT_SPREAD puts each bundle on another node, so that all nodes have equally many ranks
        bundles, strategy = [per_node] * (num_workers // workers_per_node), "STRICT_SPREAD"
    if not ray.is_initialized():
        ray.init()
    group = ray.util.placement_group(bundles, strategy=strategy)
    workers: list[Any] = []
    try:
        if not group.wait(START_SECONDS):
            raise LaunchError(
                f"{len(bundles)} places of {bundles[0]} ({strategy}) are required for "
                f"{num_workers} workers. The cluster has {ray.cluster_resources()} and gave none "
                f"within {START_SECONDS:g} s."
            )
        workers, places = _start(ray, group, each, num_workers, len(bundles))
        results = _call(ray, workers, places, train, args, environment or {})
        # Asked to end first, because exit handlers do not run in a worker that `ray.kill` ends
        ends = [worker.__ray_terminate__.remote() for worker in workers]
        ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
        return results
    finally:
        for worker in workers:
            # Also after a failure, because the other ranks wait for the failed one in a collective
            ray.kill(worker)
        ray.util.remove_placement_group(group)


def _ray() -> Any:
    """Import Ray, or say how to get it."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise LaunchError("Ray is required: pip install 'ray>=2.40'.") from error
    return ray


def _start(
    ray: Any, group: Any, each: dict[str, float], workers: int, bundles: int
) -> tuple[list[Any], list[WorkerLocation]]:
    """Start the workers; return them and their places, node by node, the driver's node first."""
    own_options = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    # Zero for a resource that is not asked for, because an actor otherwise needs a CPU to be
    # placed, which its bundle may lack
    options: dict[str, Any] = {option: each.get(name, 0) for name, option in own_options.items()}
    options["resources"] = {name: each[name] for name in each.keys() - own_options.keys()}
    actor = ray.remote(RayWorker)
    started = [
        actor.options(
            **options,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number * bundles // workers
            ),
        ).remote()
        for number in range(workers)
    ]
    try:
        places = ray.get([worker.place.remote() for worker in started], timeout=START_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise LaunchError(
            f"{workers} workers must start within {START_SECONDS:g} s. Not all did: `ray list "
            "actors` says why."
        ) from error
    # Rank 0 is on the driver's node, if that has a worker, because it writes files
    driver_address = ray.util.get_node_ip_address()
    nearest = sorted(places, key=lambda place: place.address != driver_address)
    nodes = list(dict.fromkeys(place.node for place in nearest))
    order = sorted(range(workers), key=lambda number: nodes.index(places[number].node))
    return [started[number] for number in order], [places[number] for number in order]


def _call(
    ray: Any,
    workers: list[Any],
    places: list[WorkerLocation],
    train: Callable[..., Any],
    args: Sequence[Any],
    environment: Mapping[str, str],
) -> list[Any]:
    """Give each worker its rank, let it train, and stop at the first that fails."""
    # The driver's environment may be given whole, with variables of the launch that it belongs to
    identity = {*of_launchers(), "TFCOMMX_SECRET"}
    shared = {
        **{name: value for name, value in environment.items() if name not in identity},
        "WORLD_SIZE": str(len(workers)),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(ray.get(workers[0].free_port.remote())),
        "TFCOMMX_SECRET": secrets.token_hex(16),
    }
    seen: Counter[str] = Counter()
    ranks: dict[Any, int] = {}
    for rank, (worker, place) in enumerate(zip(workers, places, strict=True)):
        # Counted by address, because several of Ray's nodes may share a host and its GPUs
        rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(seen[place.address])}
        seen[place.address] += 1
        # `cx.init` takes the GPU with the number of the local rank
        named = ",".join(
            neighbour.gpus for neighbour in places if neighbour.address == place.address
        )
        gpus = ",".join(dict.fromkeys(filter(None, named.split(","))))
        rank_variables |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        ranks[worker.call.remote({**shared, **rank_variables}, train, *args)] = rank
    # Received as they end, not by rank: a rank that waits for the failed one would hide the failure
    results: dict[int, Any] = {}
    waiting = list(ranks)
    while waiting:
        (ended, *_), waiting = ray.wait(waiting)
        rank = ranks[ended]
        try:
            results[rank] = ray.get(ended)
        except ray.exceptions.RayError as error:
            raise RankLostError(
                f"Rank {rank} of {len(workers)} failed on {places[rank].address}; the others have "
                f"been ended. {error}"
            ) from error
    return [results[rank] for rank in range(len(workers))]
