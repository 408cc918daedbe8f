"""A Gloo launch without horovodrun: ranks that srun, torchrun or others started find each other.

    rank r                         rank 0, at the address and port of its environment
      rank, host, local rank ---->   ... until all ranks have called, or the time is over
      <---- address of Horovod's rendezvous and slots; or the reason of a failure

Rank 0 serves all calls in parallel (launch/handshake.py). It then starts the rendezvous that
horovodrun would serve, and every rank sets the variables that horovodrun would have set. After that
it is a normal launch under Gloo.

With TFCOMMX_SECRET in the environment of all ranks, both sides prove that they know it
(launch/handshake.py). The ports between the hosts must be in a private network, because Horovod's
rendezvous and Gloo's connections are not secured, as under horovodrun.
"""

import contextlib
import ipaddress
import itertools
import os
import queue
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from tfcommx.collectives.horovod import serve_rendezvous
from tfcommx.core import LaunchError, Topology, log
from tfcommx.launch.cluster_environment import ClusterEnvironment
from tfcommx.launch.commands import ipv4_addresses
from tfcommx.launch.handshake import NO_PARTNER, Caller, Entrance, Handshake, shortened
from tfcommx.launch.hosts import check_host_name, is_host_name
from tfcommx.launch.launcher import rendezvous_seconds

# Seconds that ranks wait for each other; TFCOMMX_RENDEZVOUS_SECONDS overrides it
SECONDS = 300.0
# Seconds for one message, after which a silent process is disconnected
MESSAGE_SECONDS = 5.0
# Largest number of simultaneous callers without proof, in addition to the ranks
STRANGERS = 64
# Version of the messages; other versions, and other programs, are refused
PROTOCOL = "tfcommx rendezvous 3"


class Arrival(NamedTuple):
    """A rank that has called rank 0."""

    rank: int
    host: str
    local_rank: int | None
    # Address at which this rank reaches rank 0, and its own address
    reached: str
    own: str
    caller: Caller


def join(cluster: ClusterEnvironment, any_order: bool = False) -> None:
    """Connect all ranks, and make this process part of a Gloo launch.

    Args:
        cluster: environment that the launcher gave this process.
        any_order: True if ranks of a host need not be consecutive.

    **Ranks:** all, before Horovod starts. **Cost:** one connection of every rank to rank 0.
    **Raises:** LaunchError, on all ranks that have called, that names ranks which are missing,
    exist twice, or are not in the order of their hosts; a port that is in use; an address that does
    not answer.
    """
    seconds = rendezvous_seconds(SECONDS)
    log.info(
        "Rank %d of %d, started by %s, meets the others at %s, port %d, within %g s.",
        *(cluster.rank, cluster.size, cluster.launcher, cluster.address, cluster.port, seconds),
    )
    deadline = time.monotonic() + seconds
    if cluster.rank == 0:
        settings, address = _gather(cluster, deadline, seconds, any_order)
    else:
        settings, address = _ask(cluster, deadline, seconds)
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or interface_of(address)
    os.environ |= settings | {"HOROVOD_GLOO_IFACE": interface}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


# --- rank 0 -------------------------------------------------------------------------------------


