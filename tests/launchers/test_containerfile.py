"""The Containerfile of docs/how-to/kubernetes.md, checked without building it."""

from __future__ import annotations

import re

import pytest
from launching import ROOT
from manifests import FOLDER, pod_template

TEXT = re.sub(r"\\\n", "", (FOLDER / "Containerfile").read_text())
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
# Stage -> its base image
STAGES = dict(reversed(pair) for pair in re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.M))
TARGETS = ("cpu", "cuda")


def lines_of(stage: str) -> str:
    """Return the lines of a stage after its FROM."""
    found = re.search(rf"^FROM \S+ AS {stage}$(.*?)(?=^FROM |\Z)", TEXT, re.M | re.S)
    assert found
    return found[1]


def test_the_page_lists_the_targets() -> None:
    assert set(re.findall(r"^\| `([\w-]+)` \| ", PAGE, re.M)) == set(TARGETS)
    assert set(TARGETS) < STAGES.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_as_the_user_of_the_manifest(target: str) -> None:
    (number,) = re.findall(r"^ARG USER_ID=(\d+)$", TEXT, re.M)
    assert re.findall(r"^USER (\S+)$", lines_of(target), re.M)[-1] == "${USER_ID}"
    assert pod_template()["spec"]["securityContext"]["runAsUser"] == int(number)


def test_the_bases_are_pinned() -> None:
    bases = dict(re.findall(r"^ARG (\w+)=(\S+:\S+)$", TEXT, re.M))
    assert bases.keys() == {"DEBIAN", "CUDA"}
    for stage, base in STAGES.items():
        named = re.match(r"\$\{(\w+)\}", base)
        assert named[1] in bases if named else base in STAGES, stage
    assert all(re.search(r":\D*\d[\d.-]+", base) for base in bases.values())


def test_what_is_copied_exists() -> None:
    copied = [
        word
        for words in re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.M)
        for word in words.split()
    ]
    assert copied
    for word in copied:
        assert list(ROOT.glob(word)), word


def test_the_image_of_the_manifest_is_one_of_the_targets() -> None:
    (container,) = pod_template()["spec"]["containers"]
    assert container["image"].rpartition(":")[2] in TARGETS
