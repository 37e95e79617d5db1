#!/usr/bin/env bash
# Errors that other trainers have had where two ways to cut a model meet, as far as test_array has no layout for them
# (docs/combinations.md): what one layout leaves another goes on with, to the losses, gradient norms, weights and moments of
# one rank; evaluations and figures; experts that get no token decay. All models have dropout and a clipped norm.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
make_tiny
base=(model.arch=llama model.layers=2 model.hidden=32 model.heads=4 model.ffn=64 model.seq=32 model.dropout=0.1
    train.steps=3 train.global_batch=8 train.eval_every=0 optim.lr=0.01 parallel.seq_blocks=4 parallel.tp_blocks=4)
mixture=(moe.experts=8 moe.ffn=16)
model() { # NAME KEY=VALUE...: a later value takes the place of an earlier one
    make_ini "$1.ini" $(printf '%s\n' "${base[@]}" "${@:2}" | awk -F= '{ of[$1] = $0 } END { for (k in of) print of[k] }')
}
model norms model.qk_norm=true model.kv_heads=2
model words model.vocab=263 model.tied=false
model aux "${mixture[@]}" moe.balance=aux moe.z_coeff=0.001
model bias "${mixture[@]}" moe.router=sigmoid moe.balance=bias moe.shared_ffn=16 moe.shared_gate=true
model rare "${mixture[@]}" moe.topk=1 model.seq=8 train.global_batch=2 parallel.seq_blocks=2
model gated optim.name=muon model.attention_gate=true model.kv_heads=2
model few
model masked data.mask_eod=true data.reset_at_eod=true

for i in $(seq 1 400); do # documents of very different lengths: ranks have unequally many tokens that count
    printf '{"text": "%s"}\n' "$(printf 'x%.0s' $(seq 1 $((i * i % 61 + 1))))"
done >docs.jsonl
sed -i 's/^train=a$/train=docs/' masked.ini
sed -i 's/^train=a$/train=few/' few.ini
"$mt" preprocess --input docs.jsonl --tokenizer byte --output docs --append-eod >/dev/null 2>err.txt || bad "preprocess: $(tail -1 err.txt)"

head -20 docs.jsonl >few.jsonl # fewer samples than three steps take, so the last is of the second epoch
"$mt" preprocess --input few.jsonl --tokenizer byte --output few --append-eod >/dev/null 2>err.txt || bad "preprocess: $(tail -1 err.txt)"

# run DIR RANKS MODEL KEY=VALUE...
run() {
    local start=() keys=(optim.clip=0.1)
    [[ " $* " == *" optim.clip="* ]] && keys=()
    [[ " $* " == *" train.micro_batch="* ]] || keys+=(train.micro_batch=1)
    [ "$2" = 1 ] || start=("$root/scripts/launch.sh" -n "$2" --)
    timeout 600 "${start[@]}" "$mt" --config "$3.ini" run.dir="$1" "${keys[@]}" "${@:4}" >/dev/null 2>"$1.err"
}
whole() { [ -d "whole-$1" ] || run "whole-$1" 1 "$1"; } # the run of one rank, once

# begun in one layout, gone on with in another, ended in a third: states of ZeRO, of stages, of experts, halves of SwiGLU,
# rows of the vocabulary, the place in the data
while IFS='|' read -r name first second third; do
    read -r name <<<"$name"
    n=1
    whole "$name"
    for keys in "$first" "$second" "$third"; do
        read -r ranks keys <<<"$keys"
        # shellcheck disable=SC2086
        run moved "$ranks" "$name" $keys train.stop_at=$n
        n=$((n + 1))
    done
    check "$name:$first, then$second, then$third: $(grep -m1 error moved.err)" same_run moved "whole-$name" 3
    rm -rf moved
done <<'EOT'
norms | 4 parallel.pp=2 parallel.zero=3  | 2 parallel.zero=3             | 2 parallel.pp=2 parallel.vpp=1
words | 2 parallel.tp=2                  | 1                             | 4 parallel.tp=4 parallel.sp=false
aux   | 2 parallel.ep=2 parallel.zero=2  | 1                             | 4 parallel.tp=2 parallel.ep=4
gated | 4 parallel.zero=3                | 2 parallel.tp=2 parallel.zero=1 | 4 parallel.pp=2 parallel.zero=2
few   | 2 parallel.zero=1                | 1 train.micro_batch=4         | 2 parallel.pp=2
bias  | 4 parallel.pp=2 parallel.ep=2    | 2 parallel.zero=3 parallel.ep=2 | 2 parallel.tp=2 parallel.ep=2
EOT

