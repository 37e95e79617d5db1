#!/usr/bin/env bash
# The whole program with device=cuda beside device=cpu (cuda_runs.sh): losses of every kind of model in every precision,
# recomputation, kernels launched. What else a run does: test_cuda_resume.sh. With EMU_STREAMS=now, where work runs as soon
# as it is enqueued, it is about what the host does around kernels: what differs by numbers alone is left to the other pass.
. "$(dirname "$0")/cuda_runs.sh"
now=$([ "${EMU_STREAMS:-}" != now ] || echo 1)

differ() { ! same_losses "$@"; }

# ---- losses ----
for c in gpt2 llama; do
    run $c-cpu $c.ini run.device=cpu run.precision=fp32 run.reproducible=run
    run $c-cuda $c.ini run.device=cuda run.precision=fp32
    check "$c fp32: losses within 1e-5 of the CPU's" close $c-cuda $c-cpu 1e-5
    [ -z "$now" ] || [ $c = llama ] || continue
    run $c-bf16-cpu $c.ini run.device=cpu run.precision=bf16 run.fp32_residual=false run.fp32_vectors=false
    run $c-bf16 $c.ini run.device=cuda
    check "$c: bf16 is the default on cuda" grep -q 'precision = bf16' <("$mt" config --config $c.ini run.device=cuda)
    check "$c bf16: losses within 2e-2 of the CPU's bf16" close $c-bf16 $c-bf16-cpu 2e-2
    run $c-residual-cpu $c.ini run.device=cpu run.precision=bf16 run.fp32_vectors=false
    run $c-residual $c.ini run.device=cuda run.fp32_residual=true
    check "$c bf16, residual fp32: losses within 2e-2 of the CPU's" close $c-residual $c-residual-cpu 2e-2
    check "$c bf16, residual fp32: other losses than without" differ $c-residual $c-bf16
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
# products of 8 bits, as far as the GPU has them
fp8() { # CONFIG RECIPE KEYS...
    local of=(run.precision=fp8 run.fp8="$2" run.fp8_keep=0 "${@:3}") name=$1-$2
    run "$name-cpu" "$1.ini" run.device=cpu "${of[@]}"
    run_fp8 "$name" "$1.ini" run.device=cuda "${of[@]}" || return
    check "$1 fp8 $2: losses within 2e-2 of the CPU's" close "$name" "$name-cpu" 2e-2
    ! close "$name" "$1-bf16" 1e-7 || bad "$1 fp8 $2: losses are those of bf16"
    run "$name-full" "$1.ini" run.device=cuda "${of[@]}" train.recompute=full
    check "$1 fp8 $2: full recomputation gives the same bits" same_losses "$name-full" "$name"
}
run_fp8() { # as run
    "$mt" --config "$2" run.dir="probe-$1" "${@:3}" train.stop_at=1 >probe.out 2>probe.err
    if grep -qE 'has no products of fp8|on compute capability (9.0|10.0 and 10.3) alone' probe.err; then
        skip "$1: $(sed -n 's/^megatrain: error[^:]*: //p' probe.err)"
        return 1
    fi
    run "$@"
}
if [ -z "$now" ]; then
    for c in gpt2 llama; do
        for recipe in tensorwise blockwise; do fp8 $c $recipe; done
    done
    # (on the emulator a GPU that has such products)
    EMU_GPU=10.0 fp8 llama mxfp8 model.hidden=64 model.seq=32
    # What a GPU does not have is refused before the first step, in the words of a plan for it.
    if [ -x "$(dirname "$mt")/test_cuda_fp8" ]; then
        of=(run.precision=fp8 run.fp8=mxfp8 run.fp8_keep=0 model.hidden=64 model.seq=32)
        EMU_GPU=9.0 "$mt" --config llama.ini run.dir=refused run.device=cuda "${of[@]}" >refused.out 2>refused.err
        check "mxfp8 on 9.0: refused" [ $? -eq 2 ]
        words="mxfp8 has products on compute capability 10.0 and 10.3 alone, not on "
        check "in one line: $(head -1 refused.err)" grep -qE "^megatrain: error \(configuration\): $words.* \(9.0\)$" refused.err
        check "before step 1" [ "$(grep -c 'step ' refused.out)" -eq 0 ]
    fi
    attention variants "cap, sinks and gate"
else
    fp8 llama tensorwise
