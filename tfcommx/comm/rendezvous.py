"""A Gloo launch without horovodrun: ranks that srun, torchrun or others started find each other.

    rank r                         rank 0, at the address and port of its environment
      who I am ------------------>   ... until all ranks have come, or the time is over
      <---- where Horovod's rendezvous is, slots on hosts; or why there will be none

Rank 0 then serves what horovodrun would serve, and every rank sets the variables that horovodrun
would have set; from there on it is a launch like any other under Gloo.

With TFCOMMX_SECRET in the environment of all ranks, both sides prove that they know it
(challenge.py). Horovod's rendezvous and Gloo's connections are not secured, as under horovodrun:
the ports between the hosts belong into a private network.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from tfcommx.comm.challenge import NO_PARTNER, Caller, Handshake
from tfcommx.comm.cluster_environment import ClusterEnvironment
from tfcommx.comm.horovod import serve_rendezvous
from tfcommx.comm.launcher import rendezvous_seconds
from tfcommx.terms import PlanError

log = logging.getLogger("tfcommx")

# How long ranks wait for each other; TFCOMMX_RENDEZVOUS_SECONDS counts more
SECONDS = 300.0
# Of one message: a process that connects and says nothing holds nobody up for longer
MESSAGE_SECONDS = 5.0
# The form of the messages: other versions, and other programs, are refused
PROTOCOL = "tfcommx rendezvous 2"


class Arrival(NamedTuple):
    """A rank that has come to rank 0."""

    rank: int
    host: str
    local_rank: int | None
    # Address of rank 0 as this rank reaches it, and its own
    reached: str
    own: str
    caller: Caller


def join(here: ClusterEnvironment) -> None:
    """Bring all ranks together, and make this process one of a Gloo launch.

    **Ranks:** all, before Horovod starts. **Cost:** one connection of every rank to rank 0.
    **Raises:** PlanError, on all ranks that have come, that names ranks which did not come or came
    twice; a port that is in use; an address that does not answer.
    """
    seconds = rendezvous_seconds(SECONDS)
    log.info(
        "Rank %d of %d, started by %s, meets the others at %s, port %d, within %g s.",
        *(here.rank, here.size, here.launcher, here.address, here.port, seconds),
    )
    deadline = time.monotonic() + seconds
    if here.rank == 0:
        settings, address = _gather(here, deadline, seconds)
    else:
        settings, address = _ask(here, deadline, seconds)
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or interface_of(address)
    os.environ |= settings | {"HOROVOD_GLOO_IFACE": interface}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


# --- rank 0 -------------------------------------------------------------------------------------


def _gather(
    here: ClusterEnvironment, deadline: float, seconds: float
) -> tuple[dict[str, str], str]:
    """Wait for all ranks, and answer them; return this rank's settings and address."""
    try:
        server = socket.create_server(("", here.port), backlog=min(here.size, 1024))
    except OSError as error:
        raise PlanError(
            f"Rank 0 needs TCP port {here.port} to bring the ranks of {here.launcher} together. "
            f"Received: {error}. Set TFCOMMX_PORT to a free one, equal on all ranks."
        ) from error
    arrivals: dict[int, Arrival] = {}
    everyone: list[Arrival] = []  # Also those that there is no place for
    problem = ""
    with server:
        while len(arrivals) < here.size - 1 and not problem:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, here.size)) - arrivals.keys())
                problem = (
                    f"{_ranks(missing)} of {here.size} did not come to rank 0 on "
                    f"{socket.gethostname()}, port {here.port}, within {seconds:g} s. Did "
                    f"{here.launcher} start them, and do they call tfcommx.init()? Are ports "
                    "between the hosts open? TFCOMMX_RENDEZVOUS_SECONDS changes the time."
                )
                break
            arrival = _receive(here, connection)
            if arrival is not None:
                problem = _problem(here, arrivals, arrival)
                arrivals.setdefault(arrival.rank, arrival)
                everyone.append(arrival)
    try:
        if problem:
            raise PlanError(problem)
        own = _address_of_rank_0(arrivals.values())
        settings = _serve(here, arrivals, own)
        for rank, arrival in arrivals.items():
            _answer(arrival, {"settings": settings[rank], "address": own})
        return settings[0], own
    except Exception as error:  # Whatever it is, ranks that wait must hear of it
        for arrival in everyone:
            _answer(arrival, {"problem": f"Rank 0: {error}"})
        raise
    finally:
        for arrival in everyone:
            arrival.caller.connection.close()


