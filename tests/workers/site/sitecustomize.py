"""On PYTHONPATH of the tests' programs: those that load TensorFlow, and horovodrun, start faster.

horovodrun loads TensorFlow at each launch to query Horovod's features, which takes 2 CPU seconds.
Where Horovod was built without Gloo or MPI the ranks themselves fail. A fifth of the time to load
TensorFlow is spent on garbage collection, although there is no garbage yet. Ranks need not load it
at all (warm_start.py).
"""

import gc
import os
import sys

gc.set_threshold(100_000, 50, 50)

if "TFCOMMX_TEST_WARM" in os.environ:
    import warm_start

    warm_start.begin()

if any(word.endswith("/horovodrun") for word in sys.orig_argv[1:2]):
    from horovod.common import util

    util.gloo_built = util.mpi_built = lambda verbose=False: True
