"""The versions of Keras that were tested."""

from __future__ import annotations

import keras

# Major and minor, as in requirements.txt: the tests pass with these.
TESTED = ("3.15",)


def require_tested_keras(version: str = keras.__version__) -> None:
    """Refuse a version of Keras that the tests have not passed with.

    >>> require_tested_keras("3.15.2")

    Args:
        version: such as "3.15.0"; the installed one by default.

    **Raises:** ImportError that names the tested versions and what to do.
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        raise ImportError(
            "tfcommx takes part in the step of Keras's optimizers, which is private to Keras, and "
            f"was tested with Keras {', '.join(TESTED)}. Received Keras {version}. Install a "
            f"tested one: pip install 'keras=={TESTED[-1]}.*'. To try yours, add it to TESTED in "
            "tfcommx/optim/keras_internals/version.py and run the tests."
        )
