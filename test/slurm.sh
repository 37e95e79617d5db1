#!/usr/bin/env bash
# A Slurm for tests: all daemons, state, keys and ports of its own, on this host alone. Needs root, slurm-wlm and munge.
#
#   test/slurm.sh start DIR NODES CPUS_OF_A_NODE      then: export SLURM_CONF=DIR/slurm.conf
#   test/slurm.sh stop DIR
#
# Several slurmd, each a node n0, n1, ...: node numbers are real, names do not resolve, cores are shared.
set -u
[ $# -ge 2 ] || { sed -n '4,5p' "$0" >&2; exit 2; }
dir=$2 nodes=${3:-2} cpus=${4:-4} host=$(hostname -s)
export SLURM_CONF=$dir/slurm.conf

# only what is written in the file, and still has the name of a daemon
living() {
    local pid
    while read -r pid; do
        case $(cat "/proc/$pid/comm" 2>/dev/null) in slurm* | munged) echo "$pid" ;; esac
    done < <(cat "$dir/pids" 2>/dev/null)
}
stop() {
    local i pid
    [ -f "$dir/pids" ] || return 0
    timeout 5 scancel --user=root >/dev/null 2>&1
    for signal in TERM KILL; do
        for pid in $(living | tac); do kill -$signal "$pid" 2>/dev/null; done
        for ((i = 0; i < 50; i++)); do [ -n "$(living)" ] || break; sleep 0.1; done
    done
    rm -f "$dir/pids"
}
fail() {
    echo "slurm.sh: $*" >&2
    tail -n 15 "$dir"/*.log >&2
    stop
    exit 1
}
daemon() { # LOG COMMAND...
    local log=$1
    shift
    "$@" >"$dir/$log" 2>&1 </dev/null &
    echo $! >>"$dir/pids"
}
write_conf() {
    local i base=$((20000 + RANDOM % 10000))
    cat >"$SLURM_CONF" <<EOI
ClusterName=t$base
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=2
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=3
MinJobAge=300
SlurmdParameters=config_overrides
EOI
    for ((i = 0; i < nodes; i++)); do
        echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((base + 1 + i)) CPUs=$cpus RealMemory=1000 State=UNKNOWN"
    done >>"$SLURM_CONF"
    echo 'PartitionName=main Nodes=ALL Default=YES MaxTime=30 OverSubscribe=YES State=UP' >>"$SLURM_CONF"
    echo CgroupPlugin=cgroup/v1 >"$dir/cgroup.conf" # named, else slurmd asks systemd; not used
}
start() {
    local i
    mkdir -p "$dir"/{state,spool,munge} && chmod 755 "$dir" "$dir/munge" && : >"$dir/pids" || exit 1
    head -c 128 /dev/urandom >"$dir/munge/key"
    chmod 400 "$dir/munge/key"
    daemon munged.out.log munged --force --foreground --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
        --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
    for ((i = 0; i < 600; i++)); do [ -S "$dir/munge/socket" ] && break; sleep 0.1; done
    [ -S "$dir/munge/socket" ] || fail "munged did not start"
    write_conf
    daemon slurmctld.out.log slurmctld -D -c -f "$SLURM_CONF"
    for ((i = 0; i < nodes; i++)); do
        mkdir -p "$dir/spool/n$i"
        daemon slurmd.n$i.out.log slurmd -D -N n$i -f "$SLURM_CONF"
    done
    for ((i = 0; i < 1200; i++)); do
        [ "$(sinfo -h -t idle -o %D 2>/dev/null | head -1)" = "$nodes" ] && return
        [ "$(living | wc -l)" -eq $((nodes + 2)) ] || fail "a daemon ended"
        sleep 0.1
    done
    fail "the nodes are not idle after two minutes"
}
$1
