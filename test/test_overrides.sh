#!/usr/bin/env bash
# train --override: keys that may differ from the checkpoint that a run goes on from. What is named changes from that
# step on, in every layout to the same bits, and is told in the log, the metrics and later manifests; what is not named,
# not known or not needed is refused.
. "$(dirname "$0")/lib.sh"
make_tiny
run() { "$mt" --config tiny.ini run.dir="$1" "${@:2}" >/dev/null 2>"$1.err"; }
ranks() { "$root/scripts/launch.sh" -n "$1" -- "$mt" --config tiny.ini run.dir="$2" "${@:3}" >/dev/null 2>"$2.err"; }
copy() { rm -rf "$2" && cp -r "$1" "$2"; }
lines() { sed -n 's/^{"step":\([0-9]*\),"override":"\([^"]*\)","was":"\([^"]*\)","is":"\([^"]*\)","time":[0-9.]*}$/\1 \2 \3 \4/p' "$1/metrics.jsonl"; }
kept() { "$mt" inspect "$1/checkpoints/step-$(printf %08d "$2")" 2>/dev/null | sed -n '/^overrides/,/^updates/{/^updates/d;s/^[a-z]* *//;p}'; }

run plain train.steps=20
run base train.steps=20 train.stop_at=10
new=(train.steps=20 optim.lr=1e-3 optim.clip=0.5)

# ---- what is refused
copy base bad
expect 4 "optim.lr was '0.003' and is '0.001'; optim.clip was '1' and is '0.5'" "$mt" --config tiny.ini run.dir=bad "${new[@]}"
check "and says how it may: $(tail -1 err.txt)" grep -q 'hint:.*--override' err.txt
expect 4 "configuration: optim.clip was '1' and is '0.5'" "$mt" --config tiny.ini run.dir=bad --override optim.lr "${new[@]}"
expect 2 "--override: there is no key 'optim.lrr'" "$mt" --config tiny.ini run.dir=bad --override optim.clip,optim.lrr "${new[@]}"
check "with the nearest: $(tail -1 err.txt)" grep -q "did you mean 'optim.lr'" err.txt
expect 2 "--override: there is no key ''" "$mt" --config tiny.ini run.dir=bad --override optim.lr, "${new[@]}"
expect 2 "--override: 'train.stop_at' may change on resume without it" "$mt" --config tiny.ini run.dir=bad --override train.stop_at "${new[@]}"
expect 2 "--override: 'optim.beta1' does not differ from the checkpoint's: '0.9'" "$mt" --config tiny.ini run.dir=bad --override optim.lr,optim.clip,optim.beta1 "${new[@]}"
expect 2 "--override: 'data.train' does not differ from the checkpoint's: 'a'" "$mt" --config tiny.ini run.dir=bad --override data.train train.steps=20
expect 2 "there is no checkpoint that 'optim.lr' could differ from" "$mt" --config tiny.ini run.dir=none --override optim.lr "${new[@]}"
check "a start that was refused leaves nothing" [ ! -e none ]
expect 4 "has shape" "$mt" --config tiny.ini run.dir=bad --override model.hidden,model.head_dim,model.ffn model.hidden=64 train.steps=20
check "nothing of this has changed the run: $(ls bad/checkpoints | xargs)" cmp -s base/metrics.jsonl bad/metrics.jsonl
copy base differ
ranks 2 differ "${new[@]}" train.micro_batch=5 train.global_batch=15 parallel.tp=2
check "several ranks refuse it once: $(grep -c '^megatrain: error' differ.err)" [ "$(grep -c '^megatrain: error' differ.err)" -eq 1 ]

# ---- what is named changes, from that step on, in every layout
copy base one
run one --override optim.lr --override=optim.clip "${new[@]}" # the option given twice names both
check "a run goes on with another learning rate: $(grep -m1 error one.err)" [ "$(losses one | wc -l)" -eq 20 ]
check "the steps before are the same" [ "$(losses one | head -10)" = "$(losses plain | head -10)" ]
check "step 11, too: it begins with the same weights" [ "$(losses one | sed -n 11p)" = "$(losses plain | sed -n 11p)" ]
check "those after are not" [ "$(losses one | tail -9)" != "$(losses plain | tail -9)" ]
rate() { sed -n "s/^{\"step\":$2,.*\"lr\":\([^,]*\),.*/\1/p" "$1/metrics.jsonl"; }
check "a third of the learning rate: $(rate one 11) of $(rate plain 11)" \
    awk "BEGIN { r = ($(rate one 11) - 3e-4) / ($(rate plain 11) - 3e-4); exit !(r > 0.25 && r < 0.27) }"
