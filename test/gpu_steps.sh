#!/usr/bin/env bash
# The same training on the CPU and on the GPU: 50 losses of small gpt2 and llama models, dropout on, in fp32, in bf16, in
# bf16 with the residual stream in fp32, and in fp8 (GPU_STEPS: another number). MEGATRAIN names a binary with the CUDA
# backend; the emulated one will do.
#
# Allowed, relative to the loss: some hundred times what 50 emulated steps differ by in fp32 (2e-8: sums in another
# order), some twenty times in bf16 (1.5e-4: each backend rounds where its kernels store). In fp8 a number that differs in
# its last bit may have another code, 2^-4 away; and tensor cores keep some 14 bits of its sums.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
steps=${GPU_STEPS:-50}
declare -A allowed=([fp32]=1e-5 [bf16]=3e-3 [residual]=3e-3 [tensorwise]=1e-2 [blockwise]=1e-2)
declare -A keys=([fp32]="run.precision=fp32" [bf16]="run.precision=bf16 run.fp32_residual=false run.fp32_vectors=false"
    [residual]="run.precision=bf16 run.fp32_residual=true run.fp32_vectors=false"
    [tensorwise]="run.precision=fp8 run.fp8=tensorwise run.fp8_keep=0 run.fp32_residual=false run.fp32_vectors=false"
    [blockwise]="run.precision=fp8 run.fp8=blockwise run.fp8_keep=0 run.fp32_residual=false run.fp32_vectors=false")

make_tiny
"$mt" --config tiny.ini run.device=cuda train.stop_at=1 run.dir=probe >/dev/null 2>err.txt
if grep -qE 'no CUDA backend|CUDA finds no GPU' err.txt; then
    skip "training on a GPU: $(sed -n 's/^megatrain: error[^:]*: //p' err.txt)"
    echo "$passed passed, $failed failed, $skipped skipped"
    exit 0
fi

model() { # NAME, lines for [model]
    cat >"$1.ini" <<EOI
[model]
layers = 2
hidden = 64
heads = 2
seq = 64
dropout = 0.1
attention_dropout = 0.1
$2
[train]
micro_batch = 2
global_batch = 4
steps = $steps
[optim]
lr = 1e-3
warmup = 2
[data]
train = a
valid = b
EOI
}
model gpt2 "arch = gpt2"
model llama "arch = llama
kv_heads = 1
qk_norm = true"

# largest RUN RUN: the largest |a - b| / |b| over the losses of both; "none" unless each has all of them, finite
largest() {
    paste -d' ' <(losses "$1") <(losses "$2") | awk -v want="$steps" '
        { d = ($2 - $4) / $4; if (d < 0) d = -d; if (!(d >= 0 && d < 1e9) || $1 != $3) bad = 1 }
        d > most { most = d }
        END { if (bad || NR != want) print "none"; else printf "%.2e", most }'
}

less() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "none" && a + 0 <= b + 0) }'; }
train() { # NAME PRECISION DEVICE
    # shellcheck disable=SC2086
    "$mt" --config "$1.ini" run.dir="$1-$2-$3" run.device="$3" ${keys[$2]} run.reproducible=run \
        >/dev/null 2>err.txt
}

for name in gpt2 llama; do
    for precision in fp32 bf16 residual tensorwise blockwise; do
        this=$name-$precision limit=${allowed[$precision]}
        for device in cpu cuda; do
            train $name $precision $device && continue
            if grep -qE 'has no products of fp8|on compute capability 9.0 alone' err.txt; then
                skip "$this: $(sed -n 's/^megatrain: error[^:]*: //p' err.txt)"
                continue 2
            fi
            bad "$this on $device: $(tail -1 err.txt)"
            continue 2
        done
        most=$(largest $this-cuda $this-cpu)
        echo "$name $precision: $steps losses, largest difference $most of the loss (allowed $limit)"
        check "$this: GPU against CPU" less "$most" "$limit"
        first=$(losses $this-cuda | sed -n '1s/.* //p') last=$(losses $this-cuda | sed -n '$s/.* //p')
        echo "    GPU: $first -> $last"
        [ "$steps" -lt 20 ] ||
            check "$this: the loss falls" less "$last" "$(awk -v f="$first" 'BEGIN { print 0.9 * f }')"
    done
done
finish
