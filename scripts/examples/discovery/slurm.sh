#!/bin/bash
# Hosts for `tfcommx run --host-discovery-script`: the nodes of this Slurm job that are not down.
# Let the job live on when a node fails: #SBATCH --no-kill

# Of SLURM_TASKS_PER_NODE=4(x3) the 4
slots=${SLURM_NTASKS_PER_NODE:-${SLURM_TASKS_PER_NODE%%[(,]*}}
# The state of a node that does not respond ends with *
sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format="%N %T" |
    awk -v slots="${slots:-1}" '$2 !~ /down|fail|power|\*$/ && !seen[$1]++ {print $1 ":" slots}'
