"""Read the variables of srun, torchrun and TF_CONFIG, before the processes have met.

    environment --reader--> ClusterEnvironment --rendezvous.join()--> Gloo launch

The table of launchers, and of their readers, is in known_launchers.
"""

import hashlib
import json
import os
from typing import NamedTuple

from tfcommx.core import ConfigurationError
from tfcommx.launch.hosts import check_host_name, expand_nodelist

# First port and number of ports for rank 0: above common services, below ephemeral ports
FIRST_PORT, PORTS = 12_000, 20_000
LAST_PORT = 65_535
# Tasks of TF_CONFIG that train, in the order of their ranks
RANK_TASKS = ("chief", "master", "worker")


class ClusterEnvironment(NamedTuple):
    """Rank, size and rendezvous of one process, read before the processes have met."""

    # Name of the launcher, for messages
    launcher: str
    # Rank of this process, in [0, size)
    rank: int
    size: int
    # Number of the process on its host, from 0; None if the launcher does not say
    local_rank: int | None
    # Host name or address of rank 0
    address: str
    # TCP port at which rank 0 listens
    port: int
    # Identifies this launch: ranks of other launches have another value
    launch: str = ""
    # Further addresses at which rank 0 may listen, if the launcher does not say which it is
    others: tuple[str, ...] = ()
    # True if the launcher says that all ranks are on this host
    one_host: bool = False


def srun() -> ClusterEnvironment | None:
    """Read the variables that Slurm's srun sets for a task.

    The address is the step's first node. If the first rank may run on another node, all nodes are
    addresses, because the list of nodes is sorted.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks in ("", "0", "1") or is_within_task(tasks):
        return None
    if "SLURM_PTY_PORT" in os.environ and _is_job_of_a_shell():
        raise ConfigurationError(
            "A rank is required in each task of srun. Received a command in the shell of `srun "
            f"--pty`, which runs in the first of {tasks} tasks; the shells of the others have "
            "ended. Start ranks here by `tfcommx run -- python train.py`, or by srun, without "
            "--pty, outside of this shell; to train in one process, set SLURM_STEP_NUM_TASKS=1."
        )
    job, step = _number("srun", "SLURM_JOB_ID"), _number("srun", "SLURM_STEP_ID")
    nodes = _word("srun", "SLURM_STEP_NODELIST")
    first, *further_nodes = [
        check_host_name(name, f"SLURM_STEP_NODELIST={nodes}")
        for name in expand_nodelist(nodes) or [""]
    ]
    return ClusterEnvironment(
        "srun",
        _number("srun", "SLURM_PROCID"),
        _number("srun", "SLURM_STEP_NUM_TASKS"),
        _number("srun", "SLURM_LOCALID"),
        first,
        # All ranks find the same port without talking, and steps of one node find different ones
        _own_port() or FIRST_PORT + (97 * job + step) % PORTS,
        f"{job}.{step}",
        () if _begins_at_first_node() else tuple(further_nodes),
        os.environ.get("SLURM_STEP_NUM_NODES") == "1",
    )


def _is_job_of_a_shell() -> bool:
    """Return True if a user has typed this command in an interactive shell.

    Such a shell gives each command a process group, and its terminal to that group; a script's
    commands are in the group of the script.
    """
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp() != os.getsid(0)
    except OSError:  # No terminal
        return False


def _begins_at_first_node() -> bool:
    """Return True if srun has placed rank 0 on the first node."""
    # Not with --distribution=arbitrary, which takes the order of SLURM_HOSTFILE, nor for a job of
    # several components, because their nodes are listed together
    components = (os.environ.get(f"SLURM_{name}_SIZE", "1") for name in ("HET", "PACK"))
    order = os.environ.get("SLURM_DISTRIBUTION", "block")
    return order.startswith(("block", "cyclic", "plane")) and set(components) == {"1"}


def torchrun() -> ClusterEnvironment | None:
    """Read the variables of torchrun, which many managed services set as well.

    If torchrun itself listens at MASTER_PORT, rank 0 takes the next port.
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
        _own_port()
        or _as_port("MASTER_PORT", _word("torchrun", "MASTER_PORT"), LAST_PORT - taken) + taken,
        os.environ.get("TORCHELASTIC_RUN_ID", ""),
        one_host=os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
    )


def tf_config() -> ClusterEnvironment | None:
    """Read TF_CONFIG, which TensorFlow's own strategies and many managed services use.

        {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", ...}}

    The chief, if one exists, is rank 0, and the workers follow in their order. Rank 0 listens at
    its port of TF_CONFIG, where TensorFlow's server would.

    **Raises:** ConfigurationError for tasks that are not ranks (parameter servers, evaluators), and
    for text that cannot be parsed.
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
    excluded = sorted(name for name in cluster if name not in RANK_TASKS and cluster[name])
    if excluded or (kind and kind not in RANK_TASKS):
        raise _tf_config_error(
            f"tasks of the type {', '.join(excluded) or kind}, which are no ranks"
        )
    if len(ranks) < 2:
        return None
    if (kind, index) not in ranks:
        raise _tf_config_error(f"the task {kind or 'without a type'} {index}, outside of {cluster}")
    first = cluster[ranks[0][0]][0]
    host, _, port = first.rpartition(":")
    if not host or not port.isdecimal():
        raise _tf_config_error(f"the address {first!r} of the first task")
    # The cluster identifies the launch, because all tasks have the same; sorted, because their
    # texts may list it in different orders
    digest = hashlib.sha256(json.dumps(cluster, sort_keys=True).encode()).hexdigest()
    return ClusterEnvironment(
        "TF_CONFIG",
        ranks.index((kind, index)),
        len(ranks),
        None,
        # A socket takes an IPv6 address without the brackets that separate it from a port
        host.strip("[]"),
        _own_port() or _as_port("The port in TF_CONFIG", port),
        digest[:16],
    )


def is_within_task(tasks: str) -> bool:
    """Return True if a task of srun or mpirun has started this process as one of several ranks.

    Such as `srun --ntasks-per-node=1 torchrun --nproc-per-node=8`, or a loop over GPUs. The ranks
    of a task have its variables in common.

    Args:
        tasks: number of tasks, as the launcher of the tasks states it.
    """
    ranks = os.environ.get("WORLD_SIZE", "")
    more_than_tasks = ranks.isdecimal() and tasks.isdecimal() and int(ranks) > int(tasks)
    return "RANK" in os.environ and (more_than_tasks or "TORCHELASTIC_RUN_ID" in os.environ)


def _rank_of_one() -> bool:
    """Return True if RANK fits the single process that WORLD_SIZE states or that is the default."""
    present = [name for name in ("RANK", "MASTER_ADDR") if os.environ.get(name)]
    # Under a service that sets RANK and MASTER_ADDR alone each process would train alone
    if present and not os.environ.get("WORLD_SIZE"):
        raise ConfigurationError(
            "WORLD_SIZE, the number of processes, is required beside RANK and MASTER_ADDR. "
            f"Received {' and '.join(present)} alone. Set it, equal on all ranks; to train in one "
            "process, set WORLD_SIZE=1."
        )
    return os.environ.get("RANK", "") in ("", "0")


def _addresses(tasks: object) -> list[str]:
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
    port = os.environ.get("TFCOMMX_PORT")
    return None if port is None else _as_port("TFCOMMX_PORT", port)


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


def _as_port(name: str, value: str, last: int = LAST_PORT) -> int:
    if not value.isdecimal() or not 0 < int(value) <= last:
        raise ConfigurationError(
            f"{name} must be a TCP port, from 1 to {last}. Received {value!r}."
        )
    return int(value)