def _gather(
    cluster: ClusterEnvironment, deadline: float, seconds: float, any_order: bool = False
) -> tuple[dict[str, str], str]:
    """Wait for all ranks, and answer them; return this rank's settings and address."""
    check_host_name(socket.gethostname(), "this host")
    handshake = _handshake(cluster)
    try:
        server = _listen(cluster)
    except OSError as error:
        raise LaunchError(
            f"Rank 0 needs TCP port {cluster.port} to bring the ranks of {cluster.launcher} "
            f"together. Received: {error}. Set TFCOMMX_PORT to a free one, equal on all ranks."
        ) from error
    callers: queue.SimpleQueue[Caller] = queue.SimpleQueue()
    entrance = Entrance(
        server, handshake, MESSAGE_SECONDS, callers.put, most=cluster.size + STRANGERS
    )
    arrivals: dict[int, Arrival] = {}
    everyone: list[Arrival] = []  # Including ranks that are refused
    problem = ""
    while len(arrivals) < cluster.size - 1 and not problem:
        try:
            # At least a millisecond, because `get` refuses a negative timeout
            arrival = _arrival(callers.get(timeout=max(deadline - time.monotonic(), 0.001)))
        except queue.Empty:
            missing = sorted(set(range(1, cluster.size)) - arrivals.keys())
            problem = (
                f"{_ranks(missing)} of {cluster.size} did not come to rank 0 on "
                f"{socket.gethostname()}, port {cluster.port}, within {seconds:g} s. Did "
                f"{cluster.launcher} start them, and do they call tfcommx.init()? Are ports "
                "between the hosts open? TFCOMMX_RENDEZVOUS_SECONDS changes the time."
            )
            break
        if arrival is not None:
            problem = _problem(cluster, arrivals, arrival)
            arrivals.setdefault(arrival.rank, arrival)
            everyone.append(arrival)
    entrance.close()
    # Ranks that have called since then must get the reason, too, and not wait until their deadline
    while not callers.empty():
        if (arrival := _arrival(callers.get())) is not None:
            everyone.append(arrival)
    try:
        if problem:
            raise LaunchError(problem)
        address = _address_of_rank_0(arrivals.values())
        hosts = [socket.gethostname(), *(arrivals[rank].host for rank in range(1, cluster.size))]
        # Checked here; later, rank 0 would end with its rendezvous before others know why
        if not any_order:
            Topology.of_hosts(hosts)
        answers = _serve(cluster, arrivals, hosts, address)
        for rank, arrival in arrivals.items():
            _answer(arrival, answers[rank])
        return _settings(cluster, socket.gethostname(), answers[0]), address
    except Exception as error:  # Any exception; waiting ranks must be told
        for arrival in everyone:
            _answer(arrival, {"problem": shortened(f"Rank 0: {error}")})
        raise
    finally:
        for arrival in everyone:
            arrival.caller.connection.close()


def _listen(cluster: ClusterEnvironment) -> socket.socket:
    """Listen at rank 0's port, at the given address if all ranks are on this host."""
    backlog = min(cluster.size + STRANGERS, 1024)
    if cluster.one_host:
        with contextlib.suppress(OSError):  # The port is in use, or the address is a router's
            return socket.create_server((cluster.address, cluster.port), backlog=backlog)
    return socket.create_server(("", cluster.port), backlog=backlog)


def _arrival(caller: Caller) -> Arrival | None:
    """Return the rank that has called; close the connection and return None if it is not a rank."""
    try:
        rank, host, local_rank = caller.said
        numbers = rank, 0 if local_rank is None else local_rank
        connection = caller.connection
        right = is_host_name(host) and {type(number) for number in numbers} == {int}
        if not right or _is_of_another_user(connection):
            raise ValueError("a stranger")
        reached, caller_address = connection.getsockname()[0], connection.getpeername()[0]
        return Arrival(rank, host, local_rank, reached, caller_address, caller)
    except NO_PARTNER:
        caller.connection.close()
        return None


def _is_of_another_user(connection: socket.socket) -> bool:
    """Return True if another user of this host, except root, is at the other end."""
    # Such as two users who copy the same MASTER_PORT: each had a rank of the other's launch
    ends = [
        f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"
        for address, port in (connection.getpeername(), connection.getsockname())
    ]
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/tcp").read_text().splitlines():
            if (columns := line.split())[1:3] == ends:  # The last: users outside of a namespace
                return int(columns[7]) not in (os.geteuid(), 0, 65534)
    return False  # On another host


