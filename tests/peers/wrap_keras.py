"""A pytest plugin: every Keras optimizer is wrapped as soon as it is made; outcomes go to a file.

pytest -p wrap_keras --outcomes FILE [--wrap] TESTS
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

# Whether optimizers stay plain: while one is made that is wrapped afterwards
_plain = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wrap", action="store_true", help="wrap every optimizer")
    parser.addoption("--outcomes", type=Path, help="write {test: outcome} to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: TensorFlow is one")
    config.addinivalue_line("markers", "multi_device: needs several devices")
    import keras.src.testing  # noqa: F401 - it imports modules that look for jax

    stand_in("jax")
    stand_in("conftest", skip_if_backend=skip_if_backend)
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))
    if config.getoption("--wrap"):
        wrap_all()


def pytest_collection_finish() -> None:
    del sys.modules["jax"]


def stand_in(name: str, **members: Any) -> None:
    """Provide a module that Keras's tests import and that is not in its wheel."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    sys.modules[name] = module


def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(backend == "tensorflow", reason=reason)


class Outcomes:
    """The outcome of each test: "passed", "skipped", or the error's last line."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            said = report.longrepr.reprcrash.message.splitlines()[:1] if report.longrepr else []
            self.found[report.nodeid] = f"failed: {' '.join(said)}"
        elif report.when == "call" or report.skipped:
            self.found.setdefault(report.nodeid, report.outcome)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.found, indent=0, sort_keys=True))


def wrap_all() -> None:
    """Let the constructors of Keras's optimizers return wrapped ones, made by the real wrap."""
    import keras

    import tfcommx as cx
    from tfcommx.keras_internals.step import AgreedLossScale, ExchangesGradients
    from tfcommx.optim import distributed_optimizer, wrapped

    cx.init()
    mixins = (ExchangesGradients, AgreedLossScale)

    def new(cls: type, *arguments: Any, **options: Any) -> Any:
        global _plain
        # A MultiOptimizer is made of others, which are wrapped.
        if _plain or issubclass(cls, (*mixins, keras.src.optimizers.MultiOptimizer)):
            return object.__new__(cls)
        _plain = True
        try:
            made = cls(*arguments, **options)
        finally:
            _plain = False
        if isinstance(made, keras.optimizers.LossScaleOptimizer):
            if wrapped.find_exchanger(made) is not None:
                wrapped.agree_on_loss_scale(made)  # the inner optimizer is wrapped already
            return made
        return cx.DistributedOptimizer(made)

    # Python initializes the object that `new` returns. Wrapped ones are ready
    def initialize(mixin: type, self: Any, *arguments: Any, **options: Any) -> None:
        if self.exchanger is None:
            super(mixin, self).__init__(*arguments, **options)

    keras.optimizers.Optimizer.__new__ = new
    for mixin in mixins:
        mixin.__init__ = functools.partialmethod(functools.partial(initialize, mixin))

    # Copies and pickles make a plain optimizer, and wrap it where they are loaded: there it is
    # wrapped as soon as it is made.
    real, plain_copy = distributed_optimizer._wrap, distributed_optimizer.plain_copy

    def copy(optimizer: Any) -> Any:
        global _plain
        _plain = True
        try:
            return plain_copy(optimizer)
        finally:
            _plain = False

    @functools.wraps(real)
    def wrap(optimizer: Any, *rest: Any) -> Any:
        return optimizer if isinstance(optimizer, mixins) else real(optimizer, *rest)

    distributed_optimizer._wrap, distributed_optimizer.plain_copy = wrap, copy
