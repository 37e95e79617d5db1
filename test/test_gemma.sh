#!/usr/bin/env bash
# Models with what other families have. One with all of Gemma: capped scores and logits, scaled embeddings and scores,
# norms on both sides of branches, GeGLU, another base of angles in blocks with a window. One with OLMo 2's norms: behind
# branches alone, and of all heads of queries and of keys together, which ranks of tp cut. Two whose layers stand in
# parallel: behind a norm each, with the exact GELU, or behind one. Every layout gives the same
# checkpoint and losses. That they are the right ones: test_hf.sh, against transformers; test_golden, against PyTorch.
. "$(dirname "$0")/lib.sh"
make_tiny
shared="train.global_batch=4 train.steps=4 train.eval_every=2 optim.lr=0.01 parallel.seq_blocks=8 parallel.attn_block=8
    model.arch=llama model.hidden=64 model.ffn=96 model.dropout=0.1 model.attention_dropout=0"
make_ini gemma.ini $shared model.layers=4 model.heads=4 model.kv_heads=2 model.seq=64 model.tied=true \
    model.activation=geglu model.block_norms=both model.embed_scale=8 model.attention_scale=0.2 model.final_softcap=3 \
    model.attention_softcap=5 model.rope_base_local=100 model.window=16,0 model.rope_scaling=linear model.rope_factor=4 \
    model.qk_norm=true
make_ini olmo.ini $shared model.layers=2 model.heads=8 model.kv_heads=2 model.seq=64 model.block_norms=post model.qk_norm=full
last=4 least=7
. "$root/test/like_one.sh"
hold gemma
run 1 train.recompute=full
run 1 train.recompute=selective train.micro_batch=1
run 2 parallel.tp=2
run 2 parallel.tp=2 parallel.sp=false
run 2 parallel.pp=2 parallel.schedule=zb-h1
run 2 parallel.cp=2
run 2 parallel.zero=1
run 4 parallel.tp=2 parallel.pp=2
differs activation=swiglu block_norms=pre embed_scale=7 attention_scale=0.3 final_softcap=4 rope_base_local=0
hold olmo
run 1 train.recompute=full
run 1 train.recompute=selective train.micro_batch=1
run 1 parallel.slices=2
run 2 parallel.tp=2
run 2 parallel.tp=2 parallel.sp=false train.recompute=full
run 4 parallel.tp=4 train.recompute=selective # (two ranks share a head of keys)
run 2 parallel.pp=2 parallel.schedule=zb-h1 train.micro_batch=1
run 2 parallel.cp=2
run 4 parallel.tp=2 parallel.cp=2 parallel.zero=1
run 4 parallel.tp=2 parallel.pp=2 parallel.schedule=zb-h1 train.micro_batch=1
differs block_norms=pre block_norms=both qk_norm=false qk_norm=true
begin_parallel() { # MODEL KEY=VALUE...
    make_ini $1.ini $shared model.layers=4 model.heads=4 model.kv_heads=2 model.seq=64 model.bias=true "${@:2}"
    hold $1
    run 1 train.recompute=full
    run 1 train.recompute=selective train.micro_batch=1
    run 2 parallel.tp=2
    run 4 parallel.tp=4 train.recompute=selective
    run 2 parallel.pp=2 parallel.schedule=zb-h1 train.micro_batch=1
    run 2 parallel.cp=2
    run 2 parallel.zero=2
    run 4 parallel.tp=2 parallel.pp=2 parallel.schedule=dualpipev train.micro_batch=1
    run 4 parallel.tp=2 parallel.cp=2 parallel.zero=1
    run 1 parallel.slices=2
}
begin_parallel neox model.block_norms=parallel_two model.activation=gelu_erf model.norm=layernorm
run 2 parallel.tp=2 parallel.sp=false train.recompute=full
differs block_norms=pre block_norms=parallel activation=gelu
begin_parallel beside model.block_norms=parallel model.residual_scale=0.5 moe.experts=4 moe.topk=2 moe.ffn=24 moe.every=0,1,0,1
# parts of rows that are not alike: 42 over 4 ranks
sed 's/^seq=64/seq=42/; s/^seq_blocks=8/seq_blocks=2/' olmo.ini >uneven.ini
hold uneven
run 4 parallel.tp=4 parallel.sp=false train.micro_batch=1
finish
