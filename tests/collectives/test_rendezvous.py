"""Ranks that no launcher of Horovod's has started find each other, or say who is missing."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import warm_ranks
from launching import QUICK, WORKERS, free_port, horovodrun

from tfcommx.collectives import rendezvous
from tfcommx.core import ConfigurationError, LaunchError, TfcommxError
from tfcommx.launch.cluster_environment import ClusterEnvironment
from tfcommx.launch.handshake import Caller, Handshake
from tfcommx.launch.known_launchers import cluster_environment
from tfcommx.launch.launcher import launcher

WORKER = str(WORKERS / "cluster_environment.py")


def together(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(rank)` in a thread for each rank; return results, or the errors."""
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except TfcommxError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def meet(here: ClusterEnvironment, seconds: float = 20.0) -> tuple[dict[str, str], str]:
    """Do the same as `join`, without changing this process's environment."""
    part = rendezvous._gather if here.rank == 0 else rendezvous._ask
    return part(here, time.monotonic() + seconds, seconds)


def test_each_rank_gets_its_own_settings_and_all_the_same_rendezvous() -> None:
    port = free_port()
    found = together(
        3, lambda r: meet(ClusterEnvironment("torchrun", r, 3, None, "localhost", port))
    )
    for rank, (settings, address) in enumerate(found):
        assert settings["HOROVOD_RANK"] == settings["HOROVOD_LOCAL_RANK"] == str(rank)
        assert settings["HOROVOD_SIZE"] == settings["HOROVOD_LOCAL_SIZE"] == "3"
        assert rendezvous.interface_of(address) == "lo"
    assert len({settings["HOROVOD_GLOO_RENDEZVOUS_PORT"] for settings, _ in found}) == 1


def test_a_rank_that_does_not_come_is_named_on_all_that_have_come() -> None:
    port = free_port()

    def work(rank: int) -> Any:
        return (
            None
            if rank == 2
            else meet(ClusterEnvironment("srun", rank, 4, None, "localhost", port), 2)
        )

    found = together(4, work)
    for rank in (0, 1, 3):
        assert re.search(r"[Rr]ank 2 of 4 .*\b2 s\b", str(found[rank]))


def test_rank_0_names_the_others_if_none_comes() -> None:
    port = free_port()
    with pytest.raises(LaunchError, match=r"[Rr]ank 1 of 2 .*\b0\.5 s\b"):
        meet(ClusterEnvironment("srun", 0, 2, None, "localhost", port), 0.5)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("user", [0, 4711])
def test_a_process_of_another_user_of_this_host_is_no_rank(user: int) -> None:
    """Two users with one MASTER_PORT trained each other's model: their ranks were exchanged."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        with socket.create_connection(server.getsockname()) as called:
            # Not os.seteuid, which interrupts other threads: one that waited at a closed socket
            # accepted at this one, which had its number
            os.fchown(called.fileno(), user, -1)
            caller = Caller(Handshake("", ""), server.accept()[0], (1, "red", None), "")
            is_rank = rendezvous._arrival(caller) is not None
            assert is_rank == (user == 0)
            caller.connection.close()


def test_two_processes_with_one_number_are_refused() -> None:
    port = free_port()
    number = [0, 1, 1]
    found = together(
        3, lambda r: meet(ClusterEnvironment("torchrun", number[r], 3, None, "localhost", port), 4)
    )
    host = re.escape(socket.gethostname())
    received = rf"rank 1\b.*\b{host}\b.*\b{host}\b"
    assert all(re.search(received, str(error)) for error in found), found


def test_ranks_that_are_not_in_the_order_of_their_hosts_are_refused_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 ended, and with it the store, before others had read the hosts: they waited 60 s."""
    port = free_port()
    hosts = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: hosts.name)

    def work(rank: int) -> Any:
        hosts.name = "red" if rank in (0, 2) else "blue"
        return meet(ClusterEnvironment("srun", rank, 3, None, "localhost", port), 10)

    start = time.monotonic()
    errors = together(3, work)
    assert time.monotonic() - start < 10
    for error in errors:
        assert re.search(r"rank 2\b.*'red'", str(error))


