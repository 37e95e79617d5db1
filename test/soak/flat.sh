#!/usr/bin/env bash
# A long run: memory and open files stay what they were, over evaluations and saves, while eval, inspect and report read
# the run's folder. Times of steps are printed and never judged.
#
#   test/soak/flat.sh               3,000 steps of two ranks (STEPS=3000)
. "$(dirname "$0")/../lib.sh"
steps=${STEPS:-3000}
export OMP_NUM_THREADS=1
make_tiny
make_ini flat.ini model.layers=2 model.hidden=32 model.heads=4 model.seq=32 parallel.tp=2 train.global_batch=2 \
    train.steps="$steps" train.eval_every=50 optim.lr=1e-3 checkpoint.async=true checkpoint.keep=3
sed -i 's/^every=.*/every=50/' flat.ini

mkfifo never
exec {never}<>never
pause() { read -rt "$1" -u $never; } # without a process

printf '#!/bin/bash\necho $$ >"%s/pid.$RANK"\nexec "%s" "$@"\n' "$work" "$mt" >rank.sh
chmod +x rank.sh
"$root/scripts/launch.sh" -n 2 -- "$work/rank.sh" --config flat.ini run.dir=flat >/dev/null 2>run.err &
launcher=$!

# What rank 0 has at a step: "STEP KIB FILES" lines. Samples fall where they fall; what is compared are the most of many.
step_now() { tail -1 flat/metrics.jsonl 2>/dev/null | sed -n 's/.*"step":\([0-9]*\).*/\1/p'; }
sample() {
    local pid files step kib
    read -r pid <pid.0 || return
    files=(/proc/"$pid"/fd/*)
    kib=$(sed -n 's/^VmRSS:[[:space:]]*\([0-9]*\) kB/\1/p' "/proc/$pid/status")
    step=$(step_now)
    [ -z "$step" ] || [ -z "$kib" ] || echo "$step $kib ${#files[@]}" >>samples
}
reads=0
beside() { # one of the readers, in turn; none until there is a checkpoint
    compgen -G 'flat/checkpoints/step-????????/manifest.json' >/dev/null || return
    case $((reads++ % 3)) in
    0) expect 0 digest "$mt" inspect flat ;;
    1) expect 0 loss "$mt" eval --run flat ;;
    2) expect 0 '' "$mt" report flat ;;
    esac
}
for ((turn = 0; ; turn++)); do
    kill -0 $launcher 2>/dev/null || break
    sample 2>/dev/null
    [ $((turn % 10)) -ne 9 ] || beside
    pause 0.05
done
wait $launcher
check "the run: exit $?, $(grep -m1 error run.err)" [ "$(losses flat | wc -l)" -eq "$steps" ]
check "three checkpoints stay" [ "$(ls -d flat/checkpoints/step-???????? | wc -l)" -eq 3 ]
check "eval, inspect and report were run beside it: $reads times" [ $reads -ge 3 ]

# most FIELD FROM TO: the most of a field of the samples at these thirds of the run
most() {
    awk -v f="$1" -v a="$(($2 * steps / 3))" -v b="$(($3 * steps / 3))" \
        '$1 > a && $1 <= b && $f > m { m = $f } END { print m + 0 }' samples
}
median_ms() { # FROM TO: of steps
    sed -n 's/.*"step":\([0-9]*\),.*"step_ms":\([^,}]*\).*/\1 \2/p' flat/metrics.jsonl |
        awk -v a="$1" -v b="$2" '$1 > a && $1 <= b { print $2 }' | sort -g |
        awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'
}
kib=("$(most 2 1 2)" "$(most 2 2 3)") files=("$(most 3 1 2)" "$(most 3 2 3)")
echo "    $(wc -l <samples) samples; of the second and the last third: ${kib[*]} KiB, ${files[*]} files," \
    "$(median_ms $((steps / 3)) $((2 * steps / 3))) $(median_ms $((2 * steps / 3)) "$steps") ms a step (medians)"
# (a page lost in each of the last third's saves or evaluations would be 80 KiB and more; a file 20)
check "there are samples of each third" [ "${kib[0]}" -gt 0 -a "${kib[1]}" -gt 0 ]
check "memory stays: ${kib[*]} KiB" [ "${kib[1]}" -le $((kib[0] + 256)) ]
check "open files stay: ${files[*]}" [ "${files[1]}" -le $((files[0] + 4)) ]
finish
