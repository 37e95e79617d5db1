#!/usr/bin/env bash
# One model, every layout, as processes: runs of 2, 4 and 8 ranks started by scripts/launch.sh come to the losses, weights
# and moments of the run of one rank, bit for bit; a checkpoint of one layout is another's to go on from.
#
#   test/test_ranks.sh                       one layout: the others' bits are shown by threads (test_array)
#   MEGATRAIN_RANKS=each test/test_ranks.sh  each of them with one model or the other (make test-ranks), and no more
#   MEGATRAIN_RANKS=all test/test_ranks.sh   all of them, and all that is here (make test-ranks FULL=1)
. "$(dirname "$0")/lib.sh"
all=${MEGATRAIN_RANKS:-}
launch="$root/scripts/launch.sh"
export OMP_NUM_THREADS=1
make_tiny

make_ini ranks.ini model.layers=2 model.hidden=64 model.heads=8 model.seq=32 model.dropout=0.1 \
    model.attention_dropout=0.1 parallel.seq_blocks=4 train.global_batch=16 train.steps=20 optim.lr=1e-2 optim.min_lr=1e-3
gpt2=(model.tied=true model.bias=true)
llama=(model.arch=llama model.kv_heads=2 model.qk_norm=true model.tied=false) # tp 4 and 8: ranks share kv heads

# layout N WORDS...: what a line of the tables below means
words() {
    local tp sp zero overlap micro
    read -r _ tp sp zero overlap micro <<<"$*"
    echo parallel.tp="$tp" "$([ "$tp" -gt 1 ] && echo parallel.sp="$sp")" parallel.zero="$zero" \
        parallel.overlap_grad="$overlap" parallel.overlap_param="$overlap" train.micro_batch="$micro"
}
# run DIR RANKS WORDS...
run() { timeout 600 "$launch" -n "$2" -- "$mt" --config ranks.ini run.dir="$1" "${@:3}" >/dev/null 2>"$1.err"; }
# layouts MODEL: lines "ranks tp sp zero overlap micro"
layouts() {
    if [ -z "$all" ]; then
        [ "$1" != gpt2 ] || echo '4 2 false 1 true 2'
        return
    fi
    local n tp sp zero turn=0 times overlap=(true false) third=(gpt2 llama gpt2) step=2
    [ "$all" = each ] || step=1
    for n in 2 4 8; do
        for tp in 1 2 4 8; do
            [ "$tp" -le "$n" ] || continue
            for sp in false true; do
                [ $sp = false ] || [ "$tp" -gt 1 ] || continue
                for zero in 0 1; do
                    [ $zero = 0 ] || [ "$n" -gt "$tp" ] || continue
                    times=1 # of all, gpt2 has those with replicas with and without overlap
                    [ "$all $1" != "all gpt2" ] || [ "$n" -eq "$tp" ] || times=2
                    for (( ; times > 0; times--, turn++)); do
                        [ "$all" = all ] || [ "$1" = ${third[turn % 3]} ] || continue
                        echo "$n $tp $sp $zero ${overlap[turn / step % 2]} $((1 + turn % 2))"
                    done
                done
            done
        done
    done
}

# flop_a_token RUN: what `tflops` of its last step, which is a device's share, says a token takes
flop_a_token() { sed -n 's/.*"step":20,.*"tokens_per_s":\([^,]*\),.*"tflops":\([^,]*\),.*/\1 \2/p' "$1/metrics.jsonl" | awk '{ printf "%.0f", 1e12 * $2 / $1 }'; }

