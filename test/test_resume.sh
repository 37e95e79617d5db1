#!/usr/bin/env bash
# A run that was stopped and resumed gives the bits of the run that was not: losses of all steps, all tensors of
# the last checkpoint. Stopped by train.stop_at, by SIGTERM at some step, by kill -9 at ten places of a save; with
# checkpoints that the step writes, and that a thread writes.
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

run anew checkpoint.resume=none train.max_minutes=1e-9
check "where the same command would not go on, the hint says which does (got $?)" \
    [ $?-"$(grep -c '^hint: with checkpoint.resume=auto' anew.err)" = 75-1 ]
check "the time is said in its unit: $(grep stopped anew.err)" grep -q 'stopped after [0-9.]*s (train.max_minutes)' anew.err

# begin_and_stop STEP DIR WORDS...: a run that stands still before that step; pid
# (SIGHUP counts also where the test itself runs under nohup)
begin_and_stop() {
    MEGATRAIN_RANK_FAULT=0:step:$1:stop env --default-signal=HUP "$mt" --config tiny.ini run.dir="$2" "${@:3}" >/dev/null 2>"$2.err" &
    pid=$!
    until stands_still $pid; do
        kill -0 $pid 2>/dev/null || { bad "$2: it ended before step $1"; return; }
        sleep 0.01
    done
}

# at some step; turns 3 and 4: a thread writes; the next save waits for the one before
for turn in 1 2 3 4; do
    d=term$turn async=()
    [ $turn -lt 3 ] || async=(checkpoint.async=true checkpoint.every=$((turn - 2)))
    step=$((RANDOM % 38 + 2))
    begin_and_stop $step $d "${async[@]}"
    kill -TERM $pid
    kill -CONT $pid
    wait $pid
    status=$?
    check "SIGTERM at step $step: exit 75 (got $status)" [ $status -eq 75 ]
    run $d "${async[@]}"
    check "after SIGTERM at step $(losses $d | wc -l): losses" same_losses $d whole
    check "after SIGTERM: tensors" same_tensors $d whole 40
done

# the size of the vocabulary may be given later, if it is the one that the tokenizer had
run half model.vocab=257 train.stop_at=40
check "the vocabulary's size in use is no other configuration (got $?)" grep -q "resuming from half/checkpoints/step-00000040" half.err
run half model.vocab=300
check "another is (got $?)" grep -qF "tensor 'embedding.token.weight' has shape '[257, 32]' in checkpoint 'half/checkpoints/step-00000040' and '[300, 32]' in the model" half.err

# a checkpoint of a program that did not have some keys goes on as it was, whatever these come to now
crc32c_line() { # as manifest.crc has it
    local crc=$((0xffffffff)) byte i
    for byte in $(od -An -v -tu1 "$1"); do
        crc=$((crc ^ byte))
        for i in 1 2 3 4 5 6 7 8; do crc=$((crc >> 1 ^ (0x82f63b78 & -(crc & 1)))); done
    done
    printf 'crc32c %08x size %d\n' $((crc ^ 0xffffffff)) "$(stat -c %s "$1")"
}
older=(run.precision=bf16 run.fp32_residual=false run.fp32_vectors=false)
run older "${older[@]}" train.stop_at=1
manifest=older/checkpoints/step-00000001/manifest
check "the CRC of a manifest" [ "$(crc32c_line $manifest.json)" = "$(cat $manifest.crc)" ]
says() { "$mt" inspect older 2>&1 | grep -E '^(machine|job) ' | xargs; }
check "machine and job: $(says)" grep -qE "^machine host .* job one process$" <<<"$(says)"
sed -i -E 's/"(machine|job)":"[^"]*",//g' $manifest.json
sed -i -E 's/\\u000a(fp32_residual|fp32_vectors|fp32_row_sums|fp8_experts) = [a-z]*//g' $manifest.json
crc32c_line $manifest.json >$manifest.crc
check "and of the host: '$(says)'" [ -z "$(says)" ]
check "keys are gone" [ "$(grep -c 'fp32_\|fp8_experts' $manifest.json)" -eq 0 ]
loss_of() { "$mt" eval --run older "$@" 2>/dev/null | grep -o 'loss [0-9.]*'; }
check "what reads its weights takes them as it did: $(loss_of), not $(loss_of run.fp32_residual=true run.fp32_vectors=true)" \
    [ -n "$(loss_of)" -a "$(loss_of)" = "$(loss_of run.fp32_residual=false run.fp32_vectors=false)" -a \
        "$(loss_of)" != "$(loss_of run.fp32_residual=true run.fp32_vectors=true)" ]
