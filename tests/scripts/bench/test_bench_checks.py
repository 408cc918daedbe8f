"""The checks inside benchmarks fail when the checked result is wrong."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from types import SimpleNamespace as Space

import keras
import numpy as np
import pytest
import tensorflow as tf
from launching import ROOT

from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Scheme, Topology
from tfcommx.keras_internals.optimizers import copy_with
from tfcommx.keras_internals.step import ExchangesGradients
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.requested_plan import ExchangeSettings
from tfcommx.runtime.gradient_state import GradientState
from tfcommx.runtime.trial import TrialExecutor, TrialRounds

sys.path.insert(0, str(ROOT / "scripts"))
from bench import plans, ranks, results
from bench.registry import BENCHMARKS


class Loses(keras.optimizers.SGD):
    """Loses one entry of the last gradient."""

    def apply(self, grads: list, trainable_variables: list) -> None:
        last = grads[-1] * tf.constant([1.0, 1.0, 0.0])
        super().apply([*grads[:-1], last], trainable_variables)


@pytest.mark.parametrize(("kind", "right"), [(keras.optimizers.SGD, True), (Loses, False)])
def test_a_lost_entry_is_seen_and_all_is_put_back(kind: type, right: bool) -> None:
    alone = Space(rank=0, topology=Space(size=1), gather_objects=lambda mine: [mine])
    weights = [keras.Variable([[1.0, 2.0]]), keras.Variable([3.0, 4.0, 5.0])]
    optimizer = kind(0.25)
    assert plans.sums_are_right(alone, optimizer, weights) == right
    assert [one.numpy().tolist() for one in weights] == [[[1, 2]], [3, 4, 5]]
    assert float(optimizer.learning_rate) == 0.25


@pytest.mark.parametrize(("share", "right"), [(1.0, True), (0.999, False)])
def test_sums_of_a_compression_are_right_to_rounding(share: float, right: bool) -> None:
    """The check notices if a thousandth of the ranks' residuals is lost."""

    def work(comm: Comm) -> bool:
        optimizer = copy_with(ExchangesGradients, keras.optimizers.SGD(0.25))
        scheme = Scheme(compression="powersgd/1")
        optimizer.exchanger = Exchanger(comm, scheme, ExchangeSettings())
        once = optimizer.exchanger.export

        def state() -> GradientState:
            return GradientState({path: share * one for path, one in once().residuals.items()})

        optimizer.exchanger.export = state
        return plans.sums_are_right(comm, optimizer, [keras.Variable(np.ones((40, 30), "float32"))])

    assert ThreadComm.run(Topology(2, 1), work) == [right] * 2


def test_a_trial_that_is_under_way_is_seen() -> None:
    trial = object.__new__(TrialExecutor)
    trial.rounds, trial.executors = TrialRounds(2), ["plain", "other"]
    optimizer = Space(exchanger=Space(runs={"w": Space(executor=trial)}))
    while trial.rounds.chosen is None:
        assert not plans.is_decided(optimizer)
        trial.rounds.record([0.1] * len(trial.rounds.order))
    assert plans.is_decided(optimizer)
    assert plans.is_decided(keras.optimizers.SGD(0.1))  # Exchanges nothing


def documented() -> set[str]:
    """Return the arguments of `scripts/bench` in documents and in `bench results`."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text().replace("\\\n", " ") for page in pages]
    texts += [command for command in results.COMMANDS.values()]
    return {
        line for text in texts for line in re.findall(r"python3? scripts/bench ([^`\n]*)", text)
    }


@pytest.mark.parametrize("line", sorted(documented()))
def test_a_command_of_the_documents_is_taken(line: str) -> None:
    name, *words = shlex.split(line, comments=True)
    if name not in BENCHMARKS:
        assert name in ("--list", "all", "results", "record")
        return
    parser = importlib.import_module(f"bench.benchmarks.{name}").parser()
    if BENCHMARKS[name].ranks:
        ranks.add_options(parser)
        chosen, _ = ranks.parser().parse_known_args(words)
        assert ranks.places(chosen, BENCHMARKS[name])
    parser.parse_args(words)
