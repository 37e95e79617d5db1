#!/usr/bin/env bash
# A model with all that Gemma has: capped scores and logits, scaled embeddings and scores, norms behind branches, GeGLU,
# another base of angles in blocks with a window. Every layout gives the same checkpoint and losses. That they are the
# right ones: test_hf.sh, against transformers.
. "$(dirname "$0")/lib.sh"
make_tiny
make_ini gemma.ini model.arch=llama model.layers=4 model.hidden=64 model.heads=4 model.kv_heads=2 model.ffn=96 \
    model.seq=64 model.tied=true model.activation=geglu model.block_norms=both model.embed_scale=8 \
    model.attention_scale=0.2 model.final_softcap=3 model.attention_softcap=5 model.rope_base_local=100 \
    model.window=16,0 model.rope_scaling=linear model.rope_factor=4 model.qk_norm=true model.dropout=0.1 \
    model.attention_dropout=0 train.global_batch=4 train.steps=4 train.eval_every=2 \
    optim.lr=0.01 parallel.seq_blocks=8 parallel.attn_block=8
seen() { # FOLDER: digest and losses
    "$mt" inspect "$1/checkpoints/step-00000004" 2>/dev/null | grep -i digest
    grep -oE '"(valid_)?loss":[0-9.]+' "$1/metrics.jsonl"
}
n=0
run() { # RANKS KEY=VALUE...
    local ranks=$1 start=()
    shift
    n=$((n + 1))
    [ "$ranks" = 1 ] || start=("$root/scripts/launch.sh" -n "$ranks" --)
    "${start[@]}" "$mt" --config gemma.ini run.dir=run$n "$@" >/dev/null 2>err.txt || bad "$*: $(grep -m1 error err.txt)"
    seen run$n >seen$n.txt
    [ $n = 1 ] || check "$ranks ranks, $*: $(diff seen1.txt seen$n.txt | head -3)" cmp -s seen1.txt seen$n.txt
}
run 1
check "a digest, losses of steps and of evaluations" [ "$(wc -l <seen1.txt)" -ge 7 ]
run 1 train.recompute=full
run 1 train.recompute=selective train.micro_batch=1
run 2 parallel.tp=2
run 2 parallel.tp=2 parallel.sp=false
run 2 parallel.pp=2 parallel.schedule=zb-h1
run 2 parallel.cp=2
run 2 parallel.zero=1
run 4 parallel.tp=2 parallel.pp=2
# each key does something to the losses
for key in activation=swiglu block_norms=pre embed_scale=7 attention_scale=0.3 final_softcap=4 rope_base_local=0; do
    "$mt" --config gemma.ini run.dir=other model.$key >/dev/null 2>err.txt || bad "$key: $(grep -m1 error err.txt)"
    seen other >other.txt
    check "$key changes nothing" [ "$(grep -c . other.txt)" -ge 7 -a "$(tail -1 other.txt)" != "$(tail -1 seen1.txt)" ]
    rm -rf other
done
finish
