#!/usr/bin/env bash
# What classes of transformers have beside Llama's layers, in layouts of each kind: factors on embeddings, branches,
# scores and logits; a bias of the head; squared ReLU; sinks; a part of each head that turns, in some blocks; angles by
# yarn, llama3 and linear scaling; LayerNorms, with biases and without; layers in parallel. Each model gives one digest
# and the same losses in all of them, with operands of 8 bits, Muon and muP beside them, too. That the numbers are the
# right ones: test_hf.sh.
. "$(dirname "$0")/lib.sh"
make_tiny
shared="train.global_batch=4 train.steps=3 train.eval_every=2 optim.lr=0.01 parallel.seq_blocks=8 parallel.attn_block=8
    model.arch=llama model.layers=4 model.hidden=64 model.ffn=96 model.heads=4 model.kv_heads=2 model.seq=64
    model.dropout=0.1 parallel.tp_blocks=4"
last=3 least=5
. "$root/test/like_one.sh"
begin() { # MODEL KEY=VALUE...
    make_ini $1.ini $shared "${@:2}"
    hold $1
}
twelve() { # [KEY=VALUE]: in the place of no sp
    run 1 train.recompute=full
    run 1 train.recompute=selective train.micro_batch=1
    run 1 parallel.slices=2
    run 2 parallel.tp=2
    run 2 parallel.tp=2 train.recompute=full ${1:-parallel.sp=false}
    run 4 parallel.tp=4 train.recompute=selective
    run 2 parallel.pp=2 parallel.schedule=zb-h1 train.micro_batch=1
    run 2 parallel.cp=2
    run 2 parallel.zero=1
    run 2 parallel.zero=3
    run 4 parallel.tp=2 parallel.pp=2 parallel.schedule=dualpipev train.micro_batch=1
    run 4 parallel.tp=2 parallel.cp=2 parallel.zero=2
}
factors="model.embed_scale=8 model.residual_scale=0.3 model.attention_scale=0.2 model.logits_scale=0.5"
begin swash $factors model.head_bias=true model.activation=relu2 model.sinks=true model.window=0,16*3 model.rope_layers=0,1*3 model.rope_dim=8 \
    model.rope_scaling=yarn model.rope_factor=4 model.rope_original=16
twelve
differs head_bias=false embed_scale=7 residual_scale=0.4 attention_scale=0.3 logits_scale=0.4 activation=gelu sinks=false rope_layers=1 \
    rope_dim=12 rope_scaling=llama3
begin minitron model.norm=layernorm model.activation=relu2 model.rope_dim=8 model.rope_scaling=llama3 model.rope_factor=4 \
    model.rope_original=16 model.bias=true model.head_bias=true model.tied=true \
    model.logits_scale=0.5
twelve
differs norm=rmsnorm rope_scaling=yarn rope_factor=3 bias=false
begin command model.norm=layernorm model.norm_bias=false model.block_norms=parallel model.logits_scale=0.25 \
    model.window=16*3,0 model.rope_layers=1*3,0 model.rope_scaling=linear model.rope_factor=2 moe.experts=4 moe.topk=2 \
    moe.ffn=32 moe.shared_ffn=32 moe.every=0,1,0,1 moe.router=sigmoid moe.balance=bias
twelve parallel.ep=2 # (experts want sp)
differs norm_bias=true block_norms=parallel_two
# operands of 8 bits, Muon, muP: a model each, in some of the layouts
few() {
    run 2 parallel.tp=2
    run 2 parallel.pp=2 parallel.schedule=zb-h1 train.micro_batch=1
    run 2 parallel.zero=3
}
swash="$factors model.activation=relu2 model.rope_dim=8 model.sinks=true"
begin muon $swash model.head_bias=true optim.name=muon
few
begin mup $swash optim.mup_base=32 model.tied=false
few
shared=${shared/model.hidden=64/model.hidden=128} shared=${shared/model.ffn=96/model.ffn=128} # (of whole blocks)
begin eight $swash model.head_bias=true run.precision=fp8 run.fp8=mxfp8 run.reproducible=layout
few
finish