def test_with_a_node_size_ranks_may_be_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    hosts = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: hosts.name)

    def work(rank: int) -> Any:
        hosts.name = "red" if rank in (0, 2) else "blue"
        here, end = ClusterEnvironment("srun", rank, 3, None, "localhost", port), 20.0
        end += time.monotonic()
        return (
            rendezvous._ask(here, end, 20)
            if rank
            else rendezvous._gather(here, end, 20, any_order=True)
        )

    assert [settings["HOROVOD_RANK"] for settings, _ in together(3, work)] == ["0", "1", "2"]


def test_strangers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, one that talks HTTP, one with another secret."""
    monkeypatch.setattr(rendezvous, "MESSAGE_SECONDS", 0.5)
    monkeypatch.setenv("TFCOMMX_SECRET", "ours")
    port = free_port()
    rank_0 = threading.Thread(
        target=lambda: found.append(meet(ClusterEnvironment("srun", 0, 2, None, "localhost", port)))
    )
    found: list[Any] = []
    rank_0.start()
    time.sleep(0.3)
    silent = socket.create_connection(("localhost", port))
    browser = socket.create_connection(("localhost", port))
    browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
    thief = pytest.raises(LaunchError, match=r"[Rr]ank 1 of 2 .*TFCOMMX_SECRET")
    with monkeypatch.context() as theirs, thief:
        theirs.setenv("TFCOMMX_SECRET", "theirs")
        meet(ClusterEnvironment("srun", 1, 2, None, "localhost", port), 1)
    assert not found
    settings, _ = meet(ClusterEnvironment("srun", 1, 2, None, "localhost", port))
    rank_0.join(20)
    assert settings["HOROVOD_RANK"] == "1" and found[0][0]["HOROVOD_RANK"] == "0"
    silent.close()
    browser.close()


def test_other_hosts_are_told_an_address_that_they_can_reach() -> None:
    """Debian's /etc/hosts gives a host's own name 127.0.1.1, reached from 127.0.0.1."""
    here = rendezvous.Arrival(1, "a", None, "127.0.1.1", "127.0.0.1", None)
    there = rendezvous.Arrival(2, "b", None, "10.0.0.1", "10.0.0.2", None)
    assert rendezvous._address_of_rank_0([here, there]) == "10.0.0.1"
    assert rendezvous._address_of_rank_0([here]) == "127.0.1.1"


@pytest.mark.parametrize(
    "said",
    [
        ["1", "a", None],
        [1, "a", "0"],
        [True, "a", None],
        [1, 7, None],
        [1, "-Fconfig", None],
        [1, "a;b", None],
        [1, "a"],
        None,
    ],
)
def test_what_is_no_rank_is_left_out(said: Any) -> None:
    ours, theirs = socket.socketpair()
    assert rendezvous._arrival(Caller(Handshake("", ""), ours, said, "")) is None
    assert theirs.recv(1) == b""  # Closed
    theirs.close()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"\b{port}\b.*TFCOMMX_PORT"):
            meet(ClusterEnvironment("srun", 0, 2, None, "localhost", port))


def test_a_rank_whose_number_on_its_host_is_another_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"[Rr]ank 1 .*\bb\b.*\b0\b.*\b3\b"):
        rendezvous._slots(["a", "b"], [0, 3])


SRUN = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
MPIRUN["OMPI_COMM_WORLD_SIZE"] = "4"
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SRUN, ClusterEnvironment("srun", 3, 4, 1, "gpu07", 12_000 + 97 * 41 + 2, "41.2")),
        (TORCHRUN, ClusterEnvironment("torchrun", 2, 4, None, "head", 29500)),
        (
            TORCHRUN | {"LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ClusterEnvironment("torchrun", 2, 4, 0, "head", 29501),
        ),
        (
            TORCHRUN | {"TFCOMMX_PORT": "5000"},
            ClusterEnvironment("torchrun", 2, 4, None, "head", 5000),
        ),
        # Torchrun, and a loop over GPUs, in each task of another launcher: with srun two processes
        # were rank 0 and wanted its port, with mpirun they were one rank of MPI
        (
            SRUN | TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            ClusterEnvironment("torchrun", 2, 4, None, "head", 29500),
        ),
        (
            MPIRUN | TORCHRUN | {"TORCHELASTIC_RUN_ID": "7"},
            ClusterEnvironment("torchrun", 2, 4, None, "head", 29500, "7"),
        ),
        # A job script has exported variables that are not a rank's
        (
            SRUN | TORCHRUN,
            ClusterEnvironment("srun", 3, 4, 1, "gpu07", 12_000 + 97 * 41 + 2, "41.2"),
        ),
        # In an allocation, but not started by srun; and alone
        ({"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        # In a launch of horovodrun, inside of an allocation
        (SRUN | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}, "gloo"),
        # A variable that was left in the environment
        (
            {"WORLD_SIZE": "4", "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
            | {"HOROVOD_LOCAL_RANK": "1"},
            "gloo",
        ),
    ],
)
def test_what_launchers_announce(
    variables: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if expected == "gloo":
        assert launcher().kind == "gloo"
        return
    assert cluster_environment() == expected
    assert launcher().kind == ("none" if expected is None else "environment")
    assert launcher().size == (1 if expected is None else 4)


@pytest.mark.parametrize("variables", [SRUN, TORCHRUN], ids=["srun", "torchrun"])
def test_a_variable_that_is_missing_is_named(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = list(variables)[-1]
    for name, value in variables.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=missing):
        cluster_environment()


@pytest.mark.parametrize(
    ("variables", "received"),
    [
        ({"TFCOMMX_PORT": ""}, r"TFCOMMX_PORT .*65535\b.*''"),  # It said that none was there
        (
            {"MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            r"MASTER_PORT .*65534\b.*'65535'",  # The next port was an OverflowError
        ),
    ],
)
def test_a_port_that_cannot_be_is_refused(
    variables: dict[str, str], received: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TORCHRUN | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=received):
        cluster_environment()


def start(ranks: int, arguments: list[str], variables: Callable[[int], dict[str, str]]) -> list:
    """Start ranks as a container's entry point does: with variables, and nothing else."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "SLURM_"))}
    return [
        subprocess.Popen(
            [sys.executable, WORKER, *arguments],
            env={**clean, "PYTHONPATH": QUICK, **warm_ranks.environment(), **variables(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def as_torchrun(port: int) -> Callable[[int], dict[str, str]]:
    """Return the variables of Kubernetes' operators, which know no local rank."""
    return lambda rank: {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "MASTER_ADDR": socket.gethostname(),
        "MASTER_PORT": str(port),
    }


def as_srun(port: int) -> Callable[[int], dict[str, str]]:
    return lambda rank: {
        **SRUN,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": socket.gethostname(),
        "TFCOMMX_PORT": str(port),
    }


@functools.cache
def torchrun_until_rank_2_is_killed() -> tuple[list[int], list[str], float]:
    """Return the ranks' exit statuses and outputs, and when the last one ended.

    One launch for both tests: rank 2 is killed when all have trained.
    """
    processes = start(4, ["kill"], as_torchrun(free_port()))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [process.returncode for process in processes], outputs, time.time()


@pytest.mark.extended
@pytest.mark.long_wait
def test_the_same_bits_under_every_launcher() -> None:
    """4 ranks as 2 nodes of 2, a sparse scheme: horovodrun, torchrun's variables, srun's."""
    srun = start(4, [], as_srun(free_port()))
    found = {"srun": "".join(process.communicate(timeout=120)[0] for process in srun)}
    found["torchrun"] = "".join(torchrun_until_rank_2_is_killed()[1])
    found["horovodrun"] = horovodrun(4, [WORKER]).output
    bits = {}
    for name, output in found.items():
        hashes = re.findall(r"rank \d weights (\w+)", output)
        assert len(hashes) == 4, output[-4000:]
        bits[name] = set(hashes)
    assert len(set.union(*bits.values())) == 1, bits


@pytest.mark.extended
@pytest.mark.long_wait
def test_without_a_launcher_a_rank_that_is_killed_still_ends_the_others() -> None:
    statuses, outputs, ended = torchrun_until_rank_2_is_killed()
    assert statuses[2] == -9
    died = float(re.search(r"now (\d+\.\d+)", outputs[2])[1])
    assert ended - died < 60
    others = (0, 1, 3)
    assert not {statuses[rank] for rank in others} & {0, None}
    # Not on each of them, because on a busy machine a thread of Gloo's may abort a rank before
    named = [re.search(r"rank 2 on \S+ \(", outputs[rank]) for rank in others]
    assert any(named), "".join(outputs[rank][-3000:] for rank in others)
