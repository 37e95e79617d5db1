#!/bin/bash
# What a run's start refuses is refused by `config check` and `plan` in the same words, with the same status, and before
# there is a run folder; a way out that the hint names is one.
. "$(dirname "$0")/lib.sh"

export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
launch=$root/scripts/launch.sh
seq 1 4000 >numbers.txt
"$mt" preprocess --input numbers.txt --tokenizer byte --output numbers >/dev/null 2>&1 || exit 1
cat >small.ini <<'I'
[run]
device = cpu
precision = fp32
[model]
layers = 8
hidden = 32
heads = 4
seq = 64
bias = false
[train]
global_batch = 8
micro_batch = 1
steps = 2
[data]
train = numbers
I

# The error and its hint.
said() { grep -E '^(megatrain: error|hint:)' "$1"; }

# The configuration with one of the ways out that a hint names is taken.
ways_out() { # RANKS TEXT WORDS...
    local ranks=$1 text=$2 way
    shift 2
    while read -r way; do
        [ -n "$way" ] || continue
        check "$* and then $way" "$mt" config check --config small.ini --world "$ranks" "$@" $way >out.txt 2>&1
    done < <(grep -oE 'take [a-z_.]+=.*' <<<"$text" | sed -E 's/^take //; s/; .*//; s/, or /\n/g' | grep '=')
}

# refused RANKS TEXT HINT WORDS...: by all three
refused() {
    local ranks=$1 text=$2 hint=$3 status=()
    shift 3
    "$mt" config check --config small.ini --world "$ranks" "$@" >out.txt 2>check.err
    status+=($?)
    "$mt" plan --config small.ini --world "$ranks" "$@" >out.txt 2>plan.err
    status+=($?)
    "$launch" -n "$ranks" -- "$mt" --config small.ini run.dir=no "$@" >out.txt 2>train.err
    status+=($?)
    check "$*: check, plan and train exit with ${status[*]}" [ "${status[*]}" = "2 2 2" ]
    check "$*: says '$text': $(said check.err)" grep -qF -- "$text" check.err
    check "$*: hints '$hint': $(grep ^hint check.err)" grep -qF -- "$hint" check.err
    check "$*: plan says the same: $(said plan.err)" [ "$(said plan.err)" = "$(said check.err)" ]
    check "$*: a run says the same: $(said train.err)" [ "$(said train.err)" = "$(said check.err)" ]
    check "$*: nothing was begun" [ ! -e no ]
    grep -q 'mistakes in' check.err || ways_out "$ranks" "$(cat check.err)" "$@"
    rm -rf no
}

mixture=(moe.experts=4)
refused 2 "data-parallel ranks compute their shares" 'take moe.balance=aux' "${mixture[@]}" moe.balance=global_aux
refused 2 "schedule 'chimera' does not compute them so" 'take parallel.schedule=1f1b' "${mixture[@]}" \
    moe.balance=global_aux parallel.pp=2 parallel.schedule=chimera
refused 2 "the smallest piece" 'raise parallel.seq_blocks' "${mixture[@]}" moe.slack=1 moe.overflow=redo \
    parallel.ep=2 parallel.seq_blocks=1 moe.topk=1
# (of a micro-batch of 2 samples halves are sent on, and these have no room)
refused 4 "moe.slack=1 has room for 64" 'raise parallel.seq_blocks' "${mixture[@]}" moe.slack=1 moe.overflow=redo \
    parallel.ep=2 parallel.pp=2 parallel.seq_blocks=1 moe.topk=1 parallel.schedule=chimera-bhalf train.micro_batch=2
refused 2 "schedule '2bw' updates while the pipeline runs" 'take optim.clip=0 model.tied=false' parallel.pp=2 \
    parallel.schedule=2bw
refused 2 "cuts a micro-batch into 2" 'take train.micro_batch=2, or train.micro_batch=4' parallel.pp=2 \
    parallel.schedule=chimera-bhalf
refused 2 "cuts a micro-batch into 2" 'take train.micro_batch=2, or train.micro_batch=6' parallel.pp=2 parallel.schedule=chimera-bhalf \
    train.micro_batch=3 train.global_batch=12
refused 2 "has 3 stages, no multiple of" 'must divide the stages' parallel.pp=2 'parallel.layout=Ettt|tttt|tL'
# beside other mistakes, where those are about nothing that it goes by
uneven=(parallel.pp=2 'parallel.layout=Ettt|tttt|tL')
refused 2 "3 mistakes in the configuration" '' "${uneven[@]}" optim.min_lr=1 log.every=x
expect 2 "has 3 stages, no multiple of the 2 pipeline ranks; take parallel.pp=3; the pipeline's" \
    "$mt" config check --config small.ini "${uneven[@]}" optim.min_lr=1 log.every=x
