#!/usr/bin/env bash
# `eval --ids FILE --logits OUT`: the logits that the loss of `eval` is made of, in a file that NumPy reads; the same
# bytes from every layout and micro-batch; what is refused.
. "$(dirname "$0")/lib.sh"
make_tiny
keys=(run.dir=trained model.layers=4 parallel.seq_blocks=8 parallel.attn_block=8 train.steps=3 optim.warmup=1 checkpoint.every=0)
"$mt" --config tiny.ini "${keys[@]}" >/dev/null 2>train.err || bad "training: $(tail -1 train.err)"
head -c $((7 * 32 + 1)) big.txt >v.txt
"$mt" preprocess --input v.txt --tokenizer byte --output v >/dev/null 2>&1 || bad "preprocess"
od -An -v -tu1 -w32 v.txt | head -7 >ids.txt
logits() { "$mt" eval --config tiny.ini "${keys[@]}" --ids ids.txt --logits "$@"; }
logits one.npy >out.txt 2>err.txt
check "one rank: exit $?, $(head -1 err.txt)" [ -s one.npy ]
check "nothing on stdout" [ ! -s out.txt ]

# ---- what they are
loss=$("$mt" eval --config tiny.ini "${keys[@]}" data.valid=v 2>/dev/null | sed -n 's/^loss //p')
mean=$(PYTHONPATH=$root/test/tools /usr/bin/python3 - <<'EOP'
import npy
shape, values = npy.load("one.npy")
assert shape == (7, 32, 257), shape
text = open("v.txt", "rb").read()
print(-sum(npy.log_prob(values, 257, row, text[row + 1])[0] for row in range(7 * 32)) / (7 * 32))
EOP
)
check "the mean loss of their rows, $mean, is that of eval, $loss" \
    awk -v a="$loss" -v b="$mean" 'BEGIN { d = a - b; exit !(a > 1 && d < 2e-6 && d > -2e-6) }'
# shorter sequences: what follows in a sample is not seen
cut -c1-40 ids.txt >short.txt
"$mt" eval --config tiny.ini "${keys[@]}" --ids short.txt --logits short.npy 2>err.txt
check "ten positions: $(head -1 err.txt)" env PYTHONPATH="$root/test/tools" /usr/bin/python3 -c '
import npy
(n, T, V), whole = npy.load("one.npy")
(m, S, W), short = npy.load("short.npy")
assert (m, S, W) == (n, 10, V), (m, S, W)
for i in range(n):
    assert short[i * S * V : (i + 1) * S * V] == whole[i * T * V : (i * T + S) * V], i'

# ---- every layout
n=0
while read -r count words; do
    n=$((n + 1))
    if [ "$count" = 1 ]; then logits l$n.npy $words >/dev/null 2>l$n.err
    else "$root/scripts/launch.sh" -n "$count" -- "$mt" eval --config tiny.ini "${keys[@]}" --ids ids.txt --logits l$n.npy \
        $words >/dev/null 2>l$n.err; fi
    check "$count ranks, $words: $(grep -m1 error l$n.err)" cmp one.npy l$n.npy
done <<'EOT'
1 train.micro_batch=1
1 train.micro_batch=15
1 train.global_batch=3
2 parallel.tp=2
2 parallel.tp=2 parallel.sp=false
2 parallel.pp=2
2 parallel.pp=2 parallel.schedule=dualpipe train.global_batch=12
2 parallel.cp=2
2 train.global_batch=12 train.micro_batch=2
4 parallel.tp=2 parallel.cp=2 train.micro_batch=1
4 parallel.pp=2 parallel.cp=2 train.micro_batch=1
EOT
moe=(model.layers=2 moe.experts=4 moe.topk=2 moe.ffn=32 run.dir=mixture)
"$mt" --config tiny.ini "${keys[@]}" "${moe[@]}" >/dev/null 2>train.err || bad "a mixture: $(tail -1 train.err)"
logits m1.npy "${moe[@]}" 2>err.txt || bad "a mixture: $(head -1 err.txt)"
"$root/scripts/launch.sh" -n 2 -- "$mt" eval --config tiny.ini "${keys[@]}" "${moe[@]}" --ids ids.txt --logits m2.npy \
    parallel.ep=2 train.global_batch=12 train.micro_batch=2 >/dev/null 2>m2.err
