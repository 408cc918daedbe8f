"""A host's name goes into command lines of ssh, and horovodrun's through a shell.

A host named `-Fconfig` was an option there: ssh read a configuration from the working directory,
and ran the ProxyCommand in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import QUICK

from tfcommx.cli.doctor import on_host
from tfcommx.core import ConfigurationError
from tfcommx.launch import hosts as module
from tfcommx.launch.commands import RemoteHosts
from tfcommx.launch.hosts import allocation, parse_hosts, read_hostfile
from tfcommx.launch.known_launchers import cluster_environment
from tfcommx.supervisor.hosts import hosts_of_script

OPTION = "-Fconfig"
WRONG = (
    OPTION,
    "-oProxyCommand=touch${IFS}made",
    "$(touch made)",
    "a;touch",
    "a`b`",
    "a|b",
    "é",
    ".a",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the configuration that a host's name makes ssh read."""
    (tmp_path / "config").write_text(f"Host *\n  ProxyCommand touch {tmp_path}/made\n")
    (tmp_path / "hosts").write_text(f"{OPTION} slots=2\n")
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "words", [("run", "-np", "2", "-H", f"localhost:1,{OPTION}:1", "--", "true")], ids=["run"]
)
def test_no_command_gives_ssh_an_option_for_a_host(folder: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfcommx.cli.main", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": QUICK},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.returncode and f"'{OPTION}'" in done.stderr, done.stderr
    assert not (folder / "made").exists()


def test_ssh_is_not_asked_for_such_a_host(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"'{OPTION}'"):
        RemoteHosts().run([OPTION], ["true"])
    with pytest.raises(ConfigurationError, match=f"'{OPTION}'"):
        on_host(OPTION)
    assert not (folder / "made").exists()


def test_the_end_of_ssh_s_options_stands_before_a_host() -> None:
    words = RemoteHosts(22, Path("key")).words("node1", ["echo", "a b"])
    assert words[-3:] == ["--", "node1", "echo 'a b'"]


@pytest.mark.parametrize("name", WRONG)
def test_such_a_name_is_refused_wherever_hosts_are_named(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = pytest.raises(ConfigurationError, match=f"'{re.escape(name.split()[0])}")
    for word in (name, f"node1:2,{name}:1"):
        with refused:
            parse_hosts(word)
    hostfile = folder / "hostfile"
    hostfile.write_text(f"node1\n{name} slots=1\n")
    with refused:
        read_hostfile(hostfile)
    (folder / "script").write_text(f"echo '{name}:1'\n")
    with refused:
        hosts_of_script("sh script")
    for variable, value in (
        ("SLURM_JOB_NODELIST", f"node1,{name}"),
        ("LSB_MCPU_HOSTS", f"node1 2 {name.replace(' ', '')} 3"),
        ("PBS_NODEFILE", str(hostfile)),
        ("LSB_DJOB_HOSTFILE", str(hostfile)),
    ):
        with monkeypatch.context() as environment:
            environment.setenv(variable, value)
            with refused:
                allocation()
    monkeypatch.setattr(module, "KUBERNETES_HOSTFILE", hostfile)
    with refused:
        allocation()


def test_a_name_of_slurm_s_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_JOB_ID", "1"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "0"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_NODELIST", "-node[1-2]"),
    ):
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=r"'-node1' .*SLURM_STEP_NODELIST"):
        cluster_environment()


def test_names_and_addresses_of_hosts_are_taken() -> None:
    names = ["node1", "gpu-07.example.org", "10.0.0.2", "a_b", "7", "_gateway", "a" * 253]
    assert [host.name for host in parse_hosts(",".join(f"{name}:2" for name in names))] == names
