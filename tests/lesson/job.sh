#!/usr/bin/env bash
# Under Slurm, train many_gpus.py on all GPUs of a job: sbatch tests/lesson/job.sh
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=16
# Add --account, --partition, --time and --mem as your site asks. Some sites want --gres=gpu:4 in
# place of --gpus-per-node=4. Each process and each of its loader's workers needs a CPU: 16 are
# enough for 4 processes with 3 workers each.
# Submit it in the repository's folder, on a shared disk, with your environment active. Or pass
# --export=NONE to sbatch, and activate the environment here: source .venv/bin/activate
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # rank 0's node
PORT=$((10000 + SLURM_JOB_ID % 20000))                              # two jobs may share a node
export MASTER PORT
# If sbatch is called in a shell of srun or salloc, the job inherits the limits of that shell: drop
# them. This also drops SLURM_GPUS_ON_NODE, but srun sets it anew on each node.
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER@}" "${!SLURM_GPU@}" SLURM_TRES_PER_TASK
# srun starts one torchrun on each node, and torchrun the processes. If one torchrun fails, srun ends
# all. --cpus-per-task is repeated, as srun of Slurm 22.05 to 23.02 does not take it over from sbatch.
# shellcheck disable=SC2016 # these variables differ by node
srun --export=ALL --ntasks="$SLURM_NNODES" --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c \
    'torchrun --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID --master-addr=$MASTER --master-port=$PORT \
    --nproc-per-node=$SLURM_GPUS_ON_NODE tests/lesson/many_gpus.py'
