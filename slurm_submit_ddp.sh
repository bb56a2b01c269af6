#!/usr/bin/env bash
# Train under Slurm: on each node one torchrun, which starts a process for each GPU.
#
#   sbatch slurm_submit_ddp.sh                                              # 2 nodes x 2 GPUs, train_ddp.py
#   sbatch --nodes=4 --gpus-per-node=8 slurm_submit_ddp.sh --epochs 10      # arguments after it go to the script
#   SCRIPT=train_manual_ddp.py sbatch slurm_submit_ddp.sh --checkpoint ck.pt --save-every 100
#
# With --checkpoint, the job saves before its time is up, is requeued, and goes on.
#
# What belongs to your site (--partition, --account, --time) are flags of sbatch, which win over the lines below.
# --gres=gpu:N works, too; --gpus-per-node=0 trains on CPUs; with --gpus=N, add --gpus-per-node=0; instead of
# --cpus-per-gpu, give --cpus-per-task. (Slurm refuses a flag that contradicts a line below without replacing it.)
#
# Variables, all optional (VENV=.venv sbatch slurm_submit_ddp.sh):
#   SCRIPT          what to train with, in this directory or beside this file (default train_ddp.py)
#   VENV            the directory of a virtual environment to activate
#   CONDA_ENV       the name or directory of a conda environment to activate
#   MODULES         modules to load first, separated by spaces
#   NPROC_PER_NODE  processes on each node (default: as many as GPUs there, or 1)
#   MAX_REQUEUES    after so many requeues, for whatever reason, the job no longer requeues itself (default 10)
# Without VENV, CONDA_ENV and MODULES, the environment is that of the shell that called sbatch.

#SBATCH --job-name=ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # torchrun, which starts the processes
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=2        # of all processes of a node together
#SBATCH --requeue                # allowed to this script, near the time limit, and to Slurm, when a node dies
#SBATCH --open-mode=append       # then the log goes on, too
#SBATCH --signal=B:USR1@120      # to this script, at least 120 s before the time limit

set -uo pipefail # not -e: the exit code of the training is looked at

fail() {
    echo "slurm_submit_ddp.sh: error: $1" >&2
    exit 1
}

[[ ${SLURM_JOB_ID:-} ]] || fail 'start it with sbatch'
[[ ${NPROC_PER_NODE:-1} =~ ^[1-9][0-9]{0,3}$ ]] || fail "NPROC_PER_NODE=$NPROC_PER_NODE: give a number"
[[ ${MAX_REQUEUES:-0} =~ ^[0-9]{1,4}$ ]] || fail "MAX_REQUEUES=$MAX_REQUEUES: give a number"
stopped_early=''
trap 'stopped_early=yes' USR1 # should time be nearly up before the processes are there

# The number of the job. For one of an array's tasks, SLURM_JOB_ID alone may mean the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

