"""A node of a Ray cluster on a virtual node, for the row of tests/launchers/starts.py.

ray_node.py head HOST NODES python SCRIPT [WORD...]    once all nodes have come, the script on 2
                                                       workers of each; then the cluster ends
ray_node.py lead HOST COMMAND [WORD...]                the head, until a command has ended
ray_node.py join HOST                                  until the head is gone
"""

from __future__ import annotations

import contextlib
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

PORT = 6379
HEAD = ("--head", f"--port={PORT}", "--include-dashboard=false")
WORKERS_PER_NODE = 2
# For nodes to come, where 8 processes may share 2 cores
SECONDS = 300.0
# Until the workers' output has been forwarded
FORWARDING_SECONDS = 3.0


def start(*words: str) -> subprocess.Popen[bytes]:
    """Start Ray's own processes on this host."""
    own = socket.gethostbyname(socket.gethostname())
    ray = str(Path(sys.executable).with_name("ray"))
    options = ["--block", f"--node-ip-address={own}", f"--num-cpus={WORKERS_PER_NODE}"]
    options += ["--object-store-memory=100000000", "--disable-usage-stats"]
    return subprocess.Popen([ray, "start", *words, *options], stdout=subprocess.DEVNULL)


def end(node: subprocess.Popen[bytes]) -> None:
    """Kill Ray's processes on this host: asked to end without a head, they take half a minute."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(node.pid).children(recursive=True):
            process.kill()
    node.kill()
    node.wait()


def answers(host: str) -> bool:
    """Return True if the head runs."""
    try:
        socket.create_connection((host, PORT), 2).close()
    except OSError:
        return False
    return True


def wait_for_head(host: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not answers(host):
        if time.monotonic() > deadline:
            sys.exit(f"ray_node: no head on {host}")
        time.sleep(0.2)


def run_script(words: list[str]) -> None:
    """Run a script in this process, a worker."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def connect(host: str) -> subprocess.Popen[bytes]:
    """Start the head, and be its driver; again if Ray gives up, as it does after 30 s."""
    import ray

    deadline = time.monotonic() + SECONDS
    node = start(*HEAD)
    while time.monotonic() < deadline:
        try:
            ray.init(address=f"{host}:{PORT}")
            return node
        except ConnectionError:
            time.sleep(0.5)
        if node.poll() is not None:
            node = start(*HEAD)
    end(node)
    sys.exit("ray_node: the head did not start")


def head(host: str, nodes: int, words: list[str]) -> None:
    """Start the head and run a script on all nodes."""
    node = connect(host)
    try:
        import ray

        import tfcommx.ray

        deadline = time.monotonic() + SECONDS
        while sum(one["Alive"] for one in ray.nodes()) < nodes:
            if time.monotonic() > deadline:
                sys.exit("ray_node: not all nodes have come")
            time.sleep(0.2)
        try:
            tfcommx.ray.run(
                run_script,
                nodes * WORKERS_PER_NODE,
                args=(words,),
                workers_per_node=WORKERS_PER_NODE,
            )
        finally:
            time.sleep(FORWARDING_SECONDS)
            # With its head, and so within a moment
            ray.shutdown()
    finally:
        end(node)


def lead(host: str, words: list[str]) -> int:
    """Start the head and a command; return the command's status."""
    node = connect(host)
    try:
        return subprocess.call(words)
    finally:
        end(node)


def join(host: str) -> None:
    """Be a node until the head is gone, or out of reach."""
    wait_for_head(host)
    node = start(f"--address={host}:{PORT}")
    try:
        while answers(host):
            time.sleep(0.5)
            if node.poll() is not None:
                node = start(f"--address={host}:{PORT}")
    finally:
        end(node)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if sys.argv[1] == "head":
        head(sys.argv[2], int(sys.argv[3]), sys.argv[5:])
    elif sys.argv[1] == "lead":
        sys.exit(lead(sys.argv[2], sys.argv[3:]))
    else:
        join(sys.argv[2])
