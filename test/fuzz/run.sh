#!/usr/bin/env bash
# Runs every fuzz target (`make fuzz`) for FUZZ_SECONDS (120; 0: on its seeds alone, where nothing is left to luck),
# FUZZ_JOBS (number of processors) at a time, FUZZ_TARGETS only some. What was found worth keeping stays in $BUILD/fuzz/corpus/NAME for the next run; an input that breaks a rule in
# $BUILD/fuzz/broken/NAME, and in what is printed, because the machine may be gone when somebody looks. Closes with a
# table and "N passed, N failed".
set -u
cd "$(dirname "$0")/../.."
FUZZER=${BUILD:-build}/fuzz
seconds=${FUZZ_SECONDS:-120} jobs=${FUZZ_JOBS:-$(nproc)}
limit=-max_total_time=$seconds
[ "$seconds" != 0 ] || limit=-runs=0
targets=${FUZZ_TARGETS:-$(cd "$FUZZER" && ls | sed -n 's/^fuzz_//p')}
export UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1
mkdir -p "$FUZZER/logs" "$FUZZER/spent"

run_one() {
    local name=$1 corpus=$FUZZER/corpus/$1 broken=$FUZZER/broken/$1 log=$FUZZER/logs/$1.log options=() status
    mkdir -p "$corpus" "$broken"
    touch "$FUZZER/logs/$name.begun"
    [ -e "test/fuzz/$name.dict" ] && options+=("-dict=test/fuzz/$name.dict")
    TIMEFORMAT='cpu %U %S'
    time {
        "$FUZZER/fuzz_$name" "$limit" -max_len=8192 -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512 \
            -print_final_stats=1 -artifact_prefix="$broken/" "${options[@]}" "$corpus" \
            "test/fuzz/seeds/$name" >"$log" 2>&1 &
        wait $!
        status=$?
        rm -rf {/dev/shm,/tmp}/megatrain-fuzz-$! # where it ended too soon to remove them itself
    }
    return $status
}

running=0
for name in $targets; do
    [ $running -lt "$jobs" ] || { wait -n; running=$((running - 1)); }
    { run_one "$name" || touch "$FUZZER/logs/$name.log.failed"; } 2>"$FUZZER/logs/$name.time" &
    running=$((running + 1))
done
wait

passed=0 failed=0
printf '%-16s %12s %8s %12s %8s %9s %7s %s\n' target executions cpu_s 'in all' cpu_s coverage inputs result
for name in $targets; do
    log=$FUZZER/logs/$name.log result=ok
    if [ -e "$log.failed" ]; then result=BROKEN failed=$((failed + 1)); else passed=$((passed + 1)); fi
    rm -f "$log.failed"
    # executions and seconds of this run; then of all runs since `make clean`
    now=$(awk '/^stat::number_of_executed_units/ { n = $2 } /^cpu/ { s = $2 + $3 } END { printf "%d %.1f", n, s }' \
        "$log" "$FUZZER/logs/$name.time")
    echo "$now" >>"$FUZZER/spent/$name"
    printf '%-16s %12d %8s %12d %8s %9s %7s %s\n' "$name" $now \
        $(awk '{ n += $1; s += $2 } END { printf "%d %.1f", n, s }' "$FUZZER/spent/$name") \
        "$(grep -oE 'cov: [0-9]+' "$log" | tail -1 | cut -c6-)" "$(ls "$FUZZER/corpus/$name" | wc -l)" $result
    [ $result = ok ] && continue
    grep -anE -A1 'broken:|ERROR|SUMMARY|runtime error|ALARM|Test unit' "$log" | cut -c1-400 | head -16
    for input in $(find "$FUZZER/broken/$name" -type f -newer "$FUZZER/logs/$name.begun"); do
        echo "$input, for base64 -d | gunzip: $(gzip -9nc "$input" | base64 -w0)"
    done
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
