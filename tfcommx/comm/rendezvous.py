"""Ranks that somebody else has started find each other: a Gloo launch without horovodrun.

    rank r                         rank 0, at the announced address and port
      connect ------------------->
      <------------------ challenge
      who I am, my challenge ----->   ... until all ranks have come, or the time is over
      <---- where Horovod's rendezvous is, slots on hosts; or why there will be none

Rank 0 then serves what horovodrun would serve, and every rank sets the variables that horovodrun
would have set; from there on it is a launch like any other under Gloo.

With TFCOMMX_SECRET in the environment of all ranks, both sides prove that they know it, and the
secret itself does not travel. Horovod's rendezvous and Gloo's connections are not secured, as under
horovodrun: the ports between the hosts belong into a private network.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections import Counter
from typing import Any, NamedTuple

from tfcommx.comm.announced import Announced
from tfcommx.comm.horovod import serve_rendezvous
from tfcommx.terms import PlanError

# How long ranks wait for each other; TFCOMMX_RENDEZVOUS_SECONDS counts more
SECONDS = 300.0
# Of one message: a process that connects and says nothing holds nobody up for longer
MESSAGE_SECONDS = 5.0
# The form of the messages: other versions, and other programs, are refused
PROTOCOL = "tfcommx rendezvous 1"


class Arrival(NamedTuple):
    """A rank that has come to rank 0."""

    rank: int
    host: str
    local_rank: int | None
    # Address of rank 0 as this rank reaches it, and its own
    reached: str
    own: str
    connection: Any


def join(here: Announced) -> None:
    """Bring all ranks together, and make this process one of a Gloo launch.

    **Ranks:** all, before Horovod starts. **Cost:** one connection of every rank to rank 0.
    **Raises:** PlanError, on all ranks that have come, that names ranks which did not come or came
    twice; a port that is in use; an address that does not answer.
    """
    seconds = float(os.environ.get("TFCOMMX_RENDEZVOUS_SECONDS", SECONDS))
    deadline = time.monotonic() + seconds
    if here.rank == 0:
        settings, address = _gather(here, deadline, seconds)
    else:
        settings, address = _ask(here, deadline, seconds)
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or interface_of(address)
    os.environ |= settings | {"HOROVOD_GLOO_IFACE": interface}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


# --- rank 0 -------------------------------------------------------------------------------------


def _gather(here: Announced, deadline: float, seconds: float) -> tuple[dict[str, str], str]:
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
            server.settimeout(max(deadline - time.monotonic(), 0.01))
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
            arrival = _receive(connection)
            if arrival is not None:
                problem = _problem(here, arrivals, arrival)
                arrivals.setdefault(arrival.rank, arrival)
                everyone.append(arrival)
    own = _address_of_rank_0(here, arrivals.values())
    try:
        if problem:
            raise PlanError(problem)
        settings = _serve(here, arrivals, own)
        for rank, arrival in arrivals.items():
            _answer(arrival, {"settings": settings[rank], "address": own})
        return settings[0], own
    except PlanError as error:
        for arrival in everyone:
            _answer(arrival, {"problem": str(error)})
        raise
    finally:
        for arrival in everyone:
            arrival.connection.close()


def _receive(connection: socket.socket) -> Arrival | None:
    """Let a process say who it is; None for one that does not know the secret or the protocol."""
    try:
        connection.settimeout(MESSAGE_SECONDS)
        challenge = secrets.token_hex(16)
        stream = connection.makefile("rw", encoding="utf-8", newline="\n")
        _write(stream, {"protocol": PROTOCOL, "challenge": challenge})
        said = json.loads(stream.readline(65_536))
        proof = _proof(challenge, str(said["rank"]), said["host"], said["challenge"])
        if said["protocol"] != PROTOCOL or not hmac.compare_digest(said["proof"], proof):
            raise ValueError("a stranger")
        reached, own = connection.getsockname()[0], connection.getpeername()[0]
        return Arrival(
            said["rank"],
            said["host"],
            said["local_rank"],
            reached,
            own,
            _Conversation(connection, stream, said["challenge"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()
        return None


class _Conversation(NamedTuple):
    """An open connection to a rank that waits for its answer."""

    connection: socket.socket
    stream: Any
    challenge: str

    def close(self) -> None:
        """End it."""
        self.stream.close()
        self.connection.close()


def _problem(here: Announced, arrivals: dict[int, Arrival], new: Arrival) -> str:
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


def _address_of_rank_0(here: Announced, arrivals: Any) -> str:
    """Return the address at which ranks on other hosts reach rank 0.

    On rank 0's own host its name may mean a loopback address, as Debian's /etc/hosts has it.
    """
    remote = [one.reached for one in arrivals if one.reached != one.own]
    if remote:
        return remote[0]
    return next((one.reached for one in arrivals), "127.0.0.1")


def _serve(
    here: Announced, arrivals: dict[int, Arrival], address: str
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
    body = json.dumps(text)
    said = {"body": body, "proof": _proof(arrival.connection.challenge, body)}
    try:
        _write(arrival.connection.stream, said)
    except OSError:  # It has gone; the watch, or Gloo, will say so
        return


# --- the other ranks ----------------------------------------------------------------------------


def _ask(here: Announced, deadline: float, seconds: float) -> tuple[dict[str, str], str]:
    """Tell rank 0 who this is, and wait for its answer; return settings and own address."""
    reason: object = "nobody listens there"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((here.address, here.port), MESSAGE_SECONDS) as connection:
                # Rank 0 answers when all have come, or when its own time is over
                connection.settimeout(max(deadline - time.monotonic(), 0) + 2 * MESSAGE_SECONDS)
                own, peer = connection.getsockname()[0], connection.getpeername()[0]
                answer = _converse(here, connection)
        except (OSError, ValueError, KeyError) as error:
            reason = error
            time.sleep(0.2)
            continue
        if "problem" in answer:
            raise PlanError(answer["problem"])
        # On rank 0's host, the address that other hosts know
        return answer["settings"], answer["address"] if own == peer else own
    raise PlanError(
        f"Rank {here.rank} of {here.size} could not join rank 0 at {here.address}, port "
        f"{here.port}, within {seconds:g} s: {reason}. Does rank 0 run and call tfcommx.init()? Is "
        "the port open between the hosts, and TFCOMMX_SECRET equal on all ranks? "
        "TFCOMMX_RENDEZVOUS_SECONDS changes the time."
    )


def _converse(here: Announced, connection: socket.socket) -> dict[str, Any]:
    """Say who this is, and return what rank 0 answers. **Raises:** ValueError for a stranger."""
    stream = connection.makefile("rw", encoding="utf-8", newline="\n")
    greeting = json.loads(stream.readline(65_536))
    if greeting["protocol"] != PROTOCOL:
        raise ValueError(f"another program, or version, listens there: {greeting['protocol']!r}")
    challenge, host = secrets.token_hex(16), socket.gethostname()
    proof = _proof(greeting["challenge"], str(here.rank), host, challenge)
    said = {"protocol": PROTOCOL, "rank": here.rank, "host": host, "local_rank": here.local_rank}
    _write(stream, said | {"challenge": challenge, "proof": proof})
    answer = json.loads(stream.readline())
    if not hmac.compare_digest(answer["proof"], _proof(challenge, answer["body"])):
        raise ValueError("what listens there does not know TFCOMMX_SECRET")
    return json.loads(answer["body"])


# --- both ---------------------------------------------------------------------------------------


def _proof(*words: str) -> str:
    """Return what only a process with the launch's secret can make of these words."""
    key = os.environ.get("TFCOMMX_SECRET", "").encode()
    return hmac.digest(key, json.dumps(words).encode(), "sha256").hex()


def _write(stream: Any, text: dict[str, Any]) -> None:
    stream.write(json.dumps(text) + "\n")
    stream.flush()


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
