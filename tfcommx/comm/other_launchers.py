"""Recognise launchers that started several processes, and whose variables make no ranks.

Without this, each of their processes would be rank 0 of 1: it would train alone, and all would save
to the same files. To recognise another one, add a row to OTHER_LAUNCHERS.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from tfcommx.comm.cluster_environment import says_alone
from tfcommx.terms import PlanError


class OtherLauncher(NamedTuple):
    """A launcher, and the variables by which its processes are recognised."""

    # For messages
    name: str
    # Holds the number of processes, or lists them; empty: the launcher does not say it
    size: str
    # Number or name of this process; empty: the launcher does not say it
    index: str


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

    A launcher that gives a process its number, but not how many there are, is refused unless
    another variable states that the process is alone: WORLD_SIZE=1, for one.

    **Ranks:** local. **Raises:** PlanError: each would train alone, and all would save as rank 0.
    """
    for row in (*OTHER_LAUNCHERS, *_without_row(os.environ)):
        size, index = os.environ.get(row.size, ""), os.environ.get(row.index, "")
        if size:
            several, variable = _count(size) != 1, row.size
        else:
            several, variable = index != "" and not says_alone(), row.index
        if several:
            alone = "" if size else ", or set WORLD_SIZE=1"
            raise PlanError(
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