fi
attention latent "latent attention, its gate and biases"
attention hybrid "Gated DeltaNet"
attention nemotron "blocks of one layer, experts between latents"
attention mamba "Mamba-2"
attention kda "Kimi Delta Attention"
says() { "$mt" generate --run "latent-$1" --prompt Line --tokens 8 --temperature 0 2>/dev/null; }
says cuda >said.txt
check "latent attention: the GPU says what the CPU does: '$(cat said.txt)'" diff said.txt <(says cpu)
check "latent attention: it says something" [ "$(wc -c <said.txt)" -gt 8 ]
run further-cpu llama.ini run.device=cpu run.precision=fp32 run.reproducible=run model.mtp_layers=2
run further-cuda llama.ini run.device=cuda run.precision=fp32 model.mtp_layers=2
check "multi-token prediction fp32: losses within 1e-5 of the CPU's" close further-cuda further-cpu 1e-5
run further-bf16 llama.ini run.device=cuda model.mtp_layers=2
check "multi-token prediction bf16: losses within 2e-2 of fp32" close further-bf16 further-cpu 2e-2
for norms in $([ -n "$now" ] || echo both post); do
    run further-$norms-cpu llama.ini run.device=cpu run.precision=bf16 model.mtp_layers=2 model.block_norms=$norms
    run further-$norms llama.ini run.device=cuda run.fp32_residual=true model.mtp_layers=2 model.block_norms=$norms
    check "multi-token prediction, norms $norms, bf16, residual fp32: losses within 2e-2 of the CPU's" \
        close further-$norms further-$norms-cpu 2e-2
done
run llama-full llama.ini run.device=cuda run.precision=fp32 train.recompute=full
check "llama: full recomputation gives the same bits" same_losses llama-full llama-cuda
run llama-offload llama.ini run.device=cuda run.precision=fp32 train.offload=2
check "llama: saves that wait in the host's memory give the same bits" same_losses llama-offload llama-cuda
run llama-offload-bf16 llama.ini run.device=cuda train.offload=1 train.recompute=full,none
check "llama bf16: likewise" same_losses llama-offload-bf16 llama-bf16


# ---- Muon, QK-clip ----
matrices=(optim.name=muon optim.qk_clip=0.01)
run muon-cpu gpt2.ini run.device=cpu run.precision=fp32 run.reproducible=run "${matrices[@]}"
run muon-cuda gpt2.ini run.device=cuda run.precision=fp32 "${matrices[@]}"
check "muon and QK-clip fp32: losses within 1e-3 of the CPU's" close muon-cuda muon-cpu 1e-3
for states in device host; do run muon-$states gpt2.ini run.device=cuda "${matrices[@]}" optim.states=$states; done
check "muon bf16: losses within 2e-2 of fp32" close muon-device muon-cpu 2e-2
check "muon bf16: with states on the host the same bits" same_run muon-host muon-device $steps

