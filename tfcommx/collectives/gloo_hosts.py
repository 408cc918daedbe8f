"""Every rank's host, before Horovod starts under Gloo, through the store of its rendezvous.

Horovod's static process sets follow from the hosts, and must be given when it starts.

    rank r   PUT /tfcommx_hosts/r    "node1"                --> store of horovodrun, or of rank 0
    rank 0   GET /tfcommx_hosts/0, 1, ...                   <--
    rank 0   PUT /tfcommx_hosts/all  ["node0", "node1"]     -->
    rank r   GET /tfcommx_hosts/all                         <--

It needs neither TensorFlow nor Horovod.
"""

import http.client
import json
import os
import socket
import time
from typing import Any

from tfcommx.core import ConfigurationError, LaunchError
from tfcommx.launch.commands import ipv4_addresses
from tfcommx.launch.hosts import check_host_name, is_host_name
from tfcommx.launch.launcher import Launcher, rendezvous_seconds

# Seconds that ranks wait for each other before Horovod starts, unless TFCOMMX_RENDEZVOUS_SECONDS
# is set
RENDEZVOUS_SECONDS = 60
SCOPE = "tfcommx_hosts"
# Bytes of a host's name in JSON: 253 characters, quotes, comma and space
LARGEST_NAME = 257
# Seconds for the store to answer one request
REQUEST_SECONDS = 10.0
# Seconds without an answer after which a store that has taken this rank's name has ended, because a
# busy store answers some requests
GONE_SECONDS = 15.0
# Exceptions of http.client if the store, or another server at its port, does not answer correctly
NO_STORE = (OSError, http.client.HTTPException)


def _binds(row: tuple[Any, ...]) -> bool:
    """Return True if a row of `getaddrinfo` has an address of this host."""
    family, kind, protocol, _, address = row
    try:
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(address)
    except OSError:
        return False
    return True


def require_network() -> None:
    """Refuse a host on which Gloo would end the process without a reason that Python sees.

    **Ranks:** local. **Raises:** LaunchError for a name of this host that does not resolve to one
    of its addresses, and for an interface in HOROVOD_GLOO_IFACE that it does not have.
    """
    host = socket.gethostname()
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        problem = "" if any(map(_binds, rows)) else f"{rows[0][4][0]} is of another host"
    except (OSError, UnicodeError) as error:
        problem = str(error)
    if problem:
        raise LaunchError(
            "The name of this host must resolve to one of its addresses, because Gloo binds to "
            f"it. Received {host!r}: {problem}. Let /etc/hosts have a line `127.0.1.1 {host}` and "
            "no other with that name, or start the container with another --hostname."
        )
    chosen = os.environ.get("HOROVOD_GLOO_IFACE", "")
    if not chosen:
        return
    interfaces = [name for name, addresses in ipv4_addresses().items() if addresses]
    if chosen not in interfaces:
        raise LaunchError(
            f"HOROVOD_GLOO_IFACE must name a network interface of {host} that has an IPv4 address. "
            f"Received {chosen!r}, and this host has {', '.join(interfaces)}. Name one of them, or "
            "unset the variable."
        )


def require_rendezvous() -> None:
    """Refuse a rank of a Gloo launch whose environment lacks the address of the rendezvous.

    **Ranks:** local. **Raises:** ConfigurationError.
    """
    names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_HOSTNAME")
    missing = [name for name in names if not os.environ.get(name)]
    if not missing and os.environ[names[1]].isdecimal():
        return
    received = f"no {' and no '.join(missing)}" if missing else f"{names[1]}={os.environ[names[1]]}"
    raise ConfigurationError(
        "A rank of horovodrun needs the address of its launch in its environment. Received "
        f"HOROVOD_RANK={os.environ.get('HOROVOD_RANK')} and {received}. Start all ranks by "
        "`tfcommx run`, also if HOROVOD_SIZE was set by hand; to train in one process, unset "
        "HOROVOD_RANK, HOROVOD_SIZE and HOROVOD_LOCAL_RANK, which another launch has left."
    )


