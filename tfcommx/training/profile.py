"""Measure a recipe's model on its own data: what a plan by time needs."""

from __future__ import annotations

from pathlib import Path

import keras

from tfcommx.measure.layers import Measured, measure
from tfcommx.recipes.recipe import Recipe
from tfcommx.training.position import Piece
from tfcommx.training.run import prepare
from tfcommx.training.train import compile_model


def measure_recipe(recipe: Recipe, steps: int) -> Measured:
    """Measure the model of a recipe's first phase, and the selection that its scheme asks for.

    **Ranks:** one process. **Raises:** PlanError and DataError as training does.
    """
    # One process is no node of several
    run = prepare(recipe.model_copy(update={"node_size": None}), Path())
    keras.utils.set_random_seed(recipe.seed)
    model, scheme = recipe.build_model(run.objective), recipe.scheme_of_epoch()[0]
    compile_model(model, run, scheme)
    # One batch again and again: a text's have several lengths, each of which would be traced
    batches = run.batches(Piece(0, range(1))).take(1)
    rule = None if scheme.selection == "all" else scheme.selection
    try:
        return measure(model, batches, steps, rule, scheme.density)
    finally:
        run.data.close()
