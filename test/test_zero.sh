#!/usr/bin/env bash
# ZeRO-2, ZeRO-3 and groups of ZeRO as processes: checkpoints and losses are those of one rank (in all layouts: test_array),
# evaluations between steps, a thread that writes, and runs that one kind begins and another goes on with; what is refused.
. "$(dirname "$0")/lib.sh"
make_tiny
common=(train.global_batch=8 train.eval_every=2 optim.lr=0.01 model.attention_dropout=0
    parallel.seq_blocks=8 parallel.attn_block=8)
make_ini dense.ini model.layers=4 model.hidden=64 model.heads=4 model.seq=64 model.dropout=0.1 train.steps=4 "${common[@]}"
make_ini mixture.ini model.arch=llama model.layers=4 model.hidden=64 model.heads=4 model.ffn=32 model.seq=64 \
    model.bias=false moe.experts=4 moe.shared_ffn=32 model.mtp_layers=1 model.tied=true train.steps=4 "${common[@]}"

seen() { # FOLDER: digest and losses
    "$mt" inspect "$1/checkpoints/step-00000004" 2>/dev/null | grep -i digest
    grep -oE '"(valid_)?loss":[0-9.]+' "$1/metrics.jsonl"
}
launch() { # MODEL DIR RANKS KEY=VALUE...
    local start=()
    [ "$3" = 1 ] || start=("$root/scripts/launch.sh" -n "$3" --)
    "${start[@]}" "$mt" --config "$1.ini" run.dir="$2" train.micro_batch=1 "${@:4}" >/dev/null 2>err.txt || bad "$*: $(grep -m1 error err.txt)"
}

while read -r model ranks keys; do
    # shellcheck disable=SC2086
    launch "$model" run "$ranks" $keys
    [ -f "$model.txt" ] || seen run >"$model.txt"
    seen run >seen.txt
    check "$model, $ranks ranks, $keys: $(diff "$model.txt" seen.txt | head -3)" cmp -s "$model.txt" seen.txt
    rm -rf run
done <<'EOT'
dense 1
dense 4 parallel.zero=3 parallel.pp=2 parallel.reshard=always parallel.schedule=dualpipe checkpoint.async=true
mixture 1
mixture 4 parallel.zero=3 parallel.zero_group=2 parallel.ep=2
EOT
launch dense whole 1
check "a digest, losses of steps and of evaluations" [ "$(wc -l <dense.txt)" -ge 7 -a "$(wc -l <mixture.txt)" -ge 7 ]

# each kind goes on with what another began
launch dense on 2 parallel.zero=3 train.stop_at=1
launch dense on 4 parallel.zero=3 parallel.zero_group=2 train.stop_at=2
launch dense on 4 parallel.zero=2 parallel.pp=2 parallel.schedule=chimera train.micro_batch=2 train.stop_at=3
launch dense on 4 parallel.zero=3 parallel.reshard=always parallel.pp=2 parallel.schedule=dualpipe
check "begun with one kind, ended with another" same_run on whole 4

# what ranks keep: with two of them half of the matrices' values and gradients, and buffers of two units
memory() { "$mt" plan --config dense.ini --world 2 --json parallel.zero="$1" "${@:2}" 2>/dev/null; }
for zero in 1 2 3; do memory $zero >plan$zero.json; done
check "shards of values and gradients, and two units of each: $(python3 - 2>&1 <<'EOP'
import json
rank = [json.load(open(f"plan{z}.json"))["ranks"][0] for z in (1, 2, 3)]
memory = [r.get("memory", r) for r in rank]
D, T, V = 64, 64, 257
matrices = 4 * 12 * D * D  # (tables are padded; what is said of them is a bound)
block = 12 * D * D
def half(a, b, kind, size, buffers):
    less = memory[a][kind] - memory[b][kind]
    assert size * (matrices + V * D) // 2 <= less <= size * (matrices + (V + 1024 + T) * D) // 2, (kind, less)
half(0, 1, "gradients", 8, 2)
half(1, 2, "weights", 4, 2)
assert memory[0]["weights"] == memory[1]["weights"] and memory[1]["gradients"] == memory[2]["gradients"]
assert all(m["moments"] == memory[0]["moments"] for m in memory)
unit = memory[1]["unit_buffers"] // 16  # two of gradients, in 64 bits
assert unit * 16 == memory[1]["unit_buffers"] and unit >= block, unit
assert memory[2]["unit_buffers"] == unit * 2 * (8 + 4), memory[2]["unit_buffers"]
EOP
)" [ $? -eq 0 ]
check "what plan says of a pipeline: as with zero=2" \
    [ "$("$mt" plan --config dense.ini --world 4 --json parallel.zero=3 parallel.pp=2 2>/dev/null | grep -c unit_buffers)" -ge 1 ]

# each action's units are gathered while it runs, each once: 4 blocks, the table, which is the head's too, twice
launch dense traced 2 parallel.zero=3 log.trace_steps=2 train.stop_at=2 data.valid= train.micro_batch=4
check "calls of a step: $(python3 - 2>&1 <<'EOP'
import json
spans = [e for e in json.load(open("traced/timeline.json")) if e.get("ph") == "X" and e["pid"] == 0]
count = lambda name: sum(e["name"] == name for e in spans)
steps = count("step")
gathers, sums = count("all-gather"), count("reduce-scatter-i64")
# forward: the table, 4 blocks, the table again; backward: the table and block 4 are there, then 3 blocks; and, once a
# step, what stays whole, in two buckets: biases, and what is partial over rows
assert gathers == steps * (6 + 3 + 2), (gathers, steps)
# 4 blocks, the table twice, and what stays whole
assert sums == steps * (4 + 2 + 2), (sums, steps)
EOP
)" [ $? -eq 0 ]

# what is sent beside ops is part of what is sent, however many micro-batches there are; searches with these keys, given
# and in the file, which leaves them where it looks for others
beside() { memory "$1" train.global_batch=128 train.micro_batch=1 | python3 -c '
import json, sys
text = sys.stdin.read()
rank = json.loads(text)["ranks"][0]
work = rank.get("work", rank)
sys.exit(not 0 < work["comm_beside_ops"] <= work["comm_bytes"])'; }
for zero in 2 3; do check "zero=$zero: sent beside ops is sent" beside $zero; done
sed 's/^\[parallel\]/[parallel]\nzero = 3\nreshard = always\nzero_group = 2/' dense.ini >file.ini
for keys in "dense.ini parallel.zero=1 parallel.zero_group=2" "dense.ini parallel.zero=3" "file.ini"; do
    # shellcheck disable=SC2086
    check "a search of $keys: $("$mt" plan --world 8 --device h100 --search --config $keys 2>&1 | grep -m1 error)" \
        sh -c '"$@" >/dev/null 2>&1' - "$mt" plan --world 8 --device h100 --search --config $keys
done

expect 2 "schedule 'pipedream' keeps older weights" "$mt" plan --config dense.ini --world 4 parallel.zero=3 parallel.pp=2 \
    parallel.reshard=always parallel.schedule=pipedream run.reproducible=run optim.clip=0 model.tied=false
expect 2 "zero_group = '3'" "$mt" plan --config dense.ini --world 4 parallel.zero=2 parallel.zero_group=3
expect 2 "zero_group = '8'" "$mt" plan --config dense.ini --world 4 parallel.zero=2 parallel.zero_group=8
finish
