"""Hosts as schedulers write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcommx.core import ConfigurationError
from tfcommx.launch import hosts as module
from tfcommx.launch.hosts import allocation, expand_nodelist, expand_tasks, ranks_on

VARIABLES = (
    "SLURM_JOB_NODELIST",
    "SLURM_TASKS_PER_NODE",
    "SLURM_JOB_NODELIST_HET_GROUP_0",
    "LSB_MCPU_HOSTS",
    "PE_HOSTFILE",
    *module.HOSTFILES_OF_JOBS,
    *module.HOSTFILE_VARIABLES,
)


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "KUBERNETES_HOSTFILE", tmp_path / "none")


@pytest.mark.parametrize(
    "text, names",
    [
        ("node1", "node1"),
        ("node[1-3]", "node1 node2 node3"),
        ("gpu[08-10,12],login", "gpu08 gpu09 gpu10 gpu12 login"),
        ("rack[1-2]-n[1-2]", "rack1-n1 rack1-n2 rack2-n1 rack2-n2"),
        ("a[1-2].cluster,b", "a1.cluster a2.cluster b"),
    ],
)
def test_slurm_s_node_lists(text: str, names: str) -> None:
    assert expand_nodelist(text) == names.split()


def test_slurm_s_tasks() -> None:
    assert expand_tasks("8") == [8] and expand_tasks("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "variables, hosts",
    [
        (
            {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"},
            [("n1", 4), ("n2", 4), ("n3", 2)],
        ),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, [("n1", 1), ("n2", 1)]),
        ({"LSB_MCPU_HOSTS": "b 2 a 3"}, [("b", 2), ("a", 3)]),
        (  # A heterogeneous job: the nodes of its second component were left idle
            {
                "SLURM_JOB_NODELIST": "a1",
                "SLURM_TASKS_PER_NODE": "1",
                "SLURM_JOB_NODELIST_HET_GROUP_0": "a1",
                "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
                "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-3]",
                "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2),1",
            },
            [("a1", 1), ("b1", 2), ("b2", 2), ("b3", 1)],
        ),
    ],
)
def test_an_allocation_in_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict, hosts: list
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = allocation()
    assert found and found.hosts == hosts


@pytest.mark.parametrize("variable", [*module.HOSTFILES_OF_JOBS, *module.HOSTFILE_VARIABLES])
@pytest.mark.parametrize(
    "text", ["b\nb\na\n", "b slots=2\na slots=1\n", "# workers\n\nb:2  # two\na\n"]
)
def test_an_allocation_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, text: str
) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    monkeypatch.setenv(variable, str(file))
    found = allocation()
    assert found and found.hosts == [("b", 2), ("a", 1)]


def test_the_file_of_grid_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`tfcommx run -np 12` started all ranks on the first host of the job."""
    file = tmp_path / "pe_hostfile"
    file.write_text("b.cluster 8 all.q@b.cluster UNDEFINED\na 4 all.q@a <NULL>\n")
    monkeypatch.setenv("PE_HOSTFILE", str(file))
    found = allocation()
    assert found and found.hosts == [("b.cluster", 8), ("a", 4)]
    for text in ("", "b\n", "b many all.q UNDEFINED\n", "-Fx 4 all.q UNDEFINED\n"):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match="pe_hostfile"):
            allocation()
    file.unlink()
    with pytest.raises(ConfigurationError, match="pe_hostfile"):
        allocation()


def test_the_hostfile_that_the_mpi_operator_mounts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert allocation() is None
    file = tmp_path / "hostfile"
    file.write_text("job-worker-0.job.default.svc slots=8\njob-worker-1.job.default.svc slots=8\n")
    monkeypatch.setattr(module, "KUBERNETES_HOSTFILE", file)
    found = allocation()
    assert found and [host.slots for host in found.hosts] == [8, 8]


def test_what_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4")
    with pytest.raises(ConfigurationError, match=r"SLURM_TASKS_PER_NODE .*\b3\b.*'4'"):
        allocation()
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    file = tmp_path / "empty"
    file.write_text("\n# none\n")
    monkeypatch.setenv("PBS_NODEFILE", str(file))
    with pytest.raises(ConfigurationError, match=r"/empty\b"):
        allocation()


def test_ranks_fill_host_after_host() -> None:
    hosts = [module.Host("a", 2), module.Host("b", 2), module.Host("c", 2)]
    assert ranks_on(hosts, 3, "-H") == [("a", 2), ("b", 1)]
    with pytest.raises(ConfigurationError, match="-H a:3,b:3,c:3"):
        ranks_on(hosts, 7, "-H")
