"""Pairs of sentences from files to BLEU: a small Transformer learns to copy and to translate."""

from types import MappingProxyType, SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfcommx.core import ConfigurationError, DataError, Topology
from tfcommx.recipes.datasets.translations import (
    CataloguePairs,
    Catalogues,
    LinePairs,
    PreparedPairs,
    TextFiles,
)
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.models.transformer import Transformer
from tfcommx.recipes.tasks.translate import Translate
from tfcommx.recipes.text.decoding import beam_decoder
from tfcommx.recipes.text.layers import WordAccuracy, WordLoss
from tfcommx.recipes.text.vocabulary import BEGIN, END, Vocabulary, learn

ENGLISH = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
GERMAN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]


def write_pairs(folder, name: str, count: int, seed: int) -> dict:
    """Numbers in words, and their translations word by word."""
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 10, random.integers(1, 6)) for _ in range(count)]
    files = {}
    for side, words in (("source", ENGLISH), ("target", GERMAN)):
        path = folder / f"{name}.{side}"
        path.write_text("".join(" ".join(words[n] for n in row) + "\n" for row in rows))
        files[side] = path
    return files


@pytest.fixture
def settings(tmp_path) -> TextFiles:
    train, test = write_pairs(tmp_path, "train", 400, 0), write_pairs(tmp_path, "test", 30, 1)
    tests = {f"test_{side}": path for side, path in test.items()}
    return TextFiles(**train, **tests, vocabulary=120, kept=tmp_path / "kept")


def opened(settings, rank=0, ranks=2):
    return settings.build(DataRank(Topology(1, ranks), rank, seed=4))


def test_every_rank_has_its_part_and_sentences_survive(settings):
    parts = [opened(settings, rank) for rank in range(2)]
    vocabulary = parts[0].vocabulary
    assert parts[0].inputs == vocabulary.size == len(parts[0].classes) <= 120
    pairs = dict(LinePairs(settings.source, settings.target))
    steps = parts[0].steps(64, 24)
    for part in parts:
        batches = list(part.train(64, 24, range(2)).as_numpy_iterator())
        assert len(batches) == 2 * steps
        for inputs, labels in batches:
            assert inputs["source"].shape == inputs["target"].shape == labels.shape
            assert inputs["source"].size <= 64
            for source, target, label in zip(*inputs.values(), labels, strict=True):
                english, german = vocabulary.decode(source), vocabulary.decode(label)
                assert pairs[english] == german
                assert target[0] == BEGIN and (target[1:] == label[:-1]).all()
        middle = part.train(64, 24, range(2), step=3).as_numpy_iterator()
        for (_, labels), (_, again) in zip(batches[3:], middle, strict=True):
            assert (labels == again).all()
    numbers = [
        n for part in parts for _, (_, numbers) in part.test(64, 24) for n in numbers.numpy()
    ]
    assert sorted(numbers) == list(range(30))
    assert (
        parts[0].references[:2]
        == [pair[1] for pair in LinePairs(settings.test_source, settings.test_target)][:2]
    )


def test_what_is_kept_is_used_again_and_follows_the_files(settings, monkeypatch):
    first = opened(settings)
    with monkeypatch.context() as patch:
        patch.setattr("tfcommx.recipes.text.corpus.learn", None)
        patch.setattr("tfcommx.recipes.text.corpus._encode", None)
        assert (opened(settings).corpus.source.words == first.corpus.source.words).all()
    settings.source.write_text(settings.source.read_text().replace("one", "uno"))
    assert "uno" in " ".join(opened(settings).classes).replace("▁", " ")


def test_text_is_read_back_as_it_was_written():
    """References are not normalised, so decoded text must not be either."""
    texts = ["Öffnen…", "½ Zoll", "ﬁle"]
    words = Vocabulary(learn(texts * 4, 60))
    assert [words.decode(found) for found in words.encode(texts)] == texts


def test_lines_must_be_aligned(settings):
    settings.target.write_text("eins\n")
    with pytest.raises(DataError, match=r"train\.target .*\b2\b"):
        list(LinePairs(settings.source, settings.target))
    with pytest.raises(DataError, match="/none"):
        LinePairs(settings.source, settings.source.with_name("none"))


@pytest.mark.extended
def test_it_learns_to_translate(settings):
    """Words in another language, one for one: BLEU rises from nothing to most of it."""
    keras.utils.set_random_seed(0)
    data = opened(settings, ranks=1)
    task = Translate(label_smoothing=0.1).build(data)
    model = Transformer(blocks=1, width=32, inner=64, heads=4, dropout=0.0, norm="pre").build(
        task.inputs, task.outputs
    )
    optimizer = keras.optimizers.Adam(0.005)
    model.compile(optimizer, task.loss(), metrics=task.metrics(), jit_compile=False)
    score, tests = task.scorer(model), data.test(256, 24)
    before = score(tests, lambda mine: [mine])
    history = model.fit(
        task.targets(data.train(512, 24, range(16))),
        epochs=16,
        steps_per_epoch=data.steps(512, 24),
        verbose=0,
    )
    after = score(tests, lambda mine: [mine])
    assert before["test_bleu"] < 5 and history.history["accuracy"][-1] > 0.9
    assert after["test_bleu"] > 40 and after["test_accuracy"] > 0.8, after
    # The fast decoder's output equals the whole model's
    source = next(iter(tests))[0]["source"]
    fast, whole = (beam_decoder(one, 1)(source).numpy() for one in (model, _Wrapped(model)))
    assert (fast == whole).all()
    # The task's own search: wide enough, it translates no worse
    searching = Translate(beam=4, length_penalty=0.6).build(data).scorer(model)
    assert searching(tests, lambda mine: [mine])["test_bleu"] > after["test_bleu"] - 3