def _problem(cluster: ClusterEnvironment, arrivals: dict[int, Arrival], new: Arrival) -> str:
    """Return the reason why this rank cannot be part of the launch, or ""."""
    if not 0 < new.rank < cluster.size:
        return (
            f"Ranks must be numbered from 0 to {cluster.size - 1}. Received another rank "
            f"{new.rank}, on {new.host}. Give each process its own number."
        )
    if new.rank in arrivals:
        return (
            f"Every rank must be one process. Received two that are rank {new.rank}, on "
            f"{arrivals[new.rank].host} and on {new.host}. Give each its own number."
        )
    return ""


def _address_of_rank_0(arrivals: Collection[Arrival]) -> str:
    # Ranks on other hosts have priority, because on rank 0's own host its name may mean a loopback
    # address, as in Debian's /etc/hosts
    remote = [
        arrival.reached for arrival in arrivals if not _on_this_host(arrival.own, arrival.reached)
    ]
    return (remote or [arrival.reached for arrival in arrivals])[0]


def _on_this_host(first: str, second: str) -> bool:
    """Return True if a connection between two addresses stays on one host."""
    # They may differ: a connection to 127.0.1.1 is from 127.0.0.1
    return first == second or first.startswith("127.")


def _serve(
    cluster: ClusterEnvironment, arrivals: dict[int, Arrival], hosts: list[str], address: str
) -> dict[int, dict[str, Any]]:
    """Start Horovod's rendezvous; return the answer to each rank."""
    slots = _slots(
        hosts, [cluster.local_rank, *(arrivals[r].local_rank for r in range(1, cluster.size))]
    )
    port = serve_rendezvous(Counter(hosts), address)
    return {
        rank: {"slot": slot, "address": address, "port": port} for rank, slot in enumerate(slots)
    }


def _slots(hosts: list[str], local_ranks: list[int | None]) -> list[list[int]]:
    """Return local rank and size, cross rank and size of each rank, in Horovod's sense.

    >>> _slots(["a", "a", "b"], [None, None, None])
    [[0, 2, 0, 2], [1, 2, 0, 1], [0, 1, 1, 2]]

    **Raises:** LaunchError if a launcher's local ranks are not those of consecutive ranks.
    """
    names = list(dict.fromkeys(hosts))
    sizes = Counter(hosts)
    slots = []
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host)
        if local_ranks[rank] not in (None, local):
            raise LaunchError(
                f"Consecutive ranks must be on the same host. Rank {rank} on {host} is the host's "
                f"number {local}, and its launcher says {local_ranks[rank]}. Place ranks by node "
                "(srun --distribution=block); if two hosts have the same name, rename one "
                "(hostname)."
            )
        # A cross rank counts only the hosts that have a rank of this local number
        across = [name for name in names if sizes[name] > local]
        slots.append([local, sizes[host], across.index(host), len(across)])
    return slots


