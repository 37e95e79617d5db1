#!/usr/bin/env bash
# Pipelines as processes: every kind of schedule, beside the other ways to cut a model, comes to the losses, weights and
# moments of one rank, bit for bit; a checkpoint of one is another's to go on from; eval, generate and inspect read all of
# them; what is no pipeline is refused before a rank waits.
#
#   test/test_pipeline.sh                            some of each kind, one ring of checkpoints
#   MEGATRAIN_PIPELINES=each test/test_pipeline.sh   two models, a longer ring (make test-grid)
#   MEGATRAIN_PIPELINES=all test/test_pipeline.sh    checkpoints between all pairs of layouts
. "$(dirname "$0")/lib.sh"
extent=${MEGATRAIN_PIPELINES:-}
launch="$root/scripts/launch.sh"
export OMP_NUM_THREADS=1
make_tiny

make_ini pipe.ini model.layers=8 model.hidden=32 model.heads=4 model.seq=32 parallel.seq_blocks=4 train.global_batch=16 \
    train.steps=12 train.eval_every=4 optim.lr=1e-2 optim.min_lr=1e-3 checkpoint.keep=0
gpt2=(model.tied=true model.dropout=0.1 model.attention_dropout=0.1)
llama=(model.arch=llama model.kv_heads=2 model.tied=false)

# run DIR RANKS WORDS...
run() { timeout 600 "$launch" -n "$2" -- "$mt" --config pipe.ini run.dir="$1" "${@:3}" >/dev/null 2>"$1.err"; }
valids() { sed -n 's/.*"step":\([0-9]*\),.*"valid_loss":\([^,}]*\)[,}].*/\1 \2/p' "$1/metrics.jsonl"; }
same_valids() { [ "$(valids "$1" | wc -l)" -eq 3 ] && [ "$(valids "$1")" = "$(valids "$2")" ]; }
# words LINE: "pp schedule tp dp FURTHER...": ranks, and what to say to all commands
words() {
    local pp schedule tp dp more
    read -r pp schedule tp dp more <<<"$*"
    ranks=$((pp * tp * dp)) said=(parallel.pp="$pp" parallel.tp="$tp")
    [ "$schedule" = - ] || said+=(parallel.schedule="$schedule")
    local w
    for w in $more; do
        case $w in
        v*) said+=(parallel.vpp="${w#v}") ;;
        g*) said+=(parallel.group="${w#g}") ;;
        zero) said+=(parallel.zero=1) ;;
        overlap) said+=(parallel.overlap_grad=true parallel.overlap_param=true) ;;
        swapped) said+=(parallel.order=tp-cp-ep-pp-dp) ;;
        micro*) said+=(train.micro_batch="${w#micro}") ;;
        selective | full) said+=(train.recompute="$w") ;;
        async) said+=(checkpoint.async=true checkpoint.every=3) ;;
        late) said+=(debug.comm_delay_ms=2 debug.comm_check=true) ;;
        E*) said+=("parallel.layout=$w") ;;
        *) bad "no such word: $w" ;;
        esac
    done
}

# ---- every kind of schedule

layouts='2 1f1b 1 1 late
4 gpipe 1 1 micro1
2 interleaved 1 2 v2 g4 zero overlap micro1
2 zb-h1 2 1 selective
2 zb-v 1 1 async
4 chimera 1 1 zero overlap
2 dualpipev 1 2 zero swapped
4 hanayo 1 1 full
2 1f1b 2 2 zero overlap async micro1
2 chimera 1 2 async'
[ -z "$extent" ] || layouts+='
2 gpipe 2 2 zero
4 1f1b 2 1 zero overlap
4 interleaved 1 1 v2
2 interleaved+split 2 1 v4 selective
4 zb-h1 1 2 overlap micro1 async
4 zb-v 1 1 late
4 zb-v 2 1
2 chimera 2 2 zero overlap
4 dualpipev 1 1 selective late
4 hanayo 1 2 zero async
2 hanayo 1 1 v4
4 dualpipe 1 1 async zero
2 bfs 1 2 v4 zero overlap
3 1f1b 1 1 E|ttt|tttttL
4 zb-h2 1 1 full
2 v-min 1 2 swapped zero
4 - 1 1 v2 late
8 1f1b 1 1'
models=gpt2
[ -z "$extent" ] || models='gpt2 llama'
for model in $models; do
    declare -n keys=$model
    run $model-1 1 "${keys[@]}" checkpoint.every=2 # (what each hop below must come to)
    check "$model: the run of one rank: $(tail -1 $model-1.err)" [ "$(losses $model-1 | wc -l)" -eq 12 ]
    falls=$(losses $model-1 | awk 'NR == 1 { a = $NF } { b = $NF } END { print (b < 0.9 * a) }')
    check "$model: the loss falls by a tenth" [ "$falls" = 1 ]
    count=0
    while read -r line; do
        words "$line"
        run layout $ranks "${keys[@]}" "${said[@]}"
        check "$model, $line: $(grep -m1 error layout.err)" same_run layout $model-1 12
        check "$model, $line: losses of evaluations" same_valids layout $model-1
        rm -rf layout
        count=$((count + 1))
    done <<<"$layouts"
    echo "    $model: $count layouts"
