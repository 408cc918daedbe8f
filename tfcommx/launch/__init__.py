"""How a run starts: hosts, launchers, and the output of the ranks. No TensorFlow.

hosts                the hosts of a launch: -H, a hostfile, Slurm, PBS, LSF, Kubernetes
horovodrun           start ranks by horovodrun, and wait for them
rank_output          run a rank until it ends; show the output of the ranks
commands             run short commands, on this host or others
launcher             read the variables of horovodrun, mpirun and TFCOMMX_...
known_launchers      the table of launchers; those that are only recognised are refused
cluster_environment  read the variables of srun, torchrun and TF_CONFIG
mpi_start            end ranks that wait in MPI's start for a missing rank
handshake            prove knowledge of a secret; hear the callers of a socket concurrently
interpreter          changes to this process's interpreter and environment
supervision          the variables of a supervised run, and rank 0's link to `tfcommx run`
"""
