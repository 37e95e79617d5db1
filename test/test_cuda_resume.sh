#!/usr/bin/env bash
# A run with device=cuda beside itself and device=cpu (cuda_runs.sh): a step ahead of the GPU or not, saved by a thread,
# repeated, stopped and resumed on the same and on the other device; memory, what is refused.
. "$(dirname "$0")/cuda_runs.sh"

for p in bf16 fp16 fp32; do run gpt2-$p gpt2.ini run.device=cuda run.precision=$p; done
run gpt2-cpu gpt2.ini run.device=cpu run.precision=fp32 run.reproducible=run

# ---- the host a step ahead of the GPU: the same run as one that evaluates every step, and so waits for each ----
ahead() { # CONFIG KEYS...: a run that waits for its first and last step, and one that waits for each
    local keys=(run.device=cuda checkpoint.every=0 "${@:2}")
    run "$1-long" "$1.ini" "${keys[@]}" train.eval_every=0
    run "$1-waits" "$1.ini" "${keys[@]}" train.eval_every=1 train.eval_samples=3
    check "$1 ahead: the same losses, norms and tensors" same_run "$1-long" "$1-waits" $steps
    check "$1 ahead: the same learning rates" [ "$(rates "$1-long")" = "$(rates "$1-waits")" ]
}
rates() { grep '"lr"' "$1/metrics.jsonl" | grep -oE '"lr":[^,]*|"tokens":[^,]*|"skipped":true'; }
ahead gpt2
ahead aux model.mtp_layers=1
# steps that are done again while the next one is enqueued behind them
for every in 0 1; do
    EMU_DEVICES=2 timeout 300 "$root/scripts/launch.sh" -n 2 -- "$mt" --config aux.ini run.dir=pieces-$every \
        run.device=cuda checkpoint.every=0 train.micro_batch=2 parallel.ep=2 moe.slack=1 moe.overflow=redo \
        train.eval_every=$every train.eval_samples=3 >/dev/null 2>pieces-$every.err
done
check "in pieces ahead: some steps are" grep -q 'done again in pieces' pieces-0.err
check "in pieces ahead: the same losses, norms and tensors" same_run pieces-0 pieces-1 $steps

# the data end while a step is in flight: it gets its line and its checkpoint
for f in bin idx; do cp a.$f c.$f; done
MEGATRAIN_RANK_FAULT=0:step:3:stop "$mt" --config gpt2.ini run.dir=cut data.train=c run.device=cuda checkpoint.every=0 \
    train.eval_every=0 >/dev/null 2>cut.err &
pid=$!
until stands_still $pid || ! kill -0 $pid 2>/dev/null; do sleep 0.05; done
: >c.bin
kill -CONT $pid
wait $pid
status=$?
done=$(losses cut | wc -l)
check "the data end: exit 3 (got $status) after step $done" [ $status -eq 3 -a "$done" -ge 2 -a "$done" -lt $steps ]
check "with a checkpoint of that step" [ -e "cut/checkpoints/step-$(printf %08d "$done")" ]
cp a.bin c.bin
run cut gpt2.ini data.train=c run.device=cuda checkpoint.every=0 train.eval_every=0
check "the data are back: losses, norms and tensors of the whole run" same_run cut gpt2-long $steps
# ---- saving while training goes on ----
run async gpt2.ini run.device=cuda run.precision=fp32 checkpoint.async=true checkpoint.every=2
check "checkpoints by a thread: the same bits" same_run async gpt2-fp32 $steps
check "the first of them is reported" [ "$(grep -c '"saved":true' async/metrics.jsonl)" -ge 1 ]

# ---- documents kept apart, their ends out of the loss ----
for i in 1 2 3 4 5; do sed 's/of .*/\n/' "text.txt"; done >lines.txt
"$mt" preprocess --input lines.txt --tokenizer byte --output d --append-eod --split-blank-lines >/dev/null 2>&1 || bad "preprocess"
for c in gpt2 llama; do
    keys="data.train=d data.valid=d data.mask_eod=true data.reset_at_eod=true"
    # shellcheck disable=SC2086
    run $c-docs-cpu $c.ini run.device=cpu run.precision=fp32 run.reproducible=run $keys
    # shellcheck disable=SC2086
    run $c-docs $c.ini run.device=cuda run.precision=fp32 $keys
    check "$c, documents apart: losses within 1e-5 of the CPU's" close $c-docs $c-docs-cpu 1e-5
    run $c-joined $c.ini run.device=cuda run.precision=fp32 data.train=d data.valid=d
    check "$c, documents joined: other losses" [ "$(losses $c-joined)" != "$(losses $c-docs)" ]
done

