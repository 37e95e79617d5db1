#!/usr/bin/env bash
# The whole program with device=cuda, on the emulator (or, with MEGATRAIN naming a CUDA build, on a GPU), beside
# device=cpu: losses, kernels launched, resuming on the same and on the other device, memory, what is refused.
MEGATRAIN=${MEGATRAIN:-${BUILD:-build}/emu/megatrain}
. "$(dirname "$0")/lib.sh"
make_tiny
steps=6 half=3
sed "s/^micro_batch = .*/micro_batch = 1/; s/^global_batch = .*/global_batch = 3/; s/^steps = .*/steps = $steps/
    s/^every = .*/every = $half/" tiny.ini >gpt2.ini
cat >llama.ini <<EOI
[model]
arch = llama
layers = 2
hidden = 48
heads = 4
kv_heads = 2
head_dim = 32
ffn = 64
seq = 24
qk_norm = true
window = 16,0
rope_layers = 0,1
rope_dim = 24
rope_scaling = yarn
[train]
micro_batch = 2
global_batch = 4
steps = $steps
recompute = selective
[optim]
lr = 3e-3
warmup = 4
[data]
train = a
valid = b
[checkpoint]
every = $half
keep = 0
EOI
mixture() { # NAME KEYS...: NAME.ini, from llama.ini; evaluated on little, as experts' products are slow on the emulator
    sed 's/^recompute = .*/recompute = none\neval_batches = 2/; s/^seq = .*/seq = 24\nbias = false/' llama.ini >"$1.ini"
    printf '[moe]\n' >>"$1.ini"
    printf '%s\n' "${@:2}" >>"$1.ini"
}
mixture aux experts=6 topk=2 ffn=40 shared_ffn=32 shared_gate=true balance=aux aux_coeff=0.1 z_coeff=1e-3
mixture bias experts=16 topk=4 ffn=24 router=sigmoid scale=2.5 groups=4 group_topk=2 shared_ffn=32 \
    balance=bias bias_rate=0.02 aux_coeff=1e-2 every=0,1
mixture full experts=8 topk=2 ffn=40 router=softmax_pre balance=sinkhorn capacity=1 drop=position jitter=0.1

mixture biased experts=6 topk=2 ffn=40 shared_ffn=32 shared_gate=true
sed -i 's/^bias = .*/bias = true\nactivation = clamped_swiglu\nactivation_limit = 0.1/' biased.ini

sed 's/^qk_norm = .*/sinks = true\nattention_gate = true\nattention_softcap = 2/' llama.ini >variants.ini

latent="attention = mla\nq_lora_rank = 24\nkv_lora_rank = 32\nqk_nope_head_dim = 16\nqk_rope_head_dim = 8"
latent+="\nv_head_dim = 24\nrope_mscale_all = 1\nbias = true\nattention_gate = true"
sed "/^kv_heads/d; /^head_dim/d; /^rope_dim/d; s/^qk_norm = .*/$latent/" \
    llama.ini >latent.ini

run() { # NAME CONFIG keys...
    EMU_REPORT=$PWD/$1.kernels "$mt" --config "$2" run.dir="$1" "${@:3}" >"$1.out" 2>"$1.err"
    local status=$?
    [ $status -eq 0 ] || { bad "exit $status: run $*"; head -3 "$1.err"; }
}

# close A B TOLERANCE: as many losses, each within the relative tolerance; NaN fails
close() {
    paste <(losses "$1") <(losses "$2") | awk -v tol="$3" -v steps=$steps '
        { d = $2 - $4; if (d < 0) d = -d; if (!($1 == $3 && d <= tol * $4)) bad = 1; n++ }
        END { exit !(n == steps && !bad) }'
}

# ---- losses ----
for c in gpt2 llama; do
    run $c-cpu $c.ini run.device=cpu run.precision=fp32 run.reproducible=run
    run $c-cuda $c.ini run.device=cuda run.precision=fp32
    check "$c fp32: losses within 1e-5 of the CPU's" close $c-cuda $c-cpu 1e-5
    run $c-bf16-cpu $c.ini run.device=cpu run.precision=bf16
    run $c-bf16 $c.ini run.device=cuda
    check "$c: bf16 is the default on cuda" grep -q 'precision = bf16' <("$mt" config --config $c.ini run.device=cuda)
    check "$c bf16: losses within 2e-2 of the CPU's bf16" close $c-bf16 $c-bf16-cpu 2e-2
    run $c-fp16 $c.ini run.device=cuda run.precision=fp16
    check "$c fp16: losses within 2e-2 of fp32" close $c-fp16 $c-cuda 2e-2
    check "$c fp16: the loss scale was lowered" grep -q 'done again with loss scale' $c-fp16.err
