#!/usr/bin/env bash
# Start train_ddp.py, or its twin, with torchrun: on this machine, on several by hand, or on several over ssh.
#
#   ./launch_multinode_ddp.sh --nproc-per-node 4 -- --epochs 3                          one node
#   ./launch_multinode_ddp.sh --nnodes 2 --nproc-per-node 8 --master-addr node0 -- ...  print each node's command
#   ./launch_multinode_ddp.sh --nnodes 2 ... --node-rank 0 -- --epochs 3                run this node's share
#   ./launch_multinode_ddp.sh --hosts node0,node1 --nproc-per-node 8 -- --epochs 3      run all of it, over ssh
#
# Everything after -- goes to the script. Without any argument, the commands of an example are printed.
#
#   --nproc-per-node N    processes on each node: a number, gpu, cpu or auto, as in torchrun (default 1)
#   --script FILE         what to train with, in this directory or beside this file (default train_ddp.py)
#   --nnodes N            number of nodes (default 1; with --hosts, as many as they are)
#   --node-rank N         which of them this is: 0, the master, where all meet, to N - 1
#   --master-addr HOST    name or address by which the other nodes reach node 0 (over ssh: found out)
#   --master-port PORT    a free port there (default 29500)
#   --hosts HOST,...      ssh to these, node 0 first, and train there, in a directory with the path of this one
#   --max-restarts N      how often all processes are started again after one has died (default 0)
#   --join-timeout S      seconds that a node waits for the others at the start (default 300)
#   --interface NAME      network interface for NCCL and Gloo (default: Gloo takes the one that leads to the master)
#   --env NAME[=VALUE]    set a variable on every node, by default to its value here; may be repeated
#   --python FILE         the Python to use (over ssh, by default this shell's), or --venv DIR for DIR/bin/python
#   --dry-run             print what would run, and run nothing
#   --help                print this
set -euo pipefail

fail() {
    printf '%s: error: %s\n' "${BASH_SOURCE[0]##*/}" "$1" >&2
    exit 2
}

