"""The manifests of scripts/examples/kubernetes, and the pods that their controllers make of them.

    read(file)  ->  cut_down(documents)  ->  PODS[file](documents)  ->  [Pod, ...]

What each controller adds is written here as its source has it: JobSet 0.9, Trainer 2.3, MPI
operator 0.8. No controller and no kubelet runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import yaml
from launching import ROOT

FOLDER = ROOT / "scripts" / "examples" / "kubernetes"
FILES = ("jobset.yaml", "trainer.yaml", "mpijob.yaml")
# Cut down to these nodes and processes of each
NODES, SLOTS = 2, 2
HOSTFILE = "/etc/mpi/hostfile"
SECRETS = {("rendezvous", "secret"): "only the ranks know it"}

Document = dict[str, Any]


class Pod(NamedTuple):
    """A pod of one container, as the kubelet starts it."""

    # Host name, and what others resolve
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


def read(file: str) -> list[Document]:
    """Read a file's documents."""
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def pod_templates(file: str) -> list[Document]:
    """Return the templates of pods in a file."""
    templates = []
    for document in read(file):
        if document["kind"] == "MPIJob":
            templates += [one["template"] for one in document["spec"]["mpiReplicaSpecs"].values()]
        elif document["kind"] != "TrainJob":
            templates.append(job_of(document)["template"])
    return templates


def job_of(document: Document) -> Document:
    """Return the Job's fields of a JobSet, or of a TrainingRuntime, which has one inside."""
    spec = document["spec"]
    (replicated,) = spec.get("template", {"spec": spec})["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def cut_down(documents: list[Document]) -> list[Document]:
    """Return them for NODES nodes of SLOTS processes; nothing else is changed."""
    found = copy.deepcopy(documents)
    for document in found:
        spec = document["spec"]
        if document["kind"] == "JobSet":
            job = job_of(document)
            job["completions"] = job["parallelism"] = NODES
            sizes = {"PET_NNODES": NODES, "PET_NPROC_PER_NODE": SLOTS}
            for variable in job["template"]["spec"]["containers"][0]["env"]:
                if variable["name"] in sizes:
                    variable["value"] = str(sizes[variable["name"]])
        elif document["kind"] == "TrainJob":
            spec["trainer"] |= {"numNodes": NODES, "numProcPerNode": SLOTS}
        elif document["kind"] == "MPIJob":
            spec["slotsPerWorker"] = SLOTS
            spec["mpiReplicaSpecs"]["Worker"]["replicas"] = NODES
    return found


# --- what controllers and the kubelet do ----------------------------------------------------------


def of_jobset(documents: list[Document]) -> list[Pod]:
    """Return the pods of a JobSet: SET-JOB-0-INDEX in the domain SET."""
    (jobset,) = documents
    return indexed(jobset["metadata"]["name"], jobset["spec"], job_of(jobset)["completions"])


def of_trainer(documents: list[Document]) -> list[Pod]:
    """Return the pods of a TrainJob: a JobSet of its name, with torchrun's variables."""
    runtime, job = copy.deepcopy(documents)
    reference, trainer = job["spec"]["runtimeRef"], job["spec"]["trainer"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert "torch" in runtime["spec"]["mlPolicy"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    (container,) = job_of(runtime)["template"]["spec"]["containers"]
    assert replicated["name"] == container["name"] == "node"
    container |= {name: trainer[name] for name in ("command", "args", "image") if name in trainer}
    name = job["metadata"]["name"]
    container["env"] = [
        *container["env"],
        {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]
    return indexed(name, runtime["spec"]["template"]["spec"], trainer["numNodes"])


INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def indexed(jobset: str, spec: Document, pods: int) -> list[Pod]:
    """Return the pods of a JobSet with one indexed Job."""
    (replicated,) = spec["replicatedJobs"]
    pod_spec = replicated["template"]["spec"]["template"]["spec"]
    return [
        pod(f"{jobset}-{replicated['name']}-0-{index}", jobset, 1 + index, pod_spec, str(index))
        for index in range(pods)
    ]


def of_mpi_operator(documents: list[Document]) -> list[Pod]:
    """Return the launcher, on node0, and the workers, which the hostfile names."""
    (job,) = documents
    name, spec = job["metadata"]["name"], job["spec"]
    replicas = spec["mpiReplicaSpecs"]
    domain, key = f"{name}.default.svc", {spec["sshAuthMountPath"]: {"secret": {"ssh": ""}}}
    workers = [
        pod(f"{name}-worker-{index}", domain, 1 + index, replicas["Worker"]["template"]["spec"])
        for index in range(replicas["Worker"]["replicas"])
    ]
    launcher = pod(f"{name}-launcher", domain, 0, replicas["Launcher"]["template"]["spec"])
    launcher.environment.update(
        {
            "K_MPI_JOB_ROLE": "launcher",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": HOSTFILE,
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            "OMPI_MCA_orte_set_default_slots": str(spec["slotsPerWorker"]),
        }
    )
    for one in (*workers, launcher):
        one.mounts.update(key)
    return [*workers, launcher]


def hostfile(pods: list[Pod]) -> str:
    """Return what the MPI operator writes of the workers among these pods."""
    workers = [one for one in pods if one.node > 0]
    return "".join(f"{one.name}.{one.domain} slots={SLOTS}\n" for one in workers)


def pod(name: str, domain: str, node: int, pod_spec: Document, index: str = "") -> Pod:
    """Return what the kubelet starts for a pod of one container."""
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


PODS: dict[str, Callable[[list[Document]], list[Pod]]] = {
    "jobset.yaml": of_jobset,
    "trainer.yaml": of_trainer,
    "mpijob.yaml": of_mpi_operator,
}


def pods_of(file: str) -> list[Pod]:
    """Return the pods of a manifest, cut down."""
    return PODS[file](cut_down(read(file)))
