"""A Gloo launch without horovodrun: ranks that srun, torchrun or others started find each other.

    rank r                         rank 0, at the address and port of its environment
      who I am ------------------>   ... until all ranks have come, or the time is over
      <---- where Horovod's rendezvous is, slots on hosts; or why there will be none

Rank 0 hears them side by side (entrance.py). It then serves what horovodrun would serve, and every
rank sets the variables that horovodrun would have set; from there on it is a launch like any other
under Gloo.

With TFCOMMX_SECRET in the environment of all ranks, both sides prove that they know it
(challenge.py). Horovod's rendezvous and Gloo's connections are not secured, as under horovodrun:
the ports between the hosts belong into a private network.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import queue
import socket
import time
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from tfcommx.collectives.horovod import serve_rendezvous
from tfcommx.core import LaunchError, Topology
from tfcommx.launch.cluster_environment import ClusterEnvironment
from tfcommx.launch.handshake import NO_PARTNER, Caller, Entrance, Handshake, shortened
from tfcommx.launch.hosts import check_host_name, is_host_name
from tfcommx.launch.launcher import rendezvous_seconds

log = logging.getLogger("tfcommx")

# How long ranks wait for each other; TFCOMMX_RENDEZVOUS_SECONDS counts more
SECONDS = 300.0
# Of one message: a process that connects and says nothing is then sent away
MESSAGE_SECONDS = 5.0
# Callers that have not proven themselves, at once, beside the ranks
STRANGERS = 64
# The form of the messages: other versions, and other programs, are refused
PROTOCOL = "tfcommx rendezvous 3"


class Arrival(NamedTuple):
    """A rank that has come to rank 0."""

    rank: int
    host: str
    local_rank: int | None
    # Address of rank 0 as this rank reaches it, and its own
    reached: str
    own: str
    caller: Caller


def join(here: ClusterEnvironment, any_order: bool = False) -> None:
    """Bring all ranks together, and make this process one of a Gloo launch.

    Args:
        here: what the launcher says of this process.
        any_order: whether ranks of a host need not be consecutive.

    **Ranks:** all, before Horovod starts. **Cost:** one connection of every rank to rank 0.
    **Raises:** LaunchError, on all ranks that have come, that names ranks which did not come or
    came twice, or are not in the order of their hosts; a port that is in use; an address that does
    not answer.
    """
    seconds = rendezvous_seconds(SECONDS)
    log.info(
        "Rank %d of %d, started by %s, meets the others at %s, port %d, within %g s.",
        *(here.rank, here.size, here.launcher, here.address, here.port, seconds),
    )
    deadline = time.monotonic() + seconds
    if here.rank == 0:
        settings, address = _gather(here, deadline, seconds, any_order)
    else:
        settings, address = _ask(here, deadline, seconds)
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or interface_of(address)
    os.environ |= settings | {"HOROVOD_GLOO_IFACE": interface}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


# --- rank 0 -------------------------------------------------------------------------------------


def _gather(
    here: ClusterEnvironment, deadline: float, seconds: float, any_order: bool = False
) -> tuple[dict[str, str], str]:
    """Wait for all ranks, and answer them; return this rank's settings and address."""
    check_host_name(socket.gethostname(), "this host")
    handshake = _handshake(here)
    try:
        server = _listen(here)
    except OSError as error:
        raise LaunchError(
            f"Rank 0 needs TCP port {here.port} to bring the ranks of {here.launcher} together. "
            f"Received: {error}. Set TFCOMMX_PORT to a free one, equal on all ranks."
        ) from error
    came: queue.SimpleQueue[Caller] = queue.SimpleQueue()
    entrance = Entrance(server, handshake, MESSAGE_SECONDS, came.put, most=here.size + STRANGERS)
    arrivals: dict[int, Arrival] = {}
    everyone: list[Arrival] = []  # Also those that there is no place for
    problem = ""
    while len(arrivals) < here.size - 1 and not problem:
        try:
            arrival = _arrival(came.get(timeout=max(deadline - time.monotonic(), 0.001)))
        except queue.Empty:
            missing = sorted(set(range(1, here.size)) - arrivals.keys())
            problem = (
                f"{_ranks(missing)} of {here.size} did not come to rank 0 on "
                f"{socket.gethostname()}, port {here.port}, within {seconds:g} s. Did "
                f"{here.launcher} start them, and do they call tfcommx.init()? Are ports "
                "between the hosts open? TFCOMMX_RENDEZVOUS_SECONDS changes the time."
            )
            break
        if arrival is not None:
            problem = _problem(here, arrivals, arrival)
            arrivals.setdefault(arrival.rank, arrival)
            everyone.append(arrival)
    entrance.close()
    while not came.empty():
        if (arrival := _arrival(came.get())) is not None:
            everyone.append(arrival)
    try:
        if problem:
            raise LaunchError(problem)
        own = _address_of_rank_0(arrivals.values())
        hosts = [socket.gethostname(), *(arrivals[rank].host for rank in range(1, here.size))]
        if not any_order:  # Later, rank 0 would end with its rendezvous before others know why
            Topology.of_hosts(hosts)
        answers = _serve(here, arrivals, hosts, own)
        for rank, arrival in arrivals.items():
            _answer(arrival, answers[rank])
        return _settings(here, socket.gethostname(), answers[0]), own
    except Exception as error:  # Whatever it is, ranks that wait must hear of it
        for arrival in everyone:
            _answer(arrival, {"problem": shortened(f"Rank 0: {error}")})
        raise
    finally:
        for arrival in everyone:
            arrival.caller.connection.close()


