"""How a run starts: hosts, launchers, and the output of the ranks. No TensorFlow.

hosts                the hosts of a launch: -H, a hostfile, Slurm, PBS, LSF, Kubernetes
horovodrun           start ranks by horovodrun, and wait for them
rank_output          run a rank until it ends; show what the ranks write
commands             run short commands, here or on other hosts
launcher             what horovodrun, mpirun and the TFCOMMX_... variables tell a process
known_launchers      the table of launchers; those that are only recognised are refused
cluster_environment  what srun, torchrun and TF_CONFIG tell a process
mpi_start            end ranks that wait in MPI's start for one that does not come
handshake            prove knowledge of a secret; hear the callers of a socket side by side
interpreter          changes to this process's interpreter and environment
supervision          what `tfcommx run` tells the ranks of a supervised run
"""
