#!/usr/bin/env bash
# Which checkpoints stay in whole runs: every n-th step's, and those with the lowest validation loss, which is looked up
# in metrics.jsonl here; through stops, in other layouts, by a thread, and killed at calls of saves that remove some.
. "$(dirname "$0")/lib.sh"
make_tiny
sed -i 's/^every = 7/every = 2/; s/^keep = 0/keep = 2/' tiny.ini
# a learning rate that is too high: losses go up and down, the lowest is that of step 16
keys=(train.steps=24 train.eval_every=2 train.eval_samples=15 optim.lr=0.03 optim.min_lr=0.03)
run() { "$mt" --config tiny.ini run.dir="$1" "${keys[@]}" "${@:2}" >/dev/null 2>"$1.err"; }
steps() { ls "$1/checkpoints" | sed -n 's/^step-0*//p' | sort -n | paste -sd ' '; }
# best RUN COUNT [SET]: the steps with the lowest losses, of equals the first, and the newest two
best() {
    { sed -n "s/^{\"step\":\([0-9]*\),.*${3:+\"valid\":\"$3\",}\"valid_loss\":\([0-9.e+-]*\)[,}].*/\2 \1/p" \
        "$1/metrics.jsonl" | sort -g -s -k1,1 | head -"$2" | sed 's/.* //'; printf '22\n24\n'; } |
        sort -nu | paste -sd ' '
}

run best checkpoint.keep_best=3
check "the run ends: $(tail -1 best.err)" [ "$(losses best | wc -l)" -eq 24 ]
check "the three best and the newest two stay: $(steps best), not $(best best 3)" [ "$(steps best)" = "$(best best 3)" ]
check "they are not just the newest" [ "$(steps best)" != "16 18 20 22 24" ]
first=$(steps best | cut -d' ' -f1)
path() { printf '%s/checkpoints/step-%08d' "$1" "$2"; } # RUN STEP
loss=$(sed -n "s/.*\"step\":$first,.*\"valid_loss\":\([^,}]*\)[,}].*/\1/p" best/metrics.jsonl)
check "their loss is in the manifest" \
    grep -qF "\"valid\":[{\"set\":\"\",\"loss\":$loss,\"samples\":15,\"data\":" "$(path best "$first")/manifest.json"
"$mt" inspect "$(path best "$first")" >inspect.txt 2>/dev/null
check "inspect shows it" [ "$(grep -c '^valid loss  *[0-9]' inspect.txt)" -eq 1 ]

run stopped checkpoint.keep_best=3 train.stop_at=11 # saved at its end, and evaluated there
run stopped checkpoint.keep_best=3
check "a run that was stopped: $(steps stopped), not $(best stopped 3)" [ "$(steps stopped)" = "$(best stopped 3)" ]
run async checkpoint.keep_best=3 checkpoint.async=true
check "a thread that saves keeps the same: $(steps async)" [ "$(steps async)" = "$(steps best)" ]
"$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir=two "${keys[@]}" checkpoint.keep_best=3 \
    parallel.tp=2 2>two.err
check "two ranks keep the same: $(steps two) $(tail -1 two.err)" [ "$(steps two)" = "$(steps best)" ]

run both checkpoint.keep_every=8 checkpoint.keep_best=1
check "every 8th, the best, the newest: $(steps both)" \
    [ "$(steps both)" = "$({ best both 1 | tr ' ' '\n'; printf '8\n16\n24\n'; } | sort -nu | paste -sd ' ')" ]

sets=(data.valid="near: b  far: a")
for s in near far; do
    run $s "${sets[@]}" checkpoint.keep_best=2 checkpoint.best_set=$s
    check "the best on '$s': $(steps $s), not $(best $s 2 $s)" [ "$(steps $s)" = "$(best $s 2 $s)" ]
    check "the start says '$s'" grep -q "^checkpoint.keep_best goes by the loss on '$s'$" $s.err
done
run first "${sets[@]}" checkpoint.keep_best=2
check "of several the first counts" [ "$(steps first)" = "$(steps near)" ]
expect 2 "checkpoint.best_set: there is no validation set 'sky'" "$mt" --config tiny.ini run.dir=x "${keys[@]}" \
    "${sets[@]}" checkpoint.keep_best=1 checkpoint.best_set=sky
check "the hint names one: $(tail -1 err.txt)" grep -q "^hint: the first is 'near'" err.txt
check "and nothing is left" [ ! -e x ]
expect 2 "the only one has no name" "$mt" --config tiny.ini "${keys[@]}" checkpoint.keep_best=1 checkpoint.best_set=sky

# losses of other samples are not compared with those before: the best of each sort stays, and the run says so
run unequal checkpoint.keep_best=1 train.stop_at=12
run unequal checkpoint.keep_best=1 train.eval_samples=30
check "an evaluation of more samples: $(grep warning unequal.err)" grep -q "$(printf '%s' \
    '^warning: validation losses are of 30 samples from here on, up to step 12 they were of 15: do not compare them$')" unequal.err