def _receive(here: ClusterEnvironment, connection: socket.socket) -> Arrival | None:
    """Let a process say who it is; None for one that is not of this launch."""
    try:
        caller = _handshake(here).hear(connection, time.monotonic() + MESSAGE_SECONDS)
        rank, host, local_rank = caller.said
        numbers = rank, 0 if local_rank is None else local_rank
        if not isinstance(host, str) or {type(number) for number in numbers} != {int}:
            raise ValueError("a stranger")
        reached, own = connection.getsockname()[0], connection.getpeername()[0]
        return Arrival(rank, host, local_rank, reached, own, caller)
    except NO_PARTNER:
        connection.close()
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
    here: ClusterEnvironment, arrivals: dict[int, Arrival], address: str
) -> dict[int, dict[str, str]]:
    """Start Horovod's rendezvous; return what each rank's environment needs."""
    hosts = [socket.gethostname(), *(arrivals[rank].host for rank in range(1, here.size))]
    slots = _slots(hosts, [here.local_rank, *(arrivals[r].local_rank for r in range(1, here.size))])
    port = serve_rendezvous(Counter(hosts))
    return {
        rank: {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(here.size),
            **{name: str(value) for name, value in slot.items()},
            "HOROVOD_HOSTNAME": hosts[rank],
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        for rank, slot in enumerate(slots)
    }


def _slots(hosts: list[str], local_ranks: list[int | None]) -> list[dict[str, int]]:
    """Return the local and cross numbers of each rank, as Horovod counts them.

    >>> _slots(["a", "a", "b"], [None, None, None])[2]
    {'HOROVOD_LOCAL_RANK': 0, 'HOROVOD_LOCAL_SIZE': 1, 'HOROVOD_CROSS_RANK': 1, \
'HOROVOD_CROSS_SIZE': 2}

    **Raises:** PlanError if a launcher's local ranks are not those of consecutive ranks.
    """
    names = list(dict.fromkeys(hosts))
    sizes = Counter(hosts)
    found = []
    for rank, host in enumerate(hosts):
        local = hosts[:rank].count(host)
        if local_ranks[rank] not in (None, local):
            raise PlanError(
                f"Consecutive ranks must be on the same host. Rank {rank} on {host} is the host's "
                f"number {local}, and its launcher says {local_ranks[rank]}. Place ranks by node "
                "(srun --distribution=block)."
            )
        across = [name for name in names if sizes[name] > local]
        found.append(
            {
                "HOROVOD_LOCAL_RANK": local,
                "HOROVOD_LOCAL_SIZE": sizes[host],
                "HOROVOD_CROSS_RANK": across.index(host),
                "HOROVOD_CROSS_SIZE": len(across),
            }
        )
    return found


def _answer(arrival: Arrival, text: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # It may have gone; the watch, or Gloo, will say so
        arrival.caller.answer(text)


# --- the other ranks ----------------------------------------------------------------------------


def _ask(here: ClusterEnvironment, deadline: float, seconds: float) -> tuple[dict[str, str], str]:
    """Tell rank 0 who this is, and wait for its answer; return settings and own address."""
    reason: object = "nobody listens there"
    addresses = (here.address, *here.others)
    for address in itertools.cycle(addresses):
        if time.monotonic() > deadline:
            break
        try:
            with socket.create_connection((address, here.port), MESSAGE_SECONDS) as connection:
                own, peer = connection.getsockname()[0], connection.getpeername()[0]
                said = (here.rank, socket.gethostname(), here.local_rank)
                # Rank 0 answers when all have come, or when its own time is over
                answer = _handshake(here).call(connection, said, deadline + 2 * MESSAGE_SECONDS)
        except NO_PARTNER as error:
            reason = error
            time.sleep(0.2 / len(addresses))
            continue
        if "problem" in answer:
            raise PlanError(answer["problem"])
        # On rank 0's host, the address that other hosts know
        return answer["settings"], answer["address"] if _on_this_host(own, peer) else own
    raise PlanError(
        f"Rank {here.rank} of {here.size} could not join rank 0 at {' or '.join(addresses)}, port "
        f"{here.port}, within {seconds:g} s: {reason}. Does rank 0 run and call tfcommx.init()? Is "
        "the port open between the hosts, and TFCOMMX_SECRET equal on all ranks? "
        "TFCOMMX_RENDEZVOUS_SECONDS changes the time."
    )


# --- both ---------------------------------------------------------------------------------------


def _handshake(here: ClusterEnvironment) -> Handshake:
    secret = os.environ.get("TFCOMMX_SECRET", "")
    return Handshake(secret, PROTOCOL, (here.launch, here.size))


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
    raise PlanError(
        f"This host must have an interface with the address {address}, by which rank 0 is reached. "
        f"Received {', '.join(psutil.net_if_addrs())}. Name one in HOROVOD_GLOO_IFACE."
    )


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"Rank{'s' * (len(numbers) > 1)} {shown}"