check "experts on two ranks: $(grep -m1 error m2.err)" cmp m1.npy m2.npy
check "in bf16, other numbers: $(logits half.npy run.precision=bf16 2>&1 | grep -m1 error)" [ -s half.npy ]
check "which are near" env PYTHONPATH="$root/test/tools" /usr/bin/python3 -c '
import npy
one, half = npy.load("one.npy")[1], npy.load("half.npy")[1]
worst = max(abs(a - b) for a, b in zip(one, half))
assert 0 < worst < 0.1 * max(one), worst'

# ---- refused, and what was there stays
refused() { # LINE CODE TEXT
    printf '%s\n' "$1" >bad.txt
    expect "$2" "$3" "$mt" eval --config tiny.ini "${keys[@]}" --ids bad.txt --logits one.npy
}
cp one.npy before.npy
refused "1 2 x" 3 "bad.txt:1: 'x' is no id of a vocabulary of 257"
refused $'1 2\n\n1 257' 3 "bad.txt:3: '257' is no id"
refused $'1 2\n1 -1' 3 "bad.txt:2: '-1' is no id"
refused $'1 2\n1 2 3' 3 "bad.txt:2: 3 ids, in the lines before 2"
refused "$(seq -s ' ' 1 33)" 3 "bad.txt:1: more than model.seq = 32 ids"
refused "" 3 "'bad.txt' has no ids"
printf '1 2\n1 \0 2\n' >bad.txt
expect 3 "bad.txt:2: a 0 byte" "$mt" eval --config tiny.ini "${keys[@]}" --ids bad.txt --logits one.npy
expect 3 "none.txt" "$mt" eval --config tiny.ini "${keys[@]}" --ids none.txt --logits one.npy
expect 2 "both are needed" "$mt" eval --config tiny.ini "${keys[@]}" --ids ids.txt
expect 2 "both are needed" "$mt" eval --config tiny.ini "${keys[@]}" --logits one.npy
expect 5 "none/one.npy" "$mt" eval --config tiny.ini "${keys[@]}" --ids ids.txt --logits none/one.npy
printf '1 2 x\n' >bad.txt
expect 3 "bad.txt:1: 'x'" "$root/scripts/launch.sh" -n 2 -- "$mt" eval --config tiny.ini "${keys[@]}" --ids bad.txt \
    --logits one.npy parallel.tp=2
mkdir host0 host1
apart() { # two ranks, each with a file of its own
    timeout 120 "$root/scripts/launch.sh" -n 2 -- bash -c "cd $work/host\$RANK && exec '$mt' eval --config \
        $work/tiny.ini ${keys[*]} run.dir=$work/trained --ids ids.txt --logits $work/one.npy parallel.tp=2"
}
echo "1 2 3" | tee host0/ids.txt >host1/ids.txt
check "the same ids in two files: $(apart 2>&1 | grep -m1 error)" [ "$(wc -c <one.npy)" -eq $((128 + 3 * 257 * 4)) ]
cp before.npy one.npy
for other in "1 2 4" $'1 2 3\n1 2 3' "1 2 3 4"; do
    echo "$other" >host1/ids.txt
    expect 3 "the ranks do not read the same data: rank 1 and rank 0 differ: '--ids: " apart
done
check "what was there before stays" cmp one.npy before.npy
check "nothing half-written: $(ls ./*.tmp-* 2>/dev/null)" [ -z "$(ls ./*.tmp-* 2>/dev/null)" ]
finish
