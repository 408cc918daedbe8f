"""Pictures that tell their number, caches that are closed, and processes that share one."""

import io
import json
import os
import signal
import socket
import subprocess
import sys

from launching import QUICK, ROOT, WORKERS
from PIL import Image

import tfcommx as cx

WHOLE = cx.BatchSpec(batch=7, resolution=16, dtype="uint8", drop_remainder=False)


def colour(number):
    """A colour that survives JPEG and tells the sample's number, below 256."""
    return number % 16 * 16 + 8, number // 16 * 16 + 8, 128


def number(pixel):
    return int(pixel[0]) // 16 + int(pixel[1]) // 16 * 16


def picture(n, size=(40, 30), form="JPEG", mode="RGB", **options):
    out = io.BytesIO()
    Image.new("RGB", size, colour(n)).convert(mode).save(out, form, **options)
    return out.getvalue()


def make_folder(path, count, kinds=3):
    """Class folders whose file n has colour n and class n % kinds; sizes differ."""
    for kind in range(kinds):
        (path / f"class{kind}").mkdir(parents=True)
    for n in range(count):
        (path / f"class{n % kinds}" / f"{n:04}.jpg").write_bytes(
            picture(n, (20 + n % 30, 50 - n % 17))
        )
    return path


def served(dataset):
    """[(number, label)] in the order of service."""
    return [
        (number(image[8, 8]), int(label))
        for images, labels in dataset
        for image, label in zip(images.numpy(), labels.numpy(), strict=True)
    ]


class OpenCache:
    """A cache in this process that is closed at the end."""

    def __init__(self, source, shm, topology=None, rank=None, **options):
        self.cache = cx.DataCache(source, topology=topology, rank=rank, memory=shm, **options)

    def __enter__(self):
        return self.cache

    def __exit__(self, *error):
        self.cache.close()


class Worker:
    """A process of a node, forked by workers/data.py: killed, waited for and spoken to."""

    def __init__(self, workers, pid, stdin, stdout):
        self.workers, self.pid, self.stdin, self.stdout = workers, pid, stdin, stdout
        self.status = None

    def line(self, key):
        """The process's next message that has `key`."""
        for text in self.stdout:
            if key in (message := json.loads(text)):
                return message
        raise AssertionError(f"the process ended with {self.wait()} before it said {key!r}")

    def go(self):
        """Send the line that it waits for."""
        self.stdin.write("\n")
        self.stdin.flush()

    def kill(self):
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        """The exit status, as in subprocess."""
        if self.status is None:
            self.status = self.workers.ask({"wait": self.pid})
        return self.status


class Workers:
    """Starts processes of a node; TensorFlow is imported once for all of them."""

    def __init__(self):
        self.socket, other = socket.socketpair()
        self.socket.settimeout(120)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{QUICK}:{ROOT / 'tests'}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        self.server = subprocess.Popen(
            [sys.executable, str(WORKERS / "data.py"), str(other.fileno())],
            env=environment,
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        other.close()
        self.started = []

    def ask(self, request, files=()):
        socket.send_fds(self.socket, [json.dumps(request).encode()], files)
        answer = self.socket.recv(64)
        assert answer, f"the server of processes ended with {self.server.wait()}"
        return int(answer)

    def start(self, folder, shm, rank=0, nodes=1, slots=1, **asked):
        request = dict(folder=str(folder), memory=str(shm), rank=rank, nodes=nodes, slots=slots)
        there, stdin = os.pipe()
        stdout, back = os.pipe()
        pid = self.ask({**request, "batch": 7, **asked}, [there, back])
        os.close(there)
        os.close(back)
        self.started.append(Worker(self, pid, os.fdopen(stdin, "w"), os.fdopen(stdout)))
        return self.started[-1]

    def end_started(self):
        for worker in self.started:
            worker.kill()
            worker.wait()
            worker.stdin.close()
            worker.stdout.close()
        self.started.clear()

    def close(self):
        self.end_started()
        self.socket.close()
        self.server.wait(10)
