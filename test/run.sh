#!/usr/bin/env bash
# Runs the tests of a lane and adds up their closing lines: quick (make test), slow, asan.
# Programs and scripts close with "N passed, N failed[, N skipped]"; one that does not, or that exits otherwise
# than that line says, counts as one failure.
set -u
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build}
lane=${1:-quick}
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)} BUILD
logs=$BUILD/test-logs
mkdir -p "$logs"

quick_scripts=(test/test_cli.sh test/test_keys.sh test/test_bad_input.sh test/test_resume.sh)
slow_scripts=(test/first_loss.sh test/mutants.sh test/layout_controls.sh)
case $lane in
quick) commands=("$BUILD"/test/test_*[a-z] "${quick_scripts[@]}") ;;
asan) commands=("$BUILD"/test/test_*[a-z]); export ASAN_OPTIONS=detect_leaks=1 MEGATRAIN_LAYOUTS=short ;;
slow) commands=("${slow_scripts[@]}") ;;
*) echo "usage: test/run.sh quick|asan|slow" >&2; exit 2 ;;
esac

passed=0 failed=0 skipped=0
for c in "${commands[@]}"; do
    case $c in *.d) continue ;; esac
    name=$(basename "$c" .sh) start=$SECONDS
    "$c" >"$logs/$name.log" 2>&1
    status=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$logs/$name.log" | tail -1)
    read -r p _ f _ s _ <<<"${line//,/}"
    if [ -z "$line" ] || { [ $status -ne 0 ] && [ "${f:-0}" -eq 0 ]; }; then
        line="ended with status $status and no failure counted" f=$((${f:-0} + 1))
    fi
    passed=$((passed + ${p:-0})) failed=$((failed + f)) skipped=$((skipped + ${s:-0}))
    printf '%-24s %s (%d s)\n' "$name" "$line" $((SECONDS - start))
    grep -E '^ *skipped:' "$logs/$name.log"
    [ "$f" -eq 0 ] || tail -40 "$logs/$name.log"
done
[ $skipped -gt 0 ] && tail=", $skipped skipped" || tail=
echo "$passed passed, $failed failed$tail" | tee "$logs/summary-$lane"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