for i in "2 tp parallel.tp=2 train.micro_batch=5" "3 dp parallel.zero=1 train.micro_batch=5"; do
    name=${i#* } name=${name%% *}
    copy base $name
    ranks ${i%% *} $name --override optim.lr,optim.clip "${new[@]}" ${i#* * }
    check "the same on ranks, $name: $(grep -m1 error $name.err)" same_run $name one 20
done

# ---- it is told
want="11 optim.lr 0.003 0.001
11 optim.clip 1 0.5"
manifest="from step 11 on: optim.lr was '0.003' and is '0.001'
from step 11 on: optim.clip was '1' and is '0.5'"
check "in the log" [ "$(sed -n 's/^\(from step.*\)/\1/p' one.err)" = "$manifest" ]
check "in the metrics: $(lines one)" [ "$(lines one)" = "$want" ]
check "and by rank 0 alone: $(lines tp)" [ "$(lines tp)" = "$want" ]
check "in later manifests: $(kept one 14)" [ "$(kept one 14)" = "$manifest" -a "$(kept one 20)" = "$manifest" -a -z "$(kept one 7)" ]

# ---- stopped on the way: the same command goes on, and one that has the values in its configuration
copy base half
run half --override optim.lr,optim.clip "${new[@]}" train.stop_at=12
run half --override optim.lr,optim.clip "${new[@]}" train.stop_at=15
check "the same command goes on: $(grep -m1 error half.err)" [ "$(losses half | wc -l)" -eq 15 ]
run half "${new[@]}"
check "and without the option" same_run half one 20
# ---- the table of docs/checkpoints.md has every member of this manifest, which has all there are, and no other
names() { python3 "$root/test/tools/check_names.py" "$root/docs/checkpoints.md" '## The manifest' "$@"; }
check "members of a manifest: $(names one/checkpoints/step-00000020/manifest.json | xargs)" \
    names one/checkpoints/step-00000020/manifest.json >names.txt
check "a member that is missing is noticed: $(names plain/checkpoints/step-00000020/manifest.json | xargs)" \
    [ "$(names plain/checkpoints/step-00000020/manifest.json | sed -n 1p)" = "overrides: only in the table" ]

check "it is told once: $(lines half | xargs)" [ "$(lines half)" = "$want" -a "$(kept half 20)" = "$manifest" ]
run half train.steps=22 optim.lr=1e-3 optim.clip=0.5 --override optim.lr
check "an override of an earlier start is none of this one" [ "$(lines half)" = "$want" ]
copy base killed
MEGATRAIN_RANK_FAULT=0:step:3:kill run killed --override optim.lr,optim.clip "${new[@]}" checkpoint.every=0 2>/dev/null
check "killed before it could save: $(lines killed | xargs)" [ "$(lines killed)" = "$want" ]
run killed --override optim.lr,optim.clip "${new[@]}"
check "it begins again where it was, and says so once" same_run killed one 20
check "once: $(lines killed | xargs)" [ "$(lines killed)" = "$want" ]
copy one twice
run twice train.steps=25 optim.lr=1e-4 optim.min_lr=1e-5 optim.clip=0.5 --override optim.lr,optim.min_lr
check "a second time: the manifest has all" [ "$(kept twice 25 | wc -l)" -eq 4 -a "$(kept twice 25 | head -2)" = "$manifest" ]
check "a report reads it" "$mt" report twice --output page.html 2>report.err
check "and has nothing to complain of: $(head -1 report.err)" [ ! -s report.err ]

# ---- other data, from the same position on
copy base data
expect 4 "the training data is not the checkpoint's" "$mt" --config tiny.ini run.dir=data train.steps=20 data.train=b
run data train.steps=20 data.train=b --override data.train
check "a run goes on with other data: $(grep -m1 error data.err)" [ "$(lines data)" = "11 data.train a b" ]
check "what is passed over is said" grep -q "the first 150 samples of the new data.train are passed over" data.err
# or from the new data's first sample on; the same in two pieces
start=(train.steps=20 data.train=b data.start=0)
for d in one-start two-start; do copy base $d; done
run one-start "${start[@]}" --override data.train
check "nothing is passed over: $(grep -m1 error one-start.err)" [ "$(grep -c 'passed over' one-start.err)" -eq 0 ]
run two-start "${start[@]}" --override data.train train.stop_at=15
run two-start "${start[@]}" --override data.train
check "data.start in two pieces: $(grep -m1 error two-start.err)" same_run one-start two-start 20
check "and other samples than those behind" [ "$(losses one-start)" != "$(losses data)" ]
cp -r one-start staged-later
run staged-later train.steps=22 data.train='b @22 a' --override data.train
check "stages begin by steps, too, where older data began elsewhere: $(grep -m1 error staged-later.err)" \
    grep -q "the first 300 samples of the new data.train are passed over" staged-later.err
expect 2 "stages begin by the steps" "$mt" --config tiny.ini run.dir=staged data.train='a @3 b' data.start=0
check "these are read" [ "$(losses data | sed -n 11p)" != "$(losses plain | sed -n 11p)" ]
copy base seed
run seed train.steps=20 data.seed=5 --override data.seed
check "another order of the same data: $(grep -m1 error seed.err)" [ "$(lines seed)" = "11 data.seed 1234 5" ]
copy base both
expect 4 "a token file" "$mt" --config tiny.ini run.dir=both train.steps=20 data.seed=5 data.train=b --override data.seed
finish
