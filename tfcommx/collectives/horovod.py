"""Horovod's collectives. The only module that imports Horovod."""

import contextlib
import http
import os
import re
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from tfcommx.collectives.comm import LARGEST_COUNT, Comm
from tfcommx.collectives.messages import Messages
from tfcommx.collectives.plain_data import decode, encode
from tfcommx.collectives.point_to_point import PointToPoint
from tfcommx.core import ConfigurationError, LaunchError, PlanError, Topology, Traffic
from tfcommx.launch.interpreter import environment
from tfcommx.launch.known_launchers import check_alone
from tfcommx.launch.launcher import Launcher

T = TypeVar("T")

# The tested release; its private functions are used
HOROVOD = "0.28."
# Milliseconds of Horovod's cycle if NCCL carries the collectives. It is shorter than Horovod's
# default, 1 ms, because three collectives in a chain wait up to a cycle each. On one GPU that two
# ranks share, both take the same time; between GPUs it was not measured.
CYCLE_ON_GPUS = "0.1"
# Names of the collectives of `gather_objects`
_GATHERED_HEADS, _GATHERED = {"name": "tfcommx.heads"}, {"name": "tfcommx.objects"}
# Bytes of a head: the number of bytes of the object, little-endian, and up to ROOM of them. Most
# objects fit, and need no second collective. All heads are equally long, because Horovod then
# caches the agreement of the ranks on their shape.
HEAD = 1024
_COUNT = np.dtype("<i8")
ROOM = HEAD - _COUNT.itemsize


def import_horovod() -> tuple[ModuleType, ModuleType]:
    """Import Horovod's module for TensorFlow, and its operations.

    **Raises:** LaunchError if Horovod is missing, hidden by a file of its name, of another release,
    or built for another TensorFlow.
    """
    remedy = (
        "Install it after TensorFlow: python scripts/setup, or as docs/how-to/install.md describes."
    )
    _require_keras()
    try:
        import horovod
        import horovod.tensorflow as hvd
        from horovod.tensorflow import mpi_ops
    except (ImportError, tf.errors.NotFoundError) as error:
        if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
            raise LaunchError(
                "Horovod imports tf.keras. Received TF_USE_LEGACY_KERAS="
                f"{os.environ['TF_USE_LEGACY_KERAS']}, which replaces it by the package tf_keras, "
                f"and: {error} Unset the variable, because tfcommx trains models of Keras 3."
            ) from error
        module = sys.modules.get("horovod")
        if module is not None and not hasattr(module, "__path__"):
            raise LaunchError(
                "The package horovod is required. Received the file "
                f"{getattr(module, '__file__', None)}, which has its name. Rename that file."
            ) from error
        raise LaunchError(
            f"Horovod {HOROVOD}x, built for TensorFlow {tf.__version__}, is required. Received: "
            f"{error}. {remedy}"
        ) from error
    if not horovod.__version__.startswith(HOROVOD):
        raise LaunchError(
            f"Horovod {HOROVOD}x is required. Received {horovod.__version__}. {remedy}"
        )
    return hvd, mpi_ops


def _require_keras() -> None:
    """Refuse another backend of Keras, before an error that does not name it."""
    try:
        import keras

        received = f"the backend {keras.config.backend()!r}"
        if keras.config.backend() == "tensorflow":
            return
    except ImportError as error:
        received = f"KERAS_BACKEND={os.environ.get('KERAS_BACKEND', '')}, and: {error}"
    raise LaunchError(
        f"Keras 3 with its backend TensorFlow is required. Received {received}. Set "
        "KERAS_BACKEND=tensorflow, or the backend in ~/.keras/keras.json, or install Keras: "
        "pip install keras."
    )