run older run.precision=bf16 train.stop_at=2
check "what keys are now is another run (got $?)" grep -q "run.fp32_residual was 'false' and is 'true'; run.fp32_vectors was 'false' and" older.err
run older "${older[@]}" train.stop_at=2
check "what the program did then is the same (got $?)" grep -q "resuming from older/checkpoints/step-00000001" older.err

# nor does a mixture's change whose stream and vectors were fp32 when its sums of rows were not
older=(run.precision=bf16 moe.experts=4 model.bias=false)
run rows "${older[@]}" run.fp32_row_sums=false train.stop_at=1
manifest=rows/checkpoints/step-00000001/manifest
sed -i 's/\\u000afp32_row_sums = false//' $manifest.json
crc32c_line $manifest.json >$manifest.crc
check "the key is gone, those that it asks for are not" \
    [ "$(grep -c 'fp32_residual = true.*fp32_vectors = true' $manifest.json)-$(grep -c fp32_row_sums $manifest.json)" = 1-0 ]
loss_of() { "$mt" eval --run rows "$@" 2>/dev/null | grep -o 'loss [0-9.]*'; }
check "its sums are rounded as they were: $(loss_of), not $(loss_of run.fp32_row_sums=true)" \
    [ -n "$(loss_of)" -a "$(loss_of)" = "$(loss_of run.fp32_row_sums=false)" -a "$(loss_of)" != "$(loss_of run.fp32_row_sums=true)" ]
run rows "${older[@]}" train.stop_at=2
check "sums in fp32 are another run" grep -q "configuration: run.fp32_row_sums was 'false' and is 'true'" rows.err
run rows "${older[@]}" run.fp32_row_sums=false train.stop_at=2
check "rounded ones are the same" grep -q "resuming from rows/checkpoints/step-00000001" rows.err

# weights of a folder that is being trained in: the checkpoint that was found is removed before it is read, and the only
# one is newer
run live train.stop_at=7
cp -r live further && run further train.stop_at=8
MEGATRAIN_RANK_FAULT=0:read:stop "$mt" --config tiny.ini run.dir=heir checkpoint.load=live train.stop_at=2 >/dev/null 2>heir.err &
pid=$!
until stands_still $pid || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
rm -r live/checkpoints/step-00000007
mv further/checkpoints/step-00000008 live/checkpoints/
kill -CONT $pid
wait $pid
check "a run that begins with weights that are removed meanwhile (got $?)" [ "$(losses heir | wc -l)" -eq 2 ]
check "takes the newer ones" grep -q 'weights from live/checkpoints/step-00000008' heir.err

# the token file cut short while it is read: exit 3, naming it, with a checkpoint; put back, the run goes on
for f in bin idx; do cp a.$f c.$f; done
begin_and_stop 9 cut data.train=c
: >c.bin
kill -CONT $pid
wait $pid
status=$?
check "a file cut short: exit 3 (got $status)" [ $status -eq 3 ]
check "it is named: $(grep '^megatrain: error' cut.err)" grep -q "^megatrain: error (data): '.*c.bin' cannot be read any more" cut.err
check "with a checkpoint of step $(losses cut | wc -l)" [ -e "cut/checkpoints/step-$(printf %08d "$(losses cut | wc -l)")" ]
cp a.bin c.bin
run cut data.train=c
check "the file is back: losses" same_losses cut whole
check "the file is back: tensors" same_tensors cut whole 40

