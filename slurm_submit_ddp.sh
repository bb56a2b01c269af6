#!/usr/bin/env bash
# Train under Slurm: one torchrun on each node, which starts one process per GPU.
#
#   sbatch slurm_submit_ddp.sh --epochs 10      # what follows goes to the training script
#   sbatch --nodes=4 --gpus-per-node=4 --cpus-per-task=32 slurm_submit_ddp.sh
#   sbatch --gpus-per-node=0 slurm_submit_ddp.sh                            # one process per node
#   sbatch --gpus-per-node=0 --gpus=3 slurm_submit_ddp.sh  # 3 in all: two on one node, one on the other
#   SCRIPT=train_manual_ddp.py NPROC_PER_NODE=4 sbatch slurm_submit_ddp.sh
#   sbatch --time=4:00:00 slurm_submit_ddp.sh --checkpoint ck.pt --save-every 100
#
# Add --account and --partition as your site asks. Submit it on a disk that all nodes share: relative
# paths, SCRIPT's too, begin there. With --checkpoint, a job saves about 120 s before its time is up, is
# requeued, and resumes. Without it, train_ddp.py begins anew if Slurm requeues it, as after a
# preemption. A failed job is not requeued. Flags of sbatch override most lines below, and
# --gres=gpu:8 overrides --gpus-per-node. If sbatch says that a flag contradicts an #SBATCH line,
# remove that line. If it refuses --gres=gpu:TYPE:8 with `Invalid GRES specification`, remove the
# line with --gpus-per-node. Where Slurm does not manage GPUs, remove the same line, and export
# NPROC_PER_NODE=gpu. Leave --ntasks and --ntasks-per-gpu alone: torchrun is a node's one task.
# To train in a container, export the first of these for pyxis, the second for apptainer:
#   SRUN_ARGS="--container-image=./torch.sqsh --container-mounts=$PWD:$PWD --container-workdir=$PWD"
#   TORCHRUN_PREFIX='apptainer exec --nv --env PYTHONNOUSERSITE=1 torch.sif'  # without ~/.local

#SBATCH --job-name=ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # torchrun, which starts the training processes
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=16       # for all processes of a node; to use --cpus-per-gpu, remove it
#SBATCH --requeue                # by this script, and by Slurm after a preemption or a dead node
#SBATCH --open-mode=append       # a requeued job resumes in the same log
#SBATCH --signal=B:USR1@120      # to this script, about 120 s before the time limit

# The job has the environment of the shell that called sbatch or, with --export=NONE, the one of a
# new login: then set SCRIPT and the like here, too. To use another environment, load it here:
# module load cuda; source ~/miniconda3/bin/activate ENV; export NCCL_SOCKET_IFNAME=ib0

