#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --no-kill

# In place of /path/to: where tfcommx's source is
tfcommx run --min-np 2 --network-interfaces eth0 \
    --host-discovery-script "${DISCOVERY:-/path/to/scripts/examples/discovery/slurm.sh}" -- "$@"
