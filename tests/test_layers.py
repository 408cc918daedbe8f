"""Rules that import-linter cannot check: foreign libraries, TensorFlow, environment, wording."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tfcommx"

# Modules that planning, prices and the command line's help load
NO_TENSORFLOW = (
    "core",
    "engines",
    "report.progress",
    "report.summary",
    "report.terminal",
    "report.figures",
    "kernels.build",
    "launch",
    "watch.liveness",
    "watch.membership",
    "watch.protocol",
    "watch.stalls",
    "watch.watcher",
    "compression",
    "measure.horovod_timeline",
    "wire.formats",
    "routes",
    "simulator",
    "planner",
    "strategies.easgd.process",
    "strategies.easgd.server",
    "recipes.families",
    "recipes.datasets.picture_files",
    "recipes.datasets.translations",
    "recipes.datasets.fashion_mnist",
    "recipes.models",
    "recipes.optimizers",
    "recipes.reader",
    "recipes.recipe",
    "recipes.schedules",
    "recipes.strategies",
    "recipes.tasks",
    "recipes.text.batches",
    "recipes.text.corpus",
    "recipes.text.vocabulary",
    "recipes.user",
    "comparison",
    "supervisor",
    "cli",
    "ray",
)
ONLY_IMPORTER = {"horovod": "collectives.horovod", "mpi4py": "collectives.mpi", "ray": "ray"}
MAY_READ_ENVIRONMENT = (
    "cli",
    "kernels.loader",
    "kernels.build",
    "launch",
    "watch",
    "collectives",
    "ray",
)


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name without `tfcommx.`; a package by its own."""
    names = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    return {
        name.removesuffix(".__init__"): path for name, path in names.items() if name != "__init__"
    }


MODULES = modules()


def imported(path: Path, *, also_inside_functions: bool = True) -> set[str]:
    """Every dotted name that a file imports, those for types included."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if also_inside_functions else tree.body
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def in_this_tree(dotted: str) -> bool:
    """Return True if a dotted name is a module here, or a name that its module mentions."""
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    module = module if module.is_file() else path.parent / "__init__.py"
    return module.is_file() and re.search(rf"\b{path.name}\b", module.read_text()) is not None


def test_imports_name_modules_of_this_tree() -> None:
    """A module that was renamed could still be imported, from another tree that is installed."""
    root = PACKAGE.parent
    missing = {
        f"{path.relative_to(root)}: {dotted}"
        for folder in ("tfcommx", "tests", "scripts")
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfcommx"
        for dotted in (f"{node.module}.{alias.name}" for alias in node.names)
        if not in_this_tree(dotted)
    }
    assert not missing


@pytest.mark.parametrize("name", MODULES)
def test_foreign_libraries_have_one_importer(name: str) -> None:
    names = {dotted.split(".")[0] for dotted in imported(MODULES[name])}
    for library, only in ONLY_IMPORTER.items():
        assert library not in names or name == only, f"{name} imports {library}; only {only} may"


@pytest.mark.parametrize("name", [name for name in MODULES if within(name, NO_TENSORFLOW)])
def test_no_tensorflow_is_loaded_by(name: str) -> None:
    """Imports inside functions may load it.

    Imports at the top of a file, and in the modules that they import, may not.
    """
    names = imported(MODULES[name], also_inside_functions=False)
    assert not {dotted.split(".")[0] for dotted in names} & {"tensorflow", "keras"}


def test_only_the_loader_loads_the_native_library() -> None:
    found = [name for name, path in MODULES.items() if "load_op_library(" in path.read_text()]
    assert found == ["kernels.loader"]


def test_only_keras_internals_touches_private_members_of_keras() -> None:
    private = re.compile(
        r"(?<!def )\b_(backend_apply_gradients|clip_gradients|backend_update_step"
        r"|overwrite_variables_directly_with_gradients|flatten_layers|seed_generators"
        r"|trainable_variables|non_trainable_variables|accumulated_gradients|learning_rate"
        r"|iterations|exclude_from_weight_decay\w*)\b"
    )
    found = {name for name, path in MODULES.items() if private.search(path.read_text())}
    assert found and all(within(name, ("keras_internals",)) for name in found)


def test_only_keras_internals_changes_classes_and_functions_of_keras() -> None:
    change = re.compile(r"setattr\(keras\.|\.(__class__|train_function|update_state|apply) = ")
    found = {name for name, path in MODULES.items() if change.search(path.read_text())}
    assert found and all(within(name, ("keras_internals",)) for name in found)


@pytest.mark.parametrize("name", MODULES)
def test_the_environment_is_read_where_it_may_be(name: str) -> None:
    reads = [
        node.attr
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert not reads or within(name, MAY_READ_ENVIRONMENT)


@pytest.mark.parametrize("name", MODULES)
def test_no_file_is_longer_than_500_lines(name: str) -> None:
    assert MODULES[name].read_text().count("\n") <= 500


def test_kernels_know_no_framework() -> None:
    kernels = list((PACKAGE.parent / "ops" / "kernels").iterdir())
    assert kernels
    for path in kernels:
        code = re.sub(r"//.*", "", path.read_text())
        assert "tensorflow" not in code.lower(), f"{path.name} needs a framework"


PLAN_OF_EVERY_ROUTE = """
import sys
import tfcommx as cx
from tfcommx import routes
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.core import NOMINAL