# ---- repeats, with and without graphs ----
run again gpt2.ini run.device=cuda
check "a repeat gives the same losses" same_losses again gpt2-bf16
check "a repeat gives the same tensors" same_tensors again gpt2-bf16 $steps
run eager gpt2.ini run.device=cuda run.graphs=false run.autotune=false
check "without graphs and timed products the same losses" same_losses eager gpt2-bf16
check "without graphs and timed products the same tensors" same_tensors eager gpt2-bf16 $steps
check "choices of timed products stand in the run folder" [ -s gpt2-bf16/gemm-algorithms.txt ]
check "and where nothing was timed there are none" [ ! -e eager/gemm-algorithms.txt ]

# ---- products are timed, in fp16 by gradients that no longer overflow, and no bit changes ----
if [ -s gpt2-fp32.kernels ]; then # (only the emulator can be told which algorithm is fast)
    check "fp16: gradients overflow at first" grep -q 'gradients beyond fp16' gpt2-fp16.err
    for fast in 2 3; do # of two others one has the first one's bits
        EMU_LT_FAST=$fast run fast-$fast gpt2.ini run.device=cuda run.precision=fp16
        check "fp16, algorithm $fast is fast: the same losses" same_losses fast-$fast gpt2-fp16
        check "fp16, algorithm $fast is fast: the same tensors" same_tensors fast-$fast gpt2-fp16 $steps
    done
    weights() { grep '^linear_dw' "$1/gemm-algorithms.txt"; }
    check "fp16: the fast one is taken where its bits allow" [ "$(weights fast-2)" != "$(weights fast-3)" ]
    check "and is timed for every weight" [ "$(weights fast-2 | wc -l)" -eq "$(weights gpt2-bf16 | wc -l)" ]
fi

# ---- stop and resume ----
run half gpt2.ini run.device=cuda train.stop_at=$half
run half gpt2.ini run.device=cuda
check "losses of two halves are the whole run's" same_losses half gpt2-bf16
check "tensors of two halves are the whole run's" same_tensors half gpt2-bf16 $steps
run half16 gpt2.ini run.device=cuda run.precision=fp16 train.stop_at=$half
run half16 gpt2.ini run.device=cuda run.precision=fp16
check "fp16: tensors of two halves are the whole run's" same_tensors half16 gpt2-fp16 $steps
for from in cpu cuda; do
    to=$([ $from = cpu ] && echo cuda || echo cpu)
    keys="run.precision=fp32 run.reproducible=run"
    # shellcheck disable=SC2086
    run $from-$to gpt2.ini $keys run.device=$from train.stop_at=$half
    # shellcheck disable=SC2086
    run $from-$to gpt2.ini $keys run.device=$to
    check "a checkpoint of $from resumes on $to" close $from-$to gpt2-cpu 1e-5
done

# ---- states of the optimizer in the host's memory ----
for p in bf16 fp32; do
    run host-$p gpt2.ini run.device=cuda run.precision=$p optim.states=host
    check "$p, states on the host: the same losses, norms and tensors" same_run host-$p gpt2-$p $steps
    run moved-$p gpt2.ini run.device=cuda run.precision=$p optim.states=host train.stop_at=$half
    run moved-$p gpt2.ini run.device=cuda run.precision=$p
    check "$p: and back on the GPU after a stop" same_run moved-$p gpt2-$p $steps
done
check "and says so" grep -q 'optim.states: .* in the host' host-bf16.err
expect 0 loss "$mt" eval --config gpt2.ini run.dir=gpt2-bf16 run.device=cuda
expect 0 Line "$mt" generate --run gpt2-bf16 --prompt Line --tokens 4

