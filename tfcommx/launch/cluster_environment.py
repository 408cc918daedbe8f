"""Read what launchers other than horovodrun and mpirun tell each process.

    environment --cluster_environment()--> ClusterEnvironment --rendezvous.join()--> Gloo launch

To add a launcher, write a function that returns its ClusterEnvironment, or None if it did not start
this process, and add it to LAUNCHERS. A launcher that is only recognised, so that its processes are
refused instead of training alone, is a row of other_launchers.

Recognise launchers that started several processes, and whose variables make no ranks.

Without this, each of their processes would be rank 0 of 1: it would train alone, and all would save
to the same files. To recognise another one, add a row to OTHER_LAUNCHERS.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfcommx.core import ConfigurationError
from tfcommx.launch.hosts import check_host_name, expand_nodelist


class OtherLauncher(NamedTuple):
    """A launcher, and the variables by which its processes are recognised."""

    # For messages
    name: str
    # Holds the number of processes, or lists them; empty: the launcher does not say it
    size: str
    # Number or name of this process; empty: the launcher does not say it
    rank: str


OTHER_LAUNCHERS = (
    OtherLauncher("MPICH's or Intel MPI's mpiexec (Hydra)", "PMI_SIZE", "PMI_RANK"),
    OtherLauncher("MVAPICH2's mpiexec", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    OtherLauncher("MVAPICH's mpiexec", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"),
    OtherLauncher("a launcher that uses PMIx", "", "PMIX_RANK"),
    OtherLauncher("LSF's jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    OtherLauncher("LSF's blaunch", "", "LSF_PM_TASKID"),
    OtherLauncher("PBS's pbsdsh", "PBS_TASKNUM", ""),
    OtherLauncher("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    OtherLauncher("PALS's mpiexec", "", "PALS_RANKID"),
    OtherLauncher("ALPS's aprun", "", "ALPS_APP_PE"),
    OtherLauncher("torchrun", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    OtherLauncher("Kubeflow's Trainer", "PET_NNODES", "PET_NODE_RANK"),
    OtherLauncher("an indexed job of Kubernetes", "", "JOB_COMPLETION_INDEX"),
    OtherLauncher("a job of Volcano", "", "VC_TASK_INDEX"),
    OtherLauncher("SageMaker", "SM_HOSTS", "SM_CURRENT_HOST"),
    OtherLauncher("Vertex AI", "CLUSTER_SPEC", ""),
    OtherLauncher("Azure Machine Learning", "AZUREML_NODE_COUNT", ""),
    OtherLauncher("a multi-node job of AWS Batch", "AWS_BATCH_JOB_NUM_NODES", ""),
    OtherLauncher("a slice of TPU hosts", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
    OtherLauncher("JAX", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    OtherLauncher("a tracker of DMLC", "DMLC_NUM_WORKER", "DMLC_WORKER_ID"),
    OtherLauncher("Paddle's launcher", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"),
)
# A number of processes of a launcher that has no row
ANY_SIZE = re.compile(r"(?:\w+_)?WORLD_SIZE")


def check_alone() -> None:
    """Refuse a process that is one of several which an unsupported launcher has started.

    A launcher that gives a process its rank, but not how many there are, is refused unless
    another variable states that the process is alone: WORLD_SIZE=1, for one.

    **Ranks:** local. **Raises:** ConfigurationError: each would train alone, and all would save as
    rank 0.
    """
    for row in (*OTHER_LAUNCHERS, *_without_row(os.environ)):
        size, rank = os.environ.get(row.size, ""), os.environ.get(row.rank, "")
        if size:
            several, variable = _count(size) != 1, row.size
        else:
            several, variable = rank != "" and not says_alone(), row.rank
        if several:
            alone = "" if size else ", or set WORLD_SIZE=1"
            raise ConfigurationError(
                "Several processes must be started by tfcommx run, horovodrun, mpirun, srun or "
                "torchrun: by another launcher each trains alone. "
                f"Received {variable}={os.environ[variable]} of {row.name}. Call `tfcommx run -- "
                "python train.py` once in this allocation, or give each process RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT; to train in one process, unset the "
                f"variable{alone}."
            )


def _without_row(variables: Mapping[str, str]) -> list[OtherLauncher]:
    known = {"WORLD_SIZE", *(row.size for row in OTHER_LAUNCHERS)}
    names = sorted(name for name in variables if ANY_SIZE.fullmatch(name) and name not in known)
    return [OtherLauncher("another launcher", name, "") for name in names]


def _count(text: str) -> int | None:
    """Return how many processes a size variable means; None if it cannot be read.

    >>> [_count(text) for text in ("4", "0", '["a", "b"]', "a,b,c", "localhost")]
    [4, 1, 2, 3, 1]
    >>> _count('{"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}}')
    2
    """
    if re.fullmatch(r"\d+", text):
        return max(int(text), 1)
    if text[:1] not in ("[", "{"):
        return len([word for word in text.split(",") if word.strip()])
    try:
        content = json.loads(text)
        if isinstance(content, list):
            return max(len(content), 1)
        return max(sum(len(tasks) for tasks in (content.get("cluster") or {}).values()), 1)
    except (ValueError, TypeError, AttributeError):
        return None


# Above the ports of common services and below those that systems hand out
FIRST_PORT, PORTS = 12_000, 20_000
# Tasks of TF_CONFIG that train, in the order of their ranks
RANK_TASKS = ("chief", "master", "worker")


class ClusterEnvironment(NamedTuple):
    """What a launcher says of one process, before the processes have met."""

    # For messages
    launcher: str
    # In [0, size)
    rank: int
    size: int
    # Number of the process on its host, from 0; None: it does not say
    local_rank: int | None
    # Where rank 0 is
    address: str
    # TCP port at which rank 0 listens
    port: int
    # What ranks of other launches do not have
    launch: str = ""
    # Where rank 0 may be instead, if the launcher does not say at which of several addresses
    others: tuple[str, ...] = ()
    # Whether the launcher says that all ranks are on this host
    one_host: bool = False


def cluster_environment() -> ClusterEnvironment | None:
    """Read what the launcher says; None for a process that none of LAUNCHERS has started.

    **Ranks:** local.
    **Raises:** ConfigurationError that names a variable which is missing or no number, or a rank
    that is not below the number of ranks.
    """
    environments = (read() for read in LAUNCHERS)
    here = next((environment for environment in environments if environment is not None), None)
    if here is not None and here.rank >= here.size:
        raise ConfigurationError(
            f"A rank must be below the number of ranks. Received rank {here.rank} of {here.size} "
            f"from {here.launcher}. Correct its variables, or unset them to train alone."
        )
    return here


def says_alone() -> bool:
    """Return True if a variable of LAUNCHERS states that this process is the only rank."""
    sizes = (os.environ.get(name) for name in ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"))
    return "1" in sizes or bool(os.environ.get("TF_CONFIG") and tf_config() is None)


def srun() -> ClusterEnvironment | None:
    """Read what Slurm's srun says of a task.

    srun's address is the step's first node, its port follows from the job and the step. The list of
    nodes is sorted: where the first rank may be on another one, all of them are addresses.
    """
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") in ("", "0", "1"):
        return None
    job, step = _number("srun", "SLURM_JOB_ID"), _number("srun", "SLURM_STEP_ID")
    nodes = _word("srun", "SLURM_STEP_NODELIST")
    first, *others = [
        check_host_name(name, f"SLURM_STEP_NODELIST={nodes}")
        for name in expand_nodelist(nodes) or [""]
    ]
    return ClusterEnvironment(
        "srun",
        _number("srun", "SLURM_PROCID"),
        _number("srun", "SLURM_STEP_NUM_TASKS"),
        _number("srun", "SLURM_LOCALID"),
        first,
        _own_port() or FIRST_PORT + (97 * job + step) % PORTS,
        f"{job}.{step}",
        () if _begins_at_first_node() else tuple(others),
        os.environ.get("SLURM_STEP_NUM_NODES") == "1",
    )


def _begins_at_first_node() -> bool:
    """Return True if srun has placed the tasks from the first node on.

    It has not with --distribution=arbitrary, which takes the order of SLURM_HOSTFILE, and for a job
    of several components, whose nodes are listed together.
    """
    components = (os.environ.get(f"SLURM_{name}_SIZE", "1") for name in ("HET", "PACK"))
    order = os.environ.get("SLURM_DISTRIBUTION", "block")
    return order.startswith(("block", "cyclic", "plane")) and set(components) == {"1"}


def torchrun() -> ClusterEnvironment | None:
    """Read the variables of torchrun, which many managed services set as well.

    torchrun itself listens at MASTER_PORT; then rank 0 takes the next port.
    """
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1") and _rank_of_one():
        return None
    local_rank = os.environ.get("LOCAL_RANK")
    taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ClusterEnvironment(
        "torchrun",
        _number("torchrun", "RANK"),
        _number("torchrun", "WORLD_SIZE"),
        int(local_rank) if local_rank is not None and local_rank.isdecimal() else None,
        _word("torchrun", "MASTER_ADDR"),
        _own_port() or _port("torchrun", "MASTER_PORT") + taken,
        os.environ.get("TORCHELASTIC_RUN_ID", ""),
        one_host=os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
    )


def tf_config() -> ClusterEnvironment | None:
    """Read TF_CONFIG, which TensorFlow's own strategies and many managed services use.

        {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", ...}}

    The chief, if there is one, is rank 0, and the workers follow in their order. Rank 0 listens at
    the port that TF_CONFIG gives it, where TensorFlow's server would.

    **Raises:** ConfigurationError for tasks that are no ranks (parameter servers, evaluators), and
    for text that cannot be read.
    """
    if not (text := os.environ.get("TF_CONFIG", "").strip()):
        return None
    try:
        config = json.loads(text)
        cluster = {kind: _addresses(tasks) for kind, tasks in (config.get("cluster") or {}).items()}
        task = config.get("task") or {}
        kind, index = task.get("type", ""), int(task.get("index", 0))
        ranks = [(name, i) for name in RANK_TASKS for i in range(len(cluster.get(name, ())))]
    except (ValueError, TypeError, AttributeError) as error:
        raise _tf_config_error(f"{text!r}: {error}") from error
    others = sorted(name for name in cluster if name not in RANK_TASKS and cluster[name])
    if others or (kind and kind not in RANK_TASKS):
        raise _tf_config_error(f"tasks of the type {', '.join(others) or kind}, which are no ranks")
    if len(ranks) < 2:
        return None
    if (kind, index) not in ranks:
        raise _tf_config_error(f"the task {kind or 'without a type'} {index}, outside of {cluster}")
    first = cluster[ranks[0][0]][0]
    host, _, port = first.rpartition(":")
    if not host or not port.isdecimal():
        raise _tf_config_error(f"the address {first!r} of the first task")
    digest = hashlib.sha256(json.dumps(cluster, sort_keys=True).encode()).hexdigest()
    return ClusterEnvironment(
        "TF_CONFIG",
        ranks.index((kind, index)),
        len(ranks),
        None,
        host.strip("[]"),
        _own_port() or _as_port("The port in TF_CONFIG", port),
        digest[:16],
    )


LAUNCHERS: tuple[Callable[[], ClusterEnvironment | None], ...] = (srun, torchrun, tf_config)


def _rank_of_one() -> bool:
    """Return True if RANK fits the single process that WORLD_SIZE states, or that is the default.

    **Raises:** ConfigurationError for variables of several processes: a service that sets RANK and
    MASTER_ADDR but no WORLD_SIZE would start trainings of one process each.
    """
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    several = size == "" and bool(rank or os.environ.get("MASTER_ADDR"))
    if several:
        given = [name for name in ("RANK", "MASTER_ADDR") if os.environ.get(name)]
        raise ConfigurationError(
            "WORLD_SIZE, the number of processes, is required beside RANK and MASTER_ADDR. "
            f"Received {' and '.join(given)} alone. Set it, equal on all ranks; to train in one "
            "process, set WORLD_SIZE=1."
        )
    return rank in ("", "0")


def _addresses(tasks: object) -> list[str]:
    """Return the addresses of the tasks of one type."""
    if not isinstance(tasks, list):
        raise TypeError(f"{tasks!r} is no list")
    return [str(task) for task in tasks]


def _tf_config_error(received: str) -> ConfigurationError:
    return ConfigurationError(
        "TF_CONFIG must name a chief and workers, as lists of host:port, and this process's task, "
        "because each of them becomes a rank. "
        f"Received {received}. Start chief and workers only; or set RANK, WORLD_SIZE, MASTER_ADDR "
        "and MASTER_PORT; to train in one process, unset TF_CONFIG."
    )


def _own_port() -> int | None:
    """Return the port that the user asks for."""
    return _port("a user", "TFCOMMX_PORT") if "TFCOMMX_PORT" in os.environ else None


def _word(launcher: str, name: str) -> str:
    if not (value := os.environ.get(name, "")):
        raise ConfigurationError(
            f"{launcher} seems to have started this process, so {name} is required in its "
            f"environment. Received none. Export it in the script that {launcher} starts, or start "
            "the ranks with `tfcommx run`."
        )
    return value


def _number(launcher: str, name: str) -> int:
    value = _word(launcher, name)
    if not value.isdecimal():
        raise ConfigurationError(f"{name} must be a whole number >= 0. Received {value!r}.")
    return int(value)


def _port(launcher: str, name: str) -> int:
    return _as_port(name, _word(launcher, name))


def _as_port(name: str, value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 65_536:
        raise ConfigurationError(f"{name} must be a TCP port, from 1 to 65535. Received {value!r}.")
    return int(value)