def gloo_hosts(launch: Launcher, inits: int = 0) -> list[str]:
    """Return every rank's host, in rank order, through the store of a Gloo launch.

    Args:
        launch: this rank.
        inits: ancestors of this process that have called init() as the same rank.

    **Ranks:** all.
    **Raises:** LaunchError that names the first missing rank after RENDEZVOUS_SECONDS, the content
    of the store in place of a rank's host, or a store that has ended.
    """
    address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    # Another scope, because that of the ancestors has the hosts of all ranks
    store = Store(address, port, f"{SCOPE}{inits or ''}")
    seconds = rendezvous_seconds(RENDEZVOUS_SECONDS)
    deadline = time.monotonic() + seconds
    own_host = check_host_name(os.environ["HOROVOD_HOSTNAME"], "HOROVOD_HOSTNAME")
    hosts: list[str] = []
    # Failure of the last request, such as a refused connection
    reason, written = "", False
    answered = time.monotonic()
    # Rank 0 reads the name of each rank and writes the list for all, because p squared reads would
    # take 11 s at 128 ranks: the store, a single Python process, needs 0.65 ms for each
    while len(hosts) < launch.size:
        late = time.monotonic() > deadline
        if not written:
            reason = store.put(str(launch.rank), own_host, deadline)
            written = not reason
        # After the deadline each rank looks for the missing one itself, because it may be rank 0
        one_by_one = launch.rank == 0 or late
        key = str(len(hosts)) if one_by_one else "all"
        answer, problem = store.get(
            key, LARGEST_NAME * (1 if one_by_one else launch.size), deadline
        )
        if answer is not None:
            hosts += _checked(answer, key, launch.size)
            continue
        reason = problem or reason
        if not problem:
            answered = time.monotonic()
        if written and time.monotonic() > answered + GONE_SECONDS:
            raise LaunchError(
                f"Horovod's rendezvous at {store} is required until all ranks know their hosts. "
                f"Rank {launch.rank} of {launch.size} received for {GONE_SECONDS:g} s: {reason}. "
                "The output of rank 0, or of the launcher, says why it has ended."
            )
        if late and not written:
            raise LaunchError(
                f"Rank {launch.rank} of {launch.size} must reach Horovod's rendezvous at {store}. "
                f"Received for {seconds:g} s: {reason}. Are all TCP ports open between the hosts? "
                "If an interface such as docker0 has this address on each host, name one that "
                "connects them: --network-interfaces eth0, or HOROVOD_GLOO_IFACE."
            )
        if late:
            raise LaunchError(
                f"Rank {len(hosts)} of {launch.size} has not called init() within {seconds:g} s "
                f"(seen from rank {launch.rank}). Does every rank call tfcommx.init(), and are all "
                "TCP ports open between the hosts?"
                + f" {CHILD}" * bool(inits)
                + (f" Horovod's rendezvous at {store} answers: {reason}." if reason else "")
            )
        time.sleep(max(0.02, launch.size / 500))  # At most 500 reads per second in total
    if hosts[launch.rank] != own_host:
        raise LaunchError(
            f"Horovod's rendezvous at {store} must name {own_host} as the host of rank "
            f"{launch.rank}, as this rank has written. Received {hosts[launch.rank]!r}. {_REMEDY}"
        )
    if launch.rank == 0 and (reason := store.put("all", hosts, deadline)):
        raise LaunchError(
            f"Horovod's rendezvous at {store} must take the list of hosts. Received: {reason}. "
            "Does the launcher still run?"
        )
    return hosts


# Remedy for a process that a rank has started
CHILD = (
    "This process was started by a rank that has called it before, and has inherited that rank's "
    "variables. A helper of a rank must not call it, or must run without HOROVOD_RANK, "
    "OMPI_COMM_WORLD_RANK and the like in its environment."
)
_REMEDY = (
    "Its port is open to whoever reaches it: keep other users and hosts away from it, and start "
    "again."
)


def _checked(answer: bytes, key: str, size: int) -> list[str]:
    """Return the hosts of an answer. **Raises:** LaunchError that shows an invalid answer."""
    try:
        value: Any = json.loads(answer)
    except (ValueError, RecursionError):
        value = None
    hosts = value if key == "all" else [value]
    right = isinstance(hosts, list) and len(hosts) == (size if key == "all" else 1)
    if not right or not all(map(is_host_name, hosts)):
        required = f"a list of {size} names" if key == "all" else f"the name of rank {key}'s host"
        raise LaunchError(
            f"Horovod's rendezvous must hold {required} in {SCOPE}/{key}, as JSON. Received "
            f"{answer[:60]!r}, which no rank has written. {_REMEDY}"
        )
    return hosts


class Store:
    """Horovod's key-value store, over HTTP without a proxy."""

    # An HTTP server without authentication, to which any program that reaches its port can write.
    # Therefore answers are read up to a limit, as JSON, and used only if they are names of hosts.
    # Horovod's own client would unpickle answers, which can run any code of their sender, and would
    # use the proxy of `http_proxy`

    def __init__(self, address: str, port: str, scope: str = SCOPE) -> None:
        self.address, self.port, self.scope = address, int(port), scope

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    def put(self, key: str, value: Any, deadline: float) -> str:
        """Write a value as JSON; return the reason of a failure, or ""."""
        status, _, reason = self._ask("PUT", key, 0, deadline, json.dumps(value).encode())
        return reason or ("" if status == http.client.OK else f"HTTP status {status}")

    def get(self, key: str, most: int, deadline: float) -> tuple[bytes | None, str]:
        """Return the bytes of a key, or None, and the reason of a failure, or ""."""
        # One byte more than `most`, to detect longer values
        status, body, reason = self._ask("GET", key, most + 1, deadline)
        if status == http.client.OK:
            return body, ""
        absent = status == http.client.NOT_FOUND
        return None, reason or ("" if absent else f"HTTP status {status}")

    def _ask(
        self, method: str, key: str, most: int, deadline: float, body: bytes | None = None
    ) -> tuple[int, bytes, str]:
        """Return the status, at most `most` bytes of the answer, and the reason of a failure."""
        seconds = min(max(deadline - time.monotonic(), 0.5), REQUEST_SECONDS)
        connection = http.client.HTTPConnection(self.address, self.port, timeout=seconds)
        try:
            connection.request(method, f"/{self.scope}/{key}", body)
            answer = connection.getresponse()
            return answer.status, answer.read(most), ""
        except NO_STORE as error:
            return 0, b"", str(error) or type(error).__name__
        finally:
            connection.close()
