"""The benchmark's language model: its text, sequences, network, scores and contestants."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from launching import ROOT

from tfcommx.core import ConfigurationError, DataError, Topology
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.recipe import read
from tfcommx.recipes.text.vocabulary import END

sys.path.insert(0, str(ROOT / "scripts"))
from bench.benchmarks import end_to_end
from bench.benchmarks import end_to_end_language as language


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write 20 documents of 40 paragraphs, and two that are left out."""
    folder = tmp_path / "5.36" / "pod"
    folder.mkdir(parents=True)
    for name in [*(f"perl{number:02}" for number in range(20)), "perltoc", "perl5360delta"]:
        paragraphs = [f"Paragraph {number} of\n  {name},\tBéla." for number in range(40)]
        (folder / f"{name}.pod").write_text("\n \n".join(paragraphs), encoding="utf-8")
    return tmp_path


def numbered(rank: int) -> language.Text:
    """Return a text on one of two ranks, whose pieces count up."""
    place = DataRank(Topology(2, 1), rank)
    return language.Text(place, np.arange(1000), np.arange(101), 300, tuple(map(str, range(1001))))


def test_the_last_tenth_of_the_documents_is_for_evaluation(folder: Path) -> None:
    documents = language.read_documents(folder)
    assert len(documents) == 20 and documents[3][7] == "Paragraph 7 of perl03, Bla."
    place = DataRank(Topology(1, 1), 0)
    text = language.open_manual(place, str(folder), vocabulary=100)
    assert text.test_bytes == sum(len(part) + 1 for part in [*documents[18], *documents[19]])
    paragraphs = [np.count_nonzero(stream == END) for stream in (text.training, text.testing)]
    assert paragraphs == [18 * 40, 2 * 40]
    for path in sorted(folder.glob("*/pod/*"))[9:]:
        path.unlink()
    with pytest.raises(DataError, match="perl-doc"):
        language.open_manual(place, str(folder))


def test_ranks_share_the_sequences_of_an_epoch_and_of_the_test() -> None:
    def epoch(rank: int, number: int, step: int = 0) -> np.ndarray:
        batches = numbered(rank).train(32, 8, range(number, number + 1), step)
        return np.array(list(batches.as_numpy_iterator()))  # [step, 2, sequence, piece]

    first, second = epoch(0, 0), epoch(1, 0)
    assert first.shape == second.shape == (15, 2, 4, 8) and numbered(0).steps(32, 8) == 15
    both = np.concatenate([first, second])
    np.testing.assert_array_equal(both[:, 1], both[:, 0] + 1)
    assert len(np.unique(both[:, 0])) == both[:, 0].size
    np.testing.assert_array_equal(epoch(0, 0, step=4), first[4:])
    assert (epoch(0, 1) != first).any()
    tested = [labels for rank in range(2) for _, labels in numbered(rank).test(32, 8)]
    labels = np.sort(np.concatenate([*map(np.ravel, tested)]))
    np.testing.assert_array_equal(labels[labels > 0], range(1, 101))
    with pytest.raises(ConfigurationError, match="32"):
        numbered(0).steps(16, 32)


def test_scores_are_of_all_ranks() -> None:
    """A model that gives the right piece a thousand times the probability of each other one."""
    counts: list[np.ndarray] = []

    def gather(own: np.ndarray) -> list[np.ndarray]:
        counts.append(own)
        return counts

    def model(pieces: tf.Tensor, training: bool) -> tf.Tensor:
        return math.log(1000) * tf.one_hot(pieces + 1, 1001)

    for rank in range(2):
        objective = language.predict_next(numbered(rank))
        scores = objective.scorer(model)(numbered(rank).test(32, 8), gather)
    assert tuple(scores) == objective.scores and scores["test_accuracy"] == 1
    assert scores["test_perplexity"] == pytest.approx(2, rel=1e-5)
    assert scores["test_log2_likelihood"] == pytest.approx(-100 / 300, rel=1e-5)


def test_a_piece_is_predicted_from_those_before() -> None:
    recipe = read(end_to_end.RECIPES["language"])
    model = recipe.model.build(2000, 2000)
    assert 1e6 < model.count_params() < 2e6
    pieces = np.arange(20).reshape(2, 10)
    logits, changed = model(pieces), model(np.where(pieces % 10 == 7, 0, pieces))
    assert logits.shape == (2, 10, 2000)
    same = np.isclose(logits, changed, atol=1e-5).all(axis=(0, 2))
    assert same.tolist() == 7 * [True] + 3 * [False]


@pytest.mark.exhaustive
def test_the_network_learns_a_text() -> None:
    keras.utils.set_random_seed(0)
    text = numbered(0)
    objective = language.predict_next(text)
    model = language.network(text.inputs, text.inputs, blocks=1, width=32, heads=2, context=8)
    model.compile("adam", loss=objective.loss(), metrics=objective.metrics())
    batches = objective.targets(text.train(32, 8, range(3)))
    ended = model.fit(batches, epochs=3, steps_per_epoch=15, verbose=0, shuffle=False)
    losses = ended.history["loss"]
    assert math.log(1001) > losses[1] > losses[2]


def test_every_contestant_for_adam_fits() -> None:
    names = "none horovod horovod_fp16 asa_int4 elias_int4 step_ahead one_bit_adam diloco"
    names += " streaming_diloco local_sgd"
    words = ["--recipe", "language", "--contestants", *names.split()]
    assert list(end_to_end.changes_of(end_to_end.parser().parse_args(words))) == names.split()
