"""Hostfiles, and lists of schedulers, that were read as other hosts than the user had written.

`node2 lots=8` counted as one slot, without a word (DeepSpeed had the same: its issue 3669).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcommx.core import ConfigurationError
from tfcommx.launch import hosts as module
from tfcommx.launch.hosts import Host, allocation, expand_nodelist, parse_hosts, read_hostfile
from tfcommx.supervisor.hosts import hosts_of_script


def hosts_in(folder: Path, text: str | bytes) -> list[Host]:
    file = folder / "hosts"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_hostfile(file)


@pytest.mark.parametrize(
    "line",
    [
        *("node2 lots=8", "node2 slots=eight", "node2 slots 8", "node2 slots:8", "node2 8"),
        *("node2 slots=", "node2 slots=-1", "node2 SLOTS=8", "node2:8,node3:8", "node2, node3"),
        # The last of two numbers counted
        *("node2:4 slots=8", "node2 slots=4 slots=8"),
    ],
)
def test_a_line_of_another_form_is_refused_with_its_file(tmp_path: Path, line: str) -> None:
    """Some counted as one slot; two hosts in a line were a ValueError without the line."""
    with pytest.raises(ConfigurationError, match=r"node2.*/hosts"):
        hosts_in(tmp_path, f"node1 slots=8\n{line}\n")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("node1 slots=4 max_slots=8\nnode2\tmax-slots=8 slots = 2\n", [("node1", 4), ("node2", 2)]),
        ("login slots=0\nnode1 slots=4\n", [("node1", 4)]),
        ("\ufeffnode1 slots=4\r\nnode2:2\r\n", [("node1", 4), ("node2", 2)]),
        (b"# Rechner der St\xe4dte\nnode1 slots=4\n", [("node1", 4)]),
    ],
)
def test_what_open_mpi_and_editors_write_is_read(
    tmp_path: Path, text: str | bytes, wanted: list[tuple[str, int]]
) -> None:
    """A login node without slots ended a launch; a byte order mark was part of the first name."""
    assert hosts_in(tmp_path, text) == wanted


def test_an_unknown_setting_is_named_before_its_line(tmp_path: Path) -> None:
    """Its message ended: setting in the line '...' of hosts 'lots'."""
    with pytest.raises(ConfigurationError, match=r"setting 'lots' in [^']*'node2 lots=8' of "):
        hosts_in(tmp_path, "node2 lots=8\n")


@pytest.mark.parametrize(
    ("word", "says"),
    [("[fe80::1]:2", True), ("fe80::1", True), ("::1:2", True), ("node1:2:3", False)],
)
def test_an_ipv6_address_is_named_as_one(word: str, says: bool) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_hosts(word)
    assert ("IPv4" in str(caught.value)) == says


def test_hosts_without_any_slot_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"/hosts"):
        hosts_in(tmp_path, "node1 slots=0\n")


def test_a_script_that_prints_several_hosts_in_a_line_is_refused() -> None:
    """It was a ValueError, which ended a supervised run."""
    with pytest.raises(ConfigurationError, match=r"node1:4,node2:4"):
        hosts_of_script("echo node1:4,node2:4")


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_NODELIST": "n[1-", "SLURM_TASKS_PER_NODE": "4(x2)"},
        {"SLURM_JOB_NODELIST": "n[a-b]", "SLURM_TASKS_PER_NODE": "4(x2)"},
        {"LSB_MCPU_HOSTS": "node1 4 node2"},
        {"LSB_MCPU_HOSTS": "node1 four"},
    ],
    ids=lambda variables: next(iter(variables.values())),
)
def test_a_scheduler_s_list_that_was_cut_off_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str]
) -> None:
    """It was a ValueError without the variable."""
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "KUBERNETES_HOSTFILE", tmp_path / "none")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="'n"):
        allocation()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("c[1-2]", "c1 c2"),
        ("n", "n"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        ("host[001,003-004,006]\n", "host001 host003 host004 host006"),
        ("r[1-2]n[01-02]-ib", "r1n01-ib r1n02-ib r2n01-ib r2n02-ib"),
    ],
    ids=repr,
)
def test_node_lists_that_other_programs_have_misread(text: str, names: str) -> None:
    """Of mpich's issues 3946 and 5653, scoop's pull request 30 and likwid's 180."""
    assert expand_nodelist(text) == names.split()
