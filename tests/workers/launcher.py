"""horovodrun, without a separate process that loads TensorFlow to query Horovod's features.

Horovod makes this query at each launch, which takes 4 CPU seconds; the tests launch about sixty
times. Where Horovod was built without Gloo or MPI the ranks themselves fail. `tfcommx train` and
the programs of tests/scripts start with the unchanged horovodrun.
"""

import sys

if __name__ == "__main__":  # It starts processes that load this file too
    from horovod.runner import launch

    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())
