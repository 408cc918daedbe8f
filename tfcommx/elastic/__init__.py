"""A run that outlives its ranks: a supervisor starts them again on the hosts that are left.

    discovery   which hosts there are: fixed, or printed by the user's script
    cooldown    which of them are left out for a while, because they were lost
    placement   how many ranks run on which of them
    link        the supervisor's end of the connection to rank 0
    generation  what is known of one start of the ranks
    verdict     why a generation has ended, and whether there is another one
    growth      whether it pays to start again on more hosts
    sweep       ends what is left of ranks, and removes the run's memory files, on each host
    summary     the table of generations, and the goodput
    supervisor  the loop over generations

What rank 0 says and hears is in `link`. Needs neither TensorFlow nor Horovod.
"""
