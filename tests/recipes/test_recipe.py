"""A recipe is refused with the place and the nearest key; the shipped one is read as it stands."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from launching import ROOT
from pydantic import ValidationError

from tfcommx.recipes.datasets import DATASETS
from tfcommx.recipes.models import MODELS
from tfcommx.recipes.optimizers import OPTIMIZERS
from tfcommx.recipes.reader import RecipeError
from tfcommx.recipes.recipe import LearningRate, read
from tfcommx.recipes.tasks import TASKS

SHIPPED = ROOT / "configs" / "fashion_mnist.yaml"
SMALL = """
name: small
batch_per_rank: 8
phases: [{epochs: 2, resolution: 14}, {epochs: 1, resolution: 28, scheme: {route: torus}}]
learning_rate: {peak: 0.1}
"""


@pytest.fixture
def write(tmp_path):
    def make(text: str) -> Path:
        (tmp_path / "recipe.yaml").write_text(text)
        return tmp_path / "recipe.yaml"

    return make


def test_the_shipped_recipe():
    shipped = read(SHIPPED)
    assert {phase.scheme.wire for phase in shipped.phases} == {"elias/int4"}
    assert shipped.phases[-1].resolution == 28 and shipped.node_size == 2
    header = SHIPPED.read_text().split("name:")[0]
    assert all(word in header for word in ("Claim:", "Measured:", "Hardware:", "Command:"))


def test_the_miniature_is_the_whole_recipe_but_for_sizes():
    """The same phases, schemes and switches; resolutions in the same proportions."""
    whole, small = (
        read(ROOT / "configs" / f"dawnbench_{name}.yaml") for name in ("resnet50", "miniature")
    )
    for one, other in zip(whole.phases, small.phases, strict=True):
        assert (one.epochs, one.scheme) == (other.epochs, other.scheme)
        assert one.resolution == 8 * other.resolution
        assert whole.batch(one) / whole.batch_per_rank == small.batch(other) / small.batch_per_rank
    assert [phase.epochs for phase in whole.phases] == [13, 11, 3, 1]
    assert whole.scheme_of_epoch()[12].route == "hitopk" != whole.scheme_of_epoch()[13].route
    assert (whole.optimizer, whole.task, type(whole.model), whole.learning_rate.decay) == (
        small.optimizer,
        small.task,
        type(small.model),
        small.learning_rate.decay,
    )
    switches = ("crop", "area", "flip", "test_crop")
    assert [getattr(whole.data, name) for name in switches] == [
        getattr(small.data, name) for name in switches
    ]


def test_phases_and_frozen(write):
    small = read(write(SMALL))
    assert small.epochs == 3 and [phase.resolution for phase in small.phase_of_epoch()] == [
        14,
        14,
        28,
    ]
    with pytest.raises(ValidationError):
        small.seed = 3


def test_strategies_are_built(write):
    """By default every rank applies the average; an outer optimizer is DiLoCo's."""
    assert repr(read(write(SMALL)).strategy.build()) == "Synchronous()"
    text = (
        "strategy: {name: weight_averaging, every: 32, outer: {momentum: 0.8}, "
        "fragments: 4, overlap: 8}"
    )
    assert repr(read(write(SMALL + text)).strategy.build()) == (
        "WeightAveraging(every=32, sends='updates', momentum='keep', "
        "outer=SGD(learning_rate=0.7, momentum=0.8, nesterov=True), fragments=4, overlap=8)"
    )
    ahead = read(write(SMALL + "strategy: {name: step_ahead, coefficient: 0.5}")).strategy
    assert repr(ahead.build()) == "StepAhead(coefficient=0.5)" and ahead.every == 1


def test_a_phase_warms_up_its_density(write):
    sparse = (
        "scheme: {route: hitopk, selection: mstopk, density: 0.01, momentum: 0.9, clip_norm: 2}"
    )
    text = SMALL.replace(
        "{epochs: 2, resolution: 14}",
        f"{{epochs: 3, resolution: 14, warm_up: [0.25, 0.063], {sparse}}}",
    )
    schemes = read(write(text + "optimizer: {momentum: 0}")).scheme_of_epoch()
    assert [scheme.density for scheme in schemes] == [0.25, 0.063, 0.01, 1]
    assert schemes[0].momentum == 0.9 and schemes[2].clip_norm == 2 and schemes[3].route == "torus"


