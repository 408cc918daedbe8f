"""`tfcommx profile`: measure when the gradients of a recipe's model are ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tfcommx.cli.environment import load_tensorflow
from tfcommx.cli.train import SET_HELP
from tfcommx.recipes.recipe import read as read_recipe


def profile(
    config: Annotated[Path, typer.Argument(help="Recipe, such as configs/fashion_mnist.yaml.")],
    output: Annotated[Path, typer.Option(help="File of the profile.")] = Path("profile.json"),
    steps: Annotated[int, typer.Option(min=1, help="That count.")] = 10,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="PLACE=VALUE", help=SET_HELP)
    ] = None,
) -> None:
    """Measure a recipe's model in this process: `tfcommx plan profile.json ...` reads the file."""
    load_tensorflow()
    from tfcommx.training.profile import measure_recipe

    found = measure_recipe(read_recipe(config, settings or []), steps)
    output.write_text(found.profile.to_json())
    parts = found.profile.forward_s + found.profile.backward_s
    print(
        f"forward {1e3 * found.profile.forward_s:.2f} ms, backward "
        f"{1e3 * found.profile.backward_s:.2f} ms, update {1e3 * found.profile.update_s:.2f} ms. "
        f"Without stamps forward and backward take {1e3 * found.plain_s:.2f} ms, "
        f"{found.plain_s / parts:.0%} of the parts.\n{output}: {len(found.profile.variables)} "
        "variables. Use it: tfcommx plan, tfcommx simulate --profile."
    )
