#!/usr/bin/env bash
# Traces of pipelines as processes: one timeline.json whose actions are the schedule's lists, one timeline.svg, bubbles in
# metrics.jsonl; and nothing of it without a trace. Columns: ranks, schedule, micro-batches of a rank's step, keys.
. "$(dirname "$0")/lib.sh"
make_tiny
common=(model.layers=8 train.micro_batch=1 train.global_batch=8 train.steps=6 train.stop_at=4 train.eval_every=3 checkpoint.every=0)

launch() { # RANKS NAME key=value...: a run in folder NAME
    local n=$1 name=$2
    shift 2
    "$root/scripts/launch.sh" -n "$n" -- "$mt" --config tiny.ini run.dir="$name" "${common[@]}" "$@" >"$name.out" 2>"$name.err"
}

trace_holds() { python3 "$root/test/tools/check_trace.py" "$1/timeline.json" >"$1.trace" 2>&1; }
matches() { python3 "$root/test/tools/check_timeline.py" "$1" "$1.list" "$2" >"$1.match" 2>&1; }

cases="one   2 1f1b    8 parallel.pp=2
four  4 zb-v    8 parallel.pp=4
cut   4 chimera 8 parallel.pp=2 parallel.tp=2 parallel.sp=true
data  4 dualpipev 4 parallel.pp=2 parallel.zero=1
pairs 4 dualpipev 4 parallel.pp=2 model.bias=false moe.experts=4 parallel.ep=2 parallel.overlap_moe=true
late  2 pipedream 8 parallel.pp=2 run.reproducible=run optim.clip=0 model.tied=false"
while read -r name ranks schedule microbatches keys; do
    pp=$(sed 's/.*parallel.pp=\([0-9]*\).*/\1/' <<<"$keys")
    # shellcheck disable=SC2086
    check "$name: a traced run of $schedule: exit $(launch "$ranks" "$name" parallel.schedule="$schedule" log.trace_steps=3 $keys; echo $?), $(tail -1 "$name.err")" \
        test -f "$name/timeline.svg"
    "$mt" simulate --schedule "$schedule" --stages "$pp" --microbatches "$microbatches" --list >"$name.list"
    check "$name: $(trace_holds "$name"; grep -m3 -e ^bad -e Error "$name.trace")" trace_holds "$name"
    check "$name: $(matches "$name" 3; grep -m3 -e ^bad -e Error "$name.match")" matches "$name" 3
    check "$name: a process for each rank" grep -q "^processes: $ranks," "$name.match"
done <<<"$cases"

# halves of pairs in turn: each has 2 blocks, in each of which it waits twice; on 2 data-parallel ranks
halves=$(($(grep -o '|' pairs.list | wc -l) * 2))
check "pairs: $halves halves: $(grep -o 'rows beside.*' pairs.match)" grep -q "rows beside the other half: $((halves * 2 * 2 * 2)) a step" pairs.match
check "data: one after the other" grep -q 'rows beside the other half: 0 a step' data.match
# each of 32 tokens goes to 2 of the experts, half of the rows of 32 numbers to the other rank; all in a call
check "pairs: bytes of rows" python3 - pairs/timeline.json <<'EOP'
import json, sys
sent = [e["args"]["KiB sent"] for e in json.load(open(sys.argv[1])) if e["name"] == "wait for rows"]
sys.exit(not (sent and set(sent) == {32 * 2 * 32 * 4 // 2 // 1024}))
EOP

# ranks that read clocks of their own, hours apart
cat >apart.sh <<'EOS'
#!/usr/bin/env bash
[ "$RANK" = 0 ] || exec unshare --time --fork --monotonic $((10000 * RANK)) -- "$@"
exec "$@"
EOS
chmod +x apart.sh
if unshare --time --fork --monotonic 10000 -- true 2>unshare.err; then
    "$root/scripts/launch.sh" -n 2 -- ./apart.sh "$mt" --config tiny.ini run.dir=apart "${common[@]}" parallel.pp=2 \
        log.trace_steps=3 >apart.out 2>apart.err
    cp one.list apart.list
    check "clocks apart: $(tail -1 apart.err; matches apart 3; grep -m3 -e ^bad -e Error apart.match)" matches apart 3
    check "and the picture says so" grep -q 'clocks agree within [0-9.e-]* ms' apart/timeline.svg
    check "all spans within an hour" python3 -c "
import json, sys
sys.exit(not all(0 <= e['ts'] < 3600e6 for e in json.load(open('apart/timeline.json')) if 'ts' in e))"
else
    skip "clocks apart: $(head -1 unshare.err)"
fi

# what was checked can fail: another list
sed 's/F0.s0/F1.s0/' four.list >broken.list
cp -r four broken
check "another list is noticed" bash -c "! python3 '$root/test/tools/check_timeline.py' broken broken.list 3 >/dev/null"

launch 2 off parallel.pp=2
check "a run without a trace: $(tail -1 off.err)" test -f off/metrics.jsonl
check "leaves no timeline" test ! -e off/timeline.json -a ! -e off/timeline.svg
check "and no bubbles" bash -c "! grep -q bubble off/metrics.jsonl"

launch 2 every parallel.pp=2 log.trace_every=2
check "every second step: $(grep -c '"bubble"' every/metrics.jsonl) bubbles" [ "$(grep -c '"bubble":.*"bubble_simulated":' every/metrics.jsonl)" = 2 ]
check "the last one stays: $(grep -o 'step [0-9]*;' every/timeline.svg | head -1)" grep -q '>step 4;' every/timeline.svg
check "its trace: $(trace_holds every; grep -m3 ^bad every.trace)" trace_holds every
finish
