"""On PYTHONPATH of what tests start: programs that load TensorFlow, and horovodrun, start faster.

horovodrun loads TensorFlow at each launch, to ask what Horovod can do: 2 CPU seconds. Where Horovod
was built without Gloo or MPI the ranks themselves fail. And a fifth of the time to load TensorFlow
goes into looking for garbage, of which there is none yet. Ranks need not load it at all
(warm_start.py).
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
