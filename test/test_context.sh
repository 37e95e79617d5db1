#!/usr/bin/env bash
# Sequences over several ranks from outside: processes give the bits of one rank (in all layouts: test_array); a checkpoint
# goes on with another cp; evaluation; plan's bytes fall; what is refused, with which words.
. "$(dirname "$0")/lib.sh"
make_tiny
make_ini long.ini model.layers=2 model.hidden=32 model.heads=4 model.kv_heads=2 model.seq=64 model.position=rope \
    model.dropout=0.1 model.attention_dropout=0.1 parallel.seq_blocks=8 parallel.attn_block=8 train.global_batch=8 \
    train.steps=6 data.reset_at_eod=true
run() { # DIR COUNT WORDS...
    local launch=()
    [ "$2" -eq 1 ] || launch=("$root/scripts/launch.sh" -n "$2" --)
    "${launch[@]}" "$mt" --config long.ini run.dir="$1" checkpoint.every=3 "${@:3}" >/dev/null 2>"$1.err"
}

run whole 1
check "one rank: $(tail -1 whole.err)" [ "$(losses whole | wc -l)" -eq 6 ]
run four 4 parallel.cp=2 parallel.pp=2 parallel.slices=2 parallel.cp_comm=ring,a2a debug.comm_check=true debug.comm_delay_ms=2
check "four ranks, a block's keys in a ring, another's by heads: $(grep -m1 error four.err)" same_run four whole 6

# a recurrence with one group, whose state goes from rank to rank and round to the next slice; the windows a plan refuses
group=(model.mixer=mamba2,attention model.mamba_heads=4 model.mamba_head_dim=8 model.mamba_groups=1 model.mamba_state=8
    parallel.tp_blocks=1 model.seq=512 parallel.seq_blocks=16 train.steps=3 train.global_batch=4 train.micro_batch=1)
run alone 1 "${group[@]}"
run handed 4 "${group[@]}" parallel.cp=2 parallel.pp=2 parallel.slices=2 parallel.cp_comm=state,ring debug.comm_check=true \
    debug.comm_delay_ms=2
check "four ranks, a state from rank to rank: $(grep -m1 error handed.err)" same_run handed alone 3
expect 2 "128 x cp x slices must divide seq, here 512" "$mt" plan --config long.ini --world 8 \
    "${group[@]}" parallel.cp=8 parallel.cp_comm=state,allgather

run moved 1 train.stop_at=3
cp -r moved back
run moved 4 parallel.cp=4
check "begun by one rank, gone on with by four that share sequences: $(tail -1 moved.err)" same_run moved whole 6
run turned 4 parallel.cp=2 parallel.zero=1 train.stop_at=3
run turned 2 parallel.tp=2
check "and from there to tp: $(tail -1 turned.err)" same_run turned whole 6
for cp in 1 2; do
    launch=()
    [ $cp -eq 1 ] || launch=("$root/scripts/launch.sh" -n $cp --)
    "${launch[@]}" "$mt" eval --config long.ini run.dir=whole parallel.cp=$cp >eval$cp.txt 2>&1
done
check "evaluated by two ranks: $(tail -1 eval2.txt)" \
    [ "$(grep -oE 'loss [0-9.]+' eval1.txt)" = "$(grep -oE 'loss [0-9.]+' eval2.txt)" ]
check "and there was a loss" grep -qE 'loss [0-9.]+' eval1.txt

# plan: saves of a rank, by cp; who is in which group
figure() { grep -oE "\"$1\": ?[0-9]+" | head -1 | grep -oE '[0-9]+$'; }
saves() { "$mt" plan --config long.ini --world 8 --json parallel.cp="$1" train.micro_batch=1 2>/dev/null | figure saves; }
one=$(saves 1)
for cp in 2 4; do
    check "cp $cp: saves are $(saves $cp) bytes, with one rank $one" [ $(($(saves $cp) * cp)) -le $((one * 105 / 100)) ]
done
"$mt" plan --config long.ini --world 8 parallel.cp=4 parallel.cp_comm=ring >plan.txt 2>&1
for text in '8 ranks = tp 1 x cp 4 x dp 2' '\(0 1 2 3\) \(4 5 6 7\)   cp' '\(0 1 2 3 4 5 6 7\)   dp-cp' 'cp exchange' 'cp rank 3'; do
    check "plan says $text" grep -qE -- "$text" plan.txt