# operations of the first save, counted, then killed at ten of them
MEGATRAIN_FILE_FAULT=count run count train.stop_at=7 train.eval_samples=15
total=$(sed -n 's/^file operations: \([0-9]*\)$/\1/p' count.err | tail -1)
check "file operations are counted (${total:-none})" [ "${total:-0}" -ge 20 ]
for i in $(seq 1 10); do
    d=kill$i at=$((total * i / 10))
    MEGATRAIN_FILE_FAULT=kill@$at run $d train.stop_at=7 train.eval_samples=15
    if [ -d $d/checkpoints ]; then MEGATRAIN_FILE_FAULT=kill@$((at + 25)) run $d checkpoint.async=true; fi
    run $d
    check "killed at file operation $at of $total, then run to the end" [ $? -eq 0 ]
    check "killed at $at: losses" same_losses $d whole
    check "killed at $at: tensors" same_tensors $d whole 40
    check "killed at $at: nothing half written stays: $(find $d -name '*.tmp-*')" [ -z "$(find $d -name '*.tmp-*')" ]
done

# killed while it replaced one of its files; nothing but these names goes
for f in config.ini.tmp-12 loss.svg.tmp-3 metrics.jsonl.tmp-7 gemm-algorithms.txt.tmp-9 config.ini.tmp-mine config.ini.tmp- my.tmp-5; do
    echo x >kill1/$f
done
run kill1
check "what killed runs left goes: $(ls kill1 | xargs)" [ "$(cd kill1 && ls -d *.tmp-* | xargs)" = "config.ini.tmp- config.ini.tmp-mine my.tmp-5" ]

# what a thread writes: the same, reported, and the step hardly waits
run async checkpoint.async=true
check "checkpoints by a thread: losses" same_losses async whole
check "checkpoints by a thread: all tensors" same_run async whole 40
saves() { sed -n 's/.*"saved_step":\([0-9]*\),"saved":true,"save_stall_ms":\([0-9.e-]*\),"save_ms":\([0-9.e-]*\)}$/\1 \2 \3/p' "$1/metrics.jsonl"; }
# (that of step 35 may be known after the last step only)
check "each is reported" [ "$(saves async | head -4 | cut -d' ' -f1 | xargs)" = "7 14 21 28" ]
check "and without a thread" [ "$(saves whole | cut -d' ' -f1 | xargs)" = "7 14 21 28 35" ]
# (of three runs' saves one at least: on a busy machine any of them may have lost its core for a while)
for i in 2 3; do run async$i checkpoint.async=true; done
all_saves() { for i in '' 2 3; do saves async$i; done; }
check "the step waits for a small part of it: $(all_saves | xargs)" [ "$(all_saves | awk '$2 < $3 / 5' | wc -l)" -ge 1 ]
check "the log says so" grep -q "checkpoint of step 35: training stood still for [0-9.]* ms, written in" async.err
# saves that end as soon as they have begun (on one core their thread may be the first to go on): no outcome takes the
# place of the one before
core=$(taskset -cp $$ | sed 's/.*: *\([0-9]*\).*/\1/')
fast=$work/fast
[ -w /dev/shm ] && fast=$(mktemp -d /dev/shm/megatrain-test.XXXXXX) && trap 'rm -rf "$work" "$fast"' EXIT
for i in 1 2 3; do
    taskset -c "$core" "$mt" --config tiny.ini run.dir="$fast/$i" train.steps=200 checkpoint.{async=true,every=1,keep=2} 2>fast.err
    check "each of 200 saves is in the log" [ "$(grep -c 'checkpoint of step [0-9]*: training stood still' fast.err)" -eq 200 ]
    check "and all but the last two in the metrics" [ "$(saves "$fast/$i" | cut -d' ' -f1 | xargs)" = "$(seq 198 | xargs)" ]
done

# data and tokenizer may be moved: what they hold decides
run moved train.stop_at=20
mkdir away
for f in bin idx crc; do cp a.$f away/; done
run moved data.train=away/a
check "the run goes on with files that were moved: $(grep -m1 error moved.err)" same_run moved whole 40
"$mt" preprocess --force --input text.txt --tokenizer byte --output away/a --append-eod >/dev/null 2>&1
expect 4 "the training data is not the checkpoint's" "$mt" --config tiny.ini run.dir=moved train.steps=41 data.train=away/a

