#!/usr/bin/env bash
# Start train_ddp.py, or its twin, with torchrun. Arguments after -- go to the training script.
#
#   ./launch_multinode_ddp.sh --nproc-per-node gpu -- --epochs 3    train on this machine
#   ./launch_multinode_ddp.sh --nnodes 2 --nproc-per-node 8         print the command of each node
#   ./launch_multinode_ddp.sh --hosts node0,node1 --nproc-per-node 8 -- --epochs 3    over ssh
#
#   --nproc-per-node N  processes on each node; gpu: one per GPU (default 1)
#   --script FILE       what to run, here or beside this file (default train_ddp.py)
#   --nnodes N          number of nodes (default 1); without --node-rank, print their commands
#   --node-rank N       run the command of this node, from 0 to the number of nodes - 1
#   --master-addr HOST, --master-port PORT    of node 0 (default: the first of --hosts, and 29500)
#   --hosts HOST,...    run all nodes over ssh; this directory and torchrun are at the same paths
#   --interface NAME    network interface for NCCL and Gloo, such as eth0
#   --dry-run           print what would run, and run nothing
# If the terminal closes, the training stops: use tmux, or setsid nohup ./launch... > log 2>&1 &
# This needs Linux and bash 4.4. Exported NCCL_*, GLOO_*, PYTORCH_*, TORCH_*, CUDA_* and OMP_* go
# to all nodes. On one node without --hosts, OMP_NUM_THREADS defaults to CPUs / N, unless N is gpu.
set -uo pipefail

fail() {
    echo "launch_multinode_ddp.sh: error: $1" >&2
    exit 2
}
check_number() { # flag, value, least, most
    [[ $2 =~ ^(0|[1-9][0-9]{0,4})$ && $2 -ge $3 && $2 -le $4 ]] || fail "$1 $2: give a number from $3 to $4"
}

