#!/usr/bin/env bash
# The GPUs of this machine, one rank each: a few steps of a tiny model in each way to cut it, twice, which must have the
# same bits, losses and all tensors. On 2 of them, and 4 where there are so many (GPU_RANKS: another most). MEGATRAIN
# names a binary with the CUDA backend; the emulated one will do.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch=$root/scripts/launch.sh
steps=4
count=$("$mt" doctor 2>/dev/null | grep -c '^gpu [0-9]')
if [ "$count" -lt 2 ]; then
    skip "ranks on GPUs: $count GPU, two or more are needed"
    finish
fi
most=${GPU_RANKS:-4}
make_tiny
make_ini ranks.ini model.layers=4 model.hidden=64 model.heads=4 model.seq=16 model.dropout=0.1 \
    train.global_batch=8 train.steps=$steps train.eval_every=0 optim.lr=3e-3
mixture="model.arch=llama model.bias=false moe.experts=4 moe.topk=2 moe.ffn=32"

train() { # DIR RANKS KEYS...
    timeout 120 "$launch" -n "$2" -- "$mt" --config ranks.ini run.dir="$1" run.device=cuda "${@:3}" >/dev/null 2>"$1.err" ||
        bad "$1: $(grep -m1 error "$1.err")"
}
while read -r name ranks keys; do
    [ "$ranks" -le "$count" ] && [ "$ranks" -le "$most" ] || continue
    for again in '' -again; do
        # shellcheck disable=SC2086
        train $name$again "$ranks" $keys
    done
    check "$name: over NCCL: $(grep 'between GPUs' "$name.err")" grep -q 'between GPUs: NCCL' "$name.err"
    check "$name on $ranks GPUs, repeated: other bits" same_run $name-again $name $steps
    echo "$name on $ranks GPUs, last loss $(losses $name | sed -n '$s/.* //p')"
done <<EOM
dp2 2 parallel.zero=1
tp2 2 parallel.tp=2
ep2 2 $mixture parallel.ep=2 parallel.zero=1
pp2 2 parallel.pp=2 parallel.schedule=zb-h1
dp4 4 parallel.zero=1
tp2-dp2 4 parallel.tp=2
ep2-pp2 4 $mixture parallel.ep=2 parallel.pp=2
EOM
finish