def _listen(here: ClusterEnvironment) -> socket.socket:
    """Listen at rank 0's port: at the address that is given if all ranks are on this host."""
    backlog = min(here.size + STRANGERS, 1024)
    if here.one_host:
        with contextlib.suppress(OSError):  # The port is in use, or the address is a router's
            return socket.create_server((here.address, here.port), backlog=backlog)
    return socket.create_server(("", here.port), backlog=backlog)


def _arrival(caller: Caller) -> Arrival | None:
    """Return the rank that has called; None, and the end of its connection, if it is none."""
    try:
        rank, host, local_rank = caller.said
        numbers = rank, 0 if local_rank is None else local_rank
        if not is_host_name(host) or {type(number) for number in numbers} != {int}:
            raise ValueError("a stranger")
        connection = caller.connection
        reached, own = connection.getsockname()[0], connection.getpeername()[0]
        return Arrival(rank, host, local_rank, reached, own, caller)
    except NO_PARTNER:
        caller.connection.close()
        return None


def _problem(here: ClusterEnvironment, arrivals: dict[int, Arrival], new: Arrival) -> str:
    """Return why this rank cannot be one of the launch; empty if it can."""
    if not 0 < new.rank < here.size:
        return (
            f"Ranks must be numbered from 0 to {here.size - 1}. Received another rank {new.rank}, "
            f"on {new.host}. Give each process its own number."
        )
    if new.rank in arrivals:
        return (
            f"Every rank must be one process. Received two that are rank {new.rank}, on "
            f"{arrivals[new.rank].host} and on {new.host}. Give each its own number."
        )
    return ""


def _address_of_rank_0(arrivals: Collection[Arrival]) -> str:
    """Return the address at which ranks on other hosts reach rank 0.

    On rank 0's own host its name may mean a loopback address, as Debian's /etc/hosts has it.
    """
    remote = [one.reached for one in arrivals if not _on_this_host(one.own, one.reached)]
    return (remote or [one.reached for one in arrivals])[0]


def _on_this_host(one: str, other: str) -> bool:
    """Tell whether a connection between two addresses stays on one host.

    A connection to 127.0.1.1 comes from 127.0.0.1.
    """
    return one == other or one.startswith("127.")


def _serve(
    here: ClusterEnvironment, arrivals: dict[int, Arrival], hosts: list[str], address: str
) -> dict[int, dict[str, Any]]:
    """Start Horovod's rendezvous; return the answer to each rank."""
    slots = _slots(hosts, [here.local_rank, *(arrivals[r].local_rank for r in range(1, here.size))])
    port = serve_rendezvous(Counter(hosts), address)
    return {
        rank: {"slot": slot, "address": address, "port": port} for rank, slot in enumerate(slots)
    }


def _slots(hosts: list[str], local_ranks: list[int | None]) -> list[list[int]]:
    """Return local rank and size, cross rank and size of each rank, as Horovod counts them.

    >>> _slots(["a", "a", "b"], [None, None, None])
    [[0, 2, 0, 2], [1, 2, 0, 1], [0, 1, 1, 2]]

    **Raises:** LaunchError if a launcher's local ranks are not those of consecutive ranks.
    """
    names = list(dict.fromkeys(hosts))
    sizes = Counter(hosts)
    found = []
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host)
        if local_ranks[rank] not in (None, local):
            raise LaunchError(
                f"Consecutive ranks must be on the same host. Rank {rank} on {host} is the host's "
                f"number {local}, and its launcher says {local_ranks[rank]}. Place ranks by node "
                "(srun --distribution=block)."
            )
        across = [name for name in names if sizes[name] > local]
        found.append([local, sizes[host], across.index(host), len(across)])
    return found


