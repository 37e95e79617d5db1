#!/usr/bin/env bash
# Steps that are recorded and replayed (src/engine/replays.h) beside the same run op by op: losses, norms and all tensors
# are the same, on one rank and on two, over NCCL and staged; evaluations and checkpoints between steps, a batch that
# grows, steps done again, resuming; how many launches there are. On the emulator, or on the GPUs of this machine.
[ -z "${EMU:-}" ] || MEGATRAIN=$EMU/megatrain
. "$(dirname "$0")/lib.sh"
launch="$root/scripts/launch.sh"
export OMP_NUM_THREADS=1
make_tiny
steps=8 # (two are listened to, or three where gradients are summed beside backward, and one is recorded)
make_ini graphs.ini model.layers=2 model.hidden=32 model.heads=4 model.seq=16 model.dropout=0.1 \
    model.attention_dropout=0.1 train.global_batch=8 train.steps=$steps train.eval_every=3 \
    optim.lr=3e-3 run.device=cuda run.precision=fp32 run.graphs=true

gpus() { "$mt" doctor 2>/dev/null | grep -c '^gpu [0-9]'; }
export EMU_DEVICES=2
count=$(gpus)
if [ "$count" -eq 0 ]; then
    # (nothing falls back: neither to a CPU nor to a step without graphs)
    expect 2 "megatrain: error (configuration)" "$mt" --config graphs.ini
    expect 2 "only device=cuda has graphs" "$mt" --config graphs.ini run.device=cpu
    skip "steps as graphs: this machine or build has no GPU"
    finish
fi
[ "$count" -ge 2 ] || skip "ranks over NCCL: 1 GPU, two are needed"

# run DIR RANKS DEVICES words...: over the first DEVICES GPUs
run() {
    local visible
    visible=$(seq -s, 0 $(($3 - 1)))
    EMU_DEVICES=$3 CUDA_VISIBLE_DEVICES=$visible timeout 600 "$launch" -n "$2" -- "$mt" --config graphs.ini run.dir="$1" \
        train.eval_samples=4 checkpoint.every=4 "${@:4}" >/dev/null 2>"$1.err" || { bad "$1: $(grep -m1 error "$1.err")"; sed -n 2,4p "$1.err"; }
}
said() { grep -o "graphs: a step's .*" "$1.err" | tail -1; }
recorded() { [ -n "$(said "$1")" ]; }
# of what a run said: launches one by one; graphs and calls
launches() { said "$1" | awk '{ print $4 }'; }
given() { said "$1" | awk '{ print $7 + $10 }'; }

mixture="model.arch=llama model.bias=false moe.experts=6 moe.topk=2 moe.ffn=24 moe.shared_ffn=16 moe.balance=aux
    moe.aux_coeff=0.1 train.global_batch=4"
while read -r name n devices keys; do
    [ "$devices" -le "$count" ] || continue
    case $keys in *MIXTURE*) keys="${keys/MIXTURE/} $mixture" ;; esac
    case $name in ${ONLY:-*}) ;; *) continue ;; esac
    # shellcheck disable=SC2086
    run "$name" "$n" "$devices" $keys
    # shellcheck disable=SC2086
    run "$name-plain" "$n" "$devices" $keys run.graphs=false
    check "$name: a step is recorded" recorded "$name"
    check "$name: nothing is, where that is not wanted" [ -z "$(said "$name-plain")" ]
    n=$steps
    case $keys in *train.steps=*) n=${keys##*train.steps=} n=${n%% *} ;; esac
    check "$name: losses, norms and tensors are those without graphs" same_run "$name" "$name-plain" "$n"
    check "$name: fewer things to launch: $(said "$name")" [ "$(given "$name")" -lt "$(launches "$name")" ]
done <<'EOM'
one 1 1
tp 2 2 parallel.tp=2
tp-bands 2 2 parallel.tp=2 parallel.overlap_tp=2 train.recompute=selective
tp-plain-rows 2 1 parallel.tp=2 parallel.sp=false run.precision=bf16
dp 2 2 parallel.overlap_grad=true
zero1 2 2 parallel.zero=1 parallel.overlap_grad=true parallel.overlap_param=true
zero3 2 2 parallel.zero=3 parallel.overlap_grad=true parallel.overlap_param=true train.eval_every=1
zero1-staged 2 1 parallel.zero=1 parallel.overlap_grad=true parallel.overlap_param=true run.precision=bf16
pp 2 2 parallel.pp=2 parallel.schedule=1f1b
pp-split 2 2 parallel.pp=2 parallel.schedule=zb-h1 model.layers=4
pp-slices 2 1 parallel.pp=2 parallel.slices=2 train.micro_batch=1 model.dropout=0 model.attention_dropout=0 train.global_batch=4
cp-ring 2 2 parallel.cp=2 parallel.cp_comm=ring model.dropout=0 model.attention_dropout=0 train.global_batch=4
ramp 2 2 parallel.zero=1 train.global_batch=4*6,8 train.steps=12
muon 2 2 optim.name=muon parallel.zero=1
ep 2 2 MIXTURE parallel.ep=2 parallel.zero=1
ep-staged 2 1 MIXTURE parallel.ep=2 parallel.zero=1 run.precision=bf16
ep-pairs 2 2 MIXTURE parallel.ep=2 parallel.schedule=dualpipev parallel.overlap_moe=true train.micro_batch=1
moe-tp 2 2 MIXTURE parallel.tp=2
moe-batch-loss 2 2 MIXTURE parallel.tp=2 moe.balance=global_aux
EOM
[ -z "${ONLY:-}" ] || finish
[ ! -d ramp ] || check "ramp: steps of both sizes are recorded" [ "$(grep -c "graphs: a step's" ramp.err)" -eq 2 ]

# repeated, and in two halves, in the second of which steps are recorded anew
for name in tp ep; do
    keys="parallel.tp=2"
    [ $name = tp ] || keys="$mixture parallel.ep=2 parallel.zero=1"
    [ -d "$name" ] || continue
    # shellcheck disable=SC2086
    run "$name-again" 2 2 $keys
    check "$name: repeated" same_run "$name-again" "$name" $steps
    # shellcheck disable=SC2086
    run "$name-half" 2 2 $keys train.stop_at=4
    # shellcheck disable=SC2086
    run "$name-half" 2 2 $keys
    check "$name: the tensors of two halves" [ "$(digest "$name-half" $steps)" = "$(digest "$name" $steps)" ]
done
finish
