#!/usr/bin/env bash
# Runs the tests of a lane and adds up their closing lines: quick (make test), ranks, grid, faults, files, launchers, slow,
# soak, asan; on the emulator of CUDA (folder EMU): emu (make test-emu; kernels in three orders of threads, one of
# them with a chip's rounding, work that runs late, at once and in one queue), emu-asan, emu-tsan, emu-bugs. TEST_JOBS
# (one more than processors): how many run at a time. FULL=1: ranks,
# grid, faults, slow and emu-bugs try their lists in full, not the part that covers each kind. Programs and scripts close
# with "N passed, N failed[, N skipped]"; one that does not, or that exits otherwise than that line says, counts as one
# failure.
set -u
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build}
EMU=${EMU:-$BUILD/emu}
lane=${1:-quick}
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)} BUILD
logs=$BUILD/test-logs
mkdir -p "$logs"

quick_scripts=(test/test_cli.sh test/test_help.sh test/test_readme.sh test/test_keys.sh test/test_plan.sh test/test_auto.sh test/test_micro_batch.sh
    test/test_bad_input.sh test/test_moe.sh test/test_context.sh test/test_upcycle.sh test/test_preprocess.sh
    test/test_data_sets.sh test/test_resume.sh test/test_mtp.sh test/test_moments.sh test/test_muon.sh
    test/test_overrides.sh test/test_check_layout.sh test/test_dot.sh test/test_dump.sh test/test_ramp.sh test/test_stages.sh test/test_eval.sh test/test_logits.sh test/test_tasks.sh
    test/test_tensors.sh test/test_convert.sh test/test_hf.sh test/test_gguf.sh test/test_gguf_tokens.sh test/test_keep.sh
    test/test_watch.sh test/test_gemma.sh test/test_zero.sh test/test_ranks.sh test/test_pipeline.sh test/test_timeline.sh
    test/test_stragglers.sh test/test_mup.sh test/test_combinations.sh
    test/test_cuda_ranks.sh test/test_cuda_graphs.sh test/test_faults.sh test/test_restarts.sh test/test_network.sh test/test_launchers.sh test/test_deps.sh
    test/test_threads.sh test/test_calibrate.sh test/test_recipes.sh test/test_ci.sh test/test_nccl.sh test/test_toolkit.sh)
# a command may begin with variables that it is given: NAME=VALUE|PROGRAM
emu_commands=("$EMU"/test_emu*[a-z]) emu_open=()
for c in "$EMU"/test_cuda_*[a-z]; do
    case $c in *_far) emu_commands+=("EMU_CLOSED=0|$c"); continue ;; esac # (no order of threads is too short for an index)
    emu_open+=("EMU_CLOSED=0|$c")
    # (processes; the threads of its one kernel share nothing)
    case $c in *_comm) emu_commands+=("$c" "EMU_CLOSED=0 EMU_STREAMS=now|$c"); continue ;; esac
    # (test_cuda_run.sh has these in the forward order, on a smaller GPU)
    case $c${FULL:+-full} in
    *_attention | *_elementwise | *_fp8 | *_loss | *_moe | *_muon | *_norm | *_rope) ;;
    *) emu_commands+=("EMU_CLOSED=0 EMU_ORDER=forward|$c") ;;
    esac
    emu_commands+=("EMU_CLOSED=0 EMU_STREAMS=now EMU_ORDER=reverse|$c")
    # (a chip's rounding with it, and memory closed to the host: neither depends on the order, and they cost no run of their own)
    emu_commands+=("EMU_ROUND=chip EMU_ORDER=random:1|$c")
    emu_commands+=(${FULL:+"EMU_CLOSED=0 EMU_ORDER=random:2|$c"})
done
emu_commands+=("EMU_ROUND=chip|$EMU/test_emu" "EMU_CLOSED=0 EMU_STREAMS=random|$EMU/test_cuda_steps")
halves() { for c in "$@"; do printf '%s\n' "HALF=first|$c" "HALF=second|$c"; done; } # of a list of faults (mutate.sh)
extent=${FULL:+all} extent=${extent:-each} # of the lists
case $lane in
quick) commands=("$BUILD"/test/{test,fuzz}_*[a-z] "${quick_scripts[@]}") ;;
asan) # (what fuzz_* read is read under ASan by `make fuzz`)
    commands=("$BUILD"/test/test_*[a-z]); export ASAN_OPTIONS=detect_leaks=1 MEGATRAIN_LAYOUTS=brief ;;
ranks) commands=(test/test_ranks.sh); export MEGATRAIN_RANKS=$extent ;;
faults)
    mapfile -t commands < <(halves test/test_faults.sh)
    commands+=(test/test_restarts.sh test/test_network.sh)
    commands+=(${FULL:+test/test_preprocess.sh})
    export MEGATRAIN_FAULTS=$extent ;;
grid) commands=("MEGATRAIN_LAYOUTS=${extent/each/whole}|$BUILD/test/test_array" "$BUILD/test/test_pipeline" test/test_pipeline.sh)
    export MEGATRAIN_PIPELINES=$extent ;;
