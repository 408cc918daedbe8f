"""`tfcommx profile`: measure when the gradients of a recipe's model are ready and exchanged."""

from pathlib import Path
from typing import Annotated

import typer

from tfcommx.cli.environment import load_tensorflow
from tfcommx.cli.parameters import Changes, check_output
from tfcommx.core import write_text
from tfcommx.launch.launcher import launcher
from tfcommx.recipes.recipe import Recipe
from tfcommx.recipes.recipe import read as read_recipe


def profile(
    config: Annotated[Path, typer.Argument(help="Recipe, such as configs/fashion_mnist.yaml.")],
    output: Annotated[Path, typer.Option(help="File of the profile.")] = Path("profile.json"),
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 10,
    settings: Changes = None,
    exchange: Annotated[
        Path | None,
        typer.Option(
            help="On several ranks: measure the step with its exchange, and write it to this file "
            "for `tfcommx explain FILE --links links.json`."
        ),
    ] = None,
) -> None:
    """Measure a recipe's model in this process: `tfcommx plan profile.json ...` reads the file.

    With its exchange: `horovodrun -np 2 tfcommx profile CONFIG --exchange step.json`.
    """
    recipe = read_recipe(config, settings or [])
    if launcher().rank == 0:  # Which writes; before the measurement
        check_output(exchange or output)
    # After the checks above, because importing TensorFlow takes seconds
    load_tensorflow()
    if exchange is not None:
        _measure_exchange(recipe, steps, exchange)
        return
    from tfcommx.training.profile import measure_recipe

    result = measure_recipe(recipe, steps)
    write_text(output, result.profile.to_json())
    parts = result.profile.forward_s + result.profile.backward_s
    print(
        f"forward {1e3 * result.profile.forward_s:.2f} ms, backward "
        f"{1e3 * result.profile.backward_s:.2f} ms, update {1e3 * result.profile.update_s:.2f} ms. "
        f"Without stamps forward and backward take {1e3 * result.plain_s:.2f} ms, "
        f"{result.plain_s / parts:.0%} of the parts.\n{output}: {len(result.profile.variables)} "
        "variables. Use it: tfcommx plan, tfcommx simulate --profile."
    )


def _measure_exchange(recipe: Recipe, steps: int, file: Path) -> None:
    """Measure a step on all ranks; rank 0 writes the file. **Ranks:** all."""
    from tfcommx.collectives import process
    from tfcommx.training.profile import measure_recipe_exchange

    result = measure_recipe_exchange(recipe, steps)
    if process.is_chief():
        write_text(file, result.to_json())
        timeline = result.timeline
        print(
            f"{timeline.ranks} ranks: a step of {1e3 * timeline.step_s:.2f} ms, of which "
            f"{1e3 * timeline.exposed_s:.2f} ms wait for the exchange of "
            f"{len(result.plan.buckets)} buckets.\n{file}: compare it with a simulated "
            f"one: tfcommx explain {file} --links links.json."
        )
    process.current().gather_objects("done")
