"""Methods: their changes to a recipe, and the settings refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import ROOT

from tfcommx.comparison.methods import Method, check_names_a_route, fitting, read_methods
from tfcommx.core import Scheme
from tfcommx.recipes.reader import RecipeError
from tfcommx.recipes.recipe import read

RECIPES = ["fashion_mnist", "translate_miniature", "dawnbench_miniature"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_shipped_method_fits_every_miniature(recipe: str) -> None:
    file = ROOT / "configs" / f"{recipe}.yaml"
    plain = read(file)
    methods = fitting(read_methods(), plain, named=False)
    assert {"dense", "float16", "recipe", "local_sgd"} <= set(methods)
    for name, method in methods.items():
        changed = read(file, method.settings([phase.epochs for phase in plain.phases]))
        assert changed.epochs == plain.epochs
        same = {"recipe", "elias_int4"} if recipe == "fashion_mnist" else {"recipe"}
        assert (changed == plain) == (name in same), name
        check_names_a_route(changed)
    dense = read(file, methods["dense"].settings([phase.epochs for phase in plain.phases]))
    assert set(dense.scheme_of_epoch()) == {Scheme()}


def test_schemes_are_compared_without_the_averages_of_a_recipe() -> None:
    file = ROOT / "configs" / "fashion_mnist.yaml"
    averages = 'strategy={"name": "weight_averaging", "every": 5}'
    for name, method in fitting(read_methods(), read(file), named=False).items():
        every = read(file, [averages, *method.settings([])]).strategy.every
        averaged = ("local_sgd_32", "local_sgd_overlapped", "diloco", "streaming_diloco")
        found = {"recipe": 5, "local_sgd": 8, **dict.fromkeys(averaged, 32)}
        assert every == found.get(name, 1), name


def test_a_method_for_another_optimizer_is_left_out_unless_it_is_named() -> None:
    recipe = read(ROOT / "configs" / "fashion_mnist.yaml")
    found = fitting(read_methods(), recipe, named=False)
    assert "momentum_int2" in found and "one_bit_adam" not in found
    with pytest.raises(RecipeError, match=r"'one_bit_adam'.*'adamw'.*'sgd'"):
        fitting(read_methods(["dense", "one_bit_adam"]), recipe, named=True)


def test_recipes_with_lars_have_a_method_that_sends_its_momentum() -> None:
    file = ROOT / "configs" / "dawnbench_miniature.yaml"
    plain = read(file)
    method = fitting(read_methods(), plain, named=False)["lars_momentum_int2"]
    changed = read(file, method.settings([phase.epochs for phase in plain.phases]))
    assert changed.optimizer.options() == plain.optimizer.options()
    assert changed.optimizer.name == "low_bit_lars"


def test_a_warm_up_goes_on_from_phase_to_phase() -> None:
    scheme = {"route": "allgather", "selection": "mstopk", "density": 0.01}
    method = Method(about="", scheme=scheme, warm_up=(0.5, 0.25, 0.1))
    file = ROOT / "configs" / "translate_miniature.yaml"
    changed = read(file, [*method.settings([2, 4]), "phases.0.epochs=2", "phases.1.epochs=4"])
    assert [one.density for one in changed.scheme_of_epoch()] == [0.5, 0.25, 0.1] + 3 * [0.01]


def test_a_warm_up_that_is_longer_than_the_recipe_is_refused_if_it_is_named() -> None:
    recipe = read(ROOT / "configs" / "fashion_mnist.yaml", ["phases.0.epochs=1"])
    longer = Method(about="", scheme={"route": "hitopk"}, warm_up=(0.5,) * (recipe.epochs + 1))
    with pytest.raises(RecipeError, match=r"'longer'.*warm_up.*Received"):
        fitting({"longer": longer}, recipe, named=True)
    assert fitting({"longer": longer}, recipe, named=False) == {}


def test_names_and_files(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("rounded: {about: mine, scheme: {wire: float16}}\ndense: {about: another}\n")
    found = read_methods(["dense", "local_sgd", str(mine)])
    assert list(found) == ["dense", "local_sgd", "rounded"] and found["dense"].about == "another"
    for word, match in (
        ("local_sdg", r"'local_sdg'.*'local_sgd'"),
        (str(tmp_path / "none.yaml"), r"none\.yaml"),
    ):
        with pytest.raises(RecipeError, match=match):
            read_methods([word])
    for number, (text, match) in enumerate(
        (
            ("a: {about: x, schema: {}}", r"a: .*'schema'.*'scheme'"),
            ("a/b: {about: x}", "'a/b'"),
            ("a: [", r"YAML.*a: \["),
            ("a: {about: x, warm_up: [0.5]}", r"a: .*warm_up needs a scheme"),
        )
    ):
        wrong = tmp_path / f"wrong{number}.yaml"
        wrong.write_text(text)
        with pytest.raises(RecipeError, match=match):
            read_methods([str(wrong)])


def test_auto_is_refused() -> None:
    file = ROOT / "configs" / "fashion_mnist.yaml"
    with pytest.raises(RecipeError, match="'auto'"):
        check_names_a_route(read(file, ["phases.0.scheme={route: auto}"]))
