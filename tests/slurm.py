"""A private Slurm for tests: munged, slurmctld on node0, a slurmd on each compute node.

Everything lies in one folder, and nothing of it outlives `stop`. The nodes are those of a virtual
cluster, so that the links between slurmds are real ones. Needs root and Debian's packages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from virtual_cluster import COMPUTE, Nodes, end, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol")
INSTALL = "apt-get install slurmctld slurmd slurm-client munge"
# Shorter than the defaults: a requeued job waits cred_expire, 120 s; a node that does not answer is
# given up after SlurmdTimeout, 300 s
CONFIGURATION = """
ClusterName=tfcommx
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
SlurmdTimeout=30
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def why_not() -> str:
    """Return the reason why there can be no Slurm here; empty if there can."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return f"Slurm lacks {', '.join(missing)}; on Debian: {INSTALL}" if missing else ""


class Slurm:
    """The daemons, and commands on node0.

    Args:
        nodes: that are up.
        folder: for keys, states and logs.
    """

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.folder, self.munged = nodes, folder, None
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle."""
        for name in ("state", *(f"spool.{node}" for node in COMPUTE)):
            (self.folder / name).mkdir()
        text = CONFIGURATION.format(folder=self.folder, nodes=",".join(COMPUTE))
        (self.folder / "slurm.conf").write_text(text)
        # `ip netns exec` hides cgroups, and nothing here needs them
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.nodes.environment["SLURM_CONF"] = str(self.folder / "slurm.conf")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        names |= {"seed-file": "seed", "log-file": "log"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        daemon = shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin")
        with (self.folder / "munged.out").open("wb") as out:
            words = [str(daemon), "--foreground", "--force", *options]
            self.daemons.append(subprocess.Popen(words, stdout=out, stderr=out))
        wait_until((self.folder / "munge.socket").exists, 20, "munged")
        self.start_daemon(0, ["/usr/sbin/slurmctld", "-D"])
        for number, name in enumerate(COMPUTE, 1):
            self.start_daemon(number, ["/usr/sbin/slurmd", "-D", "-N", name])
        wait_until(self.idle, 60, f"idle nodes of Slurm ({self.folder})")

    def start_daemon(self, node: int, words: list[str]) -> None:
        self.daemons.append(self.nodes.start(node, words, self.folder / f"daemon{node}.out"))

    def stop(self) -> None:
        """End the daemons; those on the nodes also end when the nodes go down."""
        self.do("scancel", "--user=root", check=False)
        for daemon in self.daemons[1:]:
            end(daemon)
        for daemon in self.daemons[:1]:
            daemon.terminate()
            daemon.wait(10)

    def do(self, *words: object, check: bool = True) -> str:
        """Run a short command of Slurm's; return its output."""
        done = subprocess.run(
            [*self.nodes_words(), *map(str, words)],
            env=self.nodes.environment,
            cwd=self.folder,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def nodes_words(self) -> list[str]:
        return ["ip", "netns", "exec", f"tfcommx-{self.nodes.name}-0"]

    def idle(self) -> bool:
        return self.do("sinfo", "-h", "-o", "%T %D", check=False).split() == ["idle", "2"]

    def submit(self, *words: object) -> int:
        """Submit a batch job; return its number."""
        return int(self.do("sbatch", "--parsable", *words))

    def state(self, job: int) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        shown = self.do("scontrol", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_for(self, job: int, states: set[str], seconds: float) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        wait_until(lambda: self.state(job)["JobState"] in states, seconds, f"{states} of job {job}")
        return self.state(job)
