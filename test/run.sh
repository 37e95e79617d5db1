#!/usr/bin/env bash
# Runs the tests of a lane and adds up their closing lines: quick (make test), slow, asan; on the emulator of CUDA
# (folder EMU): emu (make test-emu; kernels in four orders of threads), emu-asan, emu-tsan, emu-bugs.
# Programs and scripts close with "N passed, N failed[, N skipped]"; one that does not, or that exits otherwise
# than that line says, counts as one failure.
set -u
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build}
EMU=${EMU:-$BUILD/emu}
lane=${1:-quick}
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)} BUILD
logs=$BUILD/test-logs
mkdir -p "$logs"

quick_scripts=(test/test_cli.sh test/test_keys.sh test/test_bad_input.sh test/test_resume.sh)
slow_scripts=(test/first_loss.sh test/mutants.sh test/layout_controls.sh)
# a command may begin with an order of threads: ORDER|PROGRAM
emu_commands=("$EMU"/test_emu*[a-z])
for c in "$EMU"/test_cuda_*[a-z]; do
    for order in forward reverse random:1 random:2; do emu_commands+=("$order|$c"); done
done
case $lane in
quick) commands=("$BUILD"/test/test_*[a-z] "${quick_scripts[@]}") ;;
asan) commands=("$BUILD"/test/test_*[a-z]); export ASAN_OPTIONS=detect_leaks=1 MEGATRAIN_LAYOUTS=short ;;
slow) commands=("${slow_scripts[@]}") ;;
emu) commands=("${emu_commands[@]}" test/test_cuda_run.sh test/gpu_check.sh); export EMU ;;
emu-asan) commands=("$EMU"/test_*[a-z]); export ASAN_OPTIONS=detect_leaks=0 ;;
emu-tsan) commands=("$EMU"/test_*[a-z]); export TSAN_OPTIONS=halt_on_error=1 ;;
emu-bugs) commands=(test/cuda_bugs.sh) ;;
*) echo "usage: test/run.sh quick|asan|slow|emu|emu-asan|emu-tsan|emu-bugs" >&2; exit 2 ;;
esac

passed=0 failed=0 skipped=0
for c in "${commands[@]}"; do
    case $c in *.d) continue ;; esac
    order=forward
    case $c in *'|'*) order=${c%%|*} c=${c#*|} ;; esac
    name=$(basename "$c" .sh) start=$SECONDS
    [ $order = forward ] || name+=-$order
    EMU_ORDER=$order "$c" >"$logs/$name.log" 2>&1
    status=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$logs/$name.log" | tail -1)
    read -r p _ f _ s _ <<<"${line//,/}"
    if [ -z "$line" ] || { [ $status -ne 0 ] && [ "${f:-0}" -eq 0 ]; }; then
        line="ended with status $status and no failure counted" f=$((${f:-0} + 1))
    fi
    passed=$((passed + ${p:-0})) failed=$((failed + f)) skipped=$((skipped + ${s:-0}))
    printf '%-32s %s (%d s)\n' "$name" "$line" $((SECONDS - start))
    grep -E '^ *skipped:' "$logs/$name.log"
    [ "$f" -eq 0 ] || tail -40 "$logs/$name.log"
done
[ $skipped -gt 0 ] && tail=", $skipped skipped" || tail=
echo "$passed passed, $failed failed$tail" | tee "$logs/summary-$lane"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
