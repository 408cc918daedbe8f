"""`python -m tfcommx.recipes.datasets NAME...`: put data sets on this machine before training."""

from __future__ import annotations

import sys

from tfcommx.recipes.datasets import DATASETS
from tfcommx.recipes.datasets.idx import DataError


def main(names: list[str]) -> int:
    """Fetch the data sets; return the exit status."""
    # Those that need no settings
    known = [
        name
        for name, kind in DATASETS.items()
        if not any(field.is_required() for field in kind.model_fields.values())
    ]
    if not names or not set(names) <= set(known):
        print(f"Names are required, of {', '.join(known)}. Received {names}.", file=sys.stderr)
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