done

# a first stage that is the embedding alone needs the least scratch of all
run least 2 "${gpt2[@]}" model.hidden=16 parallel.pp=2 parallel.slices=4 train.micro_batch=1 'parallel.layout=E|t*8L' \
    train.stop_at=2
check "the least scratch: $(grep -m1 error least.err)" [ "$(losses least | wc -l)" -eq 2 ]

# ---- checkpoints from one to the next

# readers DIR STEP: whoever reads a checkpoint reads this one as the one of one rank
readers() {
    check "$1: inspect" [ -n "$(digest "$1" "$2")" ]
    check "$1: digest of step $2" [ "$(digest "$1" "$2")" = "$(digest gpt2-1 "$2")" ]
    "$mt" eval --config pipe.ini "${gpt2[@]}" "${said[@]}" run.dir="$1" >eval-1.txt 2>eval.err
    check "$1: eval alone: $(grep -m1 error eval.err)" grep -q '^loss [0-9]' eval-1.txt
    check "$1: eval alone at step $2: $(head -1 eval-1.txt)" grep -qx "loss $(valid_at "$2")" eval-1.txt
    "$launch" -n $ranks -- "$mt" eval --config pipe.ini "${gpt2[@]}" "${said[@]}" run.dir="$1" >eval-n.txt 2>eval.err
    check "$1: eval on $ranks ranks is eval alone: $(grep -m1 error eval.err)" cmp -s eval-1.txt eval-n.txt
}
valid_at() { valids gpt2-1 | awk -v s="$1" '$1 == s { printf "%.6f", $2 }'; }

# hop DIR STOP LINE: the run in DIR goes on in that layout up to step STOP
hop() {
    words "$3"
    run "$1" $ranks "${gpt2[@]}" "${said[@]}" train.stop_at="$2"
    check "$1 to step $2 as $3: exit $?, $(grep -m1 error "$1.err")" [ -n "$(digest "$1" "$2")" ]
}

ring=('2 1f1b 1 1 zero' '2 interleaved 1 2 v2 zero swapped' '4 chimera 1 1 zero overlap' '1 - 2 1' '2 zb-v 1 2 zero async'
    '3 1f1b 1 1 E|ttt|tttttL')
step=0
for line in "${ring[@]}"; do
    step=$((step + 2))
    hop ring $step "$line"
    [ $((step % 4)) -ne 0 ] || readers ring $step
    check "ring: digest of step $step after $line" [ "$(digest ring $step)" = "$(digest gpt2-1 $step)" ]
done
check "the ring of ${#ring[@]} layouts: $(grep -m1 error ring.err)" same_run ring gpt2-1 12
text() { "$mt" generate --run "$1" --prompt Line --tokens 12 2>/dev/null; }
check "generate from it: '$(text ring)'" [ "$(text ring)" = "$(text gpt2-1)" ]
# of one rank with several chunks, whatever shape its schedule wants
for words in "bfs 1" "dualpipev 2"; do
    read -r schedule micro <<<"$words"
    rm -rf chunks
    "$mt" --config pipe.ini run.dir=chunks train.stop_at=1 train.micro_batch="$micro" parallel.vpp=2 \
        parallel.schedule="$schedule" >chunks.log 2>&1
    check "generate after $schedule: $(tail -1 chunks.log)" \
        [ "$("$mt" generate --run chunks --prompt Line --tokens 4 2>&1 | grep -c '^Line')" = 1 ]
done
check "generate says something" [ "$(text ring | wc -c)" -gt 8 ]

# every pair: saved as A, gone on with as B
if [ "$extent" = all ]; then
    pairs=("${ring[@]}" '4 gpipe 1 1' '2 dualpipev 2 1 zero swapped' '4 zb-h1 1 1' '4 hanayo 1 1 async' '2 chimera 2 1'
        '4 dualpipe 1 1 zero' '1 - 1 1')
    for from in "${pairs[@]}"; do
        rm -rf from
        hop from 4 "$from"
        readers from 4
        for to in "${pairs[@]}"; do
            rm -rf pair
            cp -r from pair
            hop pair 6 "$to"
            check "from $from to $to" [ "$(digest pair 6)" = "$(digest gpt2-1 6)" ]
        done
    done
    echo "    ${#pairs[@]} x ${#pairs[@]} pairs"
fi

