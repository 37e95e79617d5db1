#!/usr/bin/env bash
# A slow rank is found: one that sleeps for 0.2 s in each of its forwards, while the others wait for it, is named in
# metrics.jsonl, in event files and in the report, whatever the layout. And the traces of chosen ranks, joined.
. "$(dirname "$0")/lib.sh"
make_tiny
export OMP_NUM_THREADS=1
common=(train.micro_batch=1 train.global_batch=2 train.eval_every=0 checkpoint.every=0)

launch() { # RANKS NAME key=value...
    local n=$1 name=$2
    shift 2
    "$root/scripts/launch.sh" -n "$n" -- "$mt" --config tiny.ini run.dir="$name" "${common[@]}" "$@" >"$name.out" 2>"$name.err"
}
events_agree() { python3 "$root/test/tools/check_events.py" "$1" >"$1.events" 2>&1; }
# of the steps of a run, those in which a rank lagged by the length of its sleep or more
named() { grep -o '"slowest_rank":[0-9]*,"lag_ms":[0-9]*' "$1/metrics.jsonl" | tr '":,a-z_' ' ' | awk -v r="$2" '$1 == r && $2 >= 150' | wc -l; }

# ---- who it is: columns ranks, the slow one, layout
steps=7
while read -r n slow keys; do
    name=slow$n-$slow-${keys//[^a-z0-9]/}
    # shellcheck disable=SC2086
    MEGATRAIN_RANK_FAULT=$slow:forward:1:slow launch "$n" "$name" train.steps=$steps log.tensorboard=true $keys
    check "$name: $(tail -1 "$name.err")" [ "$(losses "$name" | wc -l)" -eq $steps ]
    # (beside a machine's other work a step may be another's)
    check "$name: in event files: $(events_agree "$name"; tail -3 "$name.events")" events_agree "$name"
    check "$name: rank $slow is named in $(named "$name" "$slow") of $steps steps" [ "$(named "$name" "$slow")" -gt $((steps / 2)) ]
    "$mt" report "$name" --output "$name.html"
    check "$name: in the report" grep -q "<td>rank $slow in [0-9]* of $steps <small>(by [0-9]* % on average)" "$name.html"
done <<'EOC'
2 1 parallel.zero=1
2 0 parallel.tp=2
2 1 parallel.pp=2
2 1 parallel.cp=2 parallel.seq_blocks=4 parallel.attn_block=8
4 2 parallel.pp=2 train.global_batch=4
EOC
losses slow2-1-parallelzero1 >first
launch 2 undisturbed train.steps=$steps parallel.zero=1
check "times change no bits" same_losses undisturbed slow2-1-parallelzero1
launch 2 seldom train.steps=5 log.every=2
check "only steps that make a line of the log are measured: $(grep -c slowest_rank seldom/metrics.jsonl)" \
    [ "$(grep slowest_rank seldom/metrics.jsonl | sed 's/{"step":\([0-9]*\),.*/\1/' | xargs)" = "2 4" ]
"$mt" --config tiny.ini run.dir=alone "${common[@]}" train.stop_at=2 >/dev/null 2>&1
check "a run of one rank" [ $? -eq 0 ]
check "one rank is compared with nobody" bash -c "! grep -q slowest_rank alone/metrics.jsonl"
"$mt" report alone --output alone.html
check "nor in its report" bash -c "! grep -q 'that was slow' alone.html"

# ---- traces of chosen ranks: columns name, ranks, keys, processes of the file, its picture
traced() { python3 -c "
import json, sys
events = json.load(open(sys.argv[1] + '/timeline.json'))
print(*sorted(e['pid'] for e in events if e['name'] == 'process_name'))" "$1"; }
trace_holds() { python3 "$root/test/tools/check_trace.py" "$1/timeline.json" >"$1.trace" 2>&1; }
while IFS='|' read -r name n keys want picture; do
    # shellcheck disable=SC2086
    launch "$n" "$name" train.stop_at=3 log.trace_steps=3 train.global_batch=4 $keys
    check "$name: ranks $(traced "$name") of $n: $(tail -1 "$name.err")" [ "$(traced "$name")" = "$want" ]
    check "$name: $(trace_holds "$name"; grep -m3 -e ^bad -e Error "$name.trace")" trace_holds "$name"
    check "$name: $picture a picture" test $picture "$name/timeline.svg"
done <<'EOC'
usual|2|parallel.zero=1|0|! -e
both|2|parallel.zero=1 log.trace_ranks=all|0 1|! -e
other|2|parallel.tp=2 log.trace_ranks=1|1|! -e
some|4|parallel.tp=2 log.trace_ranks=0,2-3|0 2 3|! -e
pipe|4|parallel.pp=2 log.trace_ranks=1,3|1 3|-e
EOC
expect 2 "log.trace_ranks = '0,2': must be ranks of the run" "$mt" config check --config tiny.ini --world 2 log.trace_ranks=0,2
finish