@pytest.mark.extended
def test_a_model_is_saved_after_it_has_translated(tmp_path):
    """Keras could not save a model whose decoder was cut out: it adds nodes to shared layers."""
    model = Transformer(blocks=1, width=8, inner=16, heads=2).build(20, 20)
    model.compile(keras.optimizers.AdamW(0.0), WordLoss(0.1), jit_compile=False)
    source = np.array([[5, 6, 7, 3]], np.int32)
    said = beam_decoder(model, 1, more=2)(source)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert (beam_decoder(again, 1, more=2)(source).numpy() == said.numpy()).all()
    given = {"source": source, "target": np.array([[2, 9]], np.int32)}
    np.testing.assert_array_equal(model(given), again(given))


class _Wrapped(keras.Model):
    """A model without layers that the decoder knows."""

    def __init__(self, inner: keras.Model) -> None:
        super().__init__()
        self.inner = inner

    def call(self, inputs, training=False):
        return self.inner(inputs, training=training)


def test_padding_counts_for_nothing():
    logits = np.random.default_rng(0).normal(size=(1, 3, 5)).astype(np.float32)
    for smoothing in (0.0, 0.1):
        wanted = keras.losses.CategoricalCrossentropy(True, label_smoothing=smoothing)(
            tf.one_hot([[3, 1]], 5), logits[:, :2]
        )
        loss = WordLoss(smoothing)(np.array([[3, 1, 0]]), logits)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    accuracy = WordAccuracy(name="accuracy")
    accuracy.update_state(np.array([[1, 2, 0]]), tf.one_hot([[1, 3, 0]], 5))
    accuracy.update_state(np.array([[1, 0, 0]]), tf.one_hot([[1, 3, 0]], 5))
    assert float(accuracy.result()) == pytest.approx(2 / 3)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(WordLoss(0.3))
    )
    assert again.label_smoothing == 0.3


def test_decoding_ends():
    """Rows that have ended say END; one that never ends is cut by its own words, not by padding."""

    class Says(keras.Model):
        def call(self, inputs, training=False):
            # Row 0 ends after two words, row 1 never does
            said = tf.shape(inputs["target"])[1]
            words = tf.stack([tf.where(said > 2, END, 7), 8])
            return tf.one_hot(words, 10)[:, None, :]

    for source in ([[5, 6], [5, 0]], [[5, 6, 7, 9], [5, 0, 0, 0]]):
        found = beam_decoder(Says(), 1, more=3)(tf.constant(source)).numpy()
        assert found.tolist() == [[7, 7, END, END], [8] * 4]
    assert beam_decoder(Says(), 1, more=0)(tf.constant([[5, 0], [5, 6]])).numpy().tolist() == [
        [7, END],
        [8, 8],
    ]


def test_catalogues(tmp_path):
    """One line a message; contexts, plurals and marks of menus are taken away."""
    messages = {
        "": "Content-Type: text/plain; charset=UTF-8\n",
        "_Open the file": "Datei ö_ffnen",
        "menu\x04Close it": "Schließen",
        "two\nlines": "zwei\nZeilen",
        "same": "same",
        "%d file\x00%d files": "%d Datei\x00%d Dateien",
        "a_b and c_d": "a_b und c_d",
    }
    write_catalogue(tmp_path / "one.mo", messages)
    pairs = dict([*CataloguePairs(tmp_path, False), *CataloguePairs(tmp_path, True)])
    assert pairs == {
        "Open the file": "Datei öffnen",
        "Close it": "Schließen",
        "%d file": "%d Datei",
        "a_b and c_d": "a_b und c_d",
    }
    assert Catalogues(folder=tmp_path).fetch() == tmp_path
    (tmp_path / "one.mo").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"one\.mo\b.*magic number"):
        CataloguePairs(tmp_path, False)


def write_catalogue(path, messages: dict[str, str]) -> None:
    """Write the binary form of gettext: numbers, two tables of lengths and places, the texts."""
    rows = [(key.encode(), value.encode()) for key, value in sorted(messages.items())]
    texts, tables = b"", ([], [])
    start = 28 + 16 * len(rows)
    for side in (0, 1):
        for row in rows:
            tables[side].extend((len(row[side]), start + len(texts)))
            texts += row[side] + b"\0"
    head = [0x950412DE, 0, len(rows), 28, 28 + 8 * len(rows), 0, start]
    path.write_bytes(np.array([*head, *tables[0], *tables[1]], "<u4").tobytes() + texts)


def test_a_translation_data_set_by_name(tmp_path):
    class Builder:
        class info:
            full_name = "wmt/1.0"
            splits = MappingProxyType({"train": SimpleNamespace(num_examples=1)})

        def as_dataset(self, split):
            return tf.data.Dataset.from_tensor_slices({"en": ["one "], "de": ["eins"]})

    assert list(PreparedPairs(Builder(), "train", ("en", "de"))) == [("one", "eins")]
    with pytest.raises(DataError, match=r"wmt/1\.0.*'dev'"):
        PreparedPairs(Builder(), "dev", ("en", "de"))


def test_pairs_for_training_alone_are_refused(settings):
    """The scores were 0, because nothing was evaluated."""
    for path in (settings.test_source, settings.test_target):
        path.write_text("\n")
    with pytest.raises(DataError, match="Test pairs"):
        opened(settings)


def test_pictures_are_not_translated():
    with pytest.raises(ConfigurationError, match=r"\btranslate\b.*\btext_files\b"):
        Translate().build(object())