# a longer run: the schedule that ended with it would begin again, which is said, with the key that keeps it
run longer train.stop_at=20
cp -r longer kept
run longer train.steps=80 train.stop_at=22
check "a run made longer: its learning rate" grep -q 'learning rate goes from .* to .* optim.decay_steps=40 keeps' longer.err
run kept train.steps=80 optim.decay_steps=40 train.stop_at=40
check "decay_steps keeps the schedule" same_run kept whole 40
check "and nothing is said" [ "$(grep -c 'learning rate goes' kept.err)" -eq 0 ]

# Ctrl-C in a long step: it is told at once what happens, and the second one leaves
MEGATRAIN_RANK_FAULT=0:step:3:loop "$mt" --config tiny.ini run.dir=interrupted 2>interrupted.err &
pid=$!
shows() { for _ in $(seq 1200); do grep -q "$1" interrupted.err && return; sleep 0.1; done; return 1; }
check "two steps are done" shows '^step 2/40'
kill -INT $pid
check "the first Ctrl-C is answered" shows '^megatrain: finishing step [23], then saving; Ctrl-C again quits without saving$'
kill -INT $pid
wait $pid
code=$?
check "the second one leaves: $code" [ $code -eq 130 ]
check "and says so" grep -q '^megatrain: quit in step [23] without saving$' interrupted.err
# ---- checkpoints that are gone: nothing is cut, and the run does not begin anew
run gone train.steps=9
cp gone/metrics.jsonl before.jsonl
rm -r gone/checkpoints/*
expect 4 "'gone/metrics.jsonl' goes up to step 9, but 'gone/checkpoints' is empty" "$mt" --config tiny.ini run.dir=gone train.steps=12
rmdir gone/checkpoints
expect 4 "goes up to step 9, but 'gone/checkpoints' is not there" "$mt" --config tiny.ini run.dir=gone train.steps=9
expect 4 "is its disk mounted?" "$mt" --config tiny.ini run.dir=gone train.steps=12
check "its metrics stay" cmp -s gone/metrics.jsonl before.jsonl
expect 0 "done: step 2" "$mt" --config tiny.ini run.dir=gone train.steps=9 train.stop_at=2 checkpoint.resume=none
rm -r gone/checkpoints/* # its last step alone was saved, of which no line of a later step can tell
expect 4 "goes up to step 2, but 'gone/checkpoints' is empty" "$mt" --config tiny.ini run.dir=gone train.steps=9
sed -i '/"saved":true/d' gone/metrics.jsonl
rm gone/starts/saved # as if it had been killed in its first save: there may be a folder by then
expect 0 "done: step 9" "$mt" --config tiny.ini run.dir=gone train.steps=9

# ---- saves that fail: a warning, or with checkpoint.fail_after the end
mkdir full1 full2 && ln -s /proc/none full1/checkpoints && ln -s /proc/none full2/checkpoints
keys=(checkpoint.every=1 train.steps=9 train.eval_every=0)
expect 5 "megatrain: error (storage): cannot" "$mt" --config tiny.ini run.dir=full1 "${keys[@]}"
check "the steps were done" [ "$(losses full1 | wc -l)" -eq 9 ]
expect 5 "3 saves in a row failed (checkpoint.fail_after): " "$mt" --config tiny.ini run.dir=full2 "${keys[@]}" checkpoint.fail_after=3
check "no more steps than that: $(losses full2 | wc -l)" [ "$(losses full2 | wc -l)" -eq 3 ]

# ---- a terminal that is closed
begin_and_stop 5 hangup
kill -HUP $pid && kill -CONT $pid
wait $pid
check "SIGHUP: exit 75 (got $?)" grep -q "stopped by SIGHUP after step" hangup.err
check "and a checkpoint" [ -n "$(ls hangup/checkpoints)" ]
# (under nohup it is ignored)
expect 0 "done: step 40" bash -c 'trap "" HUP; "$0" --config tiny.ini run.dir=nohup train.eval_every=0 2>nohup.err & kill -HUP $!; wait $!; rc=$?; cat nohup.err >&2; exit $rc' "$mt"

# ---- a run whose folder is removed says so, once
begin_and_stop 5 removed train.eval_every=0
rm -r removed
kill -CONT $pid
wait $pid
check "a removed folder is said, once" [ "$(grep -c "the folder 'removed' was removed or replaced" removed.err)" -eq 1 ]
finish