whole masked
# an evaluation is of its set, whatever the batch, the masks and the run's state are; rates end; figures are the step's
eval_of() { "$mt" eval --run whole-masked data.valid=few --json "$@" 2>/dev/null; }
eval_of >few.1
for words in train.micro_batch=4 train.global_batch=24; do
    eval_of $words >few.2
    check "an evaluation with $words: $(cat few.2)" [ -s few.1 -a "$(cat few.1)" = "$(cat few.2)" ]
done
run still 1 masked data.valid=few train.eval_every=1 optim.lr=1e-30 optim.warmup=0
check "evaluations of a run that learns nothing: $(grep -c valid_loss still/metrics.jsonl)" \
    [ "$(sed -n 's/.*"valid_loss":\([0-9.]*\),.*/\1/p' still/metrics.jsonl | sort | uniq -c | awk '{ print $1 }')" = 3 ]
run ends 1 norms train.steps=4 optim.decay_steps=2 optim.warmup=0 optim.min_lr=0.003
check "a learning rate past its end: $(grep -o '"lr":[^,]*' ends/metrics.jsonl | xargs)" \
    [ "$(grep -c '"step":[34],.*"lr":0.00[23][09]*[0-9]*,' ends/metrics.jsonl)" -eq 2 ]
run stages 2 norms parallel.pp=2
why=$(/usr/bin/python3 - whole-norms stages 2>&1 <<'EOP'
import json, sys
flop = []
for run, ranks in zip(sys.argv[1:], (1, 2)):
    for m in map(json.loads, open(f"{run}/metrics.jsonl")):
        if "tflops" in m:
            assert abs(m["tokens_per_s"] * m["step_ms"] / 1e3 / (8 * 32) - 1) < 1e-6, f"{run}: tokens of another step"
            flop.append(m["tflops"] * ranks / m["tokens_per_s"])
assert len(flop) == 6 and max(flop) <= min(flop) * (1 + 1e-6), flop
EOP
)
check "tokens and FLOP of a step, of the whole model: $why" [ -z "$why" ]

# experts without tokens: some there are, and their weights only decay, in each layout the same
for case in "one 1" "spread 2 parallel.ep=2 parallel.zero=1"; do
    read -r dir ranks keys <<<"$case"
    # shellcheck disable=SC2086
    run $dir "$ranks" rare $keys train.stop_at=1 optim.warmup=0 optim.schedule=constant optim.weight_decay=0.5
done
run start 1 rare train.stop_at=1 optim.warmup=0 optim.schedule=constant optim.lr=0
why=$(/usr/bin/python3 - start one spread 2>&1 <<'EOP'
import array, glob, json, sys
def tensors(run):
    out = {}
    for name in glob.glob(f"{run}/checkpoints/step-00000001/*.safetensors"):
        data = open(name, "rb").read()
        n = int.from_bytes(data[:8], "little")
        for key, t in json.loads(data[8:8 + n]).items():
            if key.endswith("experts.fc1.weight") and "@" not in key and not key.startswith(("m.", "v.")):
                begin, end = t["data_offsets"]
                out.setdefault(key, array.array("f")).extend(array.array("f", data[8 + n + begin:8 + n + end]))
    return out
start, one = tensors(sys.argv[1]), tensors(sys.argv[2])
idle = busy = 0
assert start, "no experts"
for key, before in start.items():
    after, size = one[key], len(before) // 8
    for e in range(8):
        part = [(before[i], after[i]) for i in range(e * size, (e + 1) * size)]
        only = all(abs(b - a * (1 - 0.01 * 0.5)) <= 2e-7 * abs(a) for a, b in part)
        idle += only
        busy += not only
assert idle and busy, f"{idle} experts decay only, {busy} learn"
EOP
)
check "experts without tokens decay: $why" [ -z "$why" ]
check "in each layout alike" [ -n "$(digest one 1)" -a "$(digest one 1)" = "$(digest spread 1)" ]
finish