@pytest.mark.parametrize(
    ("old", "new", "received"),
    [
        (
            "name: small",
            "name: small\nbatch_per_rnk: 1",
            r"recipe: .*'batch_per_rnk'.*'batch_per_rank'",
        ),
        (
            "name: small",
            "name: small\ntask: {label_smothing: 0.1}",
            r"task: .*'label_smothing'.*'label_smoothing'",
        ),
        (
            "name: small",
            "name: small\nmodel: {name: smal_cnn}",
            r"model: .*'smal_cnn'.*'small_cnn'",
        ),
        (
            "name: small",
            "name: small\nmodel: {name: [small_cnn]}",
            r"model: .*\['small_cnn'\]",
        ),
        (
            "name: small",
            "name: small\nmodel: {name: transformer, size: [base]}",
            r"model\.size: .*\['base'\]",
        ),
        (
            "name: small",
            "name: small\nmodel: {filters: [8, 0]}",
            r"model\.filters\[1\]: .*\b1\b.*\b0\b",
        ),
        ("name: small", "name: small\ndata: images", r"data: .*'images'"),
        (
            "name: small",
            "name: small\nstrategy: {name: weight_averaging, every: 2, fragments: 3}",
            r"strategy: .*fragments\b.*every=2\b.*\b3\b",
        ),
        (
            "name: small",
            "name: small\nstrategy: {name: weight_averaging, every: 8, fragments: 3, overlap: 3}",
            r"strategy: .*overlap\b.*\b2\b.*\b3\b",
        ),
        (
            "name: small",
            "name: small\nstrategy: {name: weight_averaging, every: 2, outer: {momentun: 0}}",
            r"strategy\.outer: .*'momentun'.*'momentum'",
        ),
        ("{peak: 0.1}", "{peek: 0.1}", r"learning_rate: .*'peek'.*'peak'"),
        (
            "route: torus",
            "rout: torus",
            r"phases\[1\]\.scheme: .*'rout'.*'route'",
        ),
        (
            "route: torus",
            "route: tours",
            r"phases\[1\]\.scheme: .*'tours'.*'torus'",
        ),
        (
            "route: torus",
            "route: hitopk, selection: mstopk, density: 0",
            r"phases\[1\]\.scheme: .*`density`.*Received 0\.",
        ),
        (
            "route: torus",
            "route: hitopk, selection: mstopk, density: some",
            r"phases\[1\]\.scheme: .*`density`.*Received 'some'",
        ),
        ("{route: torus}", "torus", r"phases\[1\]\.scheme: .*'torus'"),
        (
            "epochs: 2",
            "epochs: 0",
            r"phases\[0\]\.epochs: .*\b1\b.*\b0\b",
        ),
        ("epochs: 2, ", "", r"phases\[0\]\.epochs: "),
        # The list of its epochs' schemes took all memory
        ("epochs: 2", "epochs: 99999999999", r"phases\[0\]\.epochs: .*\b1000000\b"),
        (
            "route: torus",
            "route: hitopk, selection: mstopk, density: 0.1, momentum: 0.9",
            r"recipe: .*optimizer\.momentum=0\.9",
        ),
        (
            "scheme: {route: torus}",
            "warm_up: [0.25]",
            r"phases\[1\]: .*warm_up\b.*route='allreduce'",
        ),
        (
            "scheme: {route: torus}",
            "warm_up: [0.25, 0.1]",
            r"phases\[1\]: .*warm_up\b.*\b1\b.*\[0\.25, 0\.1\]",
        ),
        (
            "{peak: 0.1}",
            "{peak: 0.1, peak_per_256: 0.1}",
            r"learning_rate: .*peak=0\.1, peak_per_256=0\.1",
        ),
        (
            "{peak: 0.1}",
            "{peak: 0.1, warm_up_epochs: 3}",
            r"recipe: .*warm_up_epochs\b.*\b3\b.*\b3\.0",
        ),
        ("name: small", "name: ../small", r"name: .*'\.\./small'"),
        ("name: small", "name: [", r"YAML.*name: \["),
        ("name: small", "name: small\nname: large", r"YAML.*'name'"),
        ("name: small", "name: small\n? [1]\n: 2", r"YAML.*unhashable key"),
        (
            "name: small",
            "name: small\nseed: 20261122001122",
            r"seed: .*\b4294967296\b.*\b20261122001122\b",
        ),
        (SMALL, "- 1", r"\blist\b"),
    ],
)
def test_errors_name_the_place(write, old, new, received):
    assert old in SMALL
    path = write(SMALL.replace(old, new))
    with pytest.raises(RecipeError, match=f"{re.escape(str(path))}.*{received}"):
        read(path)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("data.std=[0]", "std"),
        ("data.mean=[127.5]", "mean"),
        ("data.area=[1, 0.5]", "area"),
        ("data.aspect=[0, 1]", "aspect"),
        ("data.mean=0.5", r"data\.mean: .*\[1, 2\]"),
        ("data.mean=[0.5, 0.5, 0.5]", r"mean.*\b1 channels"),
        ("data={name: folder, folder: ., std: [1, 1]}", r"std.*\b3 channels"),
        ("data={name: arrays, file: a.npz, mean: [0, 0], std: [1, 1, 1]}", r"mean.*\b3 channels"),
    ],
)
def test_what_no_batch_can_have_is_refused_before_ranks_start(setting, named):
    """Only the ranks refused it, when they made their first batch."""
    with pytest.raises(RecipeError, match=named):
        read(ROOT / "configs" / "fashion_mnist.yaml", [setting])


