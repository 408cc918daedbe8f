"""Check the ranks' GPUs in `init()`, before any training on them.

Each rank must have a separate GPU, for which ranks compare UUIDs; the native library must be built
for it; and a sum of several tensors must be correct, because Horovod does not check the launches of
its CUDA kernels.
"""

import ctypes
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import ConfigurationError, LaunchError
from tfcommx.kernels import loader
from tfcommx.kernels.build import build_advice, capability, covers, in_words

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def of(number: int) -> str:
    """Return an identity of a GPU, which is equal for processes of a host that see the same GPU.

    **Ranks:** local. **Cost:** none on the GPU; no context is created.
    """
    # Not the number, because a launcher that confines each process to its own GPUs may number all
    # of them 0. Without CUDA's driver, the variable that lists the visible GPUs tells them apart
    if uuid := _uuid(number):
        return f"the GPU {uuid}"
    seen = next((f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ), "")
    return f"the GPU {number}" + f" of {seen}" * bool(seen)


def _uuid(number: int) -> str:
    """Return the UUID in hexadecimal digits; "" without a CUDA driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        # The second version returns the UUID of the slice of a GPU that MIG has divided
        get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        failed = (
            cuda.cuInit(0)
            or cuda.cuDeviceGet(ctypes.byref(device), number)
            or get_uuid(ctypes.byref(uuid), device)
        )
    except (OSError, AttributeError):
        return ""
    return "" if failed else bytes(uuid).hex()


# Entries of the summed tensors; several, or Horovod would not merge them
LENGTHS = (1, 1000, 33, 257)


class RankGpu(NamedTuple):
    """The GPU that a rank keeps, and the code that was built for it."""

    host: str
    # Result of `of`; "": the rank computes on the CPU
    identity: str = ""
    # TensorFlow's name of it, such as "Tesla V100-SXM2-16GB"
    name: str = ""
    # Ten times its compute capability; 0 if TensorFlow does not know it, as for an AMD GPU
    architecture: int = 0
    # Architectures of the rank's native library; None: it has no GPU kernels, or is not used
    built: Sequence[int] | None = None
    # True if Horovod adds tensors on it by CUDA
    sums: bool = False

    def __str__(self) -> str:
        suffix = f" (compute capability {capability(self.architecture)})" * bool(self.architecture)
        return f"{self.name} on {self.host}{suffix}"


def keep_one_gpu(local_rank: int) -> RankGpu:
    """Keep one of the GPUs that this process sees, with memory growth; return it.

    If a launcher binds one or more to each process, they are numbered from 0 in each process.

    **Ranks:** local, before TensorFlow has used a GPU. **Raises:** ConfigurationError after that.
    """
    host = socket.gethostname()
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return RankGpu(host)
    # A launcher that binds a GPU to each process numbers it 0 in all of them
    number = local_rank % len(gpus)
    try:
        tf.config.set_visible_devices(gpus[number], "GPU")
        # TensorFlow would otherwise take all of its memory, and NCCL find none for its buffers
        tf.config.experimental.set_memory_growth(gpus[number], True)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            "With GPUs, init() must come before TensorFlow's first operation, model, and division "
            f"of a GPU, because each rank keeps one GPU. Received on local rank {local_rank}: "
            f"{error}. Move init() up, to the script's first line after its imports."
        ) from error
    details = tf.config.experimental.get_device_details(gpus[number])
    major, minor = details.get("compute_capability", (0, 0))
    name, built = details.get("device_name", "GPU"), loader.gpu_architectures()
    return RankGpu(host, of(number), name, 10 * major + minor, built)


def check_gpus(comm: Comm, own_gpu: RankGpu) -> list[RankGpu]:
    """Refuse ranks that keep the same GPU of a host, and GPUs without code that was built for them.

    Returns:
        The GPUs of all ranks, in rank order.

    **Ranks:** all; the same error on all. **Cost:** one exchange of objects, on the CPU, because
    NCCL would fail with two ranks on a GPU before the reason could be reported.
    **Raises:** LaunchError.
    """
    with tf.device("/cpu:0"):
        everyone = [RankGpu._make(row) for row in comm.gather_objects(tuple(own_gpu))]
    places = [(gpu.host, gpu.identity) for gpu in everyone]
    for rank, gpu in enumerate(everyone):
        first = places.index(places[rank])
        if gpu.identity and first != rank:
            raise LaunchError(
                f"One GPU per process is required. Ranks {first} and {rank} on {gpu.host} both "
                f"keep {gpu.identity}. Launch at most as many processes on this host as it has "
                "GPUs, or bind another GPU to each."
            )
    # Refused, not left to plain TensorFlow with a warning, because a user who has launched on GPUs
    # expects their speed, and one warning is lost in the output of many ranks. Horovod's sums would
    # be wrong on such a GPU, too, because set-up builds Horovod for the same GPUs
    for rank, gpu in enumerate(everyone):
        if gpu.architecture and gpu.built is not None and not covers(gpu.built, gpu.architecture):
            advice = build_advice(gpu.architecture for gpu in everyone if gpu.architecture)
            raise LaunchError(
                "The native library must be built for the GPU of every rank. Received, on rank "
                f"{rank}, {gpu} and a library for {in_words(gpu.built)}. {advice} To do "
                "without GPU kernels, more slowly: `export TFCOMMX_NATIVE=0`."
            )
    return everyone


def check_fused_sum(comm: Comm, everyone: Sequence[RankGpu], device: str = "/gpu:0") -> None:
    """Add several tensors in one collective on the GPUs, and refuse a wrong sum.

    **Ranks:** all; the same error on all.
    **Cost:** none unless Horovod adds on the GPU of every rank; then one allreduce of 5 kB and one
    exchange of objects.
    **Raises:** LaunchError.
    """
    if comm.topology.size == 1 or not all(gpu.sums for gpu in everyone):
        return
    problem = wrong_sum(comm, device)
    with tf.device("/cpu:0"):
        problems = comm.gather_objects(problem)
    for rank, text in enumerate(problems):
        if text:
            advice = build_advice(gpu.architecture for gpu in everyone)
            built = everyone[rank].built
            library = f", which is for {in_words(built)}" if built is not None else ""
            raise LaunchError(
                "Horovod must add the ranks' tensors correctly on their GPUs. Received, on rank "
                f"{rank}, {text}. The ranks have {', '.join(sorted(set(map(str, everyone))))}. On "
                "a GPU that it was not built for, Horovod's CUDA kernels do not run, and it does "
                f"not notice. Set-up builds it for the same GPUs as the native library{library}. "
                f"{advice} If that was done, transfers between GPUs fail: try "
                "`export NCCL_P2P_DISABLE=1`."
            )


def wrong_sum(comm: Comm, device: str) -> str:
    """Add tensors of several lengths over all ranks; return the error of the sums, or "".

    **Ranks:** all. **Cost:** waits for one allreduce.
    """
    # Exact in float32 for up to 5000 ranks: rank r adds r + i + j to entry i of tensor j. The right
    # sums are computed on the host, because a result could get freed memory of a GPU that held them
    size = comm.topology.size
    entries = [np.arange(length, dtype=np.float32) + j for j, length in enumerate(LENGTHS)]
    try:
        with tf.device(device):
            tensors = [tf.constant(values + comm.rank) for values in entries]
            sums = comm.allreduce_list(tensors, "tfcommx.fused_sum", average=False)
            received = [total.numpy() for total in sums]
    except tf.errors.OpError as error:
        return f"an error: {error.message}"
    for j, (values, total) in enumerate(zip(entries, received, strict=True)):
        right = size * values + size * (size - 1) / 2
        wrong = np.flatnonzero(total != right)
        if wrong.size:
            i = int(wrong[0])
            return (
                f"{float(total[i])} in place of {float(right[i])} in entry {i} of tensor "
                f"{j}, and {wrong.size} wrong entries of {values.size} in it"
            )
    return ""
