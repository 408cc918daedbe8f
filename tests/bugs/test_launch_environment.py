"""Past bugs in how a process learns that it is one of several: each test tells its story."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pty
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import warm_ranks
from launching import QUICK, free_port

import tfcommx.collectives.init as init_module
from tfcommx.collectives import gloo_hosts, horovod, rendezvous
from tfcommx.core import ConfigurationError, LaunchError
from tfcommx.launch.cluster_environment import ClusterEnvironment, tf_config
from tfcommx.launch.horovodrun import Launch, environment
from tfcommx.launch.hosts import Host
from tfcommx.launch.known_launchers import (
    LAUNCHERS,
    OF_HOROVOD,
    check_alone,
    cluster_environment,
    unused_tasks,
    variables,
)
from tfcommx.launch.launcher import STARTED_VARIABLE, Launcher, launcher, record_init
from tfcommx.ray import RayWorker
from tfcommx.supervisor import sweep

SAY = "import tfcommx as cx; cx.init(); print(cx.rank(), 'of', cx.size(), cx.is_chief())"


def tf_config_of(cluster: Mapping[str, object], kind: str = "worker", index: int = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


# --- TF_CONFIG ------------------------------------------------------------------------------------


@pytest.mark.long_wait
def test_the_tasks_of_tf_config_are_the_ranks_of_one_run() -> None:
    """Jobs that set TF_CONFIG ran one training a process: each was rank 0 of 1, and chief."""
    cluster = {"worker": [f"localhost:{free_port()}", "localhost:1"]}
    environment = {**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment(alone=True)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAY],
            env={**environment, "TF_CONFIG": tf_config_of(cluster, index=index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [output.splitlines()[-1:] for output in outputs] == [["0 of 2 True"], ["1 of 2 False"]]


def test_the_chief_is_rank_0_and_the_workers_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["b:2", "c:3"], "chief": ["a:1"]}
    read = []
    for kind, index in (("chief", 0), ("worker", 0), ("worker", 1)):
        monkeypatch.setenv("TF_CONFIG", tf_config_of(cluster, kind, index))
        read.append(cluster_environment())
    (launch,) = {here.launch for here in read if here}
    assert read == [
        ClusterEnvironment("TF_CONFIG", rank, 3, None, "a", 1, launch) for rank in range(3)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        tf_config_of({"worker": ["a:1"]}),
        tf_config_of({"chief": ["a:1"]}, "chief"),
        tf_config_of({"worker": ["a:1"], "ps": []}),
    ],
)
def test_a_cluster_of_one_is_one_process(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    assert launcher().size == 1 and launcher().kind == "none"
    check_alone()


@pytest.mark.parametrize(
    "text",
    [
        tf_config_of({"worker": ["a:1", "b:1"], "ps": ["c:1"]}),
        tf_config_of({"worker": ["a:1"], "ps": ["c:1"]}),
        tf_config_of({"worker": ["a:1", "b:1"]}, "evaluator"),
        tf_config_of({"worker": ["a:1", "b:1"]}, index=2),
        tf_config_of({"worker": ["a", "b"]}),
        tf_config_of({"worker": ["a:99999", "b:1"]}),
        tf_config_of({"worker": "a:1"}),
        json.dumps({"cluster": {"worker": ["a:1", "b:1"]}}),
        "{'cluster': {}}",
        "[1, 2]",
    ],
)
def test_a_tf_config_that_makes_no_ranks_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigurationError, match="TF_CONFIG"):
        launcher()


def test_a_launcher_of_ours_wins_over_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tfcommx run` may be called in a container for which a service has set TF_CONFIG."""
    monkeypatch.setenv("TF_CONFIG", tf_config_of({"worker": ["a:1", "b:1"]}))
    for name, value in {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    assert launcher().kind == "gloo" and launcher().size == 4
    assert tf_config() is not None


# --- launchers that are not understood ------------------------------------------------------------

LISTS = {"SM_HOSTS": ('["a", "b"]', '["a"]'), "TPU_WORKER_HOSTNAMES": ("a,b", "localhost")}
CLUSTERS = tuple(tf_config_of({"worker": hosts}) for hosts in (["a:1", "b:1"], ["a:1"]))


@pytest.mark.parametrize(
    "row",
    [row for row in LAUNCHERS if not row.read and not row.horovod],
    ids=lambda row: row.size or row.rank,
)
def test_processes_of_another_launcher_do_not_train_alone(
    row: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun -n 4 python train.py` trained four models without a warning.

    Each process was rank 0 of 1, and all saved to the same files. The same happened under every
    launcher whose variables tfcommx did not know.
    """
    several, one = LISTS.get(row.size, CLUSTERS if row.size == "CLUSTER_SPEC" else ("4", "1"))
    if row.rank:
        monkeypatch.setenv(row.rank, "0")
        with pytest.raises(ConfigurationError, match=f"{row.rank}=0 .*WORLD_SIZE=1"):
            check_alone()
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", "1")
            check_alone()
    if row.size:
        monkeypatch.setenv(row.size, several)
        with pytest.raises(ConfigurationError, match=f"{row.size}="), horovod.without_mpi():
            pass
        monkeypatch.setenv(row.size, one)
        with horovod.without_mpi():
            pass


def test_a_rank_on_ray_or_after_a_restart_forgets_every_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in variables():
        monkeypatch.setenv(name, "1")
    here = RayWorker().call({"RANK": "0", "WORLD_SIZE": "1"}, launcher)
    assert here.kind == "none"
    check_alone()
    # The sweep knows only the standard library
    assert tuple(f"{row.rank}=".encode() for row in OF_HOROVOD.values()) == sweep.RANK


def test_the_ranks_of_a_launch_within_a_rank_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """horovodrun lets its own environment replace the variables of the ranks that it starts.

    `tfcommx probe` or `tfcommx run` in a rank's program started processes that all were the rank of
    that program, and waited for its other ranks.
    """
    places = [f"{place}{what}" for place in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")]
    outer = [f"HOROVOD_{name}" for name in (*places, "HOSTNAME")]
    outer += [f"TFCOMMX_{name}" for name in ("RUN", "GENERATION", "SUPERVISOR")]
    for name in (*outer, "TFCOMMX_SUPERVISOR_SECRET", "HOROVOD_CYCLE_TIME", "TFCOMMX_SECRET"):
        monkeypatch.setenv(name, "1")
    left = {name for name in environment() if name.startswith(("HOROVOD_", "TFCOMMX_"))}
    assert left >= {"HOROVOD_CYCLE_TIME", "TFCOMMX_SECRET"}  # Settings of the user
    assert not left.intersection({*outer, "TFCOMMX_SUPERVISOR_SECRET"})


def test_variables_that_no_shell_can_name_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ProgramFiles(x86) in the environment no rank started: a syntax error of /bin/sh."""
    for name in ("ProgramFiles(x86)", "a b", "$(date)", "-S", "conda.root", "UMLAUT_Ä"):
        monkeypatch.setenv(name, "1")
    words = [f"{name}=1" for name, value in environment().items() if value == "1"]
    shown = subprocess.run(
        f"env {' '.join(words)} env", shell=True, env={}, capture_output=True, check=True
    ).stdout.decode()
    assert "conda.root=1" in shown and "UMLAUT_Ä=1" in shown and "x86" not in shown


def test_ranks_on_other_hosts_start_in_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """horovodrun's `cd` there got several words: the ranks started in the home folder."""
    folder = tmp_path / "my runs; $x"
    folder.mkdir()
    monkeypatch.chdir(folder)
    command = shlex.join(Launch((Host("node1", 1),), ("pwd",)).words())
    command = command[command.index("env -C") :]
    done = subprocess.run(
        f"cd {folder} > /dev/null 2>&1 ; env A=b {command}",
        shell=True,
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{folder}\n"
    monkeypatch.chdir(tmp_path)
    assert "-C" not in Launch((Host("node1", 1),), ("pwd",)).words()


def test_a_size_of_a_launcher_that_is_not_listed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="SOME_WORLD_SIZE=2"):
        check_alone()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "1", "MASTER_ADDR": "a"}, r"WORLD_SIZE.*\bRANK\b.*MASTER_ADDR"),
        ({"RANK": "0"}, r"WORLD_SIZE.*\bRANK\b.*MASTER_ADDR"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, r"WORLD_SIZE.*\bRANK\b.*MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "torchrun .*MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "torchrun .*MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "2"}, "rank 1 of 1"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "2"}, "rank 2 of 2"),
        ({"HOROVOD_RANK": "1"}, "HOROVOD_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_half_of_a_launchers_variables_is_no_training_of_one_process(
    variables: Mapping[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that set RANK and MASTER_ADDR, and WORLD_SIZE elsewhere, got N trainings of one."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=named):
        launcher()


@pytest.mark.parametrize("port", ["0", "65536", "-1", "1_000", "abc"])
def test_a_port_that_cannot_be_one_is_refused_by_its_name(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 was taken for no port at all, and 65536 ended with a traceback of `socket`."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_PORT", "TFCOMMX_PORT"):
        monkeypatch.setenv(name, port)
        with pytest.raises(ConfigurationError, match=f"{name} .*'{port}'"):
            cluster_environment()


@pytest.mark.parametrize("address", ["::1", "fe80::1%eth0"])
def test_an_ipv6_address_of_rank_0_is_refused_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks waited for 300 s, and were told that a connection was refused."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"IPv4.*'{address}' from torchrun"):
        launcher()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("MASTER_ADDR")
    cluster = {"worker": [f"[{address}]:2000", f"[{address}]:2001"]}
    monkeypatch.setenv("TF_CONFIG", tf_config_of(cluster))
    with pytest.raises(ConfigurationError, match=f"IPv4.*'{address}' from TF_CONFIG"):
        launcher()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"}, "RENDEZVOUS_ADDR"),
        (
            {
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": "$PORT",
                "HOROVOD_HOSTNAME": "a",
            },
            "RENDEZVOUS_PORT=.PORT",
        ),
    ],
)
def test_a_rank_of_horovodrun_without_its_rendezvous_is_refused(
    variables: Mapping[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that another launch had left ended with a KeyError."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"{named}.*unset HOROVOD_RANK"):
        gloo_hosts.require_rendezvous()


def test_a_process_alone_in_a_job_of_several_tasks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python train.py` in a job of 4 tasks, without srun, trained on one of them in silence."""
    assert unused_tasks() == ""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "8")
    assert unused_tasks() == ""  # Processors of the one task
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert unused_tasks() == "4 tasks on 1 host(s) of Slurm"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # srun -n 1
    assert unused_tasks() == ""
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert unused_tasks() == ""


def test_the_processes_that_a_rank_starts_are_not_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A helper of rank 0 that called init() was aborted by Gloo; under MPI it ended rank 0."""
    for name, value in {"ADDR": "a", "PORT": "1"}.items():
        monkeypatch.setenv(f"HOROVOD_GLOO_RENDEZVOUS_{name}", value)
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "HOSTNAME": "a"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    monkeypatch.delenv(STARTED_VARIABLE, raising=False)
    assert init_module._check_process(launcher()) == 0
    record_init()
    # The scope of its hosts in the store, in which those of the ranks are known already
    assert init_module._check_process(launcher()) == 1
    assert STARTED_VARIABLE not in environment()
    # The ranks of another launch, which a script of the rank has started by horovodrun
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "2")
    assert init_module._check_process(launcher()) == 0
    monkeypatch.delenv("HOROVOD_RANK")
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1"}
    for name, value in names.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1")
    assert init_module._check_process(launcher()) == 0
    record_init()
    with pytest.raises(ConfigurationError, match=r"MPI.* rank 1 .*HOROVOD_RANK"):
        init_module._check_process(launcher())


def test_a_script_that_multiprocessing_imports_again_is_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under Gloo the first children of all ranks met in another job, and the second ones hung."""
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "HOSTNAME": "a"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    for name, value in {"ADDR": "a", "PORT": "1"}.items():
        monkeypatch.setenv(f"HOROVOD_GLOO_RENDEZVOUS_{name}", value)
    # As in `multiprocessing.spawn`
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigurationError, match=rf"{os.getpid()}, which rank 1 .*__main__"):
        init_module._check_process(launcher())


def test_a_helper_of_a_rank_is_told_that_no_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous_store = {"tfcommx_hosts/0": "a", "tfcommx_hosts/1": "b"}

    def ask(store: gloo_hosts.Store, method: str, key: str, *more: object) -> tuple:
        name = f"{store.scope}/{key}"
        if method == "PUT":
            rendezvous_store[name] = json.loads(more[-1])
            return 200, b"", ""
        known = name in rendezvous_store
        return (200, json.dumps(rendezvous_store[name]).encode(), "") if known else (404, b"", "")

    monkeypatch.setattr(gloo_hosts.Store, "_ask", ask)
    monkeypatch.setenv("TFCOMMX_RENDEZVOUS_SECONDS", "0.1")
    for name, value in {"RENDEZVOUS_ADDR": "a", "RENDEZVOUS_PORT": "1"}.items():
        monkeypatch.setenv(f"HOROVOD_GLOO_{name}", value)
    monkeypatch.setenv("HOROVOD_HOSTNAME", "a")
    rank = Launcher("gloo", 0, 2, 0)
    assert gloo_hosts.gloo_hosts(rank) == ["a", "b"]
    with pytest.raises(LaunchError, match=r"Rank 1 of 2 .*\bhelper\b"):
        gloo_hosts.gloo_hosts(rank, inits=1)


def test_a_host_on_which_gloo_would_crash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose name does not resolve, ranks ended by SIGSEGV, without a line."""
    gloo_hosts.require_network()
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "no0")
    with pytest.raises(LaunchError, match=r"HOROVOD_GLOO_IFACE.*'no0'.*\blo\b"):
        gloo_hosts.require_network()
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    gloo_hosts.require_network()
    for name in ("no-such-host.invalid", "a..b", "x" * 70):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        with pytest.raises(LaunchError, match=f"'{name}'.*/etc/hosts"):
            gloo_hosts.require_network()
    # As in an image of another machine
    row = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [row])
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1.*/etc/hosts"):
        gloo_hosts.require_network()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [row, (*row[:4], ("127.0.1.1", 0))])
    gloo_hosts.require_network()