def test_numbers_for_channels_that_only_the_files_tell_are_accepted():
    data = "data={name: arrays, file: a.npz, mean: [0, 0], std: [1]}"
    assert read(SHIPPED, [data]).data.mean == (0, 0)


def test_every_error_is_told_at_once(write):
    with pytest.raises(RecipeError) as refused:
        read(
            write(
                SMALL.replace("epochs: 2", "epochs: 0").replace(
                    "batch_per_rank: 8", "batch_per_rank: many"
                )
            )
        )
    assert len(str(refused.value).splitlines()) == 2


def test_a_missing_file(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.yaml"):
        read(tmp_path / "none.yaml")


def test_settings(write):
    changed = read(
        write(SMALL),
        [
            "phases.0.epochs=5",
            "learning_rate.warm_up_epochs=2e0",
            "data.flip=false",
            "node_size=null",
            "phases.1.scheme={route: hitopk, selection: mstopk, density: 1e-3}",
        ],
    )
    assert (changed.phases[0].epochs, changed.learning_rate.warm_up_epochs, changed.data.flip) == (
        5,
        2.0,
        False,
    )
    assert changed.phases[1].scheme.density == 0.001  # PyYAML alone takes 1e-3 for text
    for setting, received in (
        ("epochs", "'epochs'"),
        ("phases.7.epochs=1", r"'phases\.7\.epochs'"),
        ("name.x=1", r"'name\.x'"),
        ("phase.0=1", r"'phase'.*'phases'"),
        ("seed=[", r"'seed=\['.*YAML"),
        ("phases.²=1", r"'phases\.²'"),
    ):
        with pytest.raises(RecipeError, match=received):
            read(write(SMALL), [setting])


def test_every_member_is_built_of_its_name(write):
    """YAML can name every member of the tables; without a name the default is taken."""
    families = {"data": DATASETS, "model": MODELS, "task": TASKS, "optimizer": OPTIMIZERS}
    needs = {
        "imagenet": "folder: here",
        "folder": "folder: here",
        "tfds": "dataset: imagenette",
        "arrays": "file: here.npz",
        "text_files": "source: a, target: b, test_source: c, test_target: d",
    }
    for key, table in families.items():
        assert type(getattr(read(write(SMALL)), key)) in table.values()
        for name, kind in table.items():
            settings = ", ".join([f"name: {name}", *filter(None, [needs.get(name)])])
            # The default of models that have their own `resolution`
            sizes = [f"phases.{number}.resolution=224" for number in (0, 1)]
            chosen = getattr(read(write(f"{SMALL}{key}: {{{settings}}}"), sizes), key)
            assert type(chosen) is kind and chosen.name == name and callable(chosen.build)


def test_reading_a_recipe_loads_no_tensorflow():
    code = (
        "import sys; from pathlib import Path; from tfcommx.recipes.recipe import read\n"
        "read(Path('configs/fashion_mnist.yaml'))\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_learning_rate(decay):
    """Up in a straight line to the peak, then down, never up again, to (nearly) zero at the end."""
    rate = LearningRate(peak_per_256=0.25, warm_up_epochs=2, decay=decay)
    values = [rate.at(step, 10, 100, 512) for step in range(100)]
    assert max(values) == values[20] == 0.5 and values[0] == pytest.approx(0.5 / 21)
    assert [b - a for a, b in pairwise(values[:21])] == pytest.approx([0.5 / 21] * 20)
    assert all(b < a for a, b in pairwise(values[20:])) and 0 < values[-1] < 0.01
    assert values[60] == pytest.approx(0.25)  # half way of the decay, for both shapes
    assert LearningRate(peak=0.1, warm_up_epochs=0).at(0, 10, 100, 9999) == 0.1


@pytest.mark.parametrize(
    ("decay", "wanted"),
    [
        # At the end of the warm-up, half way to the end, at the end
        ("{name: polynomial, power: 2}", (1, 0.25, 0)),
        ("{name: polynomial, power: 2, end: 0.1}", (1, 0.325, 0.1)),
        ("{name: step, at: [5, 9], times: 0.1}", (1, 0.1, 0.01)),
        ("inverse_sqrt", (1, (2 / 6) ** 0.5, (2 / 10) ** 0.5)),
        ("linear", (1, 0.5, 0)),
    ],
)
def test_schedules(write, decay, wanted):
    text = SMALL.replace("{peak: 0.1}", f"{{peak: 0.1, warm_up_epochs: 2, decay: {decay}}}")
    rate = read(write(text)).learning_rate
    got = [rate.at(step, 10, 100, 512) / 0.1 for step in (20, 60, 100)]
    assert got == pytest.approx(wanted)
    in_steps = text.replace("warm_up_epochs: 2", "warm_up_steps: 20")
    assert read(write(in_steps)).learning_rate.at(7, 10, 100, 512) == rate.at(7, 10, 100, 512)


def test_a_phase_has_its_batch_and_its_share_of_the_rate(write):
    """The rate counts in steps of the first phase, and follows the batch if it is per 256."""
    text = SMALL.replace(
        "{epochs: 1, resolution: 28",
        "{epochs: 1, resolution: 28, batch: 4, learning_rate_factor: 2",
    ).replace("{peak: 0.1}", "{peak_per_256: 0.1, warm_up_epochs: 1, decay: linear}")
    recipe = read(write(text))
    assert [recipe.batch(phase) for phase in recipe.phases] == [8, 4]
    last_of_the_first = recipe.rate(1, 9, 10, 32)
    first_of_the_second = recipe.rate(2, 0, 10, 32)
    assert last_of_the_first == pytest.approx(0.1 * (1 - 0.9 / 2))
    assert first_of_the_second == pytest.approx(0.1 * 0.5)  # half the batch, twice the factor
    assert read(write(SMALL)).rate(2, 3, 10, 2) == read(write(SMALL)).learning_rate.at(
        23, 10, 30, 16
    )


def test_tests_without_a_pixel_are_refused(write):
    """They were refused on all ranks, after the data was open."""
    with pytest.raises(RecipeError, match=r"data\.test_scale.*\b0\.03\b.*\b14\b"):
        read(write(SMALL), ["data={test_scale: 0.03}"])
    assert read(write(SMALL), ["data={test_scale: 0.04}"]).data.test_scale == 0.04


def test_a_network_of_one_resolution_refuses_phases_of_others(write):
    """Before any process is busy: it has weights for each position."""
    path = write(SMALL + "model: {name: vgg19, resolution: 32}\n")
    with pytest.raises(RecipeError, match=r"model\.resolution=32\b.*phases\.0\.resolution=14\b"):
        read(path)
    changes = [f"phases.{number}.resolution=32" for number in (0, 1)]
    assert read(path, changes).model.resolution == 32
    # All ranks failed in the evaluation of the first epoch
    with pytest.raises(RecipeError, match=r"data\.test_scale=1\.25\b"):
        read(path, [*changes, "data.test_scale=1.25"])
