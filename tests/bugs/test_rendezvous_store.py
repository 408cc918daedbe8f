"""The store of Horovod's rendezvous: whoever reaches its port can write to it, and that is all.

Ranks under Gloo learn each other's hosts from it before Horovod starts. They read it with Horovod's
own client, which unpickles the answers: another user of the machine took the port from the process
list, wrote a pickle, and it ran with the rights of the ranks. The client also asked the proxy of
`http_proxy` for the store, which cannot reach it.
"""

from __future__ import annotations

import base64
import http.client
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import warm_ranks
from launching import QUICK, ROOT, horovodrun

from tfcommx.collectives import gloo_hosts
from tfcommx.core import LaunchError
from tfcommx.launch.launcher import Launcher

SCRIPT = """\
import os, sys, time
end = time.monotonic() + 60
while os.environ["HOROVOD_RANK"] == "1" and not os.path.exists(sys.argv[1]):
    assert time.monotonic() < end
    time.sleep(0.05)
import tfcommx as cx
cx.init()
print(f"rank {cx.rank()} of {cx.size()} trains", flush=True)
"""


class Trap:
    """To unpickle it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def port_of_the_rendezvous(launch: subprocess.Popen[str]) -> int:
    """Read the port where any user of the machine can read it: in the list of processes."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for process in psutil.Process(launch.pid).children(recursive=True):
            try:
                words = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if port := re.search(r"HOROVOD_GLOO_RENDEZVOUS_PORT=(\d+)", words):
                return int(port[1])
        time.sleep(0.05)
    raise AssertionError("no port")


def put(port: int, key: str, value: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("PUT", f"/tfcommx_hosts/{key}", value)
    assert connection.getresponse().status == 200
    connection.close()


def test_a_pickle_that_a_stranger_writes_is_not_loaded_by_a_real_launch(tmp_path: Path) -> None:
    made, begin, script = tmp_path / "made", tmp_path / "begin", tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "tfcommx.cli.main", "run", "-np", "2", "--", sys.executable]
    launch = subprocess.Popen(
        [*words, str(script), str(begin)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": QUICK, **warm_ranks.environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        trap = base64.b64encode(pickle.dumps(Trap(made)))
        put(port_of_the_rendezvous(launch), "1", trap)
        output, _ = launch.communicate(timeout=60)
    except BaseException:
        os.killpg(launch.pid, signal.SIGKILL)
        raise
    assert not made.exists(), output
    assert launch.returncode not in (0, None)
    assert "must hold the name of rank 1's host in tfcommx_hosts/1, as JSON" in output, output
    assert trap[:60].decode() in output and "trains" not in output


def test_a_launch_starts_though_a_proxy_is_set(tmp_path: Path) -> None:
    """As on most clusters of companies; plain horovodrun starts there, too."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    nowhere = "http://127.0.0.1:9"
    proxies = {name: nowhere for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY")}
    ended = horovodrun(
        2, [str(script), str(script)], seconds=60, no_proxy="", NO_PROXY="", **proxies
    )
    assert ended.status == 0 and ended.output.count("of 2 trains") == 2, ended.output[-3000:]


class Server(ThreadingHTTPServer):
    values: dict[str, bytes]


@pytest.fixture
def store(server: Server) -> dict[str, bytes]:
    """Return the server's dictionary, to which a test adds."""
    return server.values


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve values as the rendezvous of two ranks does, of which this process is one."""
    values: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = values.get(self.path.rpartition("/")[2])
            self.send_response(404 if value is None else 200)
            self.end_headers()
            self.wfile.write(value or b"")

        def do_PUT(self) -> None:
            value = self.rfile.read(int(self.headers["Content-Length"]))
            values.setdefault(self.path.rpartition("/")[2], value)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.values = values
    wait = 0.01  # `shutdown` waits until the thread looks
    threading.Thread(target=server.serve_forever, args=[wait], daemon=True).start()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.server_port))
    monkeypatch.setenv("HOROVOD_HOSTNAME", "red")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "answer",
    [
        b'["red", "blue", "green"]',
        b'["red"]',
        b'["red", "-Fconfig"]',
        b'["red", "a;b"]',
        b'["red", 7]',
        b'{"0": "red", "1": "blue"}',
        b"[" * 500,
        b'["red", "' + b"b" * 10_000 + b'"]',
        b"\xff",
    ],
)
def test_answers_that_are_no_list_of_hosts_are_refused(store: dict, answer: bytes) -> None:
    store["all"] = answer
    with pytest.raises(LaunchError, match=r"\b2 .*tfcommx_hosts/all"):
        gloo_hosts.gloo_hosts(Launcher("gloo", 1, 2, 0))


def test_a_list_with_another_host_for_this_rank_is_refused(store: dict) -> None:
    store["all"] = b'["red", "blue"]'
    with pytest.raises(LaunchError, match=r"\bred\b.*rank 1\b.*'blue'"):
        gloo_hosts.gloo_hosts(Launcher("gloo", 1, 2, 0))


def test_no_more_is_read_of_an_answer_than_a_name_can_have(store: dict) -> None:
    store["1"] = b'"' + b"b" * 1_000_000 + b'"'
    with pytest.raises(LaunchError, match="tfcommx_hosts/1") as refused:
        gloo_hosts.gloo_hosts(Launcher("gloo", 0, 2, 0))
    assert len(str(refused.value)) < 1000


def test_a_store_that_ends_while_ranks_wait_is_named_in_time(
    store: dict, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rank 0 serves it, the store ends with rank 0; the others waited for 60 s."""
    monkeypatch.setattr(gloo_hosts, "GONE_SECONDS", 0.5)
    threading.Timer(0.5, lambda: (server.shutdown(), server.server_close())).start()
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"[Rr]ank 1 of 2 .*\b0\.5 s\b.*refused"):
        gloo_hosts.gloo_hosts(Launcher("gloo", 1, 2, 0))
    assert store["1"] == b'"red"' and time.monotonic() - start < 10


def test_a_store_that_does_not_answer_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a firewall, or an address that each host has, ranks said that rank 0 was missing."""
    monkeypatch.setenv("TFCOMMX_RENDEZVOUS_SECONDS", "1")
    monkeypatch.setenv("HOROVOD_HOSTNAME", "red")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(silent.getsockname()[1]))
        start = time.monotonic()
        with pytest.raises(LaunchError, match=r"^Rank 1 of 2 .*timed out.*docker0"):
            gloo_hosts.gloo_hosts(Launcher("gloo", 1, 2, 0))
    assert time.monotonic() - start < 6