# What to run, in which environment. $0 is a copy in Slurm's spool directory; the job knows the original, and $*.
submitted=$(scontrol show job "$job")
submitted=${submitted#*$'\n   Command='}
submitted=${submitted%%$'\n   WorkDir='*}
here=$(cd "$SLURM_SUBMIT_DIR" && dirname "$(readlink -f "${submitted%" $*"}")")
set +u # which the scripts of modules, conda and venv may not bear
if [[ $MODULES ]]; then
    # shellcheck source=/dev/null
    [[ $(type -t module) ]] || . /etc/profile
    # shellcheck disable=SC2086 # it is a list
    module load $MODULES || fail "MODULES=$MODULES could not be loaded"
fi
if [[ $CONDA_ENV ]]; then
    command -v conda >/dev/null || fail "CONDA_ENV=$CONDA_ENV: there is no conda here"
    eval "$(conda shell.bash hook)"
    conda activate "$CONDA_ENV" || fail "CONDA_ENV=$CONDA_ENV cannot be activated"
fi
if [[ $VENV ]]; then
    # shellcheck source=/dev/null
    . "$VENV/bin/activate" || fail "VENV=$VENV cannot be activated"
fi
set -u
launcher=$here/launch_multinode_ddp.sh
[[ -r $launcher ]] || fail "there is no $launcher"

export SLURM_EXPORT_ENV=ALL                         # let srun pass our variables on, even after sbatch --export=...
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer takes sbatch's --cpus-per-task
unset SLURM_GPUS_PER_NODE                           # our line above, which srun would prefer to sbatch's --gres

# Below the range from which systems give out ports, and another one for each job that may be on the node.
restarts=${SLURM_RESTART_COUNT:-0}
port=$((10000 + (SLURM_JOB_ID * 10 + restarts % 10) % 20000))
while [[ $(ss -Hltn "sport = :$port" 2>/dev/null) ]]; do ((port++)); done # this is the first node

run_node() { # on each node, as one task
    local nproc=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
    local cpus=$((SRUN_CPUS_PER_TASK / nproc))
    ((cpus)) || cpus=1
    # torch would count the cores of the node, where Slurm does not confine the job to its own.
    [[ ${OMP_NUM_THREADS:-} ]] || export OMP_NUM_THREADS=$cpus OMP_THREAD_LIMIT=$cpus
    local launch=(bash "$launcher" --script "${SCRIPT:-train_ddp.py}" --nproc-per-node "$nproc")
    launch+=(--nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID")
    # The address of the first node. Some Slurms give that node itself a loopback one; it knows its name.
    local master=$SLURM_LAUNCH_NODE_IPADDR
    [[ $master != 127.* ]] || master=$SLURMD_NODENAME
    launch+=(--master-addr "$master" --master-port "$port")
    if ((SLURM_NODEID == 0)); then
        echo "nodes $SLURM_JOB_NODELIST, master $master:$port, restarts $restarts"
        echo "processes a node $nproc, CPUs a process $cpus"
        echo "command $("${launch[@]}" --dry-run -- "$@" 2>/dev/null)"
    fi
    exec "${launch[@]}" -- "$@"
}
export -f run_node
export launcher port restarts

# In the background, for a shell that waits for a program in the foreground does not hear signals.
# shellcheck disable=SC2016 # the inner shell expands it
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash -c 'trap "" USR1 && run_node "$@"' _ "$@" &
srun=$!

save_and_stop() {
    stopped_early=yes
    echo 'time is nearly up: saving' >&2
    # Again and again: a process hears it once it has got as far as to set up its handler.
    while kill -0 "$srun" && scancel --signal=USR1 "$job"; do sleep 10; done 2>/dev/null &
}
if [[ " $* " == *' --checkpoint'[\ =]* ]]; then
    trap save_and_stop USR1
    [[ ! $stopped_early ]] || save_and_stop
else
    trap '' USR1 # it could not go on later, so let it use the time that is left
fi
trap : TERM # scancel or preemption: Slurm has told all processes, too; stay until they have saved
while kill -0 "$srun" 2>/dev/null; do
    wait "$srun" # which a signal interrupts
done
wait "$srun"
code=$?
((code != 143)) || code=1 # of the torchrun that srun has ended, with TERM, because another one had failed

# A preemption with a grace time tells only the processes, and leaves it to the job to end in time.
[[ $(scontrol show job "$job") != *PreemptTime=[0-9]* ]] || stopped_early=yes code=0
[[ $stopped_early && $code == 0 ]] || exit "$code"
((restarts < ${MAX_REQUEUES:-10})) || fail "stopped early, and requeued $restarts times before: submit it again to go on"
echo "stopped early: requeued"
trap - TERM
scontrol requeue "$job" || fail 'stopped early, and not requeued: submit it again to go on'
exec sleep infinity # until Slurm ends it: if it ended first, the job would be over. Not a child, or bash may log its end
