"""Run the tests of optimizers, trainer and callbacks in Keras's wheel, all optimizers wrapped.

    python tests/peers/run.py                         # as in `make test-peers`
    python tests/peers/run.py optimizers/sgd_test.py  # a part: expected differences of others stay

One process. Failed tests are run again with plain optimizers: those that fail there too are Keras's
own failures (most of them lack a package). The others must be exactly those that expected.yaml
lists, by reason: another failure is an error, and so is a listed test that passes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
SITE_PACKAGES = Path(find_spec("keras").origin).parent.parent
SOURCES = "keras/src"
WHAT = ("optimizers", "trainers/trainer_test.py", "trainers/compile_utils_test.py", "callbacks")


def outcomes(tests: list[str], *options: str) -> dict[str, str]:
    """Run tests in a separate process; return the outcome of each."""
    paths = [str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "outcomes.json"
        # Keras's tests have their own settings, and none of this repository's.
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        command = ["-m", "pytest", "-c", f"{folder}/pytest.ini", f"--rootdir={SITE_PACKAGES}"]
        plugins = ["-p", "wrap_keras", "-p", "no:xdist", "-p", "no:cacheprovider"]
        quiet = ["-q", "-W", "ignore", "--tb=no", "--no-summary", "--outcomes", str(found)]
        subprocess.run(
            [sys.executable, *command, *plugins, *quiet, *options, *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": ":".join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        return json.loads(found.read_text())


def shortened(found: dict[str, str]) -> dict[str, str]:
    """Return test -> outcome, without the path that all tests have in common."""
    return {name.partition(f"{SOURCES}/")[2]: said for name, said in found.items()}


def full(tests: list[str]) -> list[str]:
    return [str(SITE_PACKAGES / SOURCES / test) for test in tests]


def main() -> int:
    chosen = sys.argv[1:] or list(WHAT)
    ran = shortened(outcomes(full(chosen), "--wrap"))
    failed = {test: said for test, said in ran.items() if said.startswith("failed")}
    plain = shortened(outcomes(full(sorted(failed)))) if failed else {}
    own = {test for test in failed if plain[test].startswith("failed")}
    expected = {
        test: reason
        for reason, tests in yaml.safe_load((HERE / "expected.yaml").read_text()).items()
        for test in tests
    }
    new = sorted(failed.keys() - own - expected.keys())
    over = sorted(test for test in expected if ran.get(test) == "passed")
    gone = sorted(expected.keys() - ran.keys()) if len(sys.argv) == 1 else []
    print(
        f"{len(ran)} tests: {len(ran) - len(failed)} as with plain optimizers, {len(own)} fail "
        f"with those too, {len(failed) - len(own) - len(new)} expected differences"
    )
    for test in new:
        print(f"NEW DIFFERENCE {test}: {failed[test]}")
    for test in [*over, *gone]:
        print(f"NO DIFFERENCE ANY MORE, take it out of expected.yaml: {test}")
    return int(bool(new or over or gone))


if __name__ == "__main__":
    sys.exit(main())
