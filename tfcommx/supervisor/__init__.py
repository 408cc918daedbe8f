"""Supervise a run: restart the ranks on the remaining hosts after a loss.

hosts       available hosts, cooldown of lost hosts, number of ranks on each
generation  one start of the ranks: connection to rank 0, cause of the end, decision to continue
goodput     the table of generations, the goodput, and the price of a start on more hosts
sweep       end remaining processes of ranks, and remove the run's memory files, on each host
supervisor  the loop over generations

Needs neither TensorFlow nor Horovod.
"""
