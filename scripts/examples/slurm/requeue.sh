#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID
mkdir -p "$run"

# 120 s before the time limit Slurm sends TERM to this script. All ranks see the file, save after
# the same step, and end.
trap 'touch "$run/stop"' TERM
srun --kill-on-bad-exit=1 tfcommx train "$@" --output "$run" --resume &
wait $! # until the ranks have ended, or TERM comes
wait $!
status=$?

finished() {
    [ -f "$run/summary.json" ] && ! grep -q '"stopped"' "$run/summary.json"
}
# A run that failed is not started again
if [ $status -eq 0 ] && ! finished; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