done

refuse() { # WORLD TEXT WORDS...
    expect 2 "$2" "$mt" plan --config long.ini --world "$1" "${@:3}"
}
refuse 12 "2 x cp must divide seq; take parallel.cp=2, or parallel.cp=4" parallel.cp=3 train.global_batch=24
refuse 8 "; take parallel.seq_blocks=16, or run.reproducible=run" parallel.cp=8 run.reproducible=layout
refuse 4 "attn_block must divide seq / (2 x its ranks), here 8" parallel.cp=4 parallel.cp_comm=ring parallel.attn_block=16
refuse 4 "cp_heads must divide cp" parallel.cp=4 parallel.cp_comm=hierarchical parallel.cp_heads=3
expect 9 "each sequence; or a smaller" "$mt" --config long.ini run.dir=refused train.micro_batch=65536 \
    train.global_batch=65536 model.seq=512
# cp of a short sequence, by default of few blocks: the warning's number is one that keeps the bits
short=(model.seq=32 parallel.seq_blocks=0 train.steps=2 optim.warmup=0)
run blunt 2 "${short[@]}" parallel.cp=2
blocks=$(grep -o 'parallel.seq_blocks=[0-9]*' blunt.err | tail -1)
check "of two ranks one warns" [ "$(grep -c 'canonical block' blunt.err)" -eq 1 ]
check "cp 2 inside a block names the blocks: $(grep -m1 warning blunt.err)" [ "$blocks" = parallel.seq_blocks=4 ]
run keen1 1 "${short[@]}" "${blocks:-none}"
run keen2 2 "${short[@]}" "${blocks:-none}" parallel.cp=2
check "they keep the bits: $(grep -m1 -E 'error|warning' keen2.err)" same_run keen1 keen2 2
check "and nothing is warned of" [ "$(grep -c 'canonical block' keen2.err)" -eq 0 ]
run three 3 model.seq=48 parallel.seq_blocks=0 train.global_batch=6 train.stop_at=1 parallel.cp=3
check "cp 3 has no such number" [ "$(grep -c 'canonical block' three.err)" -gt 0 -a "$(grep -c 'keeps them alike' three.err)" -eq 0 ]
# Slices are named where they are legal and pipeline ranks hold less by them, as `plan` says.
huge=(train.micro_batch=65536 train.global_batch=65536 model.seq=512)
two() { "$root/scripts/launch.sh" -n 2 -- "$mt" --config long.ini run.dir=refused "${huge[@]}" "$@"; }
expect 9 "each sequence; parallel.slices=2, which" two parallel.pp=2
expect 9 "each sequence; parallel.slices=4, which" two parallel.pp=2 parallel.slices=2
expect 9 "each sequence; or a smaller" two parallel.pp=2 parallel.schedule=gpipe
sliced() {
    "$mt" plan --config long.ini --world 2 --json parallel.pp=2 parallel.slices="$1" train.micro_batch=1 2>/dev/null |
        figure saves
}
check "2 slices: saves are $(sliced 2) bytes, of whole sequences $(sliced 1)" \
    [ $(($(sliced 2) * 100)) -le $(($(sliced 1) * 80)) ]
# A sample of 32,768 tokens: within the memory that refuses one rank there is room for each of four.
limit=700000 # KiB of addresses
far=(data.valid=a model.seq=32768 model.layers=4 model.hidden=64 train.micro_batch=1 train.global_batch=1)
addresses() { bash -c "ulimit -v $limit"'; exec "$0" "$@"' "$@"; }
[ -n "${MEGATRAIN_SANITIZED:-}" ] || expect 9 "parallel.cp=2, with more ranks" addresses "$mt" --config long.ini \
    run.dir=refused "${far[@]}"
check "and says what it could not get" grep -q "cannot get" err.txt
total() { "$mt" plan --config long.ini --world "$1" --json "${far[@]}" parallel.cp="$1" 2>/dev/null | figure total; }
check "one rank takes $(total 1) bytes, each of 4 $(total 4)" \
    [ "$(total 1)" -gt $((limit * 1024)) -a "$(total 4)" -lt $((limit * 1024 / 2)) ]
run whole 1 parallel.seq_blocks=16
check "another seq_blocks is another run (got $?)" grep -qF "parallel.seq_blocks was '8' and is '16'" whole.err
finish
