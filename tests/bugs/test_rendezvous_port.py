"""The port of rank 0 under srun or torchrun: a foreign process can do no harm at either end.

Another process at rank 0's port could set any variable in the environment of a rank, such as
LD_PRELOAD, and an empty TFCOMMX_SECRET was taken for none. Rank 0 heard its callers one by one, so
sixty that were silent took all of its time.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tfcommx.collectives import rendezvous
from tfcommx.core import LaunchError, TfcommxError
from tfcommx.launch.cluster_environment import ClusterEnvironment
from tfcommx.launch.handshake import Handshake
from tfcommx.launch.known_launchers import cluster_environment

RIGHT = {"slot": [1, 2, 0, 1], "address": "127.0.0.1", "port": 4000}


def place(rank: int, port: int, size: int = 2, **more: Any) -> ClusterEnvironment:
    return ClusterEnvironment("srun", rank, size, None, "127.0.0.1", port, "7.0", **more)


def ask(here: ClusterEnvironment, seconds: float = 10.0) -> tuple[dict[str, str], str]:
    return rendezvous._ask(here, time.monotonic() + seconds, seconds)


def answered_by_another(answer: Any) -> tuple[dict[str, str], str]:
    """Return rank 1's result for the answer of a process that has taken rank 0's port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                handshake = Handshake("", rendezvous.PROTOCOL, ("7.0", 2))
                handshake.hear(connection, time.monotonic() + 10).answer(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            return ask(place(1, server.getsockname()[1]))
        finally:
            thread.join(10)


def test_the_right_answer_names_the_place_of_a_rank() -> None:
    settings, address = answered_by_another(RIGHT)
    assert (settings["HOROVOD_LOCAL_RANK"], settings["HOROVOD_CROSS_SIZE"]) == ("1", "1")
    assert settings["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4000" and address == "127.0.0.1"


@pytest.mark.parametrize(
    "answer",
    [
        {"settings": {"LD_PRELOAD": "/tmp/theirs.so"}, "address": "127.0.0.1"},
        RIGHT | {"slot": {"LD_PRELOAD": "/tmp/theirs.so"}},
        RIGHT | {"slot": [1, 2, 0, "1"]},
        RIGHT | {"slot": [1, 2, 0, True]},
        RIGHT | {"slot": [2, 2, 0, 1]},
        RIGHT | {"slot": [0, 3, 0, 1]},
        RIGHT | {"slot": [-1, 2, 0, 1]},
        RIGHT | {"slot": [1, 2, 0, 1, 5]},
        RIGHT | {"address": "example.org"},
        RIGHT | {"address": 2130706433},
        RIGHT | {"port": 0},
        RIGHT | {"port": "4000"},
        RIGHT | {"port": 65536},
        [],
        "LD_PRELOAD",
        None,
    ],
)
def test_no_other_answer_reaches_the_environment(answer: Any) -> None:
    before = dict(os.environ)
    with pytest.raises(LaunchError, match=re.escape(str(answer)[:40])):
        answered_by_another(answer)
    assert dict(os.environ) == before


def test_what_rank_0_gives_besides_is_not_taken() -> None:
    settings, _ = answered_by_another(RIGHT | {"settings": {"LD_PRELOAD": "/tmp/theirs.so"}})
    assert all(name.startswith("HOROVOD_") for name in settings) and len(settings) == 11


def test_a_problem_is_shown_without_control_characters() -> None:
    with pytest.raises(LaunchError) as refused:
        answered_by_another({"problem": "\x1b]0;theirs\x07 rank 1 is not wanted"})
    assert str(refused.value).isprintable() and "is not wanted" in str(refused.value)


@pytest.mark.parametrize("secret", ["", " ", "\n"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_empty_secret_is_an_error(
    rank: int, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFCOMMX_SECRET", secret)
    start = time.monotonic()
    with pytest.raises(LaunchError, match=f"TFCOMMX_SECRET .*{re.escape(repr(secret))}"):
        rendezvous.join(place(rank, 1))
    assert time.monotonic() - start < 5


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Do some work in a thread; return a function that waits for its result."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except TfcommxError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(60)
        return found[0]

    return result


def gather(here: ClusterEnvironment, seconds: float = 30.0) -> tuple[dict[str, str], str]:
    return rendezvous._gather(here, time.monotonic() + seconds, seconds)


def connect(port: int) -> socket.socket:
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5)
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_hundred_silent_callers_keep_no_rank_waiting() -> None:
    port = free_port()
    rank_0 = beside(lambda: gather(place(0, port)))
    silent = [connect(port) for _ in range(100)]
    start = time.monotonic()
    settings, _ = ask(place(1, port))
    assert settings["HOROVOD_RANK"] == "1" and rank_0()[0]["HOROVOD_RANK"] == "0"
    assert time.monotonic() - start < rendezvous.MESSAGE_SECONDS
    for connection in silent:
        connection.close()


def test_a_refusal_of_any_length_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()

    def fail(*_: Any) -> Any:
        raise LaunchError("no room " * 5000)

    monkeypatch.setattr(rendezvous, "_serve", fail)
    rank_0 = beside(lambda: gather(place(0, port)))
    with pytest.raises(LaunchError, match=r"^Rank 0: no room .*\.\.\.$"):
        ask(place(1, port))
    assert isinstance(rank_0(), LaunchError)


def listening(port: int) -> set[str]:
    """Return the addresses at which this machine listens at a port."""
    import psutil

    return {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == "LISTEN" and one.laddr.port == port
    }


@pytest.mark.parametrize("one_host", [True, False])
def test_it_listens_no_wider_than_the_ranks_need(one_host: bool) -> None:
    port = free_port()
    rank_0 = beside(lambda: gather(place(0, port, one_host=one_host)))
    connect(port).close()
    assert listening(port) == {"127.0.0.1" if one_host else "0.0.0.0"}
    settings, _ = ask(place(1, port))
    rank_0()
    store = int(settings["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    # Horovod's own server would listen at all addresses
    assert listening(store) == {"127.0.0.1"} and not listening(port)


@pytest.mark.parametrize(
    ("variables", "one_host"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, True),
        ({"LOCAL_WORLD_SIZE": "1"}, False),
        ({}, False),
    ],
)
def test_launchers_say_whether_all_ranks_are_on_one_host(
    variables: dict[str, str], one_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "5000"}
    for name, value in (torchrun | variables).items():
        monkeypatch.setenv(name, value)
    here = cluster_environment()
    assert here is not None and here.one_host == one_host


def test_the_store_takes_no_value_that_no_rank_writes_and_shows_no_files() -> None:
    """Horovod's server reads values of any length, and answers HEAD with the facts of files."""
    import http.client

    from tfcommx.collectives.horovod import serve_rendezvous

    port = serve_rendezvous({"here": 2}, "127.0.0.1")

    def request(method: str, path: str, body: bytes | None = None, **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, path, body, headers)
        status = connection.getresponse().status
        connection.close()
        return status

    assert request("PUT", "/global/0", b"an address") == request("GET", "/global/0") == 200
    assert request("PUT", "/global/0", **{"Content-Length": "1000000000"}) == 413
    assert request("PUT", "/global/0", **{"Content-Length": "-1"}) == 413
    assert request("HEAD", "/pyproject.toml") == 405