# ---- Lion, SGD ----
for of in $([ -n "$now" ] || echo lion:1e-3 sgd:0.3); do
    name=${of%:*} lr=${of#*:}
    run $name-cpu llama.ini run.device=cpu run.precision=fp32 run.reproducible=run optim.name=$name optim.lr=$lr
    run $name-cuda llama.ini run.device=cuda run.precision=fp32 optim.name=$name optim.lr=$lr
    run $name-still llama.ini run.device=cuda run.precision=fp32 optim.name=$name optim.lr=1e-9 optim.min_lr=1e-10
    check "$name fp32: losses within 1e-3 of the CPU's" close $name-cuda $name-cpu 1e-3
    ! close $name-cuda $name-still 1e-2 || bad "$name: the model stays as it is"
    run $name-bf16 llama.ini run.device=cuda optim.name=$name optim.lr=$lr
    check "$name bf16: losses within 2e-2 of fp32" close $name-bf16 $name-cpu 2e-2
done

# ---- rows of an evaluation: logits, and scores of tasks ----
seq 0 23 | xargs -n 12 >ids.txt
for i in 1 2 3 4 5; do
    printf '{"query":"Line %d of","choices":["a small text","ships","%d tides and"],"gold":%d}\n' $i $i $((i % 3))
done >asked.jsonl
for c in gpt2 llama; do
    for d in cpu cuda; do
        of=("$mt" eval --config $c.ini run.dir=$c-cuda run.device=$d run.precision=fp32)
        "${of[@]}" --ids ids.txt --logits $c-$d.npy 2>err.txt || bad "$c on $d: logits: $(head -1 err.txt)"
        "${of[@]}" data.valid= --tasks asked.jsonl --json >$c-$d.json 2>err.txt || bad "$c on $d: tasks: $(head -1 err.txt)"
    done
    check "$c: accuracies are the CPU's: $(cat $c-cuda.json)" cmp $c-cuda.json $c-cpu.json
    "$mt" eval --config $c.ini run.dir=$c-cuda run.device=cuda --ids ids.txt --logits $c-bf16.npy 2>err.txt || bad "$c in bf16: $(grep -m1 error err.txt)"
    PYTHONPATH=$root/test/tools /usr/bin/python3 - $c <<'EOP' >apart.txt 2>&1
import sys, npy
shape, cpu = npy.load(sys.argv[1] + "-cpu.npy")
assert shape == (2, 12, 257), shape
apart = lambda name: max(abs(a - b) for a, b in zip(npy.load(sys.argv[1] + name)[1], cpu))
assert apart("-cuda.npy") < 1e-5 * max(cpu), apart("-cuda.npy")
assert 0 < apart("-bf16.npy") < 0.5 * max(cpu), apart("-bf16.npy")
EOP
    check "$c: logits within 1e-5 of the CPU's, in bf16 near: $(tail -1 apart.txt)" [ ! -s apart.txt ]
done

# ---- mixtures of experts ----
loads() { grep -o '"expert_load":.*' "$1/metrics.jsonl" | grep -oE '[0-9.]+'; }
same_loads() { # A B: as many, each within 2 % (a choice between near scores may fall otherwise)
    paste <(loads "$1") <(loads "$2") | awk -v steps=$steps '
        { d = $1 - $2; if (d < 0) d = -d; if (!($1 >= 1 && $2 >= 1 && d <= 0.02 * $2)) bad = 1; n++ }
        END { exit !(n >= steps && !bad) }'
}
if [ -z "$now" ]; then
    run aux-fp8-cpu aux.ini run.device=cpu run.precision=fp8 run.fp8_keep=0
    if run_fp8 aux-fp8 aux.ini run.device=cuda run.precision=fp8 run.fp8_keep=0; then
        check "aux fp8: losses within 2e-2 of the CPU's" close aux-fp8 aux-fp8-cpu 2e-2
    fi
    # experts of 8 bits, too: their sizes are whole blocks
    experts=(run.precision=fp8 run.fp8=blockwise run.fp8_keep=0 run.fp8_experts=true model.hidden=128 moe.ffn=128)
    run experts-fp8-cpu aux.ini run.device=cpu "${experts[@]}"
    if run_fp8 experts-fp8 aux.ini run.device=cuda "${experts[@]}"; then
        check "experts fp8: losses within 2e-2 of the CPU's" close experts-fp8 experts-fp8-cpu 2e-2
        run experts-full aux.ini run.device=cuda "${experts[@]}" train.recompute=full
        check "experts fp8: full recomputation gives the same bits" same_losses experts-full experts-fp8
        run experts-bf16 aux.ini run.device=cuda "${experts[@]}" run.fp8_experts=false
        ! close experts-fp8 experts-bf16 1e-7 || bad "experts fp8: losses are those of experts in bf16"
    fi
fi
for c in aux bias full; do
    run $c-cpu $c.ini run.device=cpu run.precision=fp32 run.reproducible=run
    run $c-cuda $c.ini run.device=cuda run.precision=fp32
    check "$c fp32: losses within 1e-5 of the CPU's" close $c-cuda $c-cpu 1e-5
    check "$c fp32: loads within 2 % of the CPU's" same_loads $c-cuda $c-cpu
    run $c-bf16-cpu $c.ini run.device=cpu run.precision=bf16
    run $c-bf16 $c.ini run.device=cuda
    check "$c bf16: losses within 2e-2 of the CPU's bf16" close $c-bf16 $c-bf16-cpu 2e-2
    [ -z "$now" ] || [ $c = aux ] || continue
    run $c-fp16 $c.ini run.device=cuda run.precision=fp16
    check "$c fp16: losses within 2e-2 of fp32" close $c-fp16 $c-cuda 2e-2
    run $c-selective $c.ini run.device=cuda run.precision=fp32 train.recompute=selective run.graphs=false
    check "$c: recomputed, without graphs, the same tensors" same_tensors $c-selective $c-cuda $steps
    run $c-offload $c.ini run.device=cuda run.precision=fp32 train.offload=2
    check "$c: saves in the host's memory, the same tensors" same_tensors $c-offload $c-cuda $steps
    run $c-half $c.ini run.device=cuda train.stop_at=$half
    run $c-half $c.ini run.device=cuda
    check "$c: tensors of two halves are the whole run's" same_tensors $c-half $c-bf16 $steps
done
if [ -z "$now" ]; then
    run biased-cpu biased.ini run.device=cpu run.precision=fp32 run.reproducible=run
    run biased-cuda biased.ini run.device=cuda run.precision=fp32
    check "biased, clamped fp32: losses within 1e-5 of the CPU's" close biased-cuda biased-cpu 1e-5
    run biased-bf16 biased.ini run.device=cuda
    check "biased, clamped bf16: losses within 2e-2 of fp32" close biased-bf16 biased-cpu 2e-2
fi
drops() { grep -o '"expert_dropped":[^]]*' "$1/metrics.jsonl" | grep -oE '[0-9]+'; }
check "full: some choices are dropped in each step" [ "$(drops full-cuda | awk '$1 > 0' | wc -l)" -eq $((2 * steps)) ]
expect 0 loss "$mt" eval --config bias.ini run.dir=bias-bf16 run.device=cuda
expect 0 Line "$mt" generate --run bias-bf16 --prompt Line --tokens 4

# experts on two ranks: over NCCL where there are two GPUs, else staged
EMU_DEVICES=2 EMU_REPORT=$PWD/ep.kernels timeout 300 "$root/scripts/launch.sh" -n 2 -- "$mt" --config aux.ini \
    run.dir=ep run.device=cuda run.precision=fp32 train.micro_batch=2 parallel.ep=2 >ep.out 2>ep.err
check "aux, ep 2: losses within 1e-5 of the CPU's: $(grep -m1 error ep.err)" close ep aux-cpu 1e-5
check "aux, ep 2: loads within 2 % of the CPU's" same_loads ep aux-cpu

# ---- what exists only on the emulator ----
if [ -n "$now" ]; then
    finish # (of kernels the other pass has all)
elif [ -s gpt2-cuda.kernels ]; then
    # every kernel of cuda/ ran in one of these runs, or in the op tests, which have other forms and what only pipelines
    # use: here on the GPU whose blocks have the least shared memory, so that all of them can be launched there
    for t in attention elementwise fp8 loss moe muon norm rope; do
        EMU_GPU=8.6 EMU_CLOSED=0 EMU_REPORT=$PWD/$t.kernels "$(dirname "$mt")/test_cuda_$t" >ops.out 2>&1 ||
            bad "test_cuda_$t"
    done
    # (what that one does not have: on Hopper)
    EMU_GPU=9.0 EMU_CLOSED=0 EMU_REPORT=$PWD/products.kernels "$(dirname "$mt")/test_cuda_moe" products >ops.out 2>&1 ||
        bad "test_cuda_moe on 9.0"
    EMU_GPU=9.0 EMU_CLOSED=0 EMU_REPORT=$PWD/codes.kernels "$(dirname "$mt")/test_cuda_fp8" experts_ >ops.out 2>&1 ||
        bad "test_cuda_fp8 on 9.0"
    EMU_GPU=8.9 EMU_CLOSED=0 EMU_REPORT=$PWD/codes89.kernels "$(dirname "$mt")/test_cuda_fp8" experts_ >ops.out 2>&1 ||
        bad "test_cuda_fp8 on 8.9"
    EMU_GPU=10.0 EMU_CLOSED=0 EMU_REPORT=$PWD/codes100.kernels "$(dirname "$mt")/test_cuda_fp8" >ops.out 2>&1 ||
        bad "test_cuda_fp8 on 10.0"
    check "products of mxfp8 on 10.0: $(grep -i skip ops.out)" grep -q '^ok *products_of_any_numbers' ops.out
    EMU_GPU=9.0 EMU_CLOSED=0 EMU_REPORT=$PWD/rings.kernels "$(dirname "$mt")/test_cuda_attention" attention_rings >ops.out 2>&1 ||
        bad "test_cuda_attention on 9.0"
    kernels=$(grep -hoE '\b[a-z0-9_]+_kernel\b' "$root"/cuda/*.cu "$root"/cuda/*.cuh | sort -u)
    for k in $kernels; do
        check "kernel $k was launched" grep -qhE "^[1-9][0-9]* $k\b" ./*.kernels
    done
else
    skip "kernels counted: not on the emulator"
fi
finish