nproc_per_node=1 script=train_ddp.py nnodes='' node_rank='' master_addr='' master_port=29500
hosts='' interface='' dry_run='' torchrun=torchrun
(($#)) || nnodes=2 # without arguments, print an example
while (($#)) && [[ $1 != -- ]]; do
    [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}" # --flag=value
    case ${1//_/-} in
    --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
    --dry-run) dry_run=yes && shift && continue ;;
    --nproc-per-node | --script | --nnodes | --node-rank | --master-addr | --master-port) ;;
    --hosts | --interface) ;;
    *) fail "unknown argument $1 (see --help; those of the training script follow --)" ;;
    esac
    [[ ${2:--} != -* ]] || fail "$1 needs a value"
    name=${1#--} && declare "${name//-/_}=$2" && shift 2 # --node-rank 1 sets node_rank=1
done
arguments=("${@:2}")
hosts=${hosts//$'\n'/,} # so `scontrol show hostnames` will do, too
[[ ! $hosts || ,$hosts, != *[,@],* ]] || fail "--hosts $hosts: a host name is empty"
IFS=, read -ra hosts <<<"$hosts"
if ((${#hosts[@]})); then
    [[ ! $nnodes$node_rank ]] || fail '--hosts starts every node: no --nnodes, no --node-rank'
    torchrun=$(command -v torchrun) || fail 'no torchrun here: activate its environment'
    nnodes=${#hosts[@]} master_addr=${master_addr:-${hosts[0]#*@}}
fi
check_number --nnodes "${nnodes:=1}" 1 9999
check_number --node-rank "${node_rank:-0}" 0 $((nnodes - 1))
check_number --master-port "$master_port" 1 65535
[[ $nproc_per_node == gpu ]] || check_number --nproc-per-node "$nproc_per_node" 1 9999
[[ -e $script ]] || script=$(dirname "$(readlink -f "$0")")/$script
[[ -e $script ]] || fail "there is no script $script"
[[ ! $interface ]] || export NCCL_SOCKET_IFNAME=$interface GLOO_SOCKET_IFNAME=$interface
if ((nnodes == 1 && ${#hosts[@]} == 0)) && [[ $nproc_per_node != gpu ]]; then
    cores=$(($(nproc) / nproc_per_node)) # torchrun's default is 1, whatever the machine has
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}
fi
mapfile -t variables < <(compgen -e | grep -E '^(NCCL|GLOO|PYTORCH|TORCH|CUDA|OMP)_')

command_of() { # print the command of node $1, quoted for bash, on one line
    local meet=("--nnodes=$nnodes" "--node-rank=$1" "--master-addr=${master_addr:-NODE0_ADDRESS}")
    ((nnodes > 1)) && meet+=("--master-port=$master_port") || meet=(--standalone)
    for name in "${variables[@]}"; do printf '%s=%q ' "$name" "${!name}"; done
    printf '%q ' "$torchrun" "${meet[@]}" "--nproc-per-node=$nproc_per_node" \
        "$script" "${arguments[@]}"
}

if [[ $dry_run || ${#hosts[@]} -eq 0 && $nnodes -gt 1 && ! $node_rank ]]; then
    echo 'Start these on the nodes. Each needs this directory, the same torch and data, open ports.'
    [[ $master_addr || $nnodes == 1 ]] ||
        echo 'Replace NODE0_ADDRESS with the address at which the other nodes reach node 0.'
    for node in ${node_rank:-$(seq 0 $((nnodes - 1)))}; do
        printf '\n# %s\n%s\n' "${hosts[node]:-node $node}" "$(command_of "$node")"
    done
    exit
elif ((${#hosts[@]} == 0)); then
    [[ $master_addr || $nnodes == 1 ]] || fail '--node-rank needs --master-addr, too'
    eval "exec env $(command_of "${node_rank:-0}")" # as it is printed
fi

# Each ssh reads from a pipe that closes when this script ends, in whatever way. If the host is then
# in reach, a watcher there sends torchrun a SIGTERM. torchrun passes it on, and kills the training
# after 30 s. A torchrun whose ranks have ended waits for other hosts, and ignores SIGTERM: so SIGKILL follows.
exec 3< <(exec tail --pid=$$ -f /dev/null)
pipe=$! code=0 pids=() patience=$((${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-30} + 5))
end="kill \$torchrun; timeout $patience tail --pid=\$torchrun -f /dev/null || kill -9 \$torchrun"
watch="torchrun=\$!; (cat <&3; $end) >/dev/null 2>&1 & wait \$torchrun" # one line, for tcsh
# As Wi-Fi may be silent for many seconds, ssh gives up only after two minutes.
options=(-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=8)
label() { # print what a host prints, with its name in front
    sed -u "s/^/$1: /" && return
    # sed has failed (full disk, Ctrl-C with `| tee`): stop all hosts, and read what they still print.
    kill "$pipe" 2>/dev/null
    cat >/dev/null
    return 1
}
# ssh and sed inherit the trap: Ctrl-C must not end them before the training has saved. An ssh that
# shares a connection (ControlMaster) undoes the trap, so setsid shields it from Ctrl-C.
trap '' HUP INT TERM PIPE
for node in "${!hosts[@]}"; do
    remote="cd $(printf %q "$PWD") && exec 3<&0 || exit; $(command_of "$node") & $watch"
    # Quote for the host's shell, be it sh, zsh or tcsh: inside '...', only ' and ! are special.
    remote="exec bash -c '$(printf %s "$remote" | sed "s/['!]/'\\\\&'/g")'"
    (setsid --wait ssh "${options[@]}" -- "${hosts[node]}" "$remote" 2>&1 | label "${hosts[node]}") <&3 &
    pids+=($!)
done
stop() { # exit code, reason
    ((code == 0)) || return
    echo "$2: stopping all hosts" >&2
    (($1 != 255)) || echo 'ssh itself has failed: look whether the training there goes on before you start again' >&2
    code=$1 SECONDS=0
    kill "$pipe" 2>/dev/null # Ctrl-C may have done so
}
trap 'stop 130 "stopped by a signal"' HUP INT TERM
# After a stop, it waits for the hosts, as a new start would find the port in use.
while ((${#pids[@]} > 0)) && ((code == 0 || SECONDS < patience + 5)); do
    for node in "${!pids[@]}"; do
        kill -0 "${pids[node]}" 2>/dev/null && continue
        wait "${pids[node]}" || stop $? "${hosts[node]} ended with exit code $?"
        unset "pids[node]"
    done
    sleep 1
done
exit "$code"
