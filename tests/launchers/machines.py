"""Pods on the virtual nodes, as far as a test can start them without a container runtime.

A pod has its own processes, mounts, host name and network. It runs as the manifest's user, without
a capability, with the manifest's environment and words and nothing else. The files of an image come
from this checkout and this environment; so do libraries and programs of the system.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from launching import ROOT, WORKERS
from manifests import FOLDER, Pod
from virtual_cluster import Nodes

PROGRAMS = ("tini", "setpriv", "unshare")
INSTALL = "apt-get install tini"
SEARCH = f"{os.environ['PATH']}:/usr/sbin"
HOME = "/home/trainer"
# The image's variables. Waiting ranks sleep, because there are more ranks than cores
IMAGE = {
    "HOME": HOME,
    "PYTHONPATH": f"{ROOT}:{WORKERS}",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "OMPI_MCA_threads_pthreads_nanosleep_time": "20000",
}


def why_not() -> str:
    """Return the reason why pods cannot be started here; empty if they can."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=SEARCH)]
    return f"pods need {', '.join(missing)}; on Debian: {INSTALL}" if missing else ""


class Machines:
    """The nodes, and the files that pods on them share.

    Args:
        nodes: that are up.
        folder: new; for all volumes. Its folders `data`, `runs` and `recipe` are shared.
    """

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        for name in ("data", "runs", "recipe", "etc", "bin"):
            (folder / name).mkdir()
        (folder / "runs").chmod(0o777)
        shutil.copy(FOLDER / "ranks", folder / "bin")
        (folder / "etc" / "passwd").write_text(
            f"root:x:0:0::/root:/bin/bash\ntrainer:x:1000:1000::{HOME}:/bin/bash\n"
        )

    def start(
        self, pods: list[Pod], log: Path, **environment: str
    ) -> dict[str, subprocess.Popen[bytes]]:
        """Start pods whose names resolve, as a headless service's do; return their processes."""
        for node in {one.node for one in pods}:
            self.write_hosts(pods, node)
        return {one.name: self.start_pod(one, log, environment) for one in pods}

    def write_hosts(self, pods: list[Pod], node: int) -> None:
        """Let full names mean the pods; a short name, only on the pod itself."""
        path = Path(f"/etc/netns/tfcommx-{self.nodes.name}-{node}/hosts")
        lines = [line for line in path.read_text().splitlines() if "# pod" not in line]
        addresses = {
            name: address
            for address, name in (line.split()[:2] for line in lines if "node" in line)
        }
        for one in pods:
            names = f"{one.name}.{one.domain}" + f" {one.name}" * (one.node == node)
            lines.append(f"{addresses[f'node{one.node}']} {names} # pod")
        path.write_text("\n".join(lines) + "\n")

    def start_pod(
        self, one: Pod, log: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        script = [f"hostname {one.name}", *self.mount_lines(one)]
        given = {**IMAGE, "PATH": self.path, **one.environment, **environment}
        words = [*self.as_user(one), *one.command]
        script.append(shlex.join(["exec", "env", "-i", *(f"{k}={v}" for k, v in given.items())]))
        script[-1] += f" {shlex.join(words)}"
        isolated = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
        return self.nodes.start(one.node, [*isolated, "sh", "-ec", "\n".join(script)], log)

    @property
    def path(self) -> str:
        return f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def as_user(self, one: Pod) -> list[str]:
        """Return the command that starts a process with both security contexts."""
        whole, own = one.pod_spec["securityContext"], one.container["securityContext"]
        assert whole["runAsNonRoot"] and own["capabilities"] == {"drop": ["ALL"]}
        assert own["allowPrivilegeEscalation"] is False
        return [
            "setpriv",
            f"--reuid={whole['runAsUser']}",
            f"--regid={whole['runAsGroup']}",
            f"--groups={whole['fsGroup']}",
            "--no-new-privs",
            "--bounding-set=-all",
            "--inh-caps=-all",
        ]

    def mount_lines(self, one: Pod) -> list[str]:
        """Return the commands that mount the pod's volumes and the image's own files."""
        own = self.folder / one.name
        shutil.rmtree(own, ignore_errors=True)
        home = own / "home" / "trainer"
        home.mkdir(parents=True)
        os.chown(home, 1000, 1000)
        lines = [*self.open_lines(own), f"mount --bind {own}/home /home"]
        lines.append(f"mount --bind {self.folder}/bin /usr/local/bin")
        lines.append(f"mount --bind {self.folder}/etc/passwd /etc/passwd")
        (own / "mnt").mkdir()
        lines.append(f"mount --bind {own}/mnt /mnt")
        for path, volume in one.mounts.items():
            if path.startswith("/mnt/"):
                (own / path.lstrip("/")).mkdir()
            lines.append(self.mount(own, path, volume))
        return lines

    def open_lines(self, own: Path) -> list[str]:
        """Return the commands that let every user read the files that an image would contain.

        This Python, or this checkout, may lie in a folder that only root can enter.
        """
        needed = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
        closed = {path: _closed(path) for path in needed}
        hidden = [path for path in needed if closed[path]]
        lines = []
        for number, path in enumerate(hidden):
            (own / f"open{number}").mkdir()
            lines.append(f"mount --bind {path} {own}/open{number}")
        for top in {str(closed[path]) for path in hidden}:
            lines.append(f"mount -t tmpfs -o mode=755 tmpfs {top}")
        for number, path in enumerate(hidden):
            lines += [f"mkdir -p {path}", f"mount --bind {own}/open{number} {path}"]
        return lines

    def mount(self, own: Path, path: str, volume: dict) -> str:
        """Return the command that mounts a volume; an emptyDir is new in each pod."""
        if "emptyDir" in volume:
            if volume["emptyDir"].get("medium") == "Memory":
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
                return f"mount -t tmpfs -o size={size},mode=1777 tmpfs {path}"
            source = own / volume["name"]
            source.mkdir()
            source.chmod(0o777)
            return f"mount --bind {source} {path}"
        return f"mount --bind {self.folder / volume['name']} {path}"

    # --- the kubelet's actions on a running pod ---------------------------------------------------

    def first_process(self, one: Pod) -> psutil.Process:
        """Return the pod's process 1."""
        space = f"tfcommx-{self.nodes.name}-{one.node}"
        pids = subprocess.run(["ip", "netns", "pids", space], text=True, capture_output=True)
        (found,) = [
            process
            for process in map(psutil.Process, map(int, pids.stdout.split()))
            if process.name() == "tini"
        ]
        return found

    def terminate(self, one: Pod) -> None:
        """Send SIGTERM to the pod's process 1, as the kubelet does."""
        self.first_process(one).send_signal(signal.SIGTERM)

    def end(self, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        """Kill pods that are left, with all that runs in them."""
        for process in processes.values():
            if process.poll() is None:
                # The kernel ends a namespace of processes with its first
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                process.kill()
                process.wait()


def _closed(path: Path) -> Path | None:
    """Return the first folder on the way to a path that not everybody can enter."""
    way = [*reversed(path.parents), path]
    return next((one for one in way if not one.stat().st_mode & 1), None)
