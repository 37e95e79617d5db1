#!/usr/bin/env bash
# What Muon gains over AdamW: a GPT of 27 M weights learns the demo's text with each of them, from the same seeds and by
# equal tokens. Peak learning rates come from a sweep: each of several with one seed and a third of the steps; each
# optimizer keeps that with the lowest validation loss, which should not be an outer one. Then SEEDS runs with each. It
# needs no more than a shell: bench/optimizers.py makes tables and pictures of what it leaves, on any machine.
#
#   bench/optimizers.sh DATA OUT       DATA: folder of train.bin, train.idx, valid.bin ...; OUT: a folder that is new
#
#   MEGATRAIN=./megatrain   the program             STEPS=300        of a run
#   DEVICE=cuda             or cpu                  SEEDS="1 2 3 4 5"
#   PRECISION=bf16          or fp32                 ADAMW_RATES="2.5e-4 5e-4 1e-3 2e-3"
#   LIMIT_S=150             no run begins later     MUON_RATES="2e-3 4e-3 8e-3 1.6e-2"
#   JOBS=3                  runs at a time          MODEL="..."      keys of another model
#
# OUT gets runs.jsonl (what every run wrote of its steps, with its name), runs.tsv (name, rate, seed, seconds, last
# validation loss) and machine.txt. Exit 1: a run failed, or the time was too short for all of them.
set -euo pipefail
export LC_ALL=C # awk prints a decimal point
mt=${MEGATRAIN:-./megatrain} data=$1 out=$2
steps=${STEPS:-300} seeds=${SEEDS:-1 2 3 4 5} jobs=${JOBS:-3} limit=${LIMIT_S:-150}
declare -A rates=([adamw]=${ADAMW_RATES:-2.5e-4 5e-4 1e-3 2e-3} [muon]=${MUON_RATES:-2e-3 4e-3 8e-3 1.6e-2})
device=${DEVICE:-cuda} precision=${PRECISION:-bf16}
model=${MODEL:-model.arch=gpt2 model.position=rope model.layers=8 model.hidden=512 model.heads=8 model.seq=512 \
    model.qk_norm=true train.micro_batch=32 train.global_batch=32}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
started=$(date +%s)
failed=0

# train NAME OPTIMIZER RATE SEED STEPS: a tenth of the steps is warm-up, a cosine ends at a tenth of the rate
train() {
    local name=$1 from=$EPOCHREALTIME seconds
    [ $(($(date +%s) - started)) -lt "$limit" ] || { echo "$name: no time is left" >&2; return 1; }
    printf '[run]\ndir = %s/%s\n' "$work" "$name" >"$work/$name.ini"
    "$mt" --config "$work/$name.ini" $model data.train="$data/train" data.valid="$data/valid" \
        data.tokenizer="$data/tokenizer.json" data.seed="$4" run.seed="$4" \
        run.device="$device" run.precision="$precision" \
        optim.name="$2" optim.lr="$3" optim.min_lr="$(awk -v r="$3" 'BEGIN { printf "%g", r / 10 }')" \
        optim.warmup=$(($5 / 10)) train.steps="$5" train.eval_every=$(($5 / 12)) train.eval_samples=0 \
        checkpoint.every=0 \
        >"$work/$name.log" 2>&1 || { echo "$name: $(grep -m1 error "$work/$name.log")" >&2; return 1; }
    seconds=$(awk -v a="$from" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$3" "$4" "$seconds" "$(last_loss "$name")" >"$work/$name.row"
    rm -rf "$work/$name/checkpoints"
}
last_loss() { sed -n 's/.*"valid_loss": *\([^,}]*\).*/\1/p' "$work/$1/metrics.jsonl" | tail -1; }

# runs of standard input, a line each as train() takes them, a few at a time
train_all() {
    local words
    while read -r -a words; do
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || failed=1; done
        train "${words[@]}" &
    done
    while [ -n "$(jobs -p)" ]; do wait -n || failed=1; done
}

best() { cat "$work"/sweep-"$1"-*.row | sort -t $'\t' -k5,5g | head -1 | cut -f2; }

{
    date -u +%F
    "$mt" --version
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || grep -m1 'model name' /proc/cpuinfo
    echo "$model device=$device precision=$precision steps=$steps jobs=$jobs"
} >"$out/machine.txt"

train_all < <(for name in muon adamw; do
    for rate in ${rates[$name]}; do echo "sweep-$name-$rate $name $rate 1 $((steps / 3))"; done
done)
adamw=$(best adamw) muon=$(best muon)
echo "rates: adamw $adamw, muon $muon" | tee -a "$out/machine.txt"
train_all < <(for seed in $seeds; do
    echo "adamw-$seed adamw $adamw $seed $steps"
    echo "muon-$seed muon $muon $seed $steps"
done)

cat "$work"/*.row >"$out/runs.tsv"
for name in $(cut -f1 "$out/runs.tsv"); do
    sed "s/^{/{\"name\":\"$name\",/" "$work/$name/metrics.jsonl"
done >"$out/runs.jsonl"
echo "seconds: $(($(date +%s) - started))" | tee -a "$out/machine.txt"
column -t "$out/runs.tsv"
for name in adamw muon; do
    awk -v n=$name '$1 ~ "^" n "-" { s += $5; q += $5 * $5; k++ }
        END { if (k > 1) { m = s / k
              d = sqrt((q - k * m * m) / (k - 1))
              printf "%s: %d seeds, mean %.4f, standard deviation %.4f\n", n, k, m, d } }' \
        "$out/runs.tsv"
done | tee -a "$out/machine.txt"
exit $failed
