#!/usr/bin/env bash
# A run that was stopped and resumed gives the bits of the run that was not: losses of all steps, all tensors of
# the last checkpoint. Stopped by train.stop_at, by SIGTERM at some step, by kill -9 at ten places of a save.
. "$(dirname "$0")/lib.sh"
make_tiny
run() { "$mt" --config tiny.ini run.dir="$1" "${@:2}" >/dev/null 2>"$1.err"; }

run whole
check "the whole run ends" [ $? -eq 0 ]
check "40 losses" [ "$(losses whole | wc -l)" -eq 40 ]

run half train.stop_at=20
check "stop_at ends with 0" [ $? -eq 0 ]
check "stop_at leaves 20 losses" [ "$(losses half | wc -l)" -eq 20 ]
run half
check "20 + 20 losses are the 40" same_losses half whole
check "20 + 20 tensors are the 40's" same_tensors half whole 40

for turn in 1 2; do
    d=term$turn
    "$mt" --config tiny.ini run.dir=$d >/dev/null 2>$d.err &
    pid=$!
    while [ ! -s $d/metrics.jsonl ] || [ "$(losses $d | wc -l)" -lt $((turn * 9)) ]; do
        kill -0 $pid 2>/dev/null || break
        sleep 0.01
    done
    kill -TERM $pid 2>/dev/null
    wait $pid
    status=$?
    check "SIGTERM: exit 75 (got $status)" [ $status -eq 75 ]
    run $d
    check "after SIGTERM at step $(losses $d | wc -l): losses" same_losses $d whole
    check "after SIGTERM: tensors" same_tensors $d whole 40
done

# operations of the first save, counted, then killed at ten of them
MEGATRAIN_FILE_FAULT=count run count train.stop_at=7 train.eval_batches=1
total=$(sed -n 's/^file operations: \([0-9]*\)$/\1/p' count.err | tail -1)
check "file operations are counted (${total:-none})" [ "${total:-0}" -ge 20 ]
for i in $(seq 1 10); do
    d=kill$i at=$((total * i / 10))
    MEGATRAIN_FILE_FAULT=kill@$at run $d train.stop_at=7 train.eval_batches=1
    run $d
    check "killed at file operation $at of $total, then run to the end" [ $? -eq 0 ]
    check "killed at $at: losses" same_losses $d whole
    check "killed at $at: tensors" same_tensors $d whole 40
done
finish
