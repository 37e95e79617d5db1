#!/usr/bin/env bash
# An evaluation reads every sample of its set once, whatever the batch: the same bits of valid_loss from every
# global_batch, micro_batch and layout, also where the last batch is not full or the set is smaller than one.
. "$(dirname "$0")/lib.sh"
make_tiny
sed -i "/^eval_samples/d" tiny.ini
# sets of 20 and 327 samples of 32 tokens, and the 20 in four parts (neighbours share a token, so do the parts)
tokens() { "$mt" preprocess --input "$1".txt --tokenizer byte --output "$1" >/dev/null 2>&1 || bad "preprocess $1"; }
head -c $((20 * 32 + 1)) big.txt >v20.txt
head -c $((327 * 32 + 20)) big.txt >v327.txt
for i in 0 1 2 3; do tail -c +$((i * 160 + 1)) v20.txt | head -c 161 >part$i.txt; tokens part$i; done
tokens v20
tokens v327
valids() { sed -n 's/.*"valid_loss":\([^,}]*\)[,}].*/\1/p' "$1/metrics.jsonl"; }

# ---- in a run: weights that stay as they begin, so that only the evaluation is another
still=(optim.lr=0 optim.min_lr=0 optim.warmup=0 train.steps=1 checkpoint.every=0 data.valid="few: v20 many: v327")
run() { "$mt" --config tiny.ini run.dir="$1" "${still[@]}" "${@:2}" >/dev/null 2>"$1.err"; }
ranks() { "$root/scripts/launch.sh" -n "$1" -- "$mt" --config tiny.ini run.dir="$2" "${still[@]}" "${@:3}" >/dev/null 2>"$2.err"; }
run base
want=$(valids base)
check "two losses: $(xargs <<<"$want")" [ "$(grep -c '^[0-9.]*$' <<<"$want")" -eq 2 ]
check "the log says how many samples" grep -q '^347 samples an evaluation$' base.err
run older train.global_batch=6 train.micro_batch=2 train.eval_batches=4 # which a run of before may have
check "batches bound an evaluation: $(grep -m1 error older.err)" grep -q '^44 samples an evaluation$' older.err # all 20, and 24
check "and the log names the samples" grep -q "$(printf '%s' '^warning: train.eval_batches=4 counts global batches: with another ' \
    'train.global_batch other samples are evaluated; train.eval_samples=24 reads these with any$')" older.err
