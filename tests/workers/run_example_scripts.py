"""Runs the scripts of scripts/examples on every rank, one after the other: a few steps each.

run_example_scripts.py FOLDER [NAME...]: all without names. FOLDER receives their output files; its
folder `guide` holds the guide's own_model.py and own_model.yaml, and `wordnet` the files that
glosses.yaml reads.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

import tfcommx as cx

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"
STEPS = {"fit": 4, "custom_loop": 6, "gan": 3, "horovod_after": 5, "transformer": 3}
SHORT = ("data.count=400", "phases.0.epochs=1", "phases.1.epochs=1")


def run_script(name: str, steps: int) -> None:
    sys.argv = [f"{name}.py", "--steps", str(steps)]
    if name == "fit":
        sys.argv += ["--checkpoint", str(Path.cwd().parent / "checkpoint")]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def run_recipe(recipe: Path, folder: Path, *settings: str) -> None:
    """Train a recipe of own parts, as if the run was started in its folder."""
    from tfcommx.recipes.recipe import read
    from tfcommx.training.train import train

    sys.modules.pop(recipe.stem, None)
    sys.path.insert(0, str(recipe.parent))
    own = read(recipe, [*settings, "threads=null"])
    summary = train(own, folder)
    assert summary["replicas_identical"]
    assert len(summary["rows"]) == sum(phase.epochs for phase in own.phases)
    if recipe.stem == "glosses":  # The made-up explanations are easy to learn
        assert summary["rows"][-1]["test_accuracy"] > 0.9, summary["rows"][-1]


def main() -> None:
    folder = Path(sys.argv[1])
    cx.init()
    own = folder / f"rank{cx.rank()}"
    own.mkdir()
    os.chdir(own)
    # Horovod's own script last: it wants to start Horovod, which runs already then
    recipes = {
        "own_model": (EXAMPLES / "own_model.yaml", *SHORT),
        "guide": (folder / "guide" / "own_model.yaml", *SHORT),
        "glosses": (EXAMPLES / "glosses" / "glosses.yaml", f"data.folder={folder / 'wordnet'}"),
    }
    for name in sys.argv[2:] or (*STEPS, *recipes, "horovod_before"):
        try:
            if name in recipes:
                recipe, *settings = recipes[name]
                run_recipe(recipe, folder / "runs" / name, *settings)
            else:
                run_script(name, STEPS.get(name, STEPS["horovod_after"]))
        except BaseException:
            print(f"{name} failed on rank {cx.rank()}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        print(f"{name} ok", flush=True)


if __name__ == "__main__":
    main()
