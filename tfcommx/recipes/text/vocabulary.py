"""A vocabulary of word pieces, learnt from text by SentencePiece."""

import io
from collections.abc import Iterable, Iterator, Sequence

from tfcommx.core import DataError

# Numbers of the marks; padding is 0, so that masks are `!= 0`
PADDING, UNKNOWN, BEGIN, END = range(4)
# Bytes of the longest sentence from which pieces are learnt, SentencePiece's default. Longer ones
# are only encoded
LONGEST = 4192


def learn(lines: Iterable[str], size: int) -> bytes:
    """Learn a vocabulary, and return it in SentencePiece's format; deterministic.

    Args:
        lines: text of all languages that share the vocabulary.
        size: number of word pieces, including the four marks; fewer if the text has fewer.

    **Raises:** DataError if no sentence has at most LONGEST bytes, or the text has more characters
    than `size` holds; errors of the iterator.

    **Source:** Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword
    Units" (2016): byte pair encoding.
    """
    written = io.BytesIO()
    # The library replaces an error of the iterator, such as that of a line that is no UTF-8
    failures: list[Exception] = []

    def remembering() -> Iterator[str]:
        try:
            yield from lines
        except Exception as error:
            failures.append(error)
            raise

    try:
        _train(remembering(), written, size)
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        if "smaller than required_chars" in str(error):
            raise DataError(
                "A vocabulary that holds each character of the text is required. Received "
                f"{size:,} word pieces: {' '.join(str(error).split())}. Raise `vocabulary`."
            ) from error
        raise DataError(
            "Sentences from which word pieces can be learnt are required: at least one of at most "
            f"{LONGEST:,} bytes. Received: {' '.join(str(error).split())}. Is each sentence on "
            "its own line?"
        ) from error
    return written.getvalue()


def _train(lines: Iterator[str], written: io.BytesIO, size: int) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=written,
        vocab_size=size,
        # Small texts have fewer pieces
        hard_vocab_limit=False,
        model_type="bpe",
        character_coverage=1.0,
        # No normalization, because BLEU compares with the original sentences
        normalization_rule_name="identity",
        pad_id=PADDING,
        unk_id=UNKNOWN,
        bos_id=BEGIN,
        eos_id=END,
        # A million sentences are enough; WMT has several million
        input_sentence_size=1_000_000,
        # Nothing random, because each node learns the vocabulary, and all must learn the same
        shuffle_input_sentence=False,
        num_threads=1,
        minloglevel=2,
        max_sentence_length=LONGEST,
    )


class Vocabulary:
    """Word pieces and their numbers."""

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self._pieces = sentencepiece.SentencePieceProcessor()
        # Not by the constructor, because that ignores an empty model
        self._pieces.load_from_serialized_proto(model)
        self.size: int = self._pieces.vocab_size()

    @property
    def words(self) -> tuple[str, ...]:
        """Word pieces in the order of their numbers."""
        return tuple(self._pieces.id_to_piece(number) for number in range(self.size))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the numbers of each text's word pieces, END last."""
        return [[*numbers, END] for numbers in self._pieces.encode(texts)]

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of word pieces, up to END."""
        words = [int(number) for number in numbers]
        words = words[: words.index(END)] if END in words else words
        spoken = [word for word in words if word > UNKNOWN and word != BEGIN]
        text: str = self._pieces.decode(spoken)
        return text
