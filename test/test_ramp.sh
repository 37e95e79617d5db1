#!/usr/bin/env bash
# train.global_batch as a ramp: what each step reads, and that a run with one is resumed to the bit, in every layout.
. "$(dirname "$0")/lib.sh"
make_tiny
sed -i 's/^global_batch = 15/global_batch = 6*10,12*8,24/; s/^steps = 40/steps = 24/' tiny.ini
run() { "$mt" --config tiny.ini run.dir="$1" "${@:2}" >/dev/null 2>"$1.err"; }
ranks() { "$root/scripts/launch.sh" -n "$1" -- "$mt" --config tiny.ini run.dir="$2" "${@:3}" >/dev/null 2>"$2.err"; }
tokens() { sed -n 's/^{"step":\([0-9]*\),"tokens":\([0-9]*\),"loss".*/\1 \2/p' "$1/metrics.jsonl"; }
samples() { "$mt" inspect "$1/checkpoints/step-$(printf %08d "$2")" 2>/dev/null | sed -n 's/^step .* samples \([0-9]*\) .*/\1/p'; }

# ---- the whole run: what it counts, what it says
run whole
check "24 steps: $(grep -m1 error whole.err)" [ "$(losses whole | wc -l)" -eq 24 ]
want=$(seq 24 | awk '{ sum += 32 * ($1 <= 10 ? 6 : $1 <= 18 ? 12 : 24); print $1, sum }')
check "tokens of each step" [ "$(tokens whole)" = "$want" ]
check "the position in the data: $(samples whole 14), $(samples whole 24)" [ "$(samples whole 14)-$(samples whole 24)" = 108-300 ]
check "the log says when: $(grep -c '^from step' whole.err)" [ "$(grep '^from step' whole.err)" = "from step 11 on: global batches of 12 samples, before 6
from step 19 on: global batches of 24 samples, before 12" ]
rate() { sed -n 's/.*"lr":\([^,]*\),.*/\1/p' "$1/metrics.jsonl"; }
run flat train.global_batch=6
check "the learning rate counts steps" [ "$(rate whole)" = "$(rate flat)" ]
check "the same samples: the loss of step 1" [ "$(losses whole | head -1)" = "$(losses flat | head -1)" ]
run length train.tokens=$((300 * 32)) train.steps=0
check "train.tokens: as many steps as have them" same_run length whole 24
"$mt" plan --config tiny.ini >plan.txt
check "the plan is of the largest step: $(grep '^step' plan.txt)" grep -q '^step    24 samples, 768 tokens; 24 steps$' plan.txt
check "and says so" grep -q '^ramp    train.global_batch = 6\*10,12\*8,24' plan.txt

# ---- stopped anywhere, gone on with in any layout
for at in 5 10 11 18 19; do
    run at$at train.stop_at=$at
    run at$at train.micro_batch=$((at % 2 ? 6 : 1))
    check "stopped after step $at, then to the end" same_run at$at whole 24
done
layouts=("2 parallel.tp=2" "2 parallel.zero=1 parallel.overlap_grad=true parallel.overlap_param=true" "4 parallel.tp=2 parallel.pp=2"
    "2 parallel.pp=2 parallel.schedule=1f1b train.micro_batch=1" "2 parallel.pp=2 parallel.schedule=gpipe train.micro_batch=1"
    "2 parallel.pp=2 parallel.schedule=zb-h1 train.micro_batch=2")
n=0
for l in "${layouts[@]}"; do
    n=$((n + 1)) at=$((7 + 3 * n))
    both_ways $n $at 24 ${l%% *} ${l#* }
done
# deeper pipelines, several chunks a rank, both directions: micro-batches are left out of the list
deep=(model.layers=8)
run deep "${deep[@]}"
for s in interleaved zb-v dualpipe dualpipev; do
    more=()
    [ $s != interleaved ] || more=(parallel.vpp=2 train.micro_batch=1)
    [ $s != dualpipe ] || more=(train.micro_batch=1)
    ranks 2 $s "${deep[@]}" parallel.pp=2 parallel.schedule=$s "${more[@]}"
    check "schedule $s: $(grep -m1 error $s.err)" same_run $s deep 24
done
run spiky debug.extra_shift=24
check "steps done again with a coarser fixed point read their batch again: $(grep -c 'done again' spiky.err)" \
    [ "$(losses spiky | wc -l)-$(tokens spiky | tail -1)" = "24-24 9600" -a "$(grep -c 'done again' spiky.err)" -ge 1 ]

# ---- a ramp that a run gets on its way: it must say what was done
run late train.global_batch=6 train.stop_at=10
expect 4 "train.global_batch was '6' and is '6*10,12*8,24'" "$mt" --config tiny.ini run.dir=late
expect 4 "train.global_batch = '12' is 120 samples in the first 10 steps, the checkpoint's run had 60" \
    "$mt" --config tiny.ini run.dir=late train.global_batch=12 --override train.global_batch
check "and says how: $(tail -1 err.txt)" grep -q 'hint: .*train.global_batch=6\*10,12$' err.txt
ranks 2 late --override train.global_batch parallel.tp=2
check "overridden, the run is the ramp's: $(grep -m1 error late.err)" [ "$(tokens late)" = "$(tokens whole)" ]
run twin train.global_batch=6 train.stop_at=10
run twin --override train.global_batch
check "in every layout" same_run late twin 24

# ---- refused
expect 2 "train.global_batch = '6*10,12*8'" "$mt" --config tiny.ini train.global_batch=6*10,12*8
expect 2 "a multiple of micro_batch x dp" "$mt" --config tiny.ini train.global_batch=4*10,12
expect 2 "its updates have batches of one size" "$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini parallel.pp=2 \
    parallel.schedule=2bw optim.clip=0 model.tied=false
finish
