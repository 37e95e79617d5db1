#!/usr/bin/env bash
# Mixtures that begin as a dense model, its biases included: what they compute before their first step is what the dense
# model does, to the bit where one expert is a whole copy, near it where parts of it or weights of several are added; the
# same on any ranks; and what is refused, with which words.
. "$(dirname "$0")/lib.sh"
make_tiny
cat >dense.ini <<'EOI'
[run]
device = cpu
[model]
arch = llama
layers = 2
hidden = 32
heads = 8
kv_heads = 2
ffn = 64
seq = 32
bias = true
[parallel]
tp_blocks = 4
[train]
micro_batch = 4
global_batch = 8
steps = 60
eval_every = 0
[optim]
lr = 1e-2
warmup = 4
[data]
train = a
valid = a
[checkpoint]
every = 0
EOI
"$mt" --config dense.ini run.dir=dense >/dev/null 2>dense.err
check "the dense model learns: $(tail -1 dense.err)" \
    awk 'NR == 1 { first = $2 } END { exit !($2 < first - 0.5) }' <(losses dense)

loss_of() { grep -oE 'loss [0-9.]+' "$1" | head -1; } # of eval's output
mixture=(checkpoint.load=dense checkpoint.upcycle=true moe.balance=none)
eval_of() { # NAME WORDS...
    "$mt" eval --config dense.ini run.dir="$1" "${mixture[@]}" "${@:2}" >"$1.txt" 2>&1
}
"$mt" eval --config dense.ini run.dir=dense >dense.txt 2>&1
check "the dense model is evaluated: $(tail -1 dense.txt)" [ -n "$(loss_of dense.txt)" ]
whole=(moe.experts=4 moe.topk=1 moe.router=softmax moe.ffn=64)
parts=(moe.experts=16 moe.topk=4 moe.router=softmax moe.ffn=32)
all=(moe.experts=8 moe.topk=4 moe.router=softmax_pre moe.normalize=false moe.ffn=32 moe.scale=2)
eval_of whole "${whole[@]}"
check "one whole copy for a token: $(loss_of whole.txt), $(loss_of dense.txt)" \
    [ "$(loss_of whole.txt)" = "$(loss_of dense.txt)" ]
near_dense() { # NAME TOLERANCE
    awk -v a="$(loss_of "$1.txt" | cut -d' ' -f2)" -v b="$(loss_of dense.txt | cut -d' ' -f2)" -v tol="$2" \
        'BEGIN { d = a - b; exit !(a > 0 && d < tol && d > -tol) }'
}
eval_of parts "${parts[@]}"
check "two copies of two halves: $(loss_of parts.txt), $(loss_of dense.txt)" near_dense parts 0.00001
eval_of all "${all[@]}"
check "weights of a softmax over all: $(loss_of all.txt), $(loss_of dense.txt)" near_dense all 0.02
eval_of gelu "${whole[@]}" model.activation=gelu
check "another activation does not fit: $(tail -3 gelu.txt)" \
    grep -qF "tensor 'layers.0.mlp.fc1.weight' has shape '[128, 32]' in checkpoint" gelu.txt
check "and what it should be" grep -qF "and '[64, 32]' in the model" gelu.txt

# Trained on, by one rank and by four that hold the experts together, in parts
small=(train.steps=4 optim.warmup=1 checkpoint.every=0 "${mixture[@]}" "${parts[@]}")
"$mt" --config dense.ini run.dir=one "${small[@]}" >/dev/null 2>one.err
check "it trains: $(tail -1 one.err)" [ "$(losses one | wc -l)" -eq 4 ]
check "it says what it does" grep -q "upcycling the dense weights from .*dense" one.err
check "the first loss is no random model's: $(losses one | head -1)" \
    awk -v want="$(loss_of dense.txt | cut -d' ' -f2)" 'NR == 1 { exit !($2 < want + 0.3) }' <(losses one)
"$root/scripts/launch.sh" -n 4 -- "$mt" --config dense.ini run.dir=four "${small[@]}" parallel.ep=2 parallel.etp=2 \
    train.micro_batch=2 parallel.zero=1 >/dev/null 2>four.err
check "four ranks are one: $(tail -1 four.err)" same_run four one 4
"$root/scripts/launch.sh" -n 2 -- "$mt" --config dense.ini run.dir=two "${small[@]}" parallel.pp=2 >/dev/null 2>two.err
check "two stages are one: $(tail -1 two.err)" same_run two one 4

refuse() { # TEXT WORDS...
    expect 2 "$1" "$mt" --config dense.ini run.dir=refused "${mixture[@]}" "${@:2}"
    check "nothing is left of a refused run" [ ! -e refused ]
}
refuse "give checkpoint.load" "${whole[@]}" checkpoint.load=
refuse "a shared expert could begin as" "${whole[@]}" moe.shared_ffn=64
refuse "moe.ffn must divide model.ffn" "${whole[@]}" moe.ffn=24
refuse "model.ffn / moe.ffn = 4 experts, which must divide experts and topk" "${whole[@]}" moe.ffn=16
refuse "take moe.router=softmax" "${whole[@]}" moe.router=sigmoid
refuse "no experts to begin as another" moe.experts=0
finish