done
attention() { # CONFIG WHAT
    run "$1-cpu" "$1.ini" run.device=cpu run.precision=fp32 run.reproducible=run
    run "$1-cuda" "$1.ini" run.device=cuda run.precision=fp32
    check "$2 fp32: losses within 1e-5 of the CPU's" close "$1-cuda" "$1-cpu" 1e-5
    run "$1-bf16-cpu" "$1.ini" run.device=cpu run.precision=bf16
    run "$1-bf16" "$1.ini" run.device=cuda
    check "$2 bf16: losses within 2e-2 of the CPU's bf16" close "$1-bf16" "$1-bf16-cpu" 2e-2
    run "$1-full" "$1.ini" run.device=cuda run.precision=fp32 train.recompute=full
    check "$2: full recomputation gives the same bits" same_losses "$1-full" "$1-cuda"
    expect 0 Line "$mt" generate --run "$1-bf16" --prompt Line --tokens 4
}
attention variants "cap, sinks and gate"
attention latent "latent attention, its gate and biases"
says() { "$mt" generate --run "latent-$1" --prompt Line --tokens 8 --temperature 0 2>/dev/null; }
says cuda >said.txt
check "latent attention: the GPU says what the CPU does: '$(cat said.txt)'" diff said.txt <(says cpu)
check "latent attention: it says something" [ "$(wc -c <said.txt)" -gt 8 ]
run further-cpu llama.ini run.device=cpu run.precision=fp32 run.reproducible=run model.mtp_layers=2
run further-cuda llama.ini run.device=cuda run.precision=fp32 model.mtp_layers=2
check "multi-token prediction fp32: losses within 1e-5 of the CPU's" close further-cuda further-cpu 1e-5
run further-bf16 llama.ini run.device=cuda model.mtp_layers=2
check "multi-token prediction bf16: losses within 2e-2 of fp32" close further-bf16 further-cpu 2e-2
run llama-full llama.ini run.device=cuda run.precision=fp32 train.recompute=full
check "llama: full recomputation gives the same bits" same_losses llama-full llama-cuda

# ---- mixtures of experts ----
loads() { grep -o '"expert_load":.*' "$1/metrics.jsonl" | grep -oE '[0-9.]+'; }
same_loads() { # A B: as many, each within 2 % (a choice between near scores may fall otherwise)
    paste <(loads "$1") <(loads "$2") | awk -v steps=$steps '
        { d = $1 - $2; if (d < 0) d = -d; if (!($1 >= 1 && $2 >= 1 && d <= 0.02 * $2)) bad = 1; n++ }
        END { exit !(n >= steps && !bad) }'
}
for c in aux bias full; do
    run $c-cpu $c.ini run.device=cpu run.precision=fp32 run.reproducible=run
    run $c-cuda $c.ini run.device=cuda run.precision=fp32
    check "$c fp32: losses within 1e-5 of the CPU's" close $c-cuda $c-cpu 1e-5
    check "$c fp32: loads within 2 % of the CPU's" same_loads $c-cuda $c-cpu
    run $c-bf16-cpu $c.ini run.device=cpu run.precision=bf16
    run $c-bf16 $c.ini run.device=cuda
    check "$c bf16: losses within 2e-2 of the CPU's bf16" close $c-bf16 $c-bf16-cpu 2e-2
    run $c-fp16 $c.ini run.device=cuda run.precision=fp16
    check "$c fp16: losses within 2e-2 of fp32" close $c-fp16 $c-cuda 2e-2
    run $c-selective $c.ini run.device=cuda run.precision=fp32 train.recompute=selective run.graphs=false
    check "$c: recomputed, without graphs, the same tensors" same_tensors $c-selective $c-cuda $steps
    run $c-half $c.ini run.device=cuda train.stop_at=$half
    run $c-half $c.ini run.device=cuda
    check "$c: tensors of two halves are the whole run's" same_tensors $c-half $c-bf16 $steps
