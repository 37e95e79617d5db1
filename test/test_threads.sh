#!/usr/bin/env bash
# How many threads a run has, and how they wait, when nobody says so: waits are bounded in every start; threads are no
# more than processors, ranks and the model allow. What libgomp has understood it prints itself (OMP_DISPLAY_ENV).
. "$(dirname "$0")/lib.sh"
unset OMP_WAIT_POLICY OMP_NUM_THREADS

# the last one: of a program that is started twice in its process, two speak
spins_in() { sed -n "s/.*GOMP_SPINCOUNT *= *'\(.*\)'/\1/p" | tail -1; }
# spins NAME=VALUE...: of a start with these variables
spins() { env OMP_DISPLAY_ENV=verbose "$@" "$mt" --version 2>&1 >/dev/null | spins_in; }
check "bounded spins ($(spins)) in a plain start" [ "$(spins)" = 8000 ]
check "none where none are asked for ($(spins OMP_WAIT_POLICY=passive))" [ "$(spins OMP_WAIT_POLICY=passive)" = 0 ]
check "those that are asked for" [ "$(spins GOMP_SPINCOUNT=77)" = 77 ]
check "as many as OMP_WAIT_POLICY=active means" [ "$(spins OMP_WAIT_POLICY=active)" -gt 1000000 ]
check "under launch.sh, too" \
    [ "$(OMP_DISPLAY_ENV=verbose "$root/scripts/launch.sh" -n 1 -- "$mt" --version 2>&1 | spins_in)" = 8000 ]
check "a start that only says its version says it once" [ "$("$mt" --version | grep -c '^megatrain ')" -eq 1 ]
expect 2 "unknown command 'no such'" "$mt" 'no such'

# the process keeps its name and its words
make_tiny
sed -i 's/^steps = 40/steps = 1/; s/^warmup = 4/warmup = 0/' tiny.ini
MEGATRAIN_RANK_FAULT=0:step:1:stop "$mt" --config tiny.ini "run.dir=a run" >/dev/null 2>&1 &
pid=$!
until stands_still $pid || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
check "its name: $(cat /proc/$pid/comm)" [ "$(cat /proc/$pid/comm)" = "$(basename "$mt" | cut -c1-15)" ]
check "its words" [ "$(tr '\0' '|' </proc/$pid/cmdline)" = "$mt|--config|tiny.ini|run.dir=a run|" ]
kill -CONT $pid
wait $pid
check "and ends well" [ $? -eq 0 ]

processors=$("$mt" doctor 2>/dev/null | sed -n 's/^threads .* \([0-9]*\) allowed.*/\1/p')
threads_in() { sed -n 's/.* kernels, \([0-9]*\) threads*,.*/\1/p'; }
# threads WORDS...: of a run of that model
threads() { "$mt" --config tiny.ini run.dir="$(mktemp -u run.XXXXXX)" "$@" 2>&1 >/dev/null | threads_in; }
large=(model.layers=1 model.hidden=256 model.heads=4 model.seq=256 train.micro_batch=3)
check "a tiny model: one thread" [ "$(threads)" = 1 ]
check "unless told otherwise" [ "$(OMP_NUM_THREADS=2 threads)" = 2 ]
for threads in 1025 30000 999999999 30000,2; do
    OMP_NUM_THREADS=$threads expect 2 "OMP_NUM_THREADS='$threads': a rank has at most 1024 threads" "$mt" --config tiny.ini
done
OMP_NUM_THREADS=1024 expect 0 "ok on 1 rank" "$mt" config check --config tiny.ini
check "or by the key" [ "$(threads debug.threads=2)" = 2 ]
got=$(threads "${large[@]}")
check "a larger model: $got threads of ${processors:-unknown}" \
    [ "$got" -ge $((processors < 4 ? processors : 4)) -a "$got" -le "$processors" ]
first=$(taskset -cp $$ | sed 's/.*: //; s/[,-].*//')
got=$(taskset -c "$first" "$mt" --config tiny.ini run.dir=one "${large[@]}" 2>&1 >/dev/null | threads_in)
check "on one processor one thread, not '$got'" [ "$got" = 1 ]
"$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir=two "${large[@]}" train.global_batch=6 2>two.err
got=$(threads_in <two.err)
check "two ranks share $processors processors: '$got' threads each" \
    [ "${got:-0}" -ge 1 -a "${got:-0}" -le $((processors > 1 ? processors / 2 : 1)) ]

