"""A checkpoint continues under another number of ranks, on real processes."""

from __future__ import annotations

from pathlib import Path

from launching import WORKERS, horovodrun


def test_residuals_survive_other_numbers_of_ranks(tmp_path: Path) -> None:
    """4 ranks as 2 x 2, then 2 x 1, 3 x 1, 1 x 4: other shards, fewer ranks than files and more."""
    for launch, (ranks, node_size) in enumerate([(4, 2), (2, 1), (3, 1), (4, 4)]):
        ended = horovodrun(
            ranks,
            [str(WORKERS / "resize.py"), str(tmp_path), str(node_size)],
            seconds=240,
        )
        assert ended.status == 0 and ended.output.count(f"conserved {launch}") == ranks, (
            ended.output[-6000:]
        )
