"""horovodrun, without loading TensorFlow in a process of its own to ask what Horovod can do.

Horovod asks so at each launch, for 4 CPU seconds; the tests launch some sixty times. Where Horovod
was built without Gloo or MPI the ranks themselves fail. horovodrun as it is starts `tfcommx train`
and what tests/scripts runs.
"""

import sys

if __name__ == "__main__":  # It starts processes that load this file too
    from horovod.runner import launch

    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())
