"""Measure the model of a recipe on the recipe's data: a profile, or a step with its exchange."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

from tfcommx.collectives import process
from tfcommx.core import ConfigurationError, MeasuredStep
from tfcommx.launch.launcher import launcher
from tfcommx.measure.exchange import measure_exchange
from tfcommx.measure.profile import MeasuredProfile, measure
from tfcommx.optim.wrapped import exchanger_of
from tfcommx.recipes.recipe import Recipe
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.training.run import prepare
from tfcommx.training.steps import FitCall
from tfcommx.training.train import compile_model


def measure_recipe(recipe: Recipe, steps: int) -> MeasuredProfile:
    """Measure the model of a recipe's first phase, and the selection of its scheme.

    **Ranks:** one process. **Raises:** ConfigurationError and DataError as training does.
    """
    # `init` would refuse a `node_size` that does not divide the one rank
    recipe = recipe.model_copy(update={"node_size": None})
    scheme = recipe.scheme_of_epoch()[0]
    rule = None if scheme.selection == "all" else scheme.selection
    with _model_and_batches(recipe) as (model, batches):
        return measure(model, batches, steps, rule, scheme.density)


def measure_recipe_exchange(recipe: Recipe, steps: int) -> MeasuredStep:
    """Measure `steps` steps of a recipe's first phase with its exchange; return this rank's means.

    The exchange follows the plan of the phase's scheme; for "auto" it is plain Horovod's.

    **Ranks:** all, two or more, with the same recipe. **Cost:** as `measure_exchange`.
    **Raises:** ConfigurationError on one rank; ConfigurationError and DataError as training does.
    """
    if launcher().size == 1:
        raise ConfigurationError(
            "A step with its exchange is measured on two or more ranks. Received one. Start it "
            "with horovodrun -np 2 or more."
        )
    with _model_and_batches(recipe) as (model, batches):
        plan = exchanger_of(model).requested.plan_of(model.trainable_variables)
        exchange = PlanExecutor(plan, process.current()).exchange
        return measure_exchange(model, batches, plan, exchange, steps)


@contextlib.contextmanager
def _model_and_batches(recipe: Recipe) -> Iterator[tuple[keras.Model, tf.data.Dataset]]:
    """Build and compile the model of a recipe's first phase, and take one batch."""
    run = prepare(recipe, Path(), saves=False)
    keras.utils.set_random_seed(recipe.seed)
    model = recipe.build_model(run.objective)
    compile_model(model, run, recipe.scheme_of_epoch()[0])
    try:
        # One, because batches of text have several lengths, and each would be traced
        yield model, run.batches(FitCall(0, range(1))).take(1)
    finally:
        run.data.close()
