"""A recipe with the strategy `weight_averaging`: weights are equal where an epoch ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import horovodrun

from tfcommx.recipes.recipe import read
from tfcommx.report import read as read_summary

RECIPE = """
name: local
data: {name: fashion_mnist, limit: 2400, test_limit: 200}
model: {name: small_cnn, filters: [4]}
batch_per_rank: 300
phases:
  - {epochs: 1, resolution: 8}
  - {epochs: 1, resolution: 10}
learning_rate: {peak: 0.1, warm_up_epochs: 0}
strategy: {name: weight_averaging, every: 3}
node_size: 1
threads: 1
"""


# test_one_process.py has such a recipe on one rank, and tests/ranks its strategy
@pytest.mark.exhaustive
@pytest.mark.long_wait
def test_replicas_are_equal_at_the_end_of_epochs_of_every_phase(tmp_path: Path) -> None:
    """Averages come after steps 3 and 6 of 8, or at the end of the epoch of 4.

    In the second phase too, which has no BroadcastState to make them equal.
    """
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert read(tmp_path / "recipe.yaml").strategy.every == 3
    words = ["-m", "tfcommx.cli.main", "train", str(tmp_path / "recipe.yaml"), "--output"]
    ended = horovodrun(2, [*words, str(tmp_path / "run")])
    assert ended.status == 0, ended.output[-6000:]
    summary = read_summary(tmp_path / "run")
    assert summary["replicas_identical"]
    first, last = (row["bytes_between_nodes"] for row in summary["rows"])
    assert 0 < first < last <= summary["bytes_between_nodes"]
