"""The manifest of scripts/examples/kubernetes, and the pods that JobSet's controller makes of it.

    jobset()  ->  cut_down(document)  ->  pods()  ->  [Pod, ...]

The controller's additions are written here as the source of JobSet 0.9 has them. No controller and
no kubelet runs.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import yaml
from launching import ROOT

FOLDER = ROOT / "scripts" / "examples" / "kubernetes"
FILE = FOLDER / "jobset.yaml"
# Cut down to these nodes and processes of each
NODES, SLOTS = 2, 2
SECRETS = {("rendezvous", "secret"): "only the ranks know it"}

Document = dict[str, Any]


class Pod(NamedTuple):
    """A pod of one container, as the kubelet starts it."""

    # Host name, and the domain under which others resolve it
    name: str
    domain: str
    # Number of the virtual node
    node: int
    command: list[str]
    environment: dict[str, str]
    # Path -> the volume's own fields
    mounts: dict[str, Document]
    pod_spec: Document

    @property
    def container(self) -> Document:
        (container,) = self.pod_spec["containers"]
        return container


def jobset() -> Document:
    """Read the manifest."""
    document: Document = yaml.safe_load(FILE.read_text())
    return document


def job_of(document: Document) -> Document:
    """Return the fields of a JobSet's Job."""
    (replicated,) = document["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod_template() -> Document:
    """Return the manifest's template of a pod."""
    return job_of(jobset())["template"]


def cut_down(document: Document) -> Document:
    """Return it for NODES nodes of SLOTS processes; nothing else is changed."""
    found = copy.deepcopy(document)
    job = job_of(found)
    job["completions"] = job["parallelism"] = NODES
    sizes = {"PET_NNODES": NODES, "PET_NPROC_PER_NODE": SLOTS}
    for variable in job["template"]["spec"]["containers"][0]["env"]:
        if variable["name"] in sizes:
            variable["value"] = str(sizes[variable["name"]])
    return found


# --- actions of controllers and the kubelet -------------------------------------------------------


INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def pods() -> list[Pod]:
    """Return the pods of the manifest, cut down: SET-JOB-0-INDEX in the domain SET."""
    document = cut_down(jobset())
    name = document["metadata"]["name"]
    (replicated,) = document["spec"]["replicatedJobs"]
    pod_spec = job_of(document)["template"]["spec"]
    return [
        pod(f"{name}-{replicated['name']}-0-{index}", name, 1 + index, pod_spec, str(index))
        for index in range(NODES)
    ]


def pod(name: str, domain: str, node: int, pod_spec: Document, index: str) -> Pod:
    """Return the command, environment and volumes of a pod with one container."""
    (container,) = pod_spec["containers"]
    environment = {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == INDEX
            value = index
        elif "secretKeyRef" in source:
            value = SECRETS[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
        else:
            value = variable["value"]
        assert "$(" not in value
        environment[variable["name"]] = value
    volumes = {volume["name"]: volume for volume in pod_spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    command = [*container["command"], *container.get("args", [])]
    return Pod(name, domain, node, command, environment, mounts, pod_spec)
