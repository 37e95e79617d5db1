#!/usr/bin/env bash
# megatrain config check --layout: layouts of every kind have the bits of one rank, on the CPU, whatever the configuration
# says of the device; what is refused; nothing is left behind. That a layout which computes something else is told:
# mutants (test/mutants.txt, "config check --layout").
. "$(dirname "$0")/lib.sh"
make_tiny
sed -i "s/^micro_batch = 3/micro_batch = 2/; s/^global_batch = 15/global_batch = 16/" tiny.ini
mkdir scratch
export TMPDIR=$work/scratch
same() { # FILE RANKS KEYS...
    "$mt" config check --layout --config $1.ini --world $2 "${@:3}" >out.txt 2>err.txt
    check "$*: exit $?, $(head -1 err.txt)" grep -q "^$1.ini: $2 ranks* ha[vs]e* the bits of one: 2 steps, .*, digest [0-9a-f]\{16\}$" out.txt
    check "$*: one line, and warnings alone: $(cat err.txt)" [ "$(wc -l <out.txt)" = 1 -a "$(grep -vc ^warning err.txt)" = 0 ]
}
# at the sizes of published models
wide="train.global_batch=256 model.arch=llama model.layers=32 model.hidden=4096 model.heads=32
    model.seq=8192"
make_ini wide.ini $wide model.kv_heads=8 model.ffn=14336 model.vocab=128256 run.precision=fp8 run.device=cuda optim.states=host
make_ini sinks.ini $wide model.kv_heads=8 model.ffn=2880 model.head_dim=64 model.sinks=true model.bias=true model.window=128,0 \
    model.qk_norm=full moe.experts=32 moe.topk=4
make_ini latent.ini $wide model.ffn=18432 model.attention=mla model.q_lora_rank=1536 moe.experts=256 \
    moe.topk=8 moe.ffn=2048 moe.shared_ffn=2048 moe.every='0*3,1*29' moe.router=sigmoid moe.balance=bias moe.groups=8 \
    moe.group_topk=4
make_ini hybrid.ini $wide model.kv_heads=2 model.ffn=5632 model.mixer='delta*3,attention' model.delta_key_heads=16 \
    model.delta_value_heads=32 model.delta_key_dim=128 model.delta_value_dim=128 model.attention_gate=true
same tiny 2 parallel.tp=2
same tiny 2 parallel.pp=2 parallel.schedule=zb-h1
same tiny 4 parallel.cp=2 parallel.zero=2
same tiny 2 parallel.cp=2 parallel.cp_comm=ring parallel.attn_block=8
same tiny 1 train.recompute=full
same wide 16 parallel.tp=4 parallel.pp=2
same sinks 8 parallel.tp=2 parallel.ep=2 parallel.zero=1
same latent 4 parallel.pp=2 parallel.ep=2
same hybrid 4 parallel.tp=2 parallel.cp=2 parallel.cp_comm=a2a
same hybrid 2 parallel.cp=2 parallel.cp_comm='state*3,allgather'
digest_of() { sed -n 's/.*digest //p' out.txt; }
same tiny 2 parallel.tp=2
first=$(digest_of)
same tiny 2 parallel.tp=2
check "the same digest once more: $first" [ "$(digest_of)" = "$first" -a -n "$first" ]
same tiny 2 parallel.tp=2 run.seed=5
check "of another seed another one" [ "$(digest_of)" != "$first" ]
check "nothing is left: $(ls scratch)" [ -z "$(ls scratch)" ]

layout() { "$mt" config check --layout --config tiny.ini "$@"; }
expect 2 "takes no --layout" "$mt" config dump --layout --config tiny.ini
expect 2 "starts at most 64 ranks, not 65" layout --world 65 train.micro_batch=1 train.global_batch=65
expect 2 "parallel.auto has no layout yet" layout --world 2 parallel.auto=true
expect 2 "pipedream" layout --world 2 parallel.pp=2 parallel.schedule=pipedream
expect 2 "heads" layout --world 3 parallel.tp=3
TMPDIR=$work/nowhere expect 5 "no folder can be made" layout --world 2 parallel.tp=2
check "nothing is left: $(ls scratch)" [ -z "$(ls scratch)" ]
finish
