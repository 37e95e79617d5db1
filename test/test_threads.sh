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
finish