def _answer(arrival: Arrival, text: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # It may have ended, which the watch, or Gloo, will report
        arrival.caller.answer(text)


# --- the other ranks ----------------------------------------------------------------------------


def _ask(
    cluster: ClusterEnvironment, deadline: float, seconds: float
) -> tuple[dict[str, str], str]:
    """Introduce this rank to rank 0, and wait for its answer; return settings and own address."""
    reason: object = "no process listens there"
    # Before the loop, because a LaunchError is a ValueError, after which the loop would call again
    host, handshake = check_host_name(socket.gethostname(), "this host"), _handshake(cluster)
    addresses = (cluster.address, *cluster.others)
    for address in itertools.cycle(addresses):
        if time.monotonic() > deadline:
            break
        try:
            with socket.create_connection((address, cluster.port), MESSAGE_SECONDS) as connection:
                own_address, peer = connection.getsockname()[0], connection.getpeername()[0]
                introduction = (cluster.rank, host, cluster.local_rank)
                # Rank 0 answers when all ranks have called, or when its own time is over
                answer = handshake.call(connection, introduction, deadline + 2 * MESSAGE_SECONDS)
        except NO_PARTNER as error:
            # Each address is called about five times a second
            reason = error
            time.sleep(0.2 / len(addresses))
            continue
        if isinstance(answer, dict) and "problem" in answer:
            raise LaunchError(_printable(answer["problem"]))
        settings = _settings(cluster, host, answer)
        # On rank 0's host, the address that other hosts use
        return settings, answer["address"] if _on_this_host(own_address, peer) else own_address
    raise LaunchError(
        f"Rank {cluster.rank} of {cluster.size} could not join rank 0 at "
        f"{' or '.join(addresses)}, port {cluster.port}, within {seconds:g} s: "
        f"{reason}.{_without_ipv4(addresses)} Does rank 0 run and call tfcommx.init()? Is the port "
        "open between the hosts, "
        "and TFCOMMX_SECRET equal on all ranks? TFCOMMX_RENDEZVOUS_SECONDS changes the time."
    )


def _without_ipv4(addresses: Collection[str]) -> str:
    """Return a sentence about addresses that the resolver knows by IPv6 alone; "" for others."""

    def families(address: str) -> set[int]:
        try:
            return {row[0] for row in socket.getaddrinfo(address, None)}
        except (OSError, UnicodeError):
            return set()

    alone = [address for address in addresses if families(address) == {socket.AF_INET6}]
    return (
        f" {' and '.join(alone)} has no IPv4 address, which Horovod's Gloo needs." if alone else ""
    )


# --- both ---------------------------------------------------------------------------------------


def _handshake(cluster: ClusterEnvironment) -> Handshake:
    secret = os.environ.get("TFCOMMX_SECRET")
    if secret is not None and not secret.strip():
        raise LaunchError(
            f"TFCOMMX_SECRET must be a text that only the ranks know. Received {secret!r} on rank "
            f"{cluster.rank} of {cluster.size}, which every process knows. Set it to the same "
            "random text on all ranks, or unset it in a network that is yours alone."
        )
    return Handshake(secret or "", PROTOCOL, (cluster.launch, cluster.size))


def _settings(cluster: ClusterEnvironment, host: str, answer: Any) -> dict[str, str]:
    """Return the variables that horovodrun would have set for this rank."""
    # Rank 0 sends numbers and an address, and no names of variables, because another process that
    # answers in its place could use variables to make this one load a library
    try:
        (local_rank, local_size, cross_rank, cross_size), port = answer["slot"], answer["port"]
        numbers = (local_rank, local_size, cross_rank, cross_size, port)
        # IPv4 alone, because Horovod's Gloo has no other addresses
        address = str(ipaddress.IPv4Address(answer["address"]))
        right = (
            all(type(number) is int for number in numbers)
            and isinstance(answer["address"], str)
            and 0 <= local_rank < local_size <= cluster.size
            and 0 <= cross_rank < cross_size <= cluster.size
            and cluster.local_rank in (None, local_rank)
            and 0 < port < 65536
        )
    except (LookupError, TypeError, ValueError):
        right = False
    if not right:
        raise LaunchError(
            f"Rank 0 at {cluster.address}, port {cluster.port}, must answer rank {cluster.rank} of "
            f"{cluster.size} with its place among the ranks, and with the address and port of "
            f"Horovod's rendezvous. Received {_printable(answer)}. Is it another program's port? "
            "Set TFCOMMX_PORT, and a TFCOMMX_SECRET, equal on all ranks."
        )
    return {
        "HOROVOD_RANK": str(cluster.rank),
        "HOROVOD_SIZE": str(cluster.size),
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
    """Return the name of the network interface with an address.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    interfaces = ipv4_addresses()
    for name, addresses in interfaces.items():
        if address in addresses:
            return name
    if address.startswith("127."):  # The loopback interface has the whole range
        return interface_of("127.0.0.1")
    raise LaunchError(
        f"This host must have an interface with the address {address}, by which rank 0 is reached. "
        f"Received {', '.join(interfaces)}. Name one in HOROVOD_GLOO_IFACE."
    )


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"Rank{'s' * (len(numbers) > 1)} {shown}"