n=0
for batch in "1 1" "6 1" "6 2" "20 20" "64 4" "64 64" "327 3" "480 32"; do
    n=$((n + 1))
    run b$n train.global_batch=${batch% *} train.micro_batch=${batch#* }
    check "batches of ${batch% *}, micro-batches of ${batch#* }: $(valids b$n | xargs)" [ "$(valids b$n)" = "$want" ]
done
run ramp train.global_batch=4*1,64 train.micro_batch=4
check "a batch that grows" [ "$(valids ramp)" = "$want" ]
while read -r count words; do
    n=$((n + 1))
    ranks $count r$n $words
    check "$count ranks, $words: $(grep -m1 error r$n.err) $(valids r$n | xargs)" [ "$(valids r$n)" = "$want" ]
done <<'EOT'
2 parallel.tp=2
2 parallel.zero=1 train.global_batch=64 train.micro_batch=4
4 parallel.tp=2 train.global_batch=12 train.micro_batch=2
3 train.global_batch=54 train.micro_batch=2
2 parallel.pp=2 parallel.schedule=1f1b train.global_batch=64 train.micro_batch=4
2 parallel.pp=2 parallel.schedule=gpipe train.global_batch=480 train.micro_batch=8
4 parallel.pp=2 parallel.schedule=zb-h1 train.global_batch=24 train.micro_batch=3
EOT
for s in interleaved dualpipe dualpipev chimera-bhalf chimera-bhalf+split; do
    more=()
    [ $s != interleaved ] || more=(parallel.vpp=2)
    run one-$s model.layers=8
    ranks 2 $s model.layers=8 parallel.pp=2 parallel.schedule=$s "${more[@]}" train.global_batch=64 train.micro_batch=4
    check "schedule $s: $(grep -m1 error $s.err)" [ "$(valids $s)" = "$(valids one-$s)" -a -n "$(valids $s)" ]
done

# rows of half a micro-batch share a scale there, so they do where one process evaluates
ranks 2 halves model.layers=8 parallel.pp=2 parallel.schedule=chimera-bhalf train.global_batch=64 train.micro_batch=4 \
    run.precision=fp8 run.fp8=tensorwise run.fp8_keep=0 run.reproducible=layout checkpoint.every=1
"$mt" eval --run halves --json >halves.json 2>/dev/null
check "micro-batches in halves, evaluated by one process" [ "$(grep -o '"loss":[^,}]*' halves.json | cut -d: -f2)" = "$(valids halves)" -a -s halves.json ]

# ---- as a command: what counts, and that it is each sample once
"$mt" --config tiny.ini run.dir=trained train.steps=6 checkpoint.every=0 >/dev/null 2>&1
eval_of() { "$mt" eval --config tiny.ini run.dir=trained "$@" 2>eval.err; }
field() { sed -n "s/^$1 //p"; }
for batch in 3 15 64 480; do
    eval_of data.valid=v327 train.global_batch=$batch train.micro_batch=1 >e$batch.txt
    check "327 samples in batches of $batch: $(field tokens <e$batch.txt) tokens" [ "$(field tokens <e$batch.txt)" = 10464 ]
    check "the same figures" cmp -s e3.txt e$batch.txt
done
check "their bytes: $(field bytes <e3.txt)" [ "$(field bytes <e3.txt)" = 10464 ]
whole=$(eval_of data.valid=v20 train.global_batch=64 train.micro_batch=4 | field loss)
parts=$(for i in 0 1 2 3; do eval_of data.valid=part$i train.global_batch=64 train.micro_batch=4 | field loss; done)
check "20 samples have the mean loss of their four parts: $whole of $(xargs <<<"$parts")" \
    awk -v w="$whole" '{ sum += $1 } END { d = sum / 4 - w; exit !(NR == 4 && d < 2e-6 && d > -2e-6) }' <<<"$parts"
check "which differ" [ "$(sort -u <<<"$parts" | wc -l)" -eq 4 ]
for batch in 6 64; do eval_of data.valid=v327 train.global_batch=$batch train.micro_batch=2 train.eval_samples=25 >first$batch.txt; done
check "a bound: the first samples alone" [ "$(field tokens <first6.txt)" = $((25 * 32)) ]
check "the same ones with another batch: $(field loss <first6.txt)" cmp -s first6.txt first64.txt
check "a bound beyond the set is none" \
    [ "$(eval_of data.valid=v20 train.global_batch=6 train.eval_samples=1000000000 | field tokens)" = 640 ]
check "the older form, in batches" \
    [ "$(eval_of data.valid=v327 train.global_batch=6 train.eval_batches=4 | field tokens)" = $((24 * 32)) ]
expect 2 "give either eval_samples or eval_batches" "$mt" config check --config tiny.ini train.eval_samples=1 train.eval_batches=1
# from another folder: the run's paths began where it was started
run saved checkpoint.every=1 data.valid=v20
mkdir elsewhere
cd elsewhere || exit 1
expect 3 "hint: the paths are relative to the folder in which the run was started" "$mt" eval --run ../saved
expect 0 "tokens" "$mt" eval --run ../saved data.valid=../v20
cd "$work" || exit 1
expect 0 "warning: an evaluation reads 347 samples, training 30 between two of them" "$mt" --config tiny.ini \
    run.dir=much "${still[@]/train.steps=1/train.steps=2}" train.eval_every=2
finish
