"""The scripts in scripts/examples run on two ranks, all in one launch."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from launching import QUICK, ROOT, WORKERS, horovodrun

EXAMPLES = ROOT / "scripts" / "examples"


def write_glosses(folder: Path) -> None:
    """Write WordNet's files with made-up explanations, whose words tell the field."""
    folder.mkdir()
    for name, fields in {
        "noun": range(3, 29),
        "verb": range(29, 44),
        "adj": (0, 1, 44),
        "adv": (2,),
    }.items():
        lines = ["  1 This software and database is being provided to you"]
        for field in fields:
            word = "abcdefghij"[field // 10] + "klmnopqrst"[field % 10]
            lines += [
                f'{number:08} {field:02} n 01 it 0 000 | a {word} of the {word}; "so"'
                for number in range(40)
            ]
        (folder / f"data.{name}").write_text("\n".join(lines) + "\n")


@pytest.mark.extended
@pytest.mark.long_wait
@pytest.mark.parametrize(
    "names",
    [
        ("fit", "custom_loop", "horovod_after", "guide", "horovod_before"),
        pytest.param((), marks=pytest.mark.exhaustive),
    ],
    ids=["simple", "all"],
)
def test_the_examples_on_two_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Each for a few steps, and the guide's recipe of own parts.

    Horovod's script and its successor end with the same weights.
    """
    (tmp_path / "guide").mkdir()
    guide = (ROOT / "docs" / "how-to" / "own-model.md").read_text()
    for language, file in (("yaml", "own_model.yaml"), ("python", "own_model.py")):
        blocks = re.findall(rf"```{language}\n(.*?)```", guide, re.S)
        (block,) = [text for text in blocks if "own_model" in text or "def build_net" in text]
        (tmp_path / "guide" / file).write_text(block)
    write_glosses(tmp_path / "wordnet")
    worker = str(WORKERS / "run_example_scripts.py")
    ended = horovodrun(
        2, [worker, str(tmp_path), *names], seconds=900, PYTHONPATH=f"{QUICK}:{':'.join(sys.path)}"
    )
    assert ended.status == 0, ended.output[-6000:]
    for name in names or {"guide", "glosses", *(path.stem for path in EXAMPLES.glob("*.py"))}:
        assert ended.output.count(f"{name} ok") == 2, (name, ended.output[-6000:])
    model = keras.Sequential(
        [keras.layers.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    found = []
    for file in ("horovod", "tfcommx"):
        model.load_weights(tmp_path / "rank0" / f"{file}.weights.h5")
        found.append([weight.numpy() for weight in model.weights])
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(before, after)
    assert (tmp_path / "checkpoint").exists()


def test_the_table_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    files = [path for path in EXAMPLES.iterdir() if path.is_file()]  # Not __pycache__
    assert files
    for path in files:
        assert path.name == "README.md" or f"`{path.name}`" in text
