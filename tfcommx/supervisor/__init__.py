"""A run that outlives its ranks: a supervisor starts them again on the hosts that are left.

hosts       which hosts there are, which are left out for a while, how many ranks run on which
generation  one start of the ranks: connection to rank 0, why it ended, whether another follows
goodput     the table of generations, the goodput, and whether a start on more hosts pays
sweep       ends what is left of ranks, and removes the run's memory files, on each host
supervisor  the loop over generations

Needs neither TensorFlow nor Horovod.
"""
