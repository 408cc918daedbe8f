"""Every error and warning that a user can meet stands on the page of troubleshooting."""

from __future__ import annotations

import re

import pytest
from documents import DOCUMENTS
from launching import ROOT
from messages import Messages, fragments

PAGE = "docs/reference/troubleshooting.md"
LINES = [
    re.sub(r"\s+", " ", line.replace("`", "").replace("\\|", "|"))
    for line in DOCUMENTS[PAGE].splitlines()
]
FOUND = list(Messages().found())
# Beginnings of what no user meets, and why
INTERNAL = {
    "Ranks ... met in different collectives": "ranks as threads, which only tests use",
    "Rank ... was left alone": "likewise",
    "Rank ... expected ... from": "likewise",
    "Rank ... waited for": "likewise",
    "The process ends.": "a thread of the cache sees the interpreter's end",
    "no space left on the device": "caught: the disk level takes no more samples",
    "The facts of a slab must fit": "an assertion",
    "A force must be taken": "an assertion",
    "A snapshot must be sent": "an assertion",
    "no file of a snapshot:": "caught: the sender of a mirror is turned away",
    "it has closed the connection": "caught: said behind `no snapshot in memory`",
    "no address": "likewise",
    "no answer from ...:": "likewise",
    "the sender has gone": "caught: the rest of the file is deleted",
    "a message of": "caught: the process that would send it is turned away",
    "an array of": "caught: said behind `Plain data of another rank is required`",
    "fewer bytes than the arrays have": "likewise",
    "more bytes than the arrays have": "likewise",
    "a value of type": "likewise",
    "an empty ...": "caught: said behind `A supervised run needs`",
    "no line of a watcher:": "caught: the line is passed over",
    "... is no list": "caught: said behind `TF_CONFIG must name`",
    "... belongs to another user": "caught: the sweep leaves that folder",
    "numbers out of range:": "caught: said behind `must name a save`",
    "a wrong checksum of ...": "caught: said behind the name of the file",
    "a stranger": "caught: rank 0 turns the process away",
    "...:": "a text file's error: `... Check the path.` stands on the page",
}
# Put together from parts, so that their words are not found: where, and how they begin on the page
BUILT = {
    "tfcommx/recipes/reader.py": "means another value in YAML 1.1 than in 1.2:",
    "tfcommx/collectives/rendezvous.py": "did not come to rank 0 on",
    "tfcommx/runtime/replica_guard.py": "Replicas differ",
    "tfcommx/callbacks/agree.py": "All ranks must hold the same trainable weights.",
    "tfcommx/watch/stalls.py": "and all ranks are alive.",
    "tfcommx/data/sources/folder.py": "Check the path and its mount.",
    "tfcommx/recipes/datasets/translations.py": "Check the path.",
    "tfcommx/report/summary.py": "Train again to write it anew.",
}
# They pass on what others said
PASSED_ON = (
    "tfcommx/cli/compare.py",
    "tfcommx/cli/environment.py",
    "tfcommx/launch/horovodrun.py",
    "tfcommx/watch/watcher.py",
    "tfcommx/watch/liveness.py",
    "tfcommx/cli/train.py",
    "tfcommx/cli/run.py",
    "tfcommx/supervisor/supervisor.py",
    "tfcommx/comparison/methods.py",
    "tfcommx/optim/automatic.py",
    "tfcommx/core/files.py",
    "tfcommx/data/slab_files.py",
    "tfcommx/recipes/datasets/picture_files.py",
    "tfcommx/recipes/reader.py",
    "tfcommx/recipes/recipe.py",
    "tfcommx/recipes/text/corpus.py",
    "tfcommx/core/profile.py",
)


def is_on_the_page(text: str) -> bool:
    """Whether the fixed parts of a message stand in one line, in their order."""
    wanted = re.compile(".*".join(map(re.escape, fragments(text))))
    return any(wanted.search(line) for line in LINES)


def test_every_message_is_on_the_page() -> None:
    assert len(FOUND) > 300
    missing = [
        f"{place}: {text}"
        for place, text in FOUND
        if fragments(text) and not text.startswith(tuple(INTERNAL)) and not is_on_the_page(text)
    ]
    assert not missing, f"Give these a row in {PAGE}:\n" + "\n".join(missing)


def test_messages_without_fixed_words_are_known() -> None:
    """A message that is put together elsewhere would escape the test above."""
    places = {place.split(":")[0] for place, text in FOUND if not fragments(text)}
    assert places <= {*BUILT, *PASSED_ON}, places - {*BUILT, *PASSED_ON}


@pytest.mark.parametrize("file", BUILT)
def test_messages_that_are_put_together_are_on_the_page(file: str) -> None:
    assert BUILT[file] in " ".join((ROOT / file).read_text().replace('"\n', "").split())
    assert any(BUILT[file] in line for line in LINES)


@pytest.mark.parametrize("beginning", INTERNAL)
def test_what_is_called_internal_still_exists(beginning: str) -> None:
    assert any(text.startswith(beginning) for _, text in FOUND)


def test_a_new_message_is_missed() -> None:
    assert is_on_the_page("`keep` must be >= 1.")
    assert not is_on_the_page("`keep` must be whatever it likes, but never ...")
