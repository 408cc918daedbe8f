"""A user's own members: named module:function, checked when the recipe is read, loaded later."""

import sys
from pathlib import Path

import pytest
from launching import ROOT

from tfcommx.core import Topology
from tfcommx.recipes.families import DataRank
from tfcommx.recipes.reader import RecipeError
from tfcommx.recipes.recipe import read

MODULE = """
import keras, numpy as np
from tfcommx.recipes.datasets.picture_files import open_arrays
from tfcommx.recipes.tasks.classify import Classification

def net(inputs, outputs, width):
    flow = start = keras.Input((8, 8, inputs))
    flow = keras.layers.Dense(width)(keras.layers.Flatten()(flow))
    return keras.Model(start, keras.layers.Dense(outputs)(flow))

def data(place, count):
    images = np.zeros((count, 8, 8, 3), np.uint8)
    pair = images, np.arange(count) % 2
    return open_arrays(pair, pair, place, flip=False, memory=MEMORY)

def optimizer(momentum=0.0):
    return keras.optimizers.SGD(0.0, momentum=momentum or 0.0)

def nothing_back(**arguments):
    pass

class Unreported:
    inputs, classes, count, redistributes = 3, ("a", "b"), 8, False
    steps = train = test = close = None

def unreported(place):
    return Unreported()

def task(data, **settings):
    return Classification(data.inputs, len(data.classes), **settings)
"""
RECIPE = """
name: mine
model: {name: "user_parts:net", width: 3}
data: {name: "user_parts:data", count: 12}
optimizer: {name: "user_parts:optimizer", momentum: 0.5}
task: {name: "user_parts:task", label_smoothing: 0.1}
batch_per_rank: 4
phases: [{epochs: 1, resolution: 8}]
learning_rate: {peak: 0.1, warm_up_epochs: 0}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which a run is started, with the user's module and recipe."""
    (tmp_path / "user_parts.py").write_text(f"MEMORY = {str(tmp_path)!r}\n{MODULE}")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "user_parts", raising=False)
    return tmp_path


def test_a_recipe_of_own_members(folder):
    recipe = read(folder / "mine.yaml")
    assert "user_parts" not in sys.modules  # it may load TensorFlow
    data = recipe.data.build(DataRank(Topology(1, 1), 0))
    objective = recipe.task.build(data)
    model = recipe.build_model(objective)
    assert (model.input_shape, model.output_shape) == ((None, 8, 8, 3), (None, 2))
    assert model.layers[2].units == 3 and objective.label_smoothing == 0.1
    assert recipe.optimizer.momentum == 0.5 == recipe.optimizer.build().momentum
    assert data.steps(4, 8) == 3
    for pictures, labels in data.train(4, 8, range(1)):
        assert pictures.shape == (4, 8, 8, 3) and labels.shape == (4,)
    data.close()


@pytest.mark.parametrize(
    ("name", "received"),
    [
        ("no_such_module:net", r"model\.name: .*'no_such_module'"),
        ("user_parts:", r"model\.name: .*'user_parts:'"),
        ("user parts:net", r"model\.name: .*'user parts:net'"),
    ],
)
def test_a_bad_name_is_refused_when_the_recipe_is_read(folder, name, received):
    with pytest.raises(RecipeError, match=received):
        read(folder / "mine.yaml", [f'model={{name: "{name}"}}'])


def test_a_missing_function_is_refused_when_it_is_called(folder):
    recipe = read(folder / "mine.yaml", ['model={name: "user_parts:nothing"}'])
    with pytest.raises(RecipeError, match=r"'user_parts'.*'nothing'"):
        recipe.model.build(3, 2)
    deeper = read(folder / "mine.yaml", ['optimizer={name: "user_parts.deeper:nothing"}'])
    with pytest.raises((RecipeError, ModuleNotFoundError), match="user_parts"):
        deeper.optimizer.build()


@pytest.mark.parametrize(
    ("setting", "received"),
    [
        ('model={name: "user_parts:net"}', r"net\(inputs, outputs, width\).*'width'"),
        ('model={name: "user_parts:net", width: 3, widht: 4}', "'widht'"),
        ('model={name: "user_parts:net", width: 3, inputs: 4}', "must not.*inputs"),
        ('model={name: "user_parts:MEMORY"}', "'MEMORY'"),
        ('model={name: "user_parts:nothing_back"}', "Keras model.*None"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_by_name(folder, setting, received):
    """Each was a TypeError or AttributeError of every rank, with a traceback."""
    recipe = read(folder / "mine.yaml", [setting])
    with pytest.raises(RecipeError, match=received):
        recipe.model.build(3, 2)


def test_a_data_set_or_task_that_lacks_members_is_refused(folder):
    words = ["data", "task"]
    recipe = read(folder / "mine.yaml", [f'{x}={{name: "user_parts:nothing_back"}}' for x in words])
    with pytest.raises(RecipeError, match=r"inputs, classes, count"):
        recipe.data.build(DataRank(Topology(1, 1), 0))
    with pytest.raises(RecipeError, match="inputs, outputs"):
        recipe.task.build(None)


def test_a_data_set_without_a_report_is_refused_before_the_first_epoch(folder):
    """It was an AttributeError of every rank at the end of the first epoch."""
    recipe = read(folder / "mine.yaml", ['data={name: "user_parts:unreported"}'])
    with pytest.raises(RecipeError, match=r"without report\b"):
        recipe.data.build(DataRank(Topology(1, 1), 0))


@pytest.mark.parametrize("momentum", ["null", "[0.9]", "many"])
def test_a_momentum_that_is_no_number_is_left_to_the_function(folder, momentum):
    """`momentum: null` was a TypeError with a traceback."""
    setting = f'optimizer={{name: "user_parts:optimizer", momentum: {momentum}}}'
    assert read(folder / "mine.yaml", [setting]).optimizer.momentum == 0


def test_all_shipped_recipes_can_be_read():
    shipped = sorted((ROOT / "configs").glob("*.yaml"))
    assert [read(path).name for path in shipped] == [Path(path).stem for path in shipped]
