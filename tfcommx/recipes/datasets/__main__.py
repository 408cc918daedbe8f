"""`python -m tfcommx.recipes.datasets NAME...`: put data sets on this machine before training."""

from __future__ import annotations

import sys

from tfcommx.recipes.datasets import DATASETS
from tfcommx.recipes.datasets.idx import DataError


def main(names: list[str]) -> int:
    """Fetch the data sets; return the exit status."""
    if not names or not set(names) <= set(DATASETS):
        print(f"Names are required, of {', '.join(DATASETS)}. Received {names}.", file=sys.stderr)
        return 2
    for name in names:
        try:
            print(f"{name}: {DATASETS[name]().fetch()}")
        except DataError as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
