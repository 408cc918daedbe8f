"""Translation of sentences, scored by BLEU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from tfcommx.core import ConfigurationError
from tfcommx.recipes.families import Data, Gather, Scorer
from tfcommx.recipes.reader import RecipePart

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from tfcommx.recipes.text.vocabulary import Vocabulary


@runtime_checkable
class HasSentences(Protocol):
    """Members of sentence data that translation needs."""

    # Words of the vocabulary
    inputs: int
    vocabulary: Vocabulary
    # Reference translations of the test pairs, by number
    references: Sequence[str]


class Translate(RecipePart):
    """Translate sentences; measure BLEU on the test pairs."""

    name: Literal["translate"] = "translate"
    # Share of the target that is spread over the vocabulary
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    # Number of test pairs translated for BLEU after each epoch, over all ranks; 0: none. Accuracy
    # covers all pairs
    bleu_sentences: int = Field(2000, ge=0)
    # Words that BLEU counts: "13a" separates punctuation from words, as WMT does; "char" counts
    # characters, for languages without spaces, whose sentences are otherwise single words; "zh"
    # does so for Chinese characters only; "intl" knows the punctuation of all scripts; "none"
    # separates nothing, for text that is tokenized already
    bleu_tokenizer: Literal["13a", "char", "zh", "intl", "none"] = "13a"
    # Width of beam search; 1: greedy
    beam: int = Field(1, ge=1)
    # Length penalty of beam search; 0 compares probabilities, which favours short translations
    length_penalty: float = Field(0.6, ge=0, allow_inf_nan=False)

    def build(self, data: Data) -> Translation:
        """Return the objective. **Raises:** ConfigurationError for data without sentences."""
        if not isinstance(data, HasSentences):
            raise ConfigurationError(
                "The task translate needs pairs of sentences. Choose the data set text_files, "
                "tfds_translate or catalogues, or another task."
            )
        return Translation(data, self)


@dataclass(frozen=True)
class Translation:
    """Translation of one data set's pairs."""

    data: HasSentences
    settings: Translate

    counted: ClassVar[str] = "word pieces"

    @property
    def inputs(self) -> int:
        return self.data.inputs

    @property
    def outputs(self) -> int:
        return self.data.inputs

    @property
    def scores(self) -> Sequence[str]:
        return ["test_accuracy", "test_bleu"][: 2 if self.settings.bleu_sentences else 1]

    def loss(self) -> keras.losses.Loss:
        from tfcommx.recipes.text.layers import WordLoss

        return WordLoss(self.settings.label_smoothing)

    def metrics(self) -> Sequence[str | keras.metrics.Metric]:
        from tfcommx.recipes.text.layers import WordAccuracy

        return [WordAccuracy(name="accuracy")]

    def targets(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Return the batches unchanged: labels are targets."""
        return batches

    def scorer(self, model: keras.Model) -> Scorer:
        """Return a function that computes `test_accuracy` and `test_bleu`.

        `test_accuracy` is the share of words that are predicted correctly from all words before
        them; `test_bleu`, in [0, 100], scores translations by beam search or greedy decoding.
        """
        import tensorflow as tf

        from tfcommx.recipes.text.decoding import beam_decoder
        from tfcommx.recipes.text.layers import count_right

        words = tf.TensorSpec([None, None], tf.int32)

        @tf.function(input_signature=[{"source": words, "target": words}, words], autograph=False)
        def count(inputs: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
            return tf.stack(count_right(labels, model(inputs, training=False)))

        decode = beam_decoder(model, self.settings.beam, self.settings.length_penalty)

        def score(batches: tf.data.Dataset, gather: Gather) -> dict[str, float]:
            # In float64, because float32 counts words exactly only up to 2^24
            counts = np.zeros(2)
            translations: dict[int, str] = {}
            for inputs, (labels, numbers) in batches:
                counts += count(inputs, labels).numpy()
                # Only these are decoded, because that calls the model for each word
                chosen = numbers.numpy() < self.settings.bleu_sentences
                if chosen.any():
                    translated = decode(inputs["source"][chosen]).numpy()
                    texts = map(self.data.vocabulary.decode, translated)
                    # By number, because each rank decodes other sentences
                    translations |= dict(zip(numbers.numpy()[chosen].tolist(), texts, strict=True))
            parts = gather((counts, translations))
            right, seen = np.sum([counts for counts, _ in parts], axis=0)
            scores = {"test_accuracy": float(right / max(1.0, seen))}
            if self.settings.bleu_sentences:
                scores["test_bleu"] = self._bleu(
                    {n: t for _, by_number in parts for n, t in by_number.items()}
                )
            return scores

        return score

    def _bleu(self, translations: dict[int, str]) -> float:
        import sacrebleu

        references = [self.data.references[number] for number in translations]
        score = sacrebleu.corpus_bleu(
            [*translations.values()], [references], tokenize=self.settings.bleu_tokenizer
        )
        return float(score.score)
