"""`python -m tfcommx.recipes.datasets NAME...`: download data sets before training."""

import sys
from typing import Any

from tfcommx.core import TfcommxError
from tfcommx.recipes.datasets import DATASETS


def main(names: list[str]) -> int:
    """Fetch the data sets; return the exit status."""
    fetchable: dict[str, Any] = {
        name: kind for name, kind in DATASETS.items() if hasattr(kind, "fetch")
    }
    if not names or not set(names) <= set(fetchable):
        print(f"Names are required, of {', '.join(fetchable)}. Received {names}.", file=sys.stderr)
        return 2
    for name in names:
        try:
            print(f"{name}: {fetchable[name]().fetch()}")
        # OSError, for example, for a home without the right to write
        except (TfcommxError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