done
run biased-cpu biased.ini run.device=cpu run.precision=fp32 run.reproducible=run
run biased-cuda biased.ini run.device=cuda run.precision=fp32
check "biased, clamped fp32: losses within 1e-5 of the CPU's" close biased-cuda biased-cpu 1e-5
run biased-bf16 biased.ini run.device=cuda
check "biased, clamped bf16: losses within 2e-2 of fp32" close biased-bf16 biased-cpu 2e-2
drops() { grep -o '"expert_dropped":[^]]*' "$1/metrics.jsonl" | grep -oE '[0-9]+'; }
check "full: some choices are dropped in each step" [ "$(drops full-cuda | awk '$1 > 0' | wc -l)" -eq $((2 * steps)) ]
expect 0 loss "$mt" eval --config bias.ini run.dir=bias-bf16 run.device=cuda
expect 0 Line "$mt" generate --run bias-bf16 --prompt Line --tokens 4

# experts on two ranks: over NCCL where there are two GPUs, else staged
EMU_DEVICES=2 EMU_REPORT=$PWD/ep.kernels timeout 300 "$root/scripts/launch.sh" -n 2 -- "$mt" --config aux.ini \
    run.dir=ep run.device=cuda run.precision=fp32 train.micro_batch=2 parallel.ep=2 >ep.out 2>ep.err
check "aux, ep 2: losses within 1e-5 of the CPU's: $(grep -m1 error ep.err)" close ep aux-cpu 1e-5
check "aux, ep 2: loads within 2 % of the CPU's" same_loads ep aux-cpu

# ---- the host a step ahead of the GPU: the same run as one that evaluates every step, and so waits for each ----
ahead() { # CONFIG KEYS...: a run that waits for its first and last step, and one that waits for each
    local keys=(run.device=cuda checkpoint.every=0 "${@:2}")
    run "$1-long" "$1.ini" "${keys[@]}" train.eval_every=0
    run "$1-waits" "$1.ini" "${keys[@]}" train.eval_every=1 train.eval_batches=1
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
        train.eval_every=$every train.eval_batches=1 >/dev/null 2>pieces-$every.err
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
check "checkpoints by a thread: the same bits" same_run async gpt2-cuda $steps
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
run eager gpt2.ini run.device=cuda run.graphs=false
check "without graphs the same losses" same_losses eager gpt2-bf16
check "without graphs the same tensors" same_tensors eager gpt2-bf16 $steps

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
expect 0 loss "$mt" eval --config gpt2.ini run.dir=gpt2-bf16 run.device=cuda
expect 0 Line "$mt" generate --run gpt2-bf16 --prompt Line --tokens 4
run tuned gpt2.ini run.device=cuda run.autotune=true
check "choices of autotune stand in the run folder" [ -s tuned/gemm-algorithms.txt ]

# ---- what exists only on the emulator ----
if [ -s gpt2-cuda.kernels ]; then
    # every kernel of cuda/ ran in one of these runs, or in the op tests: other forms, and what only pipelines use
    # on the GPU whose blocks have the least shared memory: all of them can be launched there
    for t in attention elementwise loss moe norm rope; do
        EMU_GPU=8.6 EMU_CLOSED=0 EMU_REPORT=$PWD/$t.kernels "$(dirname "$mt")/test_cuda_$t" >ops.out 2>&1 ||
            bad "test_cuda_$t"
    done
    kernels=$(grep -hoE '\b[a-z0-9_]+_kernel\b' "$root"/cuda/*.cu "$root"/cuda/*.cuh | sort -u)
    for k in $kernels; do
        check "kernel $k was launched" grep -qhE "^[1-9][0-9]* $k\b" ./*.kernels
    done
    launches() { grep -E "^[0-9]+ $1_kernel\b" gpt2-cuda.kernels | awk '{ n += $1 } END { print n + 0 }'; }
    for k in grad_stats adamw; do
        check "$k is one launch a step, whatever the tensors: $(launches $k) in $steps" [ "$(launches $k)" -eq $steps ]
    done
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
else
    skip "kernel counts, missing GPU, full GPU: not on the emulator"
fi
finish