def _answer(arrival: Arrival, text: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # It may have gone; the watch, or Gloo, will say so
        arrival.caller.answer(text)


# --- the other ranks ----------------------------------------------------------------------------


def _ask(here: ClusterEnvironment, deadline: float, seconds: float) -> tuple[dict[str, str], str]:
    """Tell rank 0 who this is, and wait for its answer; return settings and own address."""
    reason: object = "no process listens there"
    # Before the loop, because a LaunchError is a ValueError, after which it would call again
    host, handshake = check_host_name(socket.gethostname(), "this host"), _handshake(here)
    addresses = (here.address, *here.others)
    for address in itertools.cycle(addresses):
        if time.monotonic() > deadline:
            break
        try:
            with socket.create_connection((address, here.port), MESSAGE_SECONDS) as connection:
                own, peer = connection.getsockname()[0], connection.getpeername()[0]
                said = (here.rank, host, here.local_rank)
                # Rank 0 answers when all have come, or when its own time is over
                answer = handshake.call(connection, said, deadline + 2 * MESSAGE_SECONDS)
        except NO_PARTNER as error:
            reason = error
            time.sleep(0.2 / len(addresses))
            continue
        if isinstance(answer, dict) and "problem" in answer:
            raise LaunchError(_printable(answer["problem"]))
        settings = _settings(here, host, answer)
        # On rank 0's host, the address that other hosts know
        return settings, answer["address"] if _on_this_host(own, peer) else own
    raise LaunchError(
        f"Rank {here.rank} of {here.size} could not join rank 0 at {' or '.join(addresses)}, port "
        f"{here.port}, within {seconds:g} s: {reason}. Does rank 0 run and call tfcommx.init()? Is "
        "the port open between the hosts, and TFCOMMX_SECRET equal on all ranks? "
        "TFCOMMX_RENDEZVOUS_SECONDS changes the time."
    )


# --- both ---------------------------------------------------------------------------------------


def _handshake(here: ClusterEnvironment) -> Handshake:
    secret = os.environ.get("TFCOMMX_SECRET")
    if secret is not None and not secret.strip():
        raise LaunchError(
            f"TFCOMMX_SECRET must be a text that only the ranks know. Received {secret!r} on rank "
            f"{here.rank} of {here.size}, which every process knows. Set it to the same random "
            "text on all ranks, or unset it in a network that is yours alone."
        )
    return Handshake(secret or "", PROTOCOL, (here.launch, here.size))


def _settings(here: ClusterEnvironment, host: str, answer: Any) -> dict[str, str]:
    """Return the variables that horovodrun would have set for this rank.

    Rank 0 says four numbers, an address and a port, and no names of variables, because another
    process may answer in its place: it could have this one load a library.

    Args:
        here: what the launcher says of this process.
        host: its name.
        answer: of rank 0.

    **Raises:** LaunchError for an answer that rank 0 does not give.
    """
    try:
        (local_rank, local_size, cross_rank, cross_size), port = answer["slot"], answer["port"]
        numbers = (local_rank, local_size, cross_rank, cross_size, port)
        address = str(ipaddress.IPv4Address(answer["address"]))
        right = (
            all(type(number) is int for number in numbers)
            and isinstance(answer["address"], str)
            and 0 <= local_rank < local_size <= here.size
            and 0 <= cross_rank < cross_size <= here.size
            and here.local_rank in (None, local_rank)
            and 0 < port < 65536
        )
    except (LookupError, TypeError, ValueError):
        right = False
    if not right:
        raise LaunchError(
            f"Rank 0 at {here.address}, port {here.port}, must answer rank {here.rank} of "
            f"{here.size} with its place among the ranks, and with the address and port of "
            f"Horovod's rendezvous. Received {_printable(answer)}. Is it another program's port? "
            "Set TFCOMMX_PORT, and a TFCOMMX_SECRET, equal on all ranks."
        )
    return {
        "HOROVOD_RANK": str(here.rank),
        "HOROVOD_SIZE": str(here.size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(cross_rank),
        "HOROVOD_CROSS_SIZE": str(cross_size),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _printable(answer: object) -> str:
    """Return an answer as text for a terminal, without its control characters."""
    text = answer if isinstance(answer, str) else repr(answer)[:200]
    return "".join(letter if letter.isprintable() else " " for letter in text)


def interface_of(address: str) -> str:
    """Return the network interface that has an address.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    import psutil  # Horovod needs it

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    if address.startswith("127."):  # The loopback interface has the whole range
        return interface_of("127.0.0.1")
    raise LaunchError(
        f"This host must have an interface with the address {address}, by which rank 0 is reached. "
        f"Received {', '.join(psutil.net_if_addrs())}. Name one in HOROVOD_GLOO_IFACE."
    )


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"Rank{'s' * (len(numbers) > 1)} {shown}"
