#!/bin/sh
#SBATCH --job-name=raycloud
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
# sbatch slurm.sh JOB RUN-DIRECTORY [more options of `raycloud train`]
# The run directory is on a file system that all nodes see; so is ~/.ray/auth_token.
set -eu
job=$1 run=$2
shift 2
export RAY_AUTH_MODE=token
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Ray on each node, the command on the first, and the end of Ray with it.
srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus="$SLURM_CPUS_ON_NODE" --disable-usage-stats \
  -- raycloud train "$job" --run-dir "$run" --address "$head:6379" "$@"
