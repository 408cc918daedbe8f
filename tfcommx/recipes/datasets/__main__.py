"""`python -m tfcommx.recipes.datasets NAME...`: download data sets before training."""

from __future__ import annotations

import sys

from tfcommx.core import TfcommxError
from tfcommx.recipes.datasets import DATASETS
from tfcommx.recipes.reader import RecipePart


def main(names: list[str]) -> int:
    """Fetch the data sets; return the exit status."""
    # Data sets without required settings, which can be fetched by name alone
    fetchable = [
        name
        for name, kind in DATASETS.items()
        if issubclass(kind, RecipePart)
        and not any(field.is_required() for field in kind.model_fields.values())
    ]
    if not names or not set(names) <= set(fetchable):
        print(f"Names are required, of {', '.join(fetchable)}. Received {names}.", file=sys.stderr)
        return 2
    for name in names:
        try:
            print(f"{name}: {DATASETS[name]().fetch()}")
        # Of the system, such as a home without the right to write
        except (TfcommxError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