set -uo pipefail # the scripts of conda and modules do not bear this, so it comes after them
script=${SCRIPT:-train_ddp.py} restarts=${SLURM_RESTART_COUNT:-0}
# A task of an array is requeued as 123_4, as a job id alone may stand for the whole array.
job=${SLURM_JOB_ID:?submit this with sbatch, or run it in salloc} task=${SLURM_ARRAY_JOB_ID:-}_${SLURM_ARRAY_TASK_ID:-}
# (A job that is submitted within an array's task inherits its variables: ask Slurm if this is 123_4.)
[[ $(scontrol show job "$task" 2>&1) != *"JobId=$job "* ]] || job=$task
# Before a preemption with a grace time, torchrun gets SIGTERM, and kills the training after 30 s,
# however long the grace time is. From torch 2.12 on, it waits for as many seconds as this says:
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}
# srun starts one task on each node: torchrun, which gets all CPUs and GPUs that the job asks for
# there. If sbatch was told several tasks per node, torchrun gets the CPUs and GPUs of all of them.
# With --cpus-per-gpu, SLURM_CPUS_PER_TASK may wrongly be 1: unset it.
[[ $(scontrol show job "$SLURM_JOB_ID") != *CPUs/Task=1\ *CpusPerTres=* ]] || unset SLURM_CPUS_PER_TASK
tasks=${SLURM_TASKS_PER_NODE%%[^0-9]*}
cpus=${SLURM_CPUS_PER_TASK:+--cpus-per-task=$((SLURM_CPUS_PER_TASK * tasks))}
gpus=${SLURM_GPUS_PER_TASK:+$((${SLURM_GPUS_PER_TASK##*:} * tasks))} # salloc sets no SLURM_GPUS_ON_NODE
gpus=${gpus:+--gpus-per-node=${SLURM_GPUS_ON_NODE:-$gpus}}
# Unset limits that are meant for one task, or come from a shell of srun or salloc: with them, torchrun
# would not get all CPUs and GPUs of the job, or srun would refuse the job's memory.
unset "${!SLURM_GPU@}" "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER@}" SLURM_TRES_PER_TASK

master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000)) # jobs that share a node need different ones
echo "$script $* on $SLURM_JOB_NODELIST, meeting at $master:$port, restart $restarts"

# Nodes may differ in their GPUs, so each runs this itself, inside the container if there is one.
start_torchrun() {
    processes=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}} number=$processes
    cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
    # With NPROC_PER_NODE=gpu, torchrun starts a process for each GPU that it sees. If Slurm does not
    # know the number of GPUs, give each process one thread.
    [[ $processes == [1-9]* ]] || number=${SLURM_GPUS_ON_NODE:-$cpus}
    # By default, each of several processes would get one thread, and a single process all cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > number ? cpus / number : 1))}
    echo "$SLURMD_NODENAME: processes: $processes, CPU threads per process: $OMP_NUM_THREADS"
    trap '' USR1 # it is for the training processes; torchrun would die of it
    exec torchrun --node-rank="$SLURM_NODEID" --nproc-per-node="$processes" "$@"
}

# bash acts on a signal only when no command runs in the foreground, so srun is in the background.
# It starts one task per node, whatever sbatch was told. Each runs start_torchrun, whose text
# `declare -f` puts into the command.
# shellcheck disable=SC2086 # some variables are several words, or none
srun --export=ALL --ntasks="$SLURM_NNODES" $cpus $gpus --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    ${TORCHRUN_PREFIX:-} bash -c "$(declare -f start_torchrun); start_torchrun \"\$@\"" _ \
    --nnodes="$SLURM_NNODES" --master-addr="$master" --master-port="$port" "$script" "$@" &
srun=$! stopped='' code=0

save_and_stop() {
    echo 'time is nearly up: telling the training to save'
    stopped=yes
    kill -USR1 "$srun" # srun forwards it to all processes of its step
    # A rank that is still starting ignores it: so it comes again after 60 s.
    timeout 60 tail --pid="$srun" -f /dev/null || kill -USR1 "$srun" &
}
trap '' USR1            # without a checkpoint, ignore it: the training goes on until the limit
trap 'kill "$srun"' INT # Ctrl-C in a shell of salloc would end only this script, not srun
if [[ " $* " == *" --checkpoint"[\ =]* ]]; then trap save_and_stop USR1 && trap 'kill -USR1 "$srun"' INT; fi
while kill -0 "$srun" 2>/dev/null; do
    wait "$srun" # a signal interrupts this
done
wait "$srun" || code=$?
# If a job ends by itself in the grace time of a preemption, Slurm does not requeue it. So this script
# does, whatever the exit code: torchrun fails after SIGTERM even if all is saved.
if [[ $(scontrol show job "$job") == *PreemptTime=[0-9]* ]]; then stopped=yes code=0; fi
[[ $stopped && $code == 0 ]] || exit "$code"
if ((restarts >= 10)); then
    echo 'requeued ten times: submit it again to resume'
    exit 1
fi
echo 'perhaps not complete: requeued'
SECONDS=0 # Slurm's controller may be busy: try for five minutes
until scontrol requeue "$job"; do
    ((SECONDS < 300)) || exit 1
    sleep 5
done