for model in gpt2 llama; do
    declare -n keys=$model
    run $model-1 1 "${keys[@]}"
    check "$model: the run of one rank: $(tail -1 $model-1.err)" [ "$(losses $model-1 | wc -l)" -eq 20 ]
    falls=$(losses $model-1 | awk 'NR == 1 { a = $NF } { b = $NF } END { print (b < 0.8 * a) }')
    check "$model: the loss falls by a fifth" [ "$falls" = 1 ]
    count=0
    while read -r line; do
        n=${line%% *} dir=$model-${line// /-} count=$((count + 1))
        run "$dir" "$n" "${keys[@]}" $(words $line)
        check "$model, ranks tp sp zero overlap micro = $line: $(grep -m1 error "$dir.err")" same_run "$dir" $model-1 20
        check "$line: flop of a token, tflops x ranks: $(flop_a_token $model-1), $(flop_a_token "$dir") x $n" \
            awk "BEGIN { x = $(flop_a_token "$dir") * $n / $(flop_a_token $model-1); exit !(x > 0.999 && x < 1.001) }"
        rm -rf "$dir"
    done < <(layouts $model)
    echo "    $model: $count layouts"
done
[ "$all" != each ] || finish # (make test does the rest)

# saved in one layout, gone on with in another, and in a third
reshape() { # MODEL
    declare -n keys=$1
    rm -rf moved
    run moved 1 "${keys[@]}" train.stop_at=8 checkpoint.keep=0
    run moved "${second%% *}" "${keys[@]}" $(words $second) train.stop_at=14 checkpoint.keep=0
    run moved "${third%% *}" "${keys[@]}" $(words $third) checkpoint.keep=0
    check "$1: 8 steps on one rank, 6 as $second, 6 as $third: $(grep -m1 error moved.err)" same_run moved "$1-1" 20
}
while IFS=, read -r model second third; do reshape "$model"; done < <(
    printf '%s\n' 'gpt2,4 2 true 1 true 2,2 1 false 1 true 4' 'llama,4 4 true 0 true 4,2 2 false 0 false 2'
    [ -z "$all" ] || printf 'gpt2,%s\n' '2 2 false 0 false 2,8 4 true 1 true 2' '8 1 false 1 true 1,4 4 true 0 false 4' \
        '2 1 false 0 true 2,1 1 false 0 false 8' '8 8 true 0 false 4,4 1 false 1 false 2'
    [ -z "$all" ] || printf 'llama,%s\n' '8 8 true 0 false 4,1 1 false 0 false 2' '2 1 false 1 true 2,8 4 false 1 true 2')

# checkpoints that a thread of each rank writes, at every step, agreed upon beside the steps' own communication
async=("${gpt2[@]}" $(words 4 2 false 1 true 2) checkpoint.async=true)
run async 4 "${async[@]}" checkpoint.every=1 debug.comm_check=true
check "saved by threads of 4 ranks: $(grep -m1 error async.err)" same_run async gpt2-1 20
check "each step's" [ "$(grep -c '"saved":true,"save_stall_ms"' async/metrics.jsonl)" -ge 18 ]
check "the one before the last is whole" [ -n "$(digest async 19)" ]
MEGATRAIN_RANK_FAULT=3:step:12:kill run dead 4 "${async[@]}" checkpoint.every=1
check "a rank dies beside a save: exit 7 (got $?)" [ $? -eq 7 ]
run dead 2 "${gpt2[@]}" parallel.tp=2 checkpoint.async=true
check "it goes on with 2 ranks: $(grep -m1 error dead.err)" same_run dead gpt2-1 20
# the operations of one save are counted, not those of the metrics beside it: on rank 0 alone, on all, on rank 2 alone
for fault in eio@5:step-00000012 eio@2:step-00000012 eio@6:shard-00002; do
    MEGATRAIN_FILE_FAULT=$fault run sick 4 "${async[@]}" checkpoint.every=4
    check "a save that fails on ranks ($fault): exit 0 (got $?)" [ $? -eq 0 ]
    check "$fault is warned of, and in the metrics" \
        [ "$(grep -c 'training goes on' sick.err)-$(grep -c '"saved":false' sick/metrics.jsonl)" = 4-1 ]
    check "$fault: and the last one is there" same_run sick gpt2-1 20
    rm -rf sick
done
# rank 2 stands still before step 6 until the signal has come to it
MEGATRAIN_RANK_FAULT=2:step:6:stop "$launch" -n 4 -- "$mt" --config ranks.ini run.dir=stopped "${async[@]}" checkpoint.every=1 \
    >/dev/null 2>stopped.err &
pid=$! kids=()
until [ ${#kids[@]} -ge 4 ] && stands_still "${kids[2]}"; do
    kill -0 $pid 2>/dev/null || break
    read -ra kids <"/proc/$pid/task/$pid/children"
    sleep 0.01
done
kill -TERM $pid
until has_pending "${kids[2]}" 15; do kill -0 $pid 2>/dev/null || break; sleep 0.01; done
kill -CONT "${kids[2]}"
wait $pid
check "stopped beside a save: exit 75 (got $?)" [ $? -eq 75 ]
check "stopped after step 6: $(losses stopped | tail -1)" [ "$(losses stopped | wc -l)" -eq 6 ]
run stopped 1 "${gpt2[@]}"
check "it goes on alone from step $(sed -n 's/.*resuming from .*step-0*//p' stopped.err)" same_run stopped gpt2-1 20

# what goes on beside what: gradients are reduced while backward runs, weights gathered while forward does, and within a
# layer rows are gathered and summed beside the products
cat >spans.py <<'EOP'
import json
import sys
events = json.load(open("traced/timeline.json"))
track = {e["tid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"}
spans = [(track.get(e["tid"], ""), e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]
group, call, beside = sys.argv[1:]
others = [(a, b) for t, n, a, b in spans if n == beside]
print(sum(any(a < d and c < b for c, d in others) for t, n, a, b in spans if t == group and n == call))
EOP
beside() { # GROUP CALL SPAN COUNT
    local seen
    seen=$(python3 spans.py "$1" "$2" "$3" 2>&1)
    check "$1 $2 beside $3: '$seen', at least $4" [ "$seen" -ge "$4" ]
}
# (a backward of many milliseconds and buckets: on a busy machine the communicator's thread has to wait for its turn)
run traced 2 "${gpt2[@]}" model.layers=4 model.hidden=256 parallel.zero=1 parallel.overlap_grad=true parallel.overlap_param=true \
    log.trace_every=5 train.micro_batch=8 train.steps=5 debug.comm_delay_ms=20
beside dp reduce-scatter-i64 backward 1
beside dp all-gather forward 1
rm -rf traced
# (products of some milliseconds, for the same reason)
run traced 2 "${gpt2[@]}" model.layers=1 model.hidden=768 train.micro_batch=8 parallel.tp=2 log.trace_every=3 train.steps=3
beside sp reduce-scatter-tree linear_dw 1
beside sp all-gather linear_dx 1

# one process reads what several left
run of-four 4 "${gpt2[@]}" parallel.tp=2 parallel.zero=1
check "eval alone" "$mt" eval --config ranks.ini run.dir=of-four "${gpt2[@]}" parallel.tp=2 >eval.txt 2>eval.err
check "eval's loss: $(head -1 eval.txt)" grep -q '^loss [0-9]' eval.txt
check "generate alone" "$mt" generate --run of-four --prompt Line --tokens 4 >generate.txt 2>&1

# outside the promise: tp cuts inside a canonical block, or float sums; near, and the same when repeated
three=(model.heads=6 model.hidden=96 model.dropout=0 model.attention_dropout=0 parallel.tp_blocks=2)
run three-1 1 "${gpt2[@]}" "${three[@]}" run.reproducible=run
run three-3 3 "${gpt2[@]}" "${three[@]}" run.reproducible=run parallel.tp=3 parallel.sp=false
check "tp 3: losses within 1e-5 of one rank's: $(grep -m1 error three-3.err)" near three-3 three-1 20 1e-5
run float-1 2 "${gpt2[@]}" run.reproducible=run parallel.zero=1
run float-2 2 "${gpt2[@]}" run.reproducible=run parallel.zero=1
run float-3 2 "${gpt2[@]}" run.reproducible=run parallel.zero=0 parallel.overlap_grad=true
run float-4 2 "${gpt2[@]}" run.reproducible=run parallel.zero=1 parallel.overlap_grad=true parallel.overlap_param=true
check "float sums, dp 2: repeated" same_run float-1 float-2 20
check "float sums, dp 2: without ZeRO, with overlap" same_run float-3 float-1 20
check "float sums, dp 2: with overlap" same_run float-4 float-1 20
check "float sums, dp 2: losses within 1e-5 of one rank's" near float-1 gpt2-1 20 1e-5
# (at a rate where rounding is not amplified from step to step; bf16: test_layouts)
slow=("${gpt2[@]}" optim.lr=1e-3 optim.min_lr=1e-4)
run fp16-1 1 "${slow[@]}" run.precision=fp16
run fp16-2 2 "${slow[@]}" run.precision=fp16 parallel.tp=2
check "fp16: tp 2 within 1e-2 of one rank: $(grep -m1 error fp16-2.err)" near fp16-2 fp16-1 20 1e-2
finish
