"""Runs the scripts of scripts/examples on every rank, one after the other: a few steps each.

run_example_scripts.py FOLDER, which receives what they write.
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


def run_script(name: str, steps: int) -> None:
    sys.argv = [f"{name}.py", "--steps", str(steps)]
    if name == "fit":
        sys.argv += ["--checkpoint", "checkpoint"]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def run_recipe(folder: Path) -> None:
    from tfcommx.recipes.recipe import read
    from tfcommx.training.train import train

    sys.path.insert(0, str(EXAMPLES))
    settings = ["data.count=400", f"data.memory={folder}", "threads=null"]
    summary = train(read(EXAMPLES / "own_model.yaml", settings), folder / "own_model")
    print(f"own_model: test accuracy {summary['test_accuracy']:.3f}", flush=True)
    assert summary["replicas_identical"] and len(summary["rows"]) == 4


def main() -> None:
    folder = Path(sys.argv[1])
    cx.init()
    own = folder / f"rank{cx.rank()}"
    own.mkdir()
    os.chdir(own)
    # Horovod's own script last: it wants to start Horovod, which runs already then
    for name in (*STEPS, "own_model", "horovod_before"):
        try:
            if name == "own_model":
                run_recipe(folder)
            else:
                run_script(name, STEPS.get(name, STEPS["horovod_after"]))
        except BaseException:
            print(f"{name} failed on rank {cx.rank()}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        print(f"{name} ok", flush=True)


if __name__ == "__main__":
    main()