# Print a command, quoted so that a shell reads it as it is.
show() {
    local line
    printf -v line '%q ' "$@"
    line=${line//'\,'/,} # needs no quoting
    printf '%s\n' "${line% }"
}

port_in_use() {
    [[ $(ss -Hltn "sport = :$1" 2>/dev/null) ]]
}

# Read the flags into variables of their names.
self=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/${BASH_SOURCE[0]##*/}
given=$# variables=() address='' dry_run=''
nnodes='' node_rank='' nproc_per_node=1 script=train_ddp.py master_addr='' master_port=29500 hosts=''
max_restarts=0 join_timeout=300 interface='' env='' python='' venv='' heartbeat=''
while (($#)); do
    case $1 in
    --) shift && break ;;
    --help | -h) sed -n '2,/^set/s/^# \{0,1\}//p' "$self" && exit ;;
    --dry-run) dry_run=yes && shift && continue ;;
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    name=${1//_/-} # torchrun takes both forms, too
    case $name in
    --nnodes | --node-rank | --nproc-per-node | --script | --master-addr | --master-port | --hosts) ;;
    --max-restarts | --join-timeout | --interface | --env | --python | --venv) ;;
    --heartbeat) ;; # over ssh, we call ourselves with it
    *) fail "unknown argument $1 (see --help; those of the script follow --)" ;;
    esac
    [[ ${2:-} ]] || fail "$1 needs a value"
    name=${name#--} && printf -v "${name//-/_}" %s "$2"
    if [[ $env ]]; then
        [[ $env =~ ^[A-Za-z_][A-Za-z0-9_]*(=|$) ]] || fail "--env $env: give NAME or NAME=VALUE"
        [[ $env == *=* || -v $env ]] || fail "--env $env: there is no such variable here; give --env $env=VALUE"
        [[ $env == *=* ]] || env=$env=${!env}
        variables+=("$env") && env=''
    fi
    shift 2
done
arguments=("$@")
IFS=, read -ra hosts <<<"$hosts"
((${#hosts[@]} == 0)) || nnodes=${nnodes:-${#hosts[@]}}
((given)) || nnodes=2 # the example
nnodes=${nnodes:-1}

# Flag $1 has to be a number from $2 to $3.
number() {
    local name=${1//-/_}
    if [[ ! ${!name} =~ ^(0|[1-9][0-9]{0,5})$ ]] || ((${!name} < $2 || ${!name} > $3)); then
        fail "--$1 ${!name}: give a number from $2 to $3"
    fi
}
number nnodes 1 9999
[[ ! $node_rank ]] || number node-rank 0 $((nnodes - 1))
[[ $nproc_per_node =~ ^(gpu|cpu|auto)$ ]] || number nproc-per-node 1 9999
number master-port 1 65535
number max-restarts 0 9999
number join-timeout 1 99999
if ((${#hosts[@]})); then
    [[ ! $node_rank ]] || fail '--hosts starts every node: leave out --node-rank'
    ((${#hosts[@]} == nnodes)) || fail "--hosts names ${#hosts[@]} hosts, but --nnodes is $nnodes"
    for host in "${hosts[@]}"; do
        [[ $host =~ ^[A-Za-z0-9_][A-Za-z0-9_.@:-]*$ ]] || fail "--hosts: '$host' is not the name of a host"
    done
    [[ ! $(printf '%s\n' "${hosts[@]}" | sort | uniq -d) ]] || fail '--hosts names a host twice'
fi
[[ $script == /* || -e $script ]] || script=${self%/*}/$script
[[ ! $venv ]] || python=$venv/bin/python
((${#hosts[@]} == 0)) || python=${python:-$(command -v python || command -v python3)} ||
    fail 'there is no python here: give --python or --venv'
torchrun=(torchrun)
[[ ! $python ]] || torchrun=("$python" -m torch.distributed.run)

# Set `command` to this node's torchrun, with the variables that it needs in front.
compose() {
    command=("${torchrun[@]}" "--nproc-per-node=$nproc_per_node")
    if ((nnodes == 1)); then
        command+=(--standalone)
    elif ((max_restarts == 0)); then
        command+=("--nnodes=$nnodes" "--node-rank=$node_rank" "--master-addr=$master_addr")
        command+=("--master-port=$master_port" "--rdzv-conf=timeout=$join_timeout")
    else
        # The rendezvous above would give restarted processes the addresses of the dead; c10d would too, but for this
        # variable (pytorch#135712). c10d gives out the ranks of the nodes as it likes.
        variables=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "${variables[@]}")
        command+=("--nnodes=$nnodes" --rdzv-backend=c10d "--rdzv-endpoint=$master_addr:$master_port" --rdzv-id=ddp)
        command+=("--rdzv-conf=is_host=$((node_rank == 0)),join_timeout=$join_timeout" ${address:+"--local-addr=$address"})
    fi
    ((max_restarts == 0)) || command+=("--max-restarts=$max_restarts")
    [[ ! $interface ]] || variables=("GLOO_SOCKET_IFNAME=$interface" "NCCL_SOCKET_IFNAME=$interface" "${variables[@]}")
    ((${#variables[@]} == 0)) || command=(env "${variables[@]}" "${command[@]}") # of two values, it takes the last
    command+=("$script" "${arguments[@]}")
}

# Set `address` to that by which this node reaches the master and is reached, and tell Gloo its interface: it would take
# the address of the node's own name, which Debian's installer makes 127.0.1.1.
find_address() {
    local master
    master=$(getent ahosts "$master_addr" | awk 'NR == 1 {print $1}') || fail "--master-addr $master_addr: unknown here"
    command -v ip >/dev/null || return 0
    address=$(ip -o route get "$master" | sed -n 's/.* src \([^ ]*\).*/\1/p') || fail "there is no route to $master_addr"
    if [[ $address == 127.* && $master_addr != 127.* && $master_addr != localhost ]]; then
        local device=${interface:-${GLOO_SOCKET_IFNAME:-}}
        address=$(ip -o -4 address show ${device:+dev "$device"} scope global | awk '{print $4}')
        [[ $address == */* && $address != *$'\n'* ]] || fail "$master_addr is $master here: give --interface"
        address=${address%/*}
    fi
    [[ $interface || ${GLOO_SOCKET_IFNAME:-} ]] ||
        variables=("GLOO_SOCKET_IFNAME=$(ip -o address show to "$address" | awk 'NR == 1 {print $2}')" "${variables[@]}")
}

print_plan() {
    echo 'Nothing has been started. Each node needs this directory, the same torch, the data set, and open ports to the'
    echo "others; they meet at port $master_port of $master_addr. Start these, one on each node, within $join_timeout s:"
    for ((node_rank = 0; node_rank < nnodes; node_rank++)); do
        printf '\n# node %d\n' "$node_rank"
        (compose && show "${command[@]}")
    done
    echo
    echo "Where a node's own name is 127.0.1.1 to itself (Debian, Ubuntu), add --interface NAME, with GPUs too. With"
    echo '--node-rank N, this script finds it and runs the command of node N; with --hosts, it runs all of them, over ssh.'
}

# Over ssh: run the command until the heartbeat on stdin stops, then end what is left of it. The workers are sessions of
# their own, which a closed connection does not end, nor does the end of torchrun: a variable tells who belongs to it.
run_with_heartbeat() {
    left() { grep -lsz "^DDP_LAUNCH=$heartbeat\$" /proc/[0-9]*/environ | cut -d/ -f3; }
    trap '' HUP PIPE
    DDP_LAUNCH=$heartbeat "$@" &
    while kill -0 $! 2>/dev/null && read -rt 15; do :; done
    kill -TERM $! 2>/dev/null || left | xargs -r kill -TERM || :
    for ((second = 0; second < 35; second++)); do # torchrun gives its workers 30
        [[ $(left) ]] || break
        sleep 1
    done
    left | xargs -r kill -KILL || :
    wait $!
}

run_here() {
    [[ -f $script ]] || fail "there is no script $script"
    command -v "${torchrun[0]}" >/dev/null || fail "there is no ${torchrun[0]}: activate its environment, or give --venv"
    if ((nnodes > 1)); then
        [[ $master_addr ]] || fail '--node-rank: give --master-addr, too'
        find_address
        ((node_rank != 0)) || ! port_in_use "$master_port" || fail "port $master_port is in use: give another --master-port"
        echo "node $node_rank of $nnodes: waiting for the others at $master_addr:$master_port, $join_timeout s at most" >&2
    fi
    compose
    [[ ! $dry_run ]] || { show "${command[@]}" && exit; }
    trap '' USR1 # it is for the workers; torchrun would die of it, and leave them behind
    [[ $heartbeat ]] || exec "${command[@]}"
    run_with_heartbeat "${command[@]}"
}

# Runs on each host before anything starts. Prints what is wrong, or ok, torch's version, GPUs, and ssh's addresses.
examine() {
    cd "$1" 2>/dev/null || { echo "error: there is no directory $1" && return; }
    for file in "$2" "$3"; do
        [[ -r $file ]] || { echo "error: there is no $file" && return; }
    done
    [[ ! $4 ]] || ! port_in_use "$4" || { echo "error: port $4 is in use: give another --master-port" && return; }
    found=$(env "${@:6}" "$5" -c 'import torch; print(torch.__version__, torch.accelerator.device_count())' 2>&1) &&
        echo "ok ${found##*$'\n'} $SSH_CONNECTION" || echo "error: $5 cannot import torch: ${found##*$'\n'}"
}

# Print a line for each host that is not ready; set `master_addr` to an address of node 0 that the others can reach.
examine_hosts() {
    local answer answers=() client failed='' fd gpus=() i needed=0 own port=$master_port server='' torch='' version words
    ((nnodes > 1)) || port='' # torchrun takes a free one
    for i in "${!hosts[@]}"; do
        words=$(show bash -s -- "$PWD" "$script" "$self" "$port" "$python" "${variables[@]}")
        exec {fd}< <(timeout 60 "${ssh[@]}" "${hosts[i]}" "$words" <<<"$(declare -f port_in_use examine); examine \"\$@\"" 2>&1)
        answers+=("$fd") port='' # it only has to be free on the first
    done
    for i in "${!hosts[@]}"; do
        answer=$(tail -n 1 <&"${answers[i]}")
        if [[ $answer != 'ok '* ]]; then
            [[ $answer == error:* ]] || answer="error: cannot log in: ${answer:-no answer in 60 s}"
            failed=yes && echo "${hosts[i]}: $answer" >&2 && continue
        fi
        read -r _ version 'gpus[i]' client _ own _ <<<"$answer" # ssh's addresses: of the launcher, and of the host
        torch=${torch:-$version}
        [[ $version == "$torch" ]] || { failed=yes && echo "${hosts[i]}: error: torch $version, not $torch" >&2; }
        [[ ! $nproc_per_node =~ ^[0-9]+$ ]] || ((gpus[i] == 0)) || needed=$nproc_per_node # else all train on CPUs
        ((i != 0)) || server=$own
        ((i != 1)) || [[ $server != 127.* && $server != ::1 ]] || server=$client # node 0 is this machine
    done
    master_addr=${master_addr:-$server}
    [[ $nproc_per_node != gpu ]] || needed=1
    for i in "${!gpus[@]}"; do
        ((gpus[i] >= needed)) || { failed=yes && echo "${hosts[i]}: error: ${gpus[i]} GPUs, but $needed needed" >&2; }
    done
    [[ ! $failed ]] || exit 1
}

# Run a command on host $1, with the host's name in front of each line.
on_host() {
    trap '' INT TERM HUP # Ctrl-C reaches ssh, too, but the hosts still have to save, and to say so
    for fd in "${heartbeats[@]}"; do exec {fd}>&-; done
    { "${ssh[@]}" "$1" "$2" 2>&1 >&3 3>&- | sed -u "s/^/$1: /" >&2 3>&-; } 3>&1 | sed -u "s/^/$1: /"
}

# Stop all hosts, because of $2; the first time, $1 becomes the exit code.
stop() {
    [[ ! $code ]] || return 0
    code=$1
    echo "$2: stopping all hosts" >&2
    for fd in "${heartbeats[@]}"; do exec {fd}>&-; done
    heartbeats=()
}

run_over_ssh() {
    local beat command fifo i pids=() status words
    ssh=(ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3)
    heartbeats=() code=''
    [[ $script == /* ]] || script=$PWD/$script
    [[ $dry_run ]] || examine_hosts
    trap 'stop 130 Ctrl-C' INT && trap 'stop 143 SIGTERM' TERM && trap 'stop 129 SIGHUP' HUP
    for i in "${!hosts[@]}"; do
        words=(bash "$self" --heartbeat "$HOSTNAME.$$.$(date +%s).$i" --nnodes "$nnodes" --node-rank "$i" --script "$script")
        words+=(--nproc-per-node "$nproc_per_node" --master-addr "${master_addr:-${hosts[0]#*@}}" --python "$python")
        words+=(--master-port "$master_port" --max-restarts "$max_restarts" --join-timeout "$join_timeout")
        words+=(${interface:+--interface "$interface"} "${variables[@]/#/--env=}" -- "${arguments[@]}")
        command="$(show cd "$PWD") && $(show exec "${words[@]}")"
        [[ ! $dry_run ]] || { echo "${ssh[*]} ${hosts[i]} ${command@Q}" && continue; }
        # When this process ends, in whatever way, so do its ends of the pipes that the heartbeats go through.
        fifo=$(mktemp -u) && mkfifo "$fifo" && exec {beat}<>"$fifo" && heartbeats+=("$beat")
        exec {beat}<"$fifo" && rm "$fifo"
        on_host "${hosts[i]}" "$command" <&"$beat" &
        pids+=($!)
        exec {beat}<&-
    done
    while ((${#pids[@]})); do
        for beat in "${heartbeats[@]}"; do
            { echo >&"$beat"; } 2>/dev/null || : # closed by `stop`, just now
        done
        for i in "${!pids[@]}"; do
            kill -0 "${pids[i]}" 2>/dev/null && continue
            status=0 && wait "${pids[i]}" || status=$?
            unset 'pids[i]'
            ((status == 0)) || stop "$status" "${hosts[i]} ended with exit code $status"
        done
        sleep 1 || :
    done
    exit "${code:-0}"
}

if ((${#hosts[@]})); then
    run_over_ssh
elif [[ $node_rank ]] || ((nnodes == 1)); then
    run_here
else
    master_addr=${master_addr:-$HOSTNAME}
    print_plan
fi
