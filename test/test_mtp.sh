#!/usr/bin/env bash
# Multi-token prediction from outside: processes give the bits of one rank, a checkpoint goes on in other layouts, its
# losses stand in metrics, evaluation and generation leave it out, plan counts it, what is refused and with which words.
. "$(dirname "$0")/lib.sh"
make_tiny
make_ini further.ini model.layers=2 model.hidden=32 model.heads=4 model.seq=32 model.position=rope model.dropout=0.1 \
    model.mtp_layers=2 model.mtp_weight=0.5 train.global_batch=8 train.steps=6 data.reset_at_eod=true
run() { # DIR COUNT WORDS...
    local launch=()
    [ "$2" -eq 1 ] || launch=("$root/scripts/launch.sh" -n "$2" --)
    "${launch[@]}" "$mt" --config further.ini run.dir="$1" "${@:3}" >"$1.out" 2>"$1.err"
}
modules() { sed -n 's/.*"mtp_loss":\[\([^]]*\)\].*/\1/p' "$1/metrics.jsonl"; }
same() { # a run of the words must be `whole`
    check "$*: $(grep -m1 error "$1.err")" same_run "$1" whole 6
    check "$*: losses of the modules" [ "$(modules "$1")" = "$(modules whole)" ]
}

run whole 1 log.tensorboard=true checkpoint.every=3
check "six pairs of losses: $(modules whole | head -2)" [ "$(modules whole | grep -cE '^[0-9.]+,[0-9.]+$')" -eq 6 ]
check "the step's line has them" grep -qE 'step 6/6  loss [0-9.]+  mtp1 [0-9.]+  mtp2 [0-9.]+' whole.err
check "and so has TensorBoard" grep -qaF 'loss/mtp 2' whole/events.out.tfevents.*

n=0
while read -r count words; do
    n=$((n + 1))
    # shellcheck disable=SC2086  # words
    run r$n "$count" $words
    same r$n "$count ranks, $words"
done <<'EOL'
2 parallel.tp=2 debug.comm_check=true
2 parallel.pp=2 parallel.schedule=zb-h1 train.recompute=selective
4 parallel.pp=2 parallel.layout=Ett|mmL parallel.zero=1 debug.comm_delay_ms=2
3 parallel.pp=3 parallel.layout=Et|tmm|L debug.comm_check=true
4 parallel.pp=4 parallel.layout=Et|t|mm|L model.tied=true train.recompute=full
EOL

# begun by one rank, then on a pipeline, then over tp
run moved 1 train.stop_at=2
run moved 3 parallel.pp=3 'parallel.layout=Ett|mm|L' train.stop_at=4
run moved 2 parallel.tp=2 parallel.sp=false
same moved "three layouts"

# the head's loss alone: a model that never had modules, and starts as this one, is evaluated alike before it is trained
for n in 0 2; do
    "$mt" --config further.ini run.dir=new$n model.mtp_layers=$n model.mtp_weight="$([ $n = 0 ] && echo 0.1 || echo 0.5)" \
        train.steps=1 optim.warmup=0 optim.lr=0 optim.min_lr=0 >/dev/null 2>new$n.err
    "$mt" eval --config further.ini run.dir=new$n model.mtp_layers=$n \
        model.mtp_weight="$([ $n = 0 ] && echo 0.1 || echo 0.5)" >eval$n.txt 2>&1
done
check "evaluation without modules: $(tail -1 eval0.txt)" [ "$(grep -oE 'loss [0-9.]+' eval0.txt)" = "$(grep -oE 'loss [0-9.]+' eval2.txt)" ]
check "and there was a loss" grep -qE 'loss [0-9.]+' eval2.txt
expect 0 "Line" "$mt" generate --run whole --prompt Line --tokens 4

# plan: two blocks, projections, heads more
flop() { "$mt" plan --config further.ini --json "$@" 2>/dev/null | grep -oE '"flop": ?[0-9]+' | head -1 | grep -oE '[0-9]+$'; }
with=$(flop) without=$(flop model.mtp_layers=0 model.mtp_weight=0.1)
check "plan: $with FLOP, without modules $without" [ "${with:-0}" -gt $((${without:-0} * 3 / 2)) ]

refuse() { expect 2 "$1" "$mt" plan --config further.ini --world 2 "${@:2}"; }
refuse "multi-token prediction has no learned positions; take model.position=rope" model.position=learned
refuse "has 0 modules of multi-token prediction, the model 2" parallel.pp=2 'parallel.layout=Et|tL'
refuse "behind 'm' come others and 'L' alone" parallel.pp=2 'parallel.layout=Ettmt|L'
refuse "stages in two directions, and modules" parallel.pp=2 parallel.schedule=chimera 'parallel.layout=Ettmm|L'
refuse "multi-token prediction would need one gradient" parallel.pp=2 parallel.schedule=pipedream optim.clip=0 model.tied=false
finish
