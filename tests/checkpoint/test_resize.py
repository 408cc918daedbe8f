"""A checkpoint continues under another number of ranks, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawing import case
from launching import WORKERS, horovodrun


@pytest.mark.extended
@pytest.mark.long_wait
@pytest.mark.parametrize(
    "launches",
    [
        [(2, 1), (3, 1)],
        case([(2, 1), (3, 1), (2, 2)], kept=False),
        case([(4, 2), (2, 1), (3, 1), (4, 4)], kept=False),
    ],
    ids=["2-3", "2-3-2", "4-2-3-4"],
)
def test_residuals_survive_other_numbers_of_ranks(
    tmp_path: Path, launches: list[tuple[int, int]]
) -> None:
    """Launches of (ranks, ranks a node): other shards, fewer ranks than files and more."""
    for launch, (ranks, node_size) in enumerate(launches):
        ended = horovodrun(
            ranks,
            [str(WORKERS / "resize.py"), str(tmp_path), str(node_size)],
            seconds=240,
        )
        assert ended.status == 0 and ended.output.count(f"conserved {launch}") == ranks, (
            ended.output[-6000:]
        )