sort_of() { # FIRST LAST: the best step of these
    sed -n 's/^{"step":\([0-9]*\),.*"valid_loss":\([0-9.e+-]*\)[,}].*/\2 \1/p' unequal/metrics.jsonl |
        awk -v first="$1" -v last="$2" '$2 >= first && $2 <= last' | sort -g -s -k1,1 | head -1 | sed 's/.* //'
}
both=$({ sort_of 1 12; sort_of 13 24; printf '22\n24\n'; } | sort -nu | paste -sd ' ')
check "the best of 15 samples and the best of 30: $(steps unequal), not $both" [ "$(steps unequal)" = "$both" ]
run others checkpoint.keep_best=1 train.stop_at=4
run others checkpoint.keep_best=1 train.stop_at=6 data.valid=a
check "as many others: $(grep warning others.err)" \
    grep -q "^warning: validation losses are of 15 samples .* up to step 4 they were of 15 others: do not compare them$" others.err
run same checkpoint.keep_best=1 train.stop_at=4
run same checkpoint.keep_best=1 train.stop_at=6
check "the same samples: $(grep compare same.err)" eval '! grep -q compare same.err'

while IFS='|' read -r text words; do
    expect 2 "$text" "$mt" --config tiny.ini run.dir=x "${keys[@]}" $words
done <<'EOT'
keep_every must be a multiple of every|checkpoint.keep_every=3
keep_every must be a multiple of every|checkpoint.keep_every=4 checkpoint.every=0
one must divide the other|checkpoint.keep_best=1 train.eval_every=3
one must divide the other|checkpoint.keep_best=1 train.eval_every=0
one must divide the other|checkpoint.keep_best=1 checkpoint.every=0
give data.valid or data.split|checkpoint.keep_best=1 data.valid=
only keep_best goes by a validation set|checkpoint.best_set=x
EOT

# killed at file calls of two saves: the best is there, and the run that goes on leaves what a whole run leaves
kills=0
run half checkpoint.keep_best=1 train.stop_at=18
kept=$(best half 1 | cut -d" " -f1)
for at in $(seq 3 7 400); do
    rm -rf killed
    cp -r half killed
    { MEGATRAIN_FILE_FAULT=kill@$at run killed checkpoint.keep_best=1 train.stop_at=22; } 2>/dev/null
    [ $? -eq 137 ] || break
    kills=$((kills + 1))
    "$mt" inspect "$(path killed "$kept")" >/dev/null 2>&1
    check "killed at call $at: the best, of step $kept, is whole" [ $? -eq 0 ]
    run killed checkpoint.keep_best=1
    check "and goes on: $(steps killed)" [ "$(steps killed)" = "$(best killed 1)" ]
    check "without remains" [ -z "$(ls killed/checkpoints | grep -v '^step-[0-9]*$\|^LATEST$')" ]
done
check "killed $kills times" [ $kills -gt 10 ]

# A checkpoint that is removed while it is read: the newer one is taken; of one that was named it is said. At each place
# the reader stops until the run has gone on.
meanwhile() { # POINT[:N] command...: its outcome, with r's step 6 replaced by step 8 at that place
    local pid
    rm -rf r && cp -r old r
    MEGATRAIN_RANK_FAULT=0:$1:stop "${@:2}" &
    pid=$!
    until stands_still $pid; do kill -0 $pid 2>/dev/null || break; sleep 0.01; done
    cp -r new/checkpoints/step-00000008 r/checkpoints/ && mv r/checkpoints/step-00000006 r/gone
    kill -CONT $pid
    wait $pid
}
rm -rf old new
"$mt" --config tiny.ini run.dir=old checkpoint.every=0 train.stop_at=6 2>/dev/null
cp -r old new && "$mt" --config tiny.ini run.dir=new checkpoint.every=0 train.stop_at=8 2>/dev/null
removed="'r/checkpoints/step-00000006' was removed while it was read"
expect 0 "step-00000006' was removed while it was read: looking again" meanwhile inspect "$mt" inspect r
check "the newer one alone is listed" [ "$(grep -c '^step ' out.txt)" -eq 1 -a "$(grep -c '^step  *8 ' out.txt)" -eq 1 ]
for point in found read; do
    expect 0 "$removed: looking again" meanwhile $point "$mt" eval --run r
    check "the newer one is evaluated" grep -q 'weights from r/checkpoints/step-00000008' err.txt
    expect 4 "$removed (checkpoint.keep)" meanwhile $point "$mt" eval --run r --step 6
done
expect 4 "$removed (checkpoint.keep)" meanwhile inspect "$mt" inspect r/checkpoints/step-00000006
finish
