"""Runs the examples (`>>>`) of all public docstrings of the package; prints how many there were.

In a separate process, because examples may call init().
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys

import tfcommx

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def main() -> None:
    names = [module.name for module in pkgutil.walk_packages(tfcommx.__path__, "tfcommx.")]
    failed = attempted = 0
    for name in ["tfcommx", *names]:
        result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
        failed, attempted = failed + result.failed, attempted + result.attempted
    print(f"{attempted} examples, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
