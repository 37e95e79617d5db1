#!/usr/bin/env bash
# data.train in stages: other data from a step on, with a batch ramp beside it, resumed to the bit in every layout.
. "$(dirname "$0")/lib.sh"
make_tiny
for i in 1 2 3 4 5 6; do tac text.txt; echo; done >other.txt
"$mt" preprocess --input other.txt --tokenizer byte --output c --append-eod >/dev/null 2>&1 || bad "preprocess"
sed -i 's/^global_batch = 15/global_batch = 6*10,12/; s/^steps = 40/steps = 24/; s/^train = a/train = a @9 0.5 a 0.5 c @17 c/' tiny.ini
run() { "$mt" --config tiny.ini run.dir="$1" "${@:2}" >/dev/null 2>"$1.err"; }
ranks() { "$root/scripts/launch.sh" -n "$1" -- "$mt" --config tiny.ini run.dir="$2" "${@:3}" >/dev/null 2>"$2.err"; }

"$mt" config check --config tiny.ini >out.txt 2>err.txt
check "config check finds nothing amiss: $(cat out.txt err.txt)" [ "$(cat out.txt err.txt)" = "tiny.ini: ok on 1 rank (more ranks were not checked: --world N)" ]

run whole
check "24 steps: $(grep -m1 error whole.err)" [ "$(losses whole | wc -l)" -eq 24 ]
check "the log says when: $(grep 'data.train' whole.err)" [ "$(grep '^from step.*data.train' whole.err)" = "from step 9 on: data.train is '0.5 a 0.5 c'
from step 17 on: data.train is 'c'" ]
run first data.train=a
check "the first stage is that data alone" [ "$(losses whole | head -8)" = "$(losses first | head -8)" ]
check "the second is not: $(losses whole | sed -n 9p), $(losses first | sed -n 9p)" [ "$(losses whole | sed -n 9p)" != "$(losses first | sed -n 9p)" ]
run two data.train="a @9 0.5 a 0.5 c"
check "a later stage changes nothing before it" [ "$(losses whole | head -16)" = "$(losses two | head -16)" ]
check "and something after" [ "$(losses whole | sed -n 17p)" != "$(losses two | sed -n 17p)" ]
"$mt" inspect whole/checkpoints/step-00000024 >inspect.txt
check "a checkpoint names all files and where they begin" [ "$(grep -c 'from sample [0-9]* on$' inspect.txt)" -eq 2 ]
check "at the samples that the batches give" grep -q 'from sample 48 on$' inspect.txt
check "over the ramp" grep -q 'from sample 132 on$' inspect.txt

for at in 4 8 9 12 16 20; do
    run at$at train.stop_at=$at
    run at$at
    check "stopped after step $at, then to the end" same_run at$at whole 24
done
n=0
for l in "2 parallel.tp=2" "2 parallel.zero=1 parallel.overlap_grad=true" "2 parallel.pp=2 parallel.schedule=1f1b"; do
    n=$((n + 1)) at=$((4 + 5 * n))
    both_ways $n $at 24 ${l%% *} ${l#* }
done

# ---- a run that began without gets a stage
run late data.train=a train.stop_at=8
expect 4 "the training data is not the checkpoint's" "$mt" --config tiny.ini run.dir=late
run late --override data.train
check "overridden, the run is the staged one: $(grep -m1 error late.err)" same_run late whole 24
run again
expect 4 "the training data is not the checkpoint's" "$mt" --config tiny.ini run.dir=again train.steps=25 data.train="a @9 0.5 a 0.5 c @18 c"

# ---- refused
expect 2 "'@4' in data.train: each stage must begin at a later step" "$mt" --config tiny.ini data.train="a @9 c @4 a"
check "with an example: $(tail -1 err.txt)" grep -q 'hint: `web @9001' err.txt
for command in "config check" plan ""; do
    expect 2 "data.order=megatron is an order of one data set" "$mt" $command --config tiny.ini data.order=megatron
done
# each order has its own blends: the check opens the data as the run does
rare=(data.train="0.0000001 a 1 c" run.dir=rare train.stop_at=2)
expect 2 "less than 1/1048576 of all weights" "$mt" config check --config tiny.ini "${rare[@]}"
expect 0 "tiny.ini: ok" "$mt" config check --config tiny.ini "${rare[@]}" data.order=megatron
expect 0 "done: step 2" "$mt" --config tiny.ini "${rare[@]}" data.order=megatron
expect 2 "stages need data.valid, not data.split" "$mt" --config tiny.ini data.valid= data.split=90,10
expect 2 "only training data have stages" "$mt" --config tiny.ini data.valid="b @9 c"
expect 3 "'gone.idx'" "$mt" --config tiny.ini data.train="a @9 gone"
finish