# ---- run.bind ----

# two_ranks NAME WORDS...: two ranks, of which the second stands still in its first step; where[r]: the processors of all
# threads of rank r. Then they go on to their end; the losses are in NAME.losses, what they said in NAME.err.
two_ranks() {
    local name=$1 pid kids=() r n=0
    shift
    MEGATRAIN_RANK_FAULT=1:step:1:stop "$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir="$name" \
        train.micro_batch=1 train.global_batch=6 "$@" 2>"$name.err" &
    pid=$!
    until [ ${#kids[@]} -ge 2 ] && stands_still "${kids[1]}" || ! kill -0 $pid 2>/dev/null; do
        sleep 0.02
        read -ra kids <"/proc/$pid/task/$pid/children"
    done 2>/dev/null
    where=()
    for r in 0 1; do
        where[r]=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/${kids[r]}/task/"*/status | sort -u | tr '\n' ' ')
    done
    kill -CONT "${kids[1]}"
    wait $pid
    check "$name ends well: $(tail -1 "$name.err")" [ $? -eq 0 ]
    losses "$name" >"$name.losses"
}
says() { check "$1: '$2' in $(grep -F run.bind "$1.err")" grep -qF -- "$2" "$1.err"; }
all=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
two_ranks free
check "nobody is bound on a machine of one node: ${where[*]}" \
    [ "$("$mt" doctor | grep -c 'auto binds ranks')" = 1 -o "${where[*]}" = "$all  $all " ]
if [ "$processors" -ge 2 ]; then
    two_ranks own run.bind=core
    says own "run.bind=core: this host's ranks are bound to processors ${where[0]% } ${where[1]% }"
    check "each has its own, and all its threads: ${where[*]}" \
        /usr/bin/python3 - "${where[@]}" "$all" <<'EOP'
import sys
def cpus(text):
    assert len(text.split()) == 1, text  # one set for all threads
    return {c for part in text.strip().split(",") for c in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)}
a, b, every = map(cpus, sys.argv[1:])
assert a and b and not a & b and a | b <= every, (a, b, every)
EOP
    check "the same losses" cmp -s free.losses own.losses
    says own " 1 thread,"
    two_ranks many run.bind=core debug.threads="$processors"
    says many "warning: run.bind=core: no rank is bound: 2 ranks of $processors threads on $processors processors"
    check "nor is it: ${where[*]}" [ "${where[*]}" = "$all  $all " ]
    # who bound them before has the last word
    OMP_PROC_BIND=false two_ranks outside run.bind=core
    says outside "no rank is bound: OMP_PROC_BIND is set"
    last=${all##*[,-]}
    cat >each.sh <<'EOS'
taskset -c "$([ "$RANK" = 0 ] && echo "$1" || echo "$2")" "${@:3}"
EOS
    "$root/scripts/launch.sh" -n 2 -- bash each.sh "$first" "$last" "$mt" --config tiny.ini run.dir=each run.bind=core \
        train.micro_batch=1 train.global_batch=6 2>each.err
    says each "no rank is bound: ranks of this host were started with different processors"
fi
# more ranks than processors: not even by force, and with a word
taskset -c "$first" "$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir=crowd run.bind=core \
    train.micro_batch=1 train.global_batch=6 2>crowd.err
says crowd "no rank is bound: 2 ranks of 1 thread on 1 processor"
HWLOC_SYNTHETIC="pack:2 numa:4 core:4 pu:2" "$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir=other \
    train.micro_batch=1 train.global_batch=6 2>other.err
says other "run.bind=auto: no rank is bound: hwloc was given another machine's topology"
check "doctor: $("$mt" doctor | grep ^placement)" grep -q '^placement .* processors\? of .* memory node.*; run.bind=auto binds' <("$mt" doctor)
check "of eight nodes" grep -q '^placement    64 processors of 32 cores in 8 memory nodes of another machine.*auto binds ranks to their node' \
    <(HWLOC_SYNTHETIC="pack:2 numa:4 core:4 pu:2" "$mt" doctor)
check "and of OMP_PLACES" grep -q '^placement .*no rank is bound: OMP_PLACES is set' <(OMP_PLACES=cores "$mt" doctor)
finish