def test_an_mpi_that_does_not_know_its_launcher_is_refused() -> None:
    """An mpirun of another MPI started N trainings of one rank; so did variables that were left."""
    code = "from tfcommx.collectives import mpi; mpi.start()"
    world = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": QUICK, **world, "OMPI_COMM_WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode and "OMPI_COMM_WORLD_SIZE=2" in ended.stderr, ended.stderr


# --- srun -----------------------------------------------------------------------------------------

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
}


@pytest.mark.parametrize(
    ("variables", "others"),
    [
        ({"SLURM_DISTRIBUTION": "arbitrary"}, ("n2", "n3")),
        ({"SLURM_DISTRIBUTION": "block", "SLURM_HET_SIZE": "2"}, ("n2", "n3")),
        ({"SLURM_DISTRIBUTION": "cyclic", "SLURM_PACK_SIZE": "2"}, ("n2", "n3")),
        ({"SLURM_DISTRIBUTION": "block:cyclic"}, ()),
        ({"SLURM_DISTRIBUTION": "plane"}, ()),
        ({}, ()),
    ],
)
def test_rank_0_is_looked_for_where_srun_may_have_placed_it(
    variables: Mapping[str, str], others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --distribution=arbitrary rank 0 may be on any node; all looked for it on the first."""
    for name, value in {**STEP, **variables}.items():
        monkeypatch.setenv(name, value)
    here = cluster_environment()
    assert here and (here.address, here.others) == ("n1", others)


@pytest.mark.parametrize("typed", [True, False])
def test_a_command_in_the_shell_of_srun_pty_waits_for_no_task(typed: bool) -> None:
    """`srun -n 4 --pty bash`, then `python train.py`: it waited 300 s for shells that had ended."""
    code = "from tfcommx.launch.known_launchers import cluster_environment as e; print(e())"
    command = f'{sys.executable} -c "{code}"; exit'
    words = ["bash", "--norc", *(["-i"] if typed else ["-c", command])]
    variables = {**os.environ, **STEP, "SLURM_PTY_PORT": "40000", "PYTHONPATH": QUICK}
    pid, terminal = pty.fork()
    if not pid:
        os.execve("/bin/bash", words, variables)
    if typed:
        os.write(terminal, f"{command}\n".encode())
    output = b""
    with contextlib.suppress(OSError):  # The end of the terminal
        while piece := os.read(terminal, 4096):
            output += piece
    os.waitpid(pid, 0)
    os.close(terminal)
    text = " ".join(output.decode().split())
    assert ("SLURM_STEP_NUM_TASKS=1" in text) == typed
    assert ("ClusterEnvironment(" in text) != typed


def test_a_rank_finds_rank_0_at_another_address() -> None:
    """With SLURM_HOSTFILE=order (node2 twice, then node1) ranks waited for 300 s, and ended."""
    port, answers = free_port(), {}

    def gather() -> None:
        here = ClusterEnvironment("srun", 0, 2, None, "127.0.0.1", port)
        answers[0] = rendezvous._gather(here, time.monotonic() + 30, 30)[0]

    thread = threading.Thread(target=gather)
    thread.start()
    here = ClusterEnvironment("srun", 1, 2, None, "no-such-host.invalid", port, "", ("127.0.0.1",))
    answers[1] = rendezvous._ask(here, time.monotonic() + 30, 30)[0]
    thread.join(30)
    assert [answers[rank]["HOROVOD_RANK"] for rank in range(2)] == ["0", "1"]
