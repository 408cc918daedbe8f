"""The table of launchers: how their processes are recognised, and which function reads them.

To add a launcher, add a row to LAUNCHERS:

    only recognised     its processes are refused, because each would be rank 0 of 1, train alone,
                        and save to the same files as the others
    with a reader       a function of cluster_environment; its ranks find each other by
                        `collectives.rendezvous`
    known to Horovod    `horovod` and `launch`
"""

import json
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from tfcommx.core import ConfigurationError
from tfcommx.launch.cluster_environment import ClusterEnvironment, srun, tf_config, torchrun
from tfcommx.launch.hosts import allocation


class KnownLauncher(NamedTuple):
    """A launcher, and the variables by which its processes are recognised."""

    # Name in messages
    name: str
    # Holds the number of processes, or lists them; empty: the launcher does not say it
    size: str
    # Number or name of this process; empty: the launcher does not say it
    rank: str
    # Parses the launcher's variables; None for a process that is alone
    read: Callable[[], ClusterEnvironment | None] | None = None
    # Other variables that the reader takes from the environment
    more: tuple[str, ...] = ()
    # "gloo" or "mpi" if Horovod itself knows the launcher
    horovod: str = ""
    # Variables by which the processes of one launch of Horovod recognise each other
    launch: tuple[str, ...] = ()

    def variable(self, name: str) -> str:
        """Return the launcher's variable for RANK, SIZE, LOCAL_RANK, ..., if Horovod knows it."""
        return f"{self.rank.removesuffix('RANK')}{name}"


# The first matching row counts
LAUNCHERS = (
    KnownLauncher(
        "horovodrun",
        "HOROVOD_SIZE",
        "HOROVOD_RANK",
        horovod="gloo",
        launch=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    KnownLauncher(
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        horovod="mpi",
        launch=("PMIX_NAMESPACE",),
    ),
    KnownLauncher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", srun),
    KnownLauncher(
        "torchrun",
        "WORLD_SIZE",
        "RANK",
        torchrun,
        ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
    ),
    KnownLauncher("TF_CONFIG", "TF_CONFIG", "", tf_config),
    KnownLauncher("MPICH's or Intel MPI's mpiexec (Hydra)", "PMI_SIZE", "PMI_RANK"),
    KnownLauncher("MVAPICH2's mpiexec", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    KnownLauncher("MVAPICH's mpiexec", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"),
    KnownLauncher("a launcher that uses PMIx", "", "PMIX_RANK"),
    KnownLauncher("LSF's jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    KnownLauncher("LSF's blaunch", "", "LSF_PM_TASKID"),
    KnownLauncher("PBS's pbsdsh", "PBS_TASKNUM", ""),
    KnownLauncher("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    KnownLauncher("PALS's mpiexec", "", "PALS_RANKID"),
    KnownLauncher("ALPS's aprun", "", "ALPS_APP_PE"),
    KnownLauncher("torchrun", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    KnownLauncher("Kubeflow's Trainer", "PET_NNODES", "PET_NODE_RANK"),
    KnownLauncher("an indexed job of Kubernetes", "", "JOB_COMPLETION_INDEX"),
    KnownLauncher("a job of Volcano", "", "VC_TASK_INDEX"),
    KnownLauncher("SageMaker", "SM_HOSTS", "SM_CURRENT_HOST"),
    KnownLauncher("Vertex AI", "CLUSTER_SPEC", ""),
    KnownLauncher("Azure Machine Learning", "AZUREML_NODE_COUNT", ""),
    KnownLauncher("a multi-node job of AWS Batch", "AWS_BATCH_JOB_NUM_NODES", ""),
    KnownLauncher("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    KnownLauncher("HTCondor's parallel universe", "_CONDOR_NPROCS", "_CONDOR_PROCNO"),
    KnownLauncher("Volcano Engine's platform", "MLP_WORKER_NUM", "MLP_ROLE_INDEX"),
    KnownLauncher("a slice of TPU hosts", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
    KnownLauncher("JAX", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    KnownLauncher("a tracker of DMLC", "DMLC_NUM_WORKER", "DMLC_WORKER_ID"),
    KnownLauncher("Paddle's launcher", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"),
)
# Kind -> row
OF_HOROVOD = {row.horovod: row for row in LAUNCHERS if row.horovod}
# Name of the variable with the number of processes, for a launcher without a row
ANY_SIZE = re.compile(r"(?:\w+_)?WORLD_SIZE")


def check_alone() -> None:
    """Refuse a process that is one of several of an unsupported launcher.

    A launcher that gives a process its number, but not the number of processes, is refused unless
    another variable, such as WORLD_SIZE=1, states that the process is alone.

    **Ranks:** local. **Raises:** ConfigurationError, because each process would train alone, and
    all would save as rank 0.
    """
    table_names = {row.size for row in LAUNCHERS}
    unknown = [x for x in sorted(os.environ) if ANY_SIZE.fullmatch(x) and x not in table_names]
    recognised = [row for row in LAUNCHERS if not row.read and not row.horovod]
    for row in (*recognised, *(KnownLauncher("another launcher", name, "") for name in unknown)):
        size, index = os.environ.get(row.size, ""), os.environ.get(row.rank, "")
        if size:
            several, variable = _count(size) != 1, row.size
        else:
            several, variable = index != "" and not says_alone(), row.rank
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


def _count(text: str) -> int | None:
    """Return the number of processes that a size variable states; None if it cannot be parsed.

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


def cluster_environment() -> ClusterEnvironment | None:
    """Read the launcher's variables; None for a process that no row with a reader has started.

    **Ranks:** local.
    **Raises:** ConfigurationError for a variable that is missing or not a number, and for a rank
    that is not below the number of ranks.
    """
    environments = (row.read() for row in LAUNCHERS if row.read)
    process = next((process for process in environments if process is not None), None)
    if process is not None and process.rank >= process.size:
        raise ConfigurationError(
            f"A rank must be below the number of ranks. Received rank {process.rank} of "
            f"{process.size} from {process.launcher}. Correct its variables, or unset them to "
            "train alone."
        )
    if process is not None and any(":" in name for name in (process.address, *process.others)):
        raise ConfigurationError(
            "The address of rank 0 must be a host's name or an IPv4 address, because Horovod's "
            f"Gloo connects by IPv4 alone. Received the IPv6 address {process.address!r} from "
            f"{process.launcher}. Name an IPv4 address of the same host, equal on all ranks."
        )
    return process


def unused_tasks() -> str:
    """Return the tasks and hosts of the job that this process, alone, does not use; "" without.

    Only of a process that no launcher has started as one of several. A variable that states that
    the process is alone, such as WORLD_SIZE=1, means that the user wants it so.
    """
    try:
        job = None if says_alone() else allocation()
    except ConfigurationError:
        return ""
    if job is None:
        return ""
    # Slurm sets it if the user has requested tasks; slots may be processors
    tasks = os.environ.get("SLURM_NTASKS", "") if job.source == "Slurm" else ""
    if len(job.hosts) == 1 and tasks in ("", "0", "1"):
        return ""
    return f"{f'{tasks} tasks on ' * bool(tasks)}{len(job.hosts)} host(s) of {job.source}"


def says_alone() -> bool:
    """Return True if a variable of a reader states that this process is the only rank."""
    sizes = {row.size: row.read for row in LAUNCHERS if row.read}
    return any(
        os.environ.get(size, "") not in ("", "0") and read() is None for size, read in sizes.items()
    )


def variables() -> list[str]:
    """Return the variables of all launchers that identify a process."""
    names = (name for row in LAUNCHERS for name in (row.size, row.rank, *row.more))
    return [name for name in names if name]
