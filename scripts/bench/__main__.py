"""The start of `python scripts/bench` and of `python -m bench`."""

import sys
from pathlib import Path

# In place of this folder, so that the package is found by its name
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.command import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
