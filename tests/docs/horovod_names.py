"""Every public name of the installed Horovod that a script for TensorFlow or Keras can use."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = (
    "horovod",
    "horovod.tensorflow",
    "horovod.tensorflow.compression",
    "horovod.tensorflow.elastic",
    "horovod.tensorflow.functions",
    "horovod.tensorflow.gradient_aggregation",
    "horovod.tensorflow.gradient_aggregation_eager",
    "horovod.tensorflow.mpi_ops",
    "horovod.tensorflow.sync_batch_norm",
    "horovod.tensorflow.util",
    "horovod.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic",
    "horovod.keras",
    "horovod.keras.callbacks",
    "horovod.keras.elastic",
)
# Their functions serve Horovod itself: names count, arguments do not.
HELPERS = ("horovod.common.util", "horovod.tensorflow.util", "horovod.tensorflow.gradient")
# Methods of layers and callbacks that Keras calls
KERAS_CALLS = ("_", "on_", "call")
# How Python writes "any"
ANY = ("self", "args", "kwargs")


def names() -> set[str]:
    """Return the public names, and the arguments of the public functions."""
    from horovod.common.basics import HorovodBasics

    found: set[str] = set()
    for module in map(importlib.import_module, MODULES):
        for name, value in vars(module).items():
            if not name.startswith("_") and _is_horovods(name, value, module):
                found |= {name, *_arguments(value)}
    # The public `init` passes all its arguments to HorovodBasics.init
    return found | set(inspect.signature(HorovodBasics.init).parameters) - {"self"}


def _is_horovods(name: str, value: Any, module: ModuleType) -> bool:
    if isinstance(value, ModuleType):
        return False
    home = getattr(value, "__module__", None) or type(value).__module__
    # Constants such as Average are numbers.
    constant = isinstance(value, int) and name[0].isupper()
    return home.startswith("horovod") or constant


def _arguments(value: Any) -> set[str]:
    """Return the arguments of a function; of a class also its methods and theirs."""
    home = getattr(value, "__module__", None) or ""
    if not callable(value) or home.startswith(HELPERS):
        return set()
    calls, found = [value], set[str]()
    if inspect.isclass(value):
        methods = {
            name: one
            for base in value.__mro__
            if base.__module__.startswith("horovod")
            for name, one in vars(base).items()
            if callable(one) and not name.startswith(KERAS_CALLS)
        }
        found |= set(methods)
        calls += methods.values()
    for call in calls:
        try:
            found |= set(inspect.signature(call).parameters)
        except ValueError:  # An exception's class has none
            continue
    return {name for name in found if name not in ANY and not name.startswith("_")}


def variables() -> set[str]:
    """Return the environment variables that Horovod's library and its launcher read."""
    from horovod.runner.common.util import config_parser
    from horovod.tensorflow import mpi_ops

    library = Path(mpi_ops.__file__).parent.glob("mpi_lib*.so")
    words = b"".join(path.read_bytes() for path in library)
    read = {word.decode() for word in re.findall(rb"(?<=\0)HOROVOD_[A-Z0-9_]+(?=\0)", words)}
    known = {name for name in vars(config_parser) if name.startswith("HOROVOD_")}
    return {name for name in read | known if "_ERROR_" not in name}


def options() -> set[str]:
    """Return the options of horovodrun."""
    from horovod.runner import launch

    return set(re.findall(r"'(--[a-z][\w-]+)'", inspect.getsource(launch.parse_args)))