# ---- what exists only on the emulator ----
if [ -s gpt2-fp32.kernels ]; then
    launches() { grep -E "^[0-9]+ $1_kernel\b" gpt2-fp32.kernels | awk '{ n += $1 } END { print n + 0 }'; }
    for k in grad_stats adamw; do
        check "$k is one launch a step, whatever the tensors: $(launches $k) in $steps" [ "$(launches $k)" -eq $steps ]
    done
    expect 2 "no NVIDIA driver on this machine" env EMU_DRIVER=0 "$mt" --config gpt2.ini run.dir=none run.device=cuda
    expect 2 "driver supports CUDA up to 11.8, this program needs" \
        env EMU_DRIVER=11080 "$mt" --config gpt2.ini run.dir=none run.device=cuda
    expect 2 "CUDA finds no GPU" env EMU_DEVICES=0 "$mt" --config gpt2.ini run.dir=none run.device=cuda
    EMU_DEVICES=0 run auto gpt2.ini run.precision=fp32
    check "device=auto without a GPU says so once" [ "$(grep -c 'computing on the CPU' auto.err)" -eq 1 ]
    check "and computes on the CPU" grep -q 'avx\|plain c' auto.err
    expect 9 "GPU 0" env EMU_MEMORY=$((800 << 20)) "$mt" --config gpt2.ini run.dir=small run.device=cuda
    for what in state saves scratch workspace; do
        check "exit 9 lists $what" grep -q "^$what.* [KMG]iB$" err.txt
    done
    planned=$("$mt" plan --config gpt2.ini run.device=cuda | sed -n 's/^ *total *\([0-9,]*\).*/\1/p' | tr -d ,)
    taken=$(sed -n 's/^\([0-9]*\) bytes of device memory$/\1/p' gpt2-bf16.kernels)
    check "device memory taken is planned memory ($taken, $planned)" [ "$taken" = "$planned" ]
    planned_host=$("$mt" plan --config gpt2.ini run.device=cuda optim.states=host | sed -n 's/^ *total *\([0-9,]*\).*/\1/p' | tr -d ,)
    taken=$(sed -n 's/^\([0-9]*\) bytes of device memory$/\1/p' host-bf16.kernels)
    check "with states on the host, too ($taken, $planned_host)" [ "$taken" = "$planned_host" ]
    weights=$("$mt" plan --config gpt2.ini | sed -n 's/^ *\([0-9,]*\) parameters$/\1/p' | tr -d ,)
    check "which are 12 bytes of each of $weights weights" [ $((planned - planned_host)) -ge $((12 * weights)) ]
    # a GPU that has room for what is left, not for all
    tight=$(((768 << 20) + planned_host + 4096))
    expect 9 "optim.states=host" env EMU_MEMORY=$tight "$mt" --config gpt2.ini run.dir=tight run.device=cuda
    EMU_MEMORY=$tight run tight gpt2.ini run.device=cuda optim.states=host
    check "a GPU too small for the states trains" same_run tight gpt2-bf16 $steps

    # train.micro_batch=auto takes what the GPU has room for: to the byte, and shared by its ranks
    batch=(run.device=cuda train.global_batch=12)
    number() { sed -n 's/^micro_batch = //p' "$1/config.ini"; }
    total() { "$mt" plan --json --config gpt2.ini "${batch[@]}" "$@" | sed 's/.*"largest_total":\([0-9]*\).*/\1/'; }
    room=$(((768 << 20) + $(total train.micro_batch=4)))
    EMU_MEMORY=$room run fitted gpt2.ini "${batch[@]}" train.micro_batch=auto train.stop_at=$half
    check "a micro-batch that fits: $(number fitted)" [ "$(number fitted)" = 4 ]
    check "as a plan here says" [ "$(EMU_MEMORY=$room "$mt" plan --config gpt2.ini "${batch[@]}" train.micro_batch=auto | grep -c 'auto: 4 samples: ')" = 1 ]
    EMU_MEMORY=$((room - 1)) run less gpt2.ini "${batch[@]}" train.micro_batch=auto
    check "a byte less: $(number less)" [ "$(number less)" = 3 ]
    expect 9 "GPU 0" env EMU_MEMORY=$room "$mt" --config gpt2.ini run.dir=none "${batch[@]}" train.micro_batch=6
    EMU_MEMORY=$((4 * room)) run fitted gpt2.ini "${batch[@]}" train.micro_batch=auto
    check "with more memory it goes on with its number: $(number fitted)" [ "$(number fitted)" = 4 ]
    run written gpt2.ini "${batch[@]}" train.micro_batch=4
    check "the run with that number" same_run fitted written $steps
    expect 9 "a smaller train.micro_batch (now 4)" env EMU_MEMORY=$((room - 1)) "$mt" --config gpt2.ini run.dir=fitted "${batch[@]}" \
        train.micro_batch=auto train.steps=8
    two() { # MEMORY DEVICES: the exit code, and the number
        EMU_DEVICES=$2 EMU_MEMORY=$1 timeout 300 "$root/scripts/launch.sh" -n 2 -- "$mt" --config gpt2.ini run.dir="two-$2-$1" \
            "${batch[@]}" train.micro_batch=auto train.stop_at=1 >two.out 2>two.err
        echo $? "$(number "two-$2-$1" 2>/dev/null)"
    }
    check "two ranks that share a GPU have half of it each, which is too little" [ "$(two $room 1)" = "9 " ]
    shared=$((2 * ((768 << 20) + $(total --world 2 train.micro_batch=3))))
    check "half of a larger one" [ "$(two $shared 1)" = "0 3" ]
    planned() { # MEMORY DEVICES: the number that a plan of two ranks on this host says
        EMU_DEVICES=$2 EMU_MEMORY=$1 "$mt" plan --config gpt2.ini --world 2 "${batch[@]}" train.micro_batch=auto |
            sed -n 's/.*auto: \([0-9]*\) samples: .*/\1/p'
    }
    check "as a plan of two ranks on one GPU says" [ "$(planned $shared 1) $(planned $((shared - 2)) 1)" = "3 2" ]
    check "and on two" [ "$(planned $((4 * room)) 2)" = 6 ]
    check "a byte less for each" [ "$(two $((shared - 2)) 1)" = "0 2" ]
    check "a GPU for each" [ "$(two $((4 * room)) 2)" = "0 6" ]
else
    skip "launches counted, missing GPU, full GPU: not on the emulator"
fi
finish
