"""The manifest of docs/how-to/kubernetes.md: its fields, and the processes that it starts.

A container runtime and a cluster are not needed: machines.py stands in for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_helpers import make_folder
from launching import ROOT
from machines import Machines, why_not
from manifests import FILE, FOLDER, jobset, pod_template, pods
from saved import left
from virtual_cluster import Nodes, wait_until

PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
RECIPE = """
name: train
data: {name: folder, folder: set on the command line, store: 24}
model: {name: "paced:build_net"}
optimizer: {name: sgd, momentum: 0.9}
batch_per_rank: 2
phases:
  - epochs: 4
    resolution: 16
    scheme: {route: hitopk, selection: mstopk, density: 0.05, dense_below: 8, dense_route: torus}
learning_rate: {peak: 0.05}
checkpoint: {every_steps: 5}
threads: 1
"""
QUICK = {"PACED_SECONDS": "0"}
SECONDS = 300.0
on_nodes = [
    pytest.mark.exhaustive,
    pytest.mark.long_wait,
]


def marked(test: object) -> object:
    """Mark a test that starts pods."""
    for mark in on_nodes:
        test = mark(test)
    return test


# --- fields ---------------------------------------------------------------------------------------


def models() -> Any:
    """Return the classes that Kubeflow publishes: its own resources, JobSet's and core's."""
    reason = "pip install kubeflow-trainer-api"
    return pytest.importorskip("kubeflow_trainer_api.models", reason=reason)


def kept(kind: Any, document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a document that a class knows; it checks types and drops the others."""
    return kind.from_dict(document).to_dict()


def test_fields_are_those_of_the_published_interface() -> None:
    assert kept(models().JobsetV1alpha2JobSet, jobset()) == jobset()


def test_a_field_that_does_not_exist_is_found() -> None:
    template = pod_template()
    template["spec"]["terminationGraceSeconds"] = 5
    assert kept(models().IoK8sApiCoreV1PodTemplateSpec, template) != template


def test_every_pod_has_what_the_page_says() -> None:
    pod = pod_template()["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["terminationGracePeriodSeconds"] > 60
    (container,) = pod["containers"]
    assert container["command"][:2] == ["tini", "--"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert volumes.keys() == set(mounts.values())
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory" and shared["sizeLimit"]


def test_the_page_names_the_manifest() -> None:
    assert FILE.name in PAGE.read_text()


# --- ranks ----------------------------------------------------------------------------------------

PLACE = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "node",
    "PET_MASTER_PORT": "29500",
}


def start_ranks(*command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(FOLDER / "ranks"), *command],
        env={"PATH": "/usr/bin:/bin", **PLACE, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_ranks_have_the_variables_of_torchrun() -> None:
    say = "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT"
    process = start_ranks("sh", "-c", say)
    output, _ = process.communicate(timeout=120)
    assert sorted(output.splitlines()) == ["2 0 4 node 29500", "3 1 4 node 29500"]
    assert process.returncode == 0


@pytest.mark.parametrize(("end", "status"), [("exit 5", 5), ("kill -9 $$", 137)])
def test_a_rank_that_fails_is_named_and_ends_the_others_of_its_pod(end: str, status: int) -> None:
    process = start_ranks("sh", "-c", f'[ "$RANK" = 3 ] && {end}; exec sleep 600')
    output, _ = process.communicate(timeout=120)
    assert process.returncode == status and "rank 3" in output and "rank 2" not in output


def test_a_pod_whose_ranks_saved_after_sigterm_has_not_finished() -> None:
    loop = "while :; do sleep 0.1; done"
    process = start_ranks("sh", "-c", f'trap "echo saved; exit 0" TERM; echo up; {loop}')
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.terminate()
    assert [process.stdout.readline() for _ in range(2)] == ["saved\n", "saved\n"]
    assert process.wait(120) == 143


@pytest.mark.parametrize(
    ("name", "value"), [("PET_NPROC_PER_NODE", "auto"), ("PET_NNODES", ""), ("PET_NODE_RANK", "x")]
)
def test_a_number_that_is_missing_is_named(name: str, value: str) -> None:
    process = start_ranks("true", **{name: value})
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and f"{name} must be a number" in output


# --- pods -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machines(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    if reason := why_not():
        pytest.skip(reason)
    made = Machines(nodes, tmp_path_factory.mktemp("kubernetes"))
    for split, count in (("train", 96), ("test", 12)):
        make_folder(made.folder / "data" / split, count)
    (made.folder / "recipe" / "recipe.yaml").write_text(RECIPE)
    yield made


class Run:
    """Pods of the manifest that train in the folder of runs."""

    def __init__(self, machines: Machines, log: Path, **environment: str) -> None:
        self.machines, self.pods, self.log = machines, pods(), log
        self.processes = machines.start(self.pods, log, **environment)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def statuses(self) -> list[int]:
        """Wait for the end; return the exit statuses by pod."""
        processes = [self.processes[one.name] for one in self.pods]
        try:
            wait_until(
                lambda: all(process.poll() is not None for process in processes), SECONDS, "the end"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output[-6000:]}") from None
        finally:
            self.machines.end(self.processes)
        return [process.returncode for process in processes]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.machines.end(self.processes)


def folder_of_run(machines: Machines) -> Path:
    return machines.folder / "runs" / "train"


def whole(machines: Machines) -> dict[str, bytes]:
    """Return the last checkpoint of an uninterrupted run."""
    remove(machines)
    with Run(machines, machines.folder / "whole.log", **QUICK) as run:
        assert not any(run.statuses()), run.output[-6000:]
    assert "4 on 2 nodes" in run.output, run.output[-6000:]
    assert "stopped" not in json.loads((folder_of_run(machines) / "summary.json").read_text())
    return left(folder_of_run(machines))


def remove(machines: Machines) -> None:
    subprocess.run(["rm", "-rf", folder_of_run(machines)], check=True)


def under_way(machines: Machines, run: Run) -> None:
    """Wait until a run has saved for the first time."""
    saved = folder_of_run(machines) / "checkpoint" / "checkpoint.json"
    processes = run.processes.values()
    wait_until(
        lambda: saved.is_file() or any(process.poll() is not None for process in processes),
        SECONDS,
        "the first checkpoint",
    )
    assert saved.is_file(), run.output[-6000:]


@marked
def test_a_pod_that_is_evicted_lets_all_save_and_the_next_start_goes_on(
    machines: Machines, tmp_path: Path
) -> None:
    expected = whole(machines)
    remove(machines)
    with Run(machines, tmp_path / "first") as run:
        under_way(machines, run)
        machines.terminate(run.pods[1])
        # 143: the pod's job has failed, and so starts again
        assert run.statuses() == [0, 143], run.output[-6000:]
        assert "and saved" in run.output, run.output[-6000:]
    with Run(machines, tmp_path / "second", **QUICK) as run:
        assert not any(run.statuses()), run.output[-6000:]
    assert left(folder_of_run(machines)) == expected