# a rank's checkpoint that is not there is not another's
words "${ring[0]}"
rm -rf torn
run torn 2 "${gpt2[@]}" "${said[@]}" train.stop_at=4
rm torn/checkpoints/step-00000004/shard-00001.safetensors
expect 4 'shard-00001' "$mt" inspect torn/checkpoints/step-00000004
expect 4 'none is valid' "$mt" --config pipe.ini "${gpt2[@]}" run.dir=torn

# ---- what is no pipeline

# refused RANKS TEXT HINT WORDS...: one error line over all ranks, before there is a run folder; config check and plan
# say the same
refused() {
    local n=$1 text=$2 hint=$3
    shift 3
    expect 2 "$text" "$launch" -n "$n" -- "$mt" --config pipe.ini run.dir=no "$@"
    check "$*: the hint '$hint': $(grep ^hint err.txt)" grep -qF -- "$hint" err.txt
    check "$*: nothing was begun" [ ! -e no ]
    expect 2 "$text" "$mt" config check --config pipe.ini --world "$n" "$@"
    expect 2 "$text" "$mt" plan --config pipe.ini --world "$n" "$@"
}
refused 2 "unknown schedule 'zbv'; did you mean 'zb-v'?" 'dualpipev' parallel.pp=2 parallel.schedule=zbv
refused 3 'an even number of ranks' '4 ranks, 8 micro-batches' parallel.pp=3 parallel.schedule=chimera
refused 2 'groups of at least as many' 'groups of 2' parallel.pp=2 parallel.vpp=2 parallel.group=1
refused 4 'cannot be shared by' 'at most 8' parallel.pp=4 parallel.vpp=4
refused 2 "has 7 blocks, the model 8" "a 't' for each" parallel.pp=2 'parallel.layout=Ettt|ttttL'
refused 2 'no multiple of' 'must divide the stages' parallel.pp=2 'parallel.layout=Ettt|tttt|tL'
refused 2 'cuts a micro-batch into 2' 'train.micro_batch=2' parallel.pp=2 parallel.schedule=chimera-bhalf train.micro_batch=1
latent=(model.attention=mla model.position=rope model.kv_lora_rank=16 model.qk_nope_head_dim=8 model.qk_rope_head_dim=4
    model.v_head_dim=8 parallel.seq_blocks=1 train.stop_at=2 train.eval_every=0)
halves=(parallel.pp=2 parallel.tp=2 parallel.schedule=chimera-bhalf+split)
mixture=(model.bias=false moe.experts=4 parallel.ep=2)
refused 4 'tp must divide these x seq_blocks, here 1 x 1' 'raise train.micro_batch' "${halves[@]}" "${latent[@]}"
refused 4 'tp must divide these x seq_blocks, here 1 x 1' 'raise train.micro_batch' "${halves[@]}" "${mixture[@]}" \
    parallel.seq_blocks=1
refused 4 'tp must divide these x seq, here 1 x 9' 'whole micro-batches' "${halves[@]}" model.seq=9 parallel.seq_blocks=1 \
    run.reproducible=run
refused 4 "the smallest piece" "raise parallel.seq_blocks, train.micro_batch" parallel.pp=2 \
    parallel.schedule=chimera-bhalf "${mixture[@]}" parallel.seq_blocks=1 moe.slack=1 moe.overflow=redo
run latent-1 1 "${latent[@]}"
for words in train.micro_batch=4 parallel.sp=false; do
    run latent-4 4 "${latent[@]}" "${halves[@]}" $words
    check "halves of micro-batches, $words: $(grep -m1 error latent-4.err)" same_run latent-4 latent-1 2
    rm -rf latent-4
done
refused 2 'no groups' 'take parallel.group=0' parallel.pp=2 parallel.group=4
refused 4 "schedule '1f1b' has no micro-batch whose forward runs beside" 'take parallel.schedule=dualpipev' parallel.pp=2 \
    parallel.ep=2 parallel.overlap_moe=true model.bias=false moe.experts=4
expect 2 "did you mean 'optim.lr'" "$launch" -n 4 -- "$mt" --config pipe.ini run.dir=no optim.lrr=1
check "nothing was begun" [ ! -e no ]
# of a launcher that tells nothing of the words: rank 0's is the error, another's a warning
for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "$mt" --config pipe.ini optim.lrr=1 2>rank$rank.err
    check "rank $rank by hand: exit 2" [ $? -eq 2 ]
done
check "rank 0 by hand has the error line" grep -q "^megatrain: error .*optim.lrr" rank0.err
check "rank 1 by hand warns" [ "$(grep -c '^megatrain: error' rank1.err)-$(grep -c 'warning: .*optim.lrr' rank1.err)" = 0-1 ]
# one rank with words of its own says so itself
printf '#!/bin/bash\n[ $RANK = 1 ] && set -- "$@" optim.no_such=1\nexec "%s" "$@"\n' "$mt" >rank.sh
chmod +x rank.sh
expect 2 "optim.no_such" "$launch" -n 2 -- "$work/rank.sh" --config pipe.ini run.dir=no
finish
