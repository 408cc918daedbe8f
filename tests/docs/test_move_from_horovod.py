"""The page for users of Horovod has a row for each of its public names, and its claims hold."""

from __future__ import annotations

import re
from pathlib import Path

import horovod_names
import pytest
from launching import ROOT, WORKERS, horovodrun

PAGE = (ROOT / "docs" / "how-to" / "move-from-horovod.md").read_text()
# The first columns of all tables; WORDS are the words between their backticks
FIRST_CELLS = "\n".join(re.findall(r"^\| (.*?) \|", PAGE, re.M))
WORDS = set(re.findall(r"--[\w-]+|\w+", " ".join(re.findall(r"`([^`]+)`", FIRST_CELLS))))


@pytest.mark.parametrize(
    ("what", "at_least", "known"),
    [
        (
            "names",
            120,
            {"SyncBatchNormalization", "backward_passes_per_step", "CommitStateCallback"},
        ),
        ("variables", 30, {"HOROVOD_TIMELINE", "HOROVOD_THREAD_AFFINITY"}),
        ("options", 40, {"--autotune", "--timeline-filename"}),
    ],
)
def test_each_has_a_row(what: str, at_least: int, known: set[str]) -> None:
    found = getattr(horovod_names, what)()
    assert len(found) >= at_least and known <= found  # The list itself is whole
    assert sorted(found - WORDS) == []


@pytest.mark.extended
@pytest.mark.long_wait
def test_what_the_page_says_holds_on_two_ranks(tmp_path: Path) -> None:
    """One launch tries all; the timeline of the same launch has rows named after buckets."""
    timeline = tmp_path / "timeline.json"
    ended = horovodrun(
        2,
        [str(WORKERS / "horovod_claims.py"), str(tmp_path)],
        "mpi",
        HOROVOD_DYNAMIC_PROCESS_SETS="1",
        HOROVOD_TIMELINE=str(timeline),
        HOROVOD_TIMELINE_MARK_CYCLES="1",
        HOROVOD_CACHE_CAPACITY="16",
        HOROVOD_THREAD_AFFINITY="0,1",
        HOROVOD_LOG_LEVEL="error",
        HOROVOD_AUTOTUNE="1",
        HOROVOD_AUTOTUNE_LOG=str(tmp_path / "autotune.csv"),
    )
    assert ended.status == 0, ended.output[-6000:]
    claims = re.findall(
        r"^def (\w+)\(\) -> None:", (WORKERS / "horovod_claims.py").read_text(), re.M
    )
    assert len(claims) >= 12
    for claim in claims:
        assert ended.output.count(f"{claim} ok") == 2, (claim, ended.output[-6000:])
    events = timeline.read_text()
    assert "CYCLE_START" in events
    rows = set(re.findall(r'"name": "(tfcommx\d+\.bucket[^"]*)"', events))
    assert {"tfcommx1.bucket0_1of2", "tfcommx1.bucket0_2of2"} <= rows, rows
    assert (tmp_path / "autotune.csv").exists()