def serve_rendezvous(slots: Mapping[str, int], address: str) -> int:
    """Serve the rendezvous of ranks under Gloo, as horovodrun would.

    Args:
        slots: host -> number of its ranks, in rank order.
        address: address of this host at which all ranks reach it.

    Returns:
        The port. The server lives in a thread of this process.
    """
    import_horovod()
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    # Not horovodrun's own server, because that listens at all addresses, accepts values of any
    # size, and reveals the files in its working directory by HEAD
    size = sum(slots.values())
    # Each of Gloo's ranks writes an address of less than 256 bytes for each of the others
    largest = 65536 + 256 * size

    class Handler(RendezvousHandler):
        def do_HEAD(self) -> None:
            self.send_status_code(http.HTTPStatus.METHOD_NOT_ALLOWED)

        def do_PUT(self) -> None:
            length = self.headers.get("Content-Length", "")
            if length.isdecimal() and int(length) <= largest:
                super().do_PUT()
            else:
                self.close_connection = True
                self.send_status_code(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    class Server(RendezvousHTTPServer):
        request_queue_size = 1024  # All ranks connect at once

        def server_bind(self) -> None:
            # Not HTTPServer's, which asks the resolver for the address's name
            socketserver.TCPServer.server_bind(self)

    server = Server((address, 0), Handler, verbose=0)
    server.init(get_host_assignments([HostInfo(*pair) for pair in slots.items()], size))
    threading.Thread(target=server.serve_forever, name="tfcommx-rendezvous", daemon=True).start()
    return int(server.server_address[1])


@contextlib.contextmanager
def without_mpi() -> Iterator[None]:
    """Make Horovod start without MPI in a single process.

    **Raises:** LaunchError if another launcher has started several processes.
    """
    check_alone()
    # A Horovod that was built with MPI would start it in a single process, too
    with environment(dict.fromkeys(("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"), "gloo")):
        yield


def nccl_carries(hvd: ModuleType) -> bool:
    """Return True if NCCL carries collectives of tensors on this process's GPU."""
    return bool(hvd.nccl_built() and tf.config.list_logical_devices("GPU"))


def smaller_groups(topology: Topology) -> list[tuple[int, ...]]:
    """Return the groups that need a process set, which are neither one rank nor all."""
    # Nodes with unequal numbers of ranks have no peers; routes of two levels refuse them
    if topology.uneven:
        return []
    groups = {
        topology.group(name, rank) for rank in range(topology.size) for name in ("node", "peers")
    }
    # In one order on all ranks, because Horovod numbers process sets as they are registered
    return sorted(ranks for ranks in groups if 1 < len(ranks) < topology.size)


def runs_on_gpus(op: str) -> bool:
    """Return True if this process has a GPU on which an operation of Horovod's runs."""
    from tensorflow.python.framework.kernels import get_registered_kernels_for_op

    if not tf.config.list_logical_devices("GPU"):
        return False
    return any(kernel.device_type == "GPU" for kernel in get_registered_kernels_for_op(op).kernel)


class HorovodComm(Comm):
    """Horovod's collectives on static process sets, over NCCL, MPI or Gloo.

    Args:
        make_messages: makes a PointToPoint of this rank; None if messages are impossible.

    **Ranks:** all, with equal topologies. It starts Horovod.
    **Raises:** LaunchError if Horovod is missing, runs already, or counts other ranks.
    """

    def __init__(
        self,
        launch: Launcher,
        topology: Topology,
        make_messages: Callable[..., PointToPoint] | None = None,
    ) -> None:
        hvd, mpi_ops = import_horovod()
        centre_rank = launch.size if launch.centre else None
        messages = Messages(launch.rank, topology, make_messages, centre_rank)
        super().__init__(launch.rank, topology, messages)
        self._hvd, self._ops = hvd, mpi_ops
        # Static sets, because dynamic ones add an exchange of all ranks to each of Horovod's cycles
        sets = {ranks: hvd.ProcessSet(ranks) for ranks in smaller_groups(topology)}
        self._start(launch, list(sets.values()))
        # On a GPU, too, if Horovod was built without NCCL's
        by_nccl = nccl_carries(hvd) and runs_on_gpus("HorovodReducescatter")
        self._gloo_scatters = launch.kind != "mpi" and not by_nccl
        self._sets = {tuple(range(topology.size)): hvd.global_process_set, **sets}
        with tf.device("/cpu:0"):
            # Variables, because traced code counts in each step; float64 is exact up to 2^53 bytes
            self._sent = {
                kind: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=f"bytes_{kind}")
                for kind in Traffic._fields
            }

    def _start(self, launch: Launcher, sets: list[Any]) -> None:
        hvd, size = self._hvd, self.topology.size
        if hvd.is_initialized():
            raise ConfigurationError(
                "tfcommx.init() starts Horovod itself, with its node and peer groups. Received "
                "an initialised Horovod. Call tfcommx.init() instead of hvd.init()."
            )
        threshold = os.environ.get("HOROVOD_FUSION_THRESHOLD", "0")
        # Horovod reads the digits at its beginning, and fuses nothing in 64 bytes
        if not threshold.isdecimal():
            raise ConfigurationError(
                "HOROVOD_FUSION_THRESHOLD must be a number of bytes, in digits. Received "
                f"{threshold!r}. Unset it, or write 64 MiB as 67108864."
            )
        self.by_nccl = nccl_carries(hvd)
        # The user's settings have priority; autotune would not tune a cycle that is set
        is_set = not {"HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE"}.isdisjoint(os.environ)
        settings = {"HOROVOD_CYCLE_TIME": CYCLE_ON_GPUS} if self.by_nccl and not is_set else {}
        with (
            without_mpi() if launch.kind == "none" else contextlib.nullcontext(),
            environment(settings),
        ):
            # `comm` is the ranks that train; None: all processes of the launch
            hvd.init(comm=list(range(size)) if launch.centre else None, process_sets=sets)
            self.progress.ends_when_queued = self.by_nccl and _is_on(
                os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION", "0")
            )
        if (hvd.rank(), hvd.size()) != (launch.rank, size):
            raise LaunchError(
                f"Horovod counts rank {hvd.rank()} of {hvd.size()}, the launcher rank "
                f"{launch.rank} of {size}. Start the script with horovodrun (or mpirun)."
            )
        # Not the topology's; `node_size` may define other nodes
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()

    @property
    def is_running(self) -> bool:
        """False after hvd.shutdown()."""
        return bool(self._hvd.is_initialized())

    def make_join_a_barrier(self) -> None:
        def join(device: int = -1) -> int:
            """Wait for all ranks, in place of letting them step on without this rank's gradients.

            **Returns:** the last rank; all have the same weights.
            """
            self.gather_objects(None)
            return self.topology.size - 1

        if self.topology.size > 1:
            vars(self._hvd)["join"] = join

    def _gather_objects(self, item: T) -> list[T]:
        self.membership.require_all()
        data = np.frombuffer(encode(item), np.uint8)
        head = np.zeros(HEAD, np.uint8)
        head[: _COUNT.itemsize] = np.array([data.size], _COUNT).view(np.uint8)
        head[_COUNT.itemsize :][: data.size] = data[:ROOM]
        # Horovod's allgather_object would unpickle the data (plain_data.py)
        with tf.init_scope():
            heads = self._hvd.allgather(tf.constant(head), **_GATHERED_HEADS).numpy()
            counts, firsts = np.split(heads.reshape(-1, HEAD), [_COUNT.itemsize], axis=1)
            sizes = counts.copy().view(_COUNT)[:, 0]
            if sizes.max() <= ROOM:
                return [
                    decode(first[:size].tobytes())
                    for first, size in zip(firsts, sizes, strict=True)
                ]
            ends = np.cumsum(sizes)
            if ends[-1] > LARGEST_COUNT:  # Bytes, and therefore entries; all ranks refuse it
                raise PlanError(
                    f"Objects of all ranks that are gathered have at most {LARGEST_COUNT} bytes "
                    f"together. Received {ends[-1]}, {data.size} of them from rank {self.rank}. "
                    "Gather less, or in several turns."
                )
            parts = np.split(self._hvd.allgather(tf.constant(data), **_GATHERED).numpy(), ends[:-1])
        return [decode(part.tobytes()) for part in parts]

    def _counted(self) -> Traffic:
        return Traffic(*(float(self._sent[kind].numpy()) for kind in Traffic._fields))

    def _count(self, sent: Traffic) -> None:
        for kind, amount in sent._asdict().items():
            if amount:
                self._sent[kind].assign_add(amount)

    def _run(
        self, collective: str, tensors: Any, name: str, group: str = "", **options: Any
    ) -> Any:
        """Call an operation of Horovod's in a group; "": in the world, without a process set."""
        scope = self._open_scope.name
        if scope:  # It begins with the package's name
            name = name.removeprefix("tfcommx/")
        if group:
            options["process_set"] = self._sets[self.members(group)]
        # Without a slash, because Horovod ignores the part before the last slash, which TensorFlow
        # extends when it inlines functions. The name is also that in HOROVOD_TIMELINE
        options |= {"name": (scope + name).replace("/", "."), "ignore_name_scope": True}
        return _call(getattr(self._ops, collective), tensors, **options)

    def _allreduce(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return self._run("_allreduce", tensor, name, group, op=self._hvd.Sum)

    def _allreduce_list(
        self, tensors: list[tf.Tensor], name: str, average: bool
    ) -> list[tf.Tensor]:
        op = self._hvd.Average if average else self._hvd.Sum
        reduced: list[tf.Tensor] = self._run("_grouped_allreduce", tensors, name, op=op)
        return reduced

    def _reduce_scatter(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        ranks = len(self.members(group))
        # Gloo's own sometimes returns wrong sums for large vectors, without an error
        # (tests/bugs/test_bugs.py)
        if self._gloo_scatters:
            shards = tf.reshape(self._alltoall(tensor, group, name), [ranks, -1, *tensor.shape[1:]])
            return tf.ensure_shape(
                tf.add_n(tf.unstack(shards)), [tensor.shape[0] // ranks, *tensor.shape[1:]]
            )
        # Horovod renegotiates each reduce-scatter, because its response cache has none of them
        shard = self._run("_reducescatter", tensor, name, group, op=self._hvd.Sum)
        return _sized(shard, tensor, 1 / ranks)

    def _all_gather(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        gathered = self._run("allgather", tensor, name, group)
        return _sized(gathered, tensor, len(self.members(group)))

    def _alltoall(self, tensor: tf.Tensor, group: str, name: str) -> tf.Tensor:
        return _sized(self._run("alltoall", tensor, name, group), tensor, 1)

    def _broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        return self._run("broadcast", tensor, name, root_rank=root)


def _call(collective: Callable[..., T], tensors: Any, *, name: str, **options: Any) -> T:
    """Call a collective of Horovod's so that its op keeps its name in any graph.

    **Cost:** in a branch or loop of traced code one more function is traced, some milliseconds, and
    called, some 20 microseconds a collective.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if not isinstance(graph, ControlFlowFuncGraph):
        return collective(tensors, name=name, **options)
    # In a separate function, because TensorFlow renames the ops of a branch in a loop over a data
    # set: it appends the name of the conditional, and after a slash in that, Horovod would find the
    # same name for all collectives of the branch. Conditionals in branches are renamed, too, in an
    # order that may differ between ranks, which would then wait for each other
    options["name"] = graph.unique_name(name).rpartition("/")[-1]
    dtypes = [tensor.dtype for tensor in tf.nest.flatten(tensors)]
    function = tf.function(
        lambda inputs: _as_floats(collective(_with_dtypes(inputs, dtypes), **options)),
        autograph=False,
    )
    inputs = _as_floats(tensors)
    result: T = _with_dtypes(function.get_concrete_function(inputs)(inputs), dtypes)
    return result


def _as_floats(tensors: Any) -> Any:
    """Return int32 tensors as float32 of the same bits, and other tensors unchanged.

    On a GPU, TensorFlow moves the int32 arguments and results of functions to the host and back,
    and wire buffers are int32.
    """
    return tf.nest.map_structure(
        lambda tensor: tf.bitcast(tensor, tf.float32) if tensor.dtype == tf.int32 else tensor,
        tensors,
    )


def _with_dtypes(tensors: Any, dtypes: list[tf.DType]) -> Any:
    """Undo `_as_floats`."""
    restored = [
        tf.bitcast(tensor, tf.int32) if dtype == tf.int32 else tensor
        for tensor, dtype in zip(tf.nest.flatten(tensors), dtypes, strict=True)
    ]
    return tf.nest.pack_sequence_as(tensors, restored)


def _is_on(value: str) -> bool:
    """Return True if Horovod takes the value as on, which begins with a number > 0."""
    number = re.match(r"\s*\+?(\d+)", value)
    return number is not None and int(number[1]) > 0


def _sized(result: tf.Tensor, tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Restore the first dimension, which Horovod's shape functions forget."""
    # Not by an op, because TensorFlow's would move int32, the dtype of wire buffers, from a GPU to
    # the host and back
    result.set_shape([round(tensor.shape[0] * factor), *tensor.shape[1:]])
    return result
