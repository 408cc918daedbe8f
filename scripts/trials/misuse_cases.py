"""What `misuse.py` draws, and what must come of it. No TensorFlow.

To add a misuse: a row of MISUSES with the texts that count as its named error, and what a rank does
in `misuse_worker.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Ranks wait for others that are alive: the stall watch says for whom
_WAITED = r"ha(?:s|ve) waited \d+ s in "
# A rank has ended or does not respond, or others wait for it; Horovod's own words do not count
_GONE = rf"ranks are missing|A rank has ended while this one waited for it|{_WAITED}"
_DIFFER = r"Replicas differ"

# Misuse -> a text of the output that names it, if the ranks do not end equal
MISUSES: dict[str, str] = {
    "none": r"(?!)",
    "one rank sets the rate": _DIFFER,
    "one rank assigns a weight": _DIFFER,
    "one rank restores its step count": _DIFFER,
    "one rank stops": _GONE,
    "one rank has fewer batches": rf"{_GONE}|same number of steps",
    "unknown numbers of batches": _GONE,
    "one rank begins later": rf"{_GONE}|begin at the same epoch",
    "an exception in a callback": r"misuse: this callback fails",
    "an exception in the data": r"misuse: these data fail",
    "a rank is killed": r"ranks are missing: rank \d|exited with|Process name: \d",
    "a rank is stopped": r"ranks are missing: rank \d|no response",
    "not wrapped": r"is not wrapped and takes steps|A wrapped optimizer is required",
    "compiled again, not wrapped": r"is not wrapped and takes steps",
    "wrapped twice": r"wrapped already",
    "one rank has another scheme": r"[Pp]lans? .*(differ|same)|same on every rank",
    "one rank has another model": r"same (variables|on every rank)|[Pp]lans? .*differ",
    "compiled again, wrapped": _DIFFER,
    "a deep copy of the optimizer": r"(?!)",
    "a pickle of the optimizer": r"(?!)",
    "one rank loads the model": _DIFFER,
}
# Those in which ranks wait for one that lives
UNEQUAL = {
    "one rank stops",
    "one rank has fewer batches",
    "unknown numbers of batches",
    "one rank begins later",
}
# Callbacks that may stand in the list, in the order in which most would put them
LISTED = (
    "BroadcastState",
    "WarmUp",
    "AverageBatchNorm",
    "AverageMetrics",
    "EarlyStopping",
    "ReduceLROnPlateau",
    "ModelCheckpoint",
    "TerminateOnNaN",
    "AgreeOnStop",
)
READ_METRICS = {"EarlyStopping", "ReduceLROnPlateau"}


@dataclass(frozen=True)
class Case:
    """One run, and what is wrong with it."""

    seed: int
    ranks: int
    misuse: str
    # The rank that does it, and the step (of each epoch, from 1) at which it does
    victim: int
    step: int
    callbacks: tuple[str, ...]
    # Rates: "number", "schedule" or "scheduler", a callback
    rate: str
    strategy: str
    scheme: str
    # Whether each rank makes its model from a seed of its own
    own_seeds: bool

    @property
    def broadcasts(self) -> bool:
        """Whether the ranks begin with the same weights."""
        return bool({"BroadcastState", "Standard"} & set(self.callbacks))

    @property
    def unequal(self) -> bool:
        """Whether ranks may take unequal numbers of steps while all live."""
        own = not self.broadcasts and "EarlyStopping" in self.callbacks
        return own or self.misuse in UNEQUAL

    def texts(self) -> str:
        """Return the regular expression of what names the misuse in the output."""
        texts = [MISUSES[self.misuse]]
        if not self.broadcasts:
            if self.own_seeds:
                texts.append(_DIFFER)
            if READ_METRICS & set(self.callbacks):
                # Their own metrics decide: the rate differs, or a rank stops
                texts += [_DIFFER, _GONE]
        if self.rate == "schedule" and "WarmUp" in self.callbacks:
            texts.append("an optimizer with a schedule")
        return "|".join(f"(?:{text})" for text in texts)


def draw(seed: int, ranks: Sequence[int] = (2, 4)) -> Case:
    """Draw a case: the same one for the same seed.

    >>> draw(3) == draw(3)
    True
    """
    dice = random.Random(seed)
    number = dice.choice(list(ranks))
    chosen = [name for name in LISTED if dice.random() < 0.5]
    if dice.random() < 0.25:
        chosen = [name for name in chosen if name not in ("BroadcastState", "AverageMetrics")]
        chosen.insert(0, "Standard")
    elif dice.random() < 0.2:
        dice.shuffle(chosen)
    return Case(
        seed=seed,
        ranks=number,
        misuse=dice.choice(list(MISUSES)),
        victim=dice.randrange(number),
        step=dice.randint(1, 6),
        callbacks=tuple(chosen),
        rate=dice.choice(["number", "number", "schedule", "scheduler"]),
        strategy=dice.choice(["synchronous", "synchronous", "root", "rebroadcast"]),
        scheme=dice.choice(["dense", "allgather", "hitopk", "torus"]),
        own_seeds=dice.random() < 0.5,
    )


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    # Exit status of the launch; None: it was ended because it took too long
    status: int | None
    output: str
    # Of the ranks that ended in order
    fingerprints: Mapping[int, str]
    # From the first step to the end
    seconds: float


def judge(case: Case, outcome: Outcome) -> tuple[str, str]:
    """Return the verdict, and the text that counted.

    Verdicts that are right: "equal", "named". Findings: "silent drift", "unnamed error", "hang",
    "silent wait", a hang in which ranks wait for one that lives, and "late", an error that is named
    and does not end the run.
    """
    found = re.search(case.texts(), outcome.output)
    said = _line_of(outcome.output, found) if found else ""
    everyone = len(outcome.fingerprints) == case.ranks
    equal = everyone and len(set(outcome.fingerprints.values())) == 1
    if outcome.status is None and not found:
        return "silent wait" if case.unequal else "hang", outcome.output[-600:]
    if found:
        # What waits for others is said, and the user decides.
        ended = outcome.status is not None or re.search(_WAITED, outcome.output)
        return "named" if ended else "late", said
    if equal and outcome.status == 0:
        return "equal", ""
    if everyone and not equal:
        return "silent drift", ""
    return "unnamed error", _error_of(outcome.output)


def _line_of(output: str, found: re.Match[str]) -> str:
    begin = output.rfind("\n", 0, found.start()) + 1
    return output[begin : output.find("\n", found.end())][:400]


def _error_of(output: str) -> str:
    lines = [line for line in output.splitlines() if re.search(r"\b\w*(Error|Exception)\b", line)]
    return " / ".join(lines[:3])[:600] or output[-400:]


def as_words(case: Case) -> dict[str, Any]:
    """Return a case as JSON can write it."""
    return asdict(case)
