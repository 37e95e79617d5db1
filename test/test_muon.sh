#!/usr/bin/env bash
# optim.name = muon: one run in every layout and after a stop, which goes on in other layouts; fewer bytes of moments in
# memory and in checkpoints; and what is refused.
. "$(dirname "$0")/lib.sh"
make_tiny
muon=optim.name=muon
run() { "$mt" --config tiny.ini run.dir="$1" $muon train.steps=10 "${@:2}" >/dev/null 2>"$1.err"; }
ranks() { OMP_NUM_THREADS=1 "$root/scripts/launch.sh" -n "$1" -- "$mt" --config tiny.ini run.dir="$2" $muon train.steps=10 "${@:3}" >/dev/null 2>"$2.err"; }
copy() { rm -rf "$2" && cp -r "$1" "$2"; }

run plain
check "a run ends: $(grep -m1 error plain.err)" [ "$(losses plain | wc -l)" -eq 10 ]
"$mt" --config tiny.ini run.dir=adamw train.steps=10 >/dev/null 2>adamw.err
check "its first loss is adamw's" [ "$(losses plain | head -1)" = "$(losses adamw | head -1)" ]
check "and its last another, lower than the first" awk -v a="$(losses plain | head -1 | cut -f2 -d' ')" \
    -v b="$(losses plain | tail -1 | cut -f2 -d' ')" -v c="$(losses adamw | tail -1 | cut -f2 -d' ')" 'BEGIN { exit !(b < a && b != c) }'

# ---- every layout, and runs that were stopped and go on in another
run half train.stop_at=4
while read -r n name words; do
    ranks "$n" "$name" $words
    check "$name: $(grep -m1 error $name.err)" same_run "$name" plain 10
    copy half "on-$name"
    ranks "$n" "on-$name" $words
    check "stopped on one rank, gone on as $name: $(grep -m1 error on-$name.err)" [ "$(digest "on-$name" 10)" = "$(digest plain 10)" ]
done <<'EOL'
3 zero parallel.zero=1 train.micro_batch=5 parallel.overlap_param=true
4 cut parallel.tp=2 parallel.pp=2 checkpoint.async=true
6 full parallel.tp=2 parallel.zero=3 train.micro_batch=5
EOL
copy full back
rm -rf back/checkpoints/step-00000010
run back
check "three copies with weights in shards, gone on on one rank" [ "$(digest back 10)" = "$(digest plain 10)" ]

# ---- bytes
bytes() { "$mt" plan --config tiny.ini --json "$@" 2>/dev/null | grep -o "\"$figure\":[0-9]*" | head -1 | cut -d: -f2; }
figure=moments
check "plan: $(bytes $muon) bytes of moments, adamw $(bytes)" [ "$(bytes $muon)" -lt $(($(bytes) * 3 / 4)) ]
figure=total
check "a run takes what was planned" [ "$(sed -n 's/.*"memory_bytes":\([0-9]*\),.*/\1/p' plain/metrics.jsonl | head -1)" = "$(bytes $muon train.steps=10)" ]
"$mt" plan --config tiny.ini $muon >plan.txt 2>&1
check "plan says muon's share" grep -q "of muon's matrices .* % of all; the rank that owns the most has 1.00 times the mean" plan.txt
"$mt" inspect plain/checkpoints/step-00000010 >kinds.txt 2>&1
check "a matrix has one moment" grep -q 'layers.0.attn.qkv.weight .* value m$' kinds.txt
check "the embedding has two" grep -q 'embedding.token.weight .* value m v$' kinds.txt

# ---- lion, sgd: one moment of every parameter, in every layout
for name in lion sgd; do
    one="optim.name=$name optim.lr=1e-3"
    "$mt" --config tiny.ini run.dir=$name $one train.steps=6 >/dev/null 2>$name.err
    check "$name learns: $(grep -m1 error $name.err)" awk -v a="$(losses $name | head -1 | cut -f2 -d' ')" \
        -v b="$(losses $name | tail -1 | cut -f2 -d' ')" 'BEGIN { exit !(b < a) }'
    OMP_NUM_THREADS=1 "$root/scripts/launch.sh" -n 6 -- "$mt" --config tiny.ini run.dir=part $one parallel.tp=2 \
        parallel.zero=2 train.micro_batch=5 train.steps=6 train.stop_at=3 >/dev/null 2>part.err
    "$mt" --config tiny.ini run.dir=part $one train.steps=6 >/dev/null 2>>part.err
    check "$name: half on 4 ranks, half on one: $(grep -m1 error part.err)" same_run part $name 6
    rm -rf part
    check "$name: a moment is all that is kept" [ "$("$mt" inspect $name/checkpoints/step-00000006 | grep -c ' value m$')" -gt 20 ]
    check "and nothing has two" [ "$("$mt" inspect $name/checkpoints/step-00000006 | grep -c ' m v$')" = 0 ]
    figure=moments
    check "plan: half of adamw's bytes" [ $((2 * $(bytes $one))) = "$(bytes)" ]
    figure=total
    check "a run takes what was planned" \
        [ "$(sed -n 's/.*"memory_bytes":\([0-9]*\),.*/\1/p' $name/metrics.jsonl | head -1)" = "$(bytes $one train.steps=6)" ]
done

# ---- what is refused
copy adamw other
expect 4 "optim.name was 'adamw' and is 'muon'" "$mt" --config tiny.ini run.dir=other $muon train.steps=12
"$mt" --config tiny.ini run.dir=other --override optim.name $muon train.steps=12 >/dev/null 2>other.err
check "but may change where that is asked for: $(grep -m1 error other.err)" [ "$(losses other | wc -l)" -eq 12 ]
copy plain other
expect 4 "has no second moment of 'layers.0.attn.qkv.weight', which another optimizer updated" \
    "$mt" --config tiny.ini run.dir=other --override optim.name train.steps=12
expect 2 "Muon's matrices go to their owners once a step" "$mt" plan --config tiny.ini --world 2 parallel.pp=2 \
    parallel.schedule=pipedream optim.clip=0 model.tied=false $muon
expect 2 "muon, lion and sgd keep their moment in fp32" "$mt" plan --config tiny.ini $muon optim.moments=bf16

# ---- in 16 bits: not the bits of other layouts, but those of its own again
run narrow run.precision=bf16
run again run.precision=bf16
check "bf16 repeats: $(grep -m1 error narrow.err)" same_run again narrow 10
ranks 2 apart run.precision=bf16 train.global_batch=18
ranks 2 apart2 run.precision=bf16 train.global_batch=18
check "on two ranks, too: $(grep -m1 error apart.err)" same_run apart2 apart 10
finish
