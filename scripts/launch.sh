#!/usr/bin/env bash
# Starts N ranks of a program on this machine and waits for them.
#
#   scripts/launch.sh -n N [-p PORT] [--] ./megatrain --config FILE ...
#
# Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a port that is taken does
# no harm (docs/ranks.md). MEGATRAIN_SECRET, by which the ranks know each other, is drawn anew (docs/security.md).
#
# SIGTERM, SIGUSR1 and SIGINT go on to the ranks, once: each rank has a process group of its own. Ctrl-Z stops them with
# the launcher, `fg` or `bg` continues them. When one rank fails
# the others have 5 s to say why, then they are killed; if nobody has said anything after 4 s (the rank was killed
# before the ranks had met) SIGTERM asks them to, and they have 5 s more. The exit code is the verdict: the first documented one that a rank
# gave, 128 + the signal only if none did. Ranks of a launcher that is killed take that for SIGTERM.
set -u
help() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
usage() { help | head -3 >&2; exit 2; }
n='' port=${MASTER_PORT:-}
while [ $# -gt 0 ]; do
    case $1 in
        -n) n=${2:-}; shift 2 || usage ;;
        -p) port=${2:-}; shift 2 || usage ;;
        --) shift; break ;;
        -h | --help) help; exit ;;
        -*) usage ;;
        *) break ;;
    esac
done
[[ $n =~ ^[1-9][0-9]*$ ]] && [ $# -gt 0 ] || usage

# (before anything is opened: without descriptors this script could neither draw a secret nor wait for ranks)
files=$(ulimit -n)
few_files() {
    echo "launch: ulimit -n is $files: 16 file descriptors are needed to start ranks; raise it" >&2
    exit 10
}
[ "$files" = unlimited ] || [ "${files:-0}" -ge 16 ] || few_files
{ exec {never}<> <(:); } 2>/dev/null || few_files

export WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MEGATRAIN_LAUNCHER_PID=$$
export MEGATRAIN_JOB=${MEGATRAIN_JOB:-launch.$$.$EPOCHREALTIME} # another one on the same port is no concern
MEGATRAIN_SECRET=$(od -An -N32 -v -tx1 /dev/urandom | tr -d ' \n')
export MEGATRAIN_SECRET
export MEGATRAIN_LAUNCHER_WORDS="${*:2}" # a mistake in them is every rank's, and rank 0 says it
# The others leave it in this file, which has no name any more: where rank 0 made no such mistake we say it.
unset MEGATRAIN_LAUNCHER_LEFT left_by_ranks # (a launcher around this one has its own)
if left=$(mktemp); then
    { exec {MEGATRAIN_LAUNCHER_LEFT}>>"$left" {left_by_ranks}<"$left"; } 2>/dev/null || few_files
    rm -f "$left"
    export MEGATRAIN_LAUNCHER_LEFT
fi
export MASTER_PORT=${port:-$((20000 + $$ % 20000))}

pids=() ranks=() early=()
to_all() { for p in "${pids[@]}"; do kill -"$1" -- "-$p" 2>/dev/null; done; }
for s in TERM USR1 HUP INT; do trap "early+=($s)" $s; done
set -m # a process group for each rank: the terminal's Ctrl-C must not reach them twice
for ((i = 0; i < n; i++)); do
    RANK=$i LOCAL_RANK=$i "$@" </dev/null {never}>&- &
    pids[i]=$! ranks[$!]=$i
done
set +m
# signals end `wait` early; what they mean is the ranks' business
for s in TERM USR1 HUP INT; do trap "to_all $s" $s; done
trap 'to_all STOP; kill -STOP $$; to_all CONT' TSTP
for s in "${early[@]}"; do to_all "$s"; done

grace() { sleep "$1" </dev/null >/dev/null 2>&1 & timer=$!; }
# ended, code: of one that has ended. Asked for every 50 ms: a `wait` that a signal interrupts can lose the exit code of
# a rank that ends at that moment.
next_to_end() {
    while :; do
        for p in "${pids[@]}" $timer; do
            kill -0 "$p" 2>/dev/null && continue
            wait "$p" 2>/dev/null
            code=$? ended=$p
            return
        done
        read -rt 0.05 -u "$never"
    done
}
verdict=0 signalled=0 timer='' stage=0 code_of_0=0
while [ ${#pids[@]} -gt 0 ]; do
    next_to_end
    if [ "$ended" = "$timer" ]; then
        timer='' stage=$((stage + 1))
        if [ $stage -eq 1 ]; then
            if [ $verdict -ne 0 ]; then grace 1; else to_all TERM; grace 5; fi
        else to_all KILL; fi
        continue
    fi
    rank=${ranks[ended]}
    unset "pids[rank]"
    [ "$rank" != 0 ] || code_of_0=$code
    if [ $code -gt 128 ] && [ $code -ne 130 ]; then
        [ $stage -gt 1 ] || echo "launch: rank $rank (pid $ended) was ended by SIG$(kill -l "$code")" >&2
        signalled=${signalled/#0/$code}
    elif [ $code -ne 0 ] && { [ $verdict -eq 0 ] || [ $verdict -eq 75 ]; }; then verdict=$code; fi
    if [ $code -ne 0 ] && [ $code -ne 75 ] && [ -z "$timer" ] && [ $stage -eq 0 ]; then grace 4; fi
done
[ -n "$timer" ] && kill "$timer" 2>/dev/null
if [ $code_of_0 -ne 2 ] && [ -n "${MEGATRAIN_LAUNCHER_LEFT:-}" ]; then
    awk '/^megatrain: error/ && n++ { exit } 1' <&"$left_by_ranks" >&2
fi
[ $verdict -ne 0 ] && exit $verdict
[ "$signalled" -eq 0 ] || echo "launch: no rank was left to say more; a start anew goes on from the newest checkpoint" >&2
exit "$signalled"