expect 2 "clip by; take optim.clip=0 model.tied=false" "$mt" config check --config small.ini parallel.pp=2 \
    parallel.schedule=2bw train.steps=0 optim.min_lr=1
expect 2 "heads must be a multiple of kv_heads" "$mt" config check --config small.ini "${uneven[@]}" model.kv_heads=3
check "a doubtful value gives no judgment" bash -c '! grep -q stages err.txt'
refused 2 "2 chunks a rank or more" 'nearest legal shape' parallel.pp=2 parallel.schedule=interleaved parallel.vpp=1
# a shape is named only if the model can be cut into its stages
for shape in "3 2" "4 4"; do # blocks, ranks that are named
    "$mt" config check --config small.ini --world 3 parallel.pp=3 parallel.schedule=gems \
        model.layers=${shape% *} 2>err.txt
    check "${shape% *} blocks: $(grep ^hint err.txt)" grep -q "nearest legal shape: ${shape#* } ranks, 8 micro" err.txt
done
refused 2 "2 x cp x slices must divide seq_blocks" '' parallel.cp=2 parallel.slices=4 run.reproducible=layout \
    parallel.seq_blocks=2
refused 6 "2 x cp must divide seq_blocks" '' parallel.cp=6 train.global_batch=12 model.seq=48 \
    run.reproducible=layout parallel.seq_blocks=4
refused 4 "take parallel.cp_heads=2" '' parallel.cp=4 parallel.cp_comm=hierarchical parallel.cp_heads=3
refused 2 "experts drop rows of whole sequences" '' "${mixture[@]}" moe.capacity=1.5 moe.drop=position parallel.pp=2 \
    parallel.slices=2
refused 1 "2 ranks" '' parallel.pp=2
long=$(printf 'long%.0s' $(seq 1 1024))
for key in run.dir data.tokenizer checkpoint.resume checkpoint.load; do
    expect 2 "a path of at most 3840 bytes" "$mt" config check --config small.ini "$key=$long"
    expect 2 "a path of at most 3840 bytes" "$mt" --config small.ini "$key=$long"
done
expect 2 "the first beyond 32" "$mt" config check --config small.ini "data.valid=$(printf 's%d: numbers ' $(seq 1 65))"
# what is dumped is the same configuration: layouts that leave to each other what schedule and chunks are
while read -r words; do
    "$mt" config dump --config small.ini --world 2 $words >dumped.ini 2>err.txt
    check "$words: is dumped: $(head -1 err.txt)" [ -s dumped.ini ]
    expect 0 "ok on 2 ranks" "$mt" config check --config dumped.ini --world 2
    "$mt" plan --config small.ini --world 2 --json $words >plan-1.json 2>/dev/null
    "$mt" plan --config dumped.ini --world 2 --json >plan-2.json 2>/dev/null
    check "$words: the dump has the same plan" bash -c '[ -s plan-1.json ] && cmp plan-1.json plan-2.json'
done <<'W'
parallel.pp=2 parallel.vpp=2
parallel.pp=2 parallel.slices=2
parallel.pp=2 parallel.schedule=bfs
parallel.pp=2 parallel.schedule=zb-v parallel.layout=Ett|tt|tt|ttL
parallel.pp=2 parallel.schedule=interleaved parallel.layout=Ett|tt|tt|ttL
W
# a way out is named once, not again with more than it needs
expect 2 "take parallel.cp_comm=allgather" "$mt" config check --config small.ini --world 2 model.seq=160 parallel.cp=2 \
    parallel.cp_comm=ring parallel.seq_blocks=4 run.reproducible=layout parallel.attn_block=64
check "a way out once" bash -c '! grep -q "cp_comm=allgather parallel.cp_heads=0" err.txt'
expect 0 "seq1f1b" "$mt" plan --search --device h100 --config small.ini --world 2 run.precision=bf16 parallel.slices=2 \
    parallel.pp=2
refused 2 "schedule 'zb-v' has 2 chunks a rank, not 1" 'take parallel.vpp=0' parallel.pp=2 parallel.schedule=zb-v \
    parallel.vpp=1
expect 0 "ok on 2 ranks (more ranks were not checked" "$mt" config check --config small.ini parallel.pp=2
expect 0 "ok on 4 ranks" "$mt" config check --config small.ini --world 4 parallel.pp=2
WORLD_SIZE=3 RANK=0 MASTER_ADDR=127.0.0.1 expect 2 "the world size is 3" "$mt" config check --config small.ini parallel.pp=2
expect 0 "a step was not planned, for the vocabulary is not known" "$mt" config check --config small.ini \
    data.tokenizer=nowhere
finish