launchers) commands=(test/test_launchers.sh); export MEGATRAIN_LAUNCHERS=all ;;
soak) commands=(test/soak/flat.sh test/soak/faults.sh) ;;
slow) mapfile -t commands < <(printf '%s\n' test/fuzz_layouts.sh test/test_fuzz_layouts.sh test/first_loss.sh test/test_bench.sh; halves test/mutants.sh test/layout_controls.sh) ;;
files)
    commands=("$BUILD"/test/test_{crash,ckpt_damage,indexed,run_faults,tokens})
    export MEGATRAIN_CRASH=all MEGATRAIN_DAMAGE=all MEGATRAIN_TOKENS=all ;;
emu) # (the longest first)
    commands=(test/test_cuda_run.sh "EMU_CLOSED=0|test/test_cuda_ranks.sh" "EMU_CLOSED=0|test/test_cuda_graphs.sh" test/test_cuda_resume.sh test/test_cuda_hf.sh)
    # a second pass in which work runs at once, all of it in one queue (that no sharing of queues by streams can lock up
    # ranks: then one queue for all does not) or in any order: half of them at a commit
    again=("EMU_CLOSED=0 EMU_STREAMS=now|test/test_cuda_run.sh" "EMU_CLOSED=0 EMU_STREAMS=queue|test/test_cuda_ranks.sh"
        "EMU_CLOSED=0 EMU_STREAMS=now|test/test_cuda_resume.sh" "EMU_CLOSED=0 EMU_STREAMS=random|test/test_cuda_graphs.sh"
        "EMU_CLOSED=0 EMU_STREAMS=queue|$EMU/test_cuda_comm")
    if [ -n "${FULL:-}" ]; then commands+=("${again[@]}"); elif [ "$(test/turn.sh 2)" = 0 ]; then commands+=("${again[@]:0:2}"); else commands+=("${again[@]:2}"); fi
    commands+=(test/gpu_check.sh "${emu_commands[@]}")
    export EMU ;;
emu-asan)
    commands=("$EMU"/test_emu*[a-z] "${emu_open[@]}")
    export ASAN_OPTIONS=detect_leaks=0:handle_sigill=1 ;; # (UBSan traps)
emu-tsan) commands=("$EMU"/test_emu*[a-z] "${emu_open[@]}"); export TSAN_OPTIONS=halt_on_error=1 ;;
emu-bugs) mapfile -t commands < <(halves test/cuda_bugs.sh) ;;
*) echo "usage: test/run.sh quick|ranks|grid|faults|files|launchers|asan|slow|soak|emu|emu-asan|emu-tsan|emu-bugs" >&2; exit 2 ;;
esac

# run_one COMMAND: prints one report, leaves its counts in a file of the lane's
run_one() {
    local c=$1 given= name g start=$SECONDS status line p f s took report
    case $c in *'|'*) given=${c%%|*} c=${c#*|} ;; esac
    name=$(basename "$c")
    for g in ${given/EMU_CLOSED=0/}; do name+=-${g#*=}; done
    env $given "$c" >"$logs/$name.log" 2>&1
    status=$?
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$logs/$name.log" | tail -1)
    read -r p _ f _ s _ <<<"${line//,/}"
    if [ -z "$line" ] || { [ $status -ne 0 ] && [ "${f:-0}" -eq 0 ]; }; then
        line="ended with status $status and no failure counted" f=$((${f:-0} + 1))
    fi
    times >"$logs/$name.times" # (of this shell, then of what it ran)
    took=$(awk -F '[ms ]+' 'NR == 2 { printf "%.1f", 60 * ($1 + $3) + $2 + $4 }' "$logs/$name.times")
    echo "${p:-0} $f ${s:-0} $took" >"$counts/$name"
    report=$(printf '%-32s %s (%d s, %s s of processors)\n' "$name" "$line" $((SECONDS - start)) "$took"
        grep -E '^ *skipped:' "$logs/$name.log")
    [ "$f" -eq 0 ] || report+=$'\n'$(tail -40 "$logs/$name.log")
    echo "$report"
}

# a few at a time: many wait, for processes to start or for a threshold to pass
jobs=${TEST_JOBS:-$(($(nproc) + 1))} running=0 count=0
counts=$logs/counts-$lane
rm -rf "$counts"
mkdir -p "$counts"
for c in "${commands[@]}"; do
    case $c in *.d | *.o) continue ;; esac
    [ $running -lt "$jobs" ] || { wait -n; running=$((running - 1)); }
    run_one "$c" </dev/null &
    running=$((running + 1)) count=$((count + 1))
done
wait

passed=0 failed=0 skipped=0
for f in "$counts"/*; do
    read -r p f s _ <"$f" || continue
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s)) count=$((count - 1))
done
[ $count -eq 0 ] || { echo "$count programs left no count"; failed=$((failed + 1)); }
awk '{ sum += $4 } END { print "processor seconds of programs:", int(sum) }' "$counts"/*
for f in "$counts"/*; do echo "$(cut -d ' ' -f 4 "$f") ${f##*/}"; done | sort -rn | awk 'NR <= 10 { printf "%8.1f %s\n", $1, $2 }'
[ $skipped -gt 0 ] && tail=", $skipped skipped" || tail=
echo "$passed passed, $failed failed$tail" | tee "$logs/summary-$lane"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