gradients = [Gradient(f"layer{i}/kernel", (512, 512), "float32") for i in range(4)]
topology = cx.Topology(2, 2)
for name in routes.ROUTES:
    scheme = cx.Scheme(name, "mstopk", 0.01) if name in routes.SPARSE else cx.Scheme(name)
    plan = make_plan(gradients, {"*": scheme}, topology)
    for bucket in plan.buckets:
        carried_by = routes.get(bucket.route)
        assert carried_by.seconds(bucket, topology, NOMINAL) > 0
        assert sum(carried_by.wire_bytes(bucket, topology)) > 0
        assert carried_by.port_bytes(bucket, topology) > 0
    assert routes.read_plan(plan.to_json()) == plan
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
"""


def test_planning_and_pricing_every_route_loads_no_tensorflow() -> None:
    subprocess.run([sys.executable, "-c", PLAN_OF_EVERY_ROUTE], cwd=PACKAGE.parent, check=True)


THREE_WORDS = re.compile("[A-Za-z]+(?: [A-Za-z]+){2}")


def expressions_of(name: str, function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield a name's values: assigned, or a column of a loop's rows or of a parametrization."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            names, rows = node.targets[0], [node.value]
        elif isinstance(node, ast.For):
            names, rows = node.target, getattr(node.iter, "elts", [])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".parametrize"):
            names, rows = node.args[0], getattr(node.args[1], "elts", [])
        else:
            continue
        columns = re.findall(r"\w+", ast.unparse(names))
        if name in columns:
            for row in rows:
                cells = row.elts if isinstance(row, ast.Tuple) else [row]
                yield cells[columns.index(name)] if len(cells) == len(columns) else row


def matched_texts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that tests of a module compare with the messages of errors and warnings."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            if not (isinstance(call.func, ast.Attribute) and call.func.attr in ("raises", "warns")):
                continue
            for match in [keyword.value for keyword in call.keywords if keyword.arg == "match"]:
                parts = [match]
                for node in ast.walk(match):
                    if isinstance(node, ast.Name):
                        parts += expressions_of(node.id, function)
                for node in [node for part in parts for node in ast.walk(part)]:
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield node.value


def test_no_test_depends_on_the_wording_of_a_message() -> None:
    """A test matches the class of a failure and the values received, so that wording can change."""
    tests = PACKAGE.parent / "tests"
    worded = {
        f"{path.relative_to(tests)}: {text}"
        for path in tests.rglob("*.py")
        for text in matched_texts(ast.parse(path.read_text()))
        if THREE_WORDS.search(text)
    }
    assert not worded
