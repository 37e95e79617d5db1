#!/usr/bin/env bash
# Tasks: accuracies of `eval --tasks` against those of another program, from the logits of each request by itself; the
# same bytes from every layout and batch; in a run; what is refused.
. "$(dirname "$0")/lib.sh"
make_tiny
sed -i '/^eval_samples/d' tiny.ini
keys=(run.dir=trained model.layers=4 parallel.seq_blocks=8 parallel.attn_block=8 train.stop_at=20 checkpoint.every=0)
"$mt" --config tiny.ini "${keys[@]}" >/dev/null 2>train.err || bad "training: $(tail -1 train.err)"
other() { PYTHONPATH=$root/test/tools /usr/bin/python3 "$root/test/tools/tasks.py" "$@"; }
other make 1 || bad "no questions"
files=(some.jsonl contexts.jsonl words.jsonl long.jsonl)
list=$(IFS=, && echo "${files[*]}")
ask() { "$mt" eval --config tiny.ini "${keys[@]}" data.valid= "$@"; } # without a loss
ask --tasks "$list" --json >one.json 2>err.txt
check "exit $?: $(grep -m1 error err.txt)" [ -s one.json ]
check "what was cut is said" grep -q "warning: 'long.jsonl': 18 requests are longer than model.seq, 32: cut from the left" err.txt

# ---- against the other program
other ids 32 "${files[@]}" >ids.txt
"$mt" eval --config tiny.ini "${keys[@]}" --ids ids.txt --logits all.npy >/dev/null 2>&1 || bad "logits"
other check 32 all.npy one.json "${files[@]}" >compared.txt 2>&1
check "$(tail -1 compared.txt)" [ "$(grep -c ' acc' compared.txt)" -eq 10 ]
check "metrics differ, or one may stand for another: $(xargs <compared.txt)" \
    [ "$(sed -n 's/^some.jsonl [^ ]* //p' compared.txt | sort -u | wc -l)" -ge 2 ]
check "some words are found, others not" grep -qE '^words.jsonl acc 0\.[0-9]*[1-9]' compared.txt

# ---- lines
ask --tasks "$list" >one.txt 2>/dev/null
check "a line a task, one of all: $(wc -l <one.txt)" [ "$(wc -l <one.txt)" -eq 5 ]
form='acc 0\.[0-9]{4} \+- 0\.[0-9]{4}'
check "choices" grep -qE "^task some questions 60 $form acc_norm 0.* acc_bytes 0.*" one.txt
check "greedy" grep -qE "^task words questions 40 $form$" one.txt
check "pooled" grep -qE "^tasks pooled questions 150 $form acc_norm 0" one.txt
"$mt" eval --config tiny.ini "${keys[@]}" --tasks some.jsonl >both.txt 2>/dev/null
check "behind the loss" [ "$(sed -n '1s/ .*//p;6p' both.txt)" = "loss
$(head -1 one.txt)" ]
check "of the loss alone no task" [ "$("$mt" eval --config tiny.ini "${keys[@]}" --json 2>/dev/null |
    grep -cE '^\{"valid":\[\{"loss":[0-9.]*,"perplexity":.*,"bits_per_byte":[0-9.]*\}\]\}$')" -eq 1 ]

# ---- every layout and batch
n=0
while read -r count words; do
    n=$((n + 1))
    launch=()
    [ "$count" = 1 ] || launch=("$root/scripts/launch.sh" -n "$count" --)
    # shellcheck disable=SC2086  # words
    "${launch[@]}" "$mt" eval --config tiny.ini "${keys[@]}" data.valid= --tasks "$list" --json $words >l$n.json 2>l$n.err
    check "$count ranks, $words: $(grep -m1 error l$n.err)" cmp one.json l$n.json
done <<'EOT'
1 train.micro_batch=1
1 train.micro_batch=5
1 train.global_batch=480 train.micro_batch=32
1 data.reset_at_eod=true
1 data.mask_eod=true
1 train.recompute=full debug.poison=true
2 parallel.tp=2
2 parallel.pp=2
2 parallel.pp=2 parallel.schedule=dualpipe train.global_batch=12
2 parallel.cp=2
2 parallel.cp=2 parallel.cp_comm=ring
2 parallel.cp=2 parallel.cp_comm=a2a parallel.cp_cut=contiguous
2 parallel.pp=2 parallel.schedule=interleaved parallel.vpp=2 train.global_batch=12 train.micro_batch=1
2 train.global_batch=12 train.micro_batch=2
4 parallel.tp=2 parallel.cp=2 train.micro_batch=1
4 parallel.pp=2 parallel.tp=2 parallel.sp=false train.micro_batch=1
EOT
moe=(model.layers=2 moe.experts=4 moe.topk=2 moe.ffn=32 run.dir=mixture)
"$mt" --config tiny.ini "${keys[@]}" "${moe[@]}" >/dev/null 2>train.err || bad "a mixture: $(tail -1 train.err)"
ask "${moe[@]}" --tasks "$list" --json >m1.json 2>err.txt || bad "a mixture: $(head -1 err.txt)"
"$root/scripts/launch.sh" -n 2 -- "$mt" eval --config tiny.ini "${keys[@]}" data.valid= "${moe[@]}" --tasks "$list" --json \
    parallel.ep=2 train.global_batch=12 train.micro_batch=2 >m2.json 2>m2.err
check "experts on two ranks: $(grep -m1 error m2.err)" cmp m1.json m2.json

# words whose logits the last rank of tp has
for _ in $(seq 1 400); do printf '\303\251 \303\250 '; done >accents.txt
"$mt" preprocess --input accents.txt --tokenizer byte --output accents >/dev/null 2>&1 || bad "preprocess"
high=(run.dir=high model.layers=1 data.train=accents data.valid= train.steps=60 train.stop_at=0 optim.lr=1e-2 model.dropout=0 model.attention_dropout=0)
"$mt" --config tiny.ini "${keys[@]}" "${high[@]}" >/dev/null 2>train.err || bad "accents: $(tail -1 train.err)"
printf '{"context":"\303\251 \303\250 \303\251 \303\250 \303\251","continuation":"\303\250"}\n' >accents.jsonl
ask "${high[@]}" --tasks accents.jsonl >h1.txt 2>err.txt
check "an accent is found: $(cat h1.txt)" grep -qx "task accents questions 1 acc 1.0000" h1.txt
"$root/scripts/launch.sh" -n 2 -- "$mt" eval --config tiny.ini "${keys[@]}" "${high[@]}" --tasks accents.jsonl parallel.tp=2 >h2.txt 2>h2.err
check "by two ranks, too: $(grep -m1 error h2.err) $(cat h2.txt)" cmp h1.txt h2.txt

# ---- in a run: the same figures, the same weights
run() { "$mt" --config tiny.ini "${keys[@]}" run.dir="$1" "${@:2}" >/dev/null 2>"$1.err"; }
accs() { grep -o '"task":.*"time"' "$1/metrics.jsonl"; }
run asked train.eval_tasks="$list" train.eval_every=10 log.every=10
check "asked twice: $(grep -m1 error asked.err)" [ "$(accs asked | wc -l)" -eq 8 ]
check "as the command says" [ "$(accs asked | tail -4 | grep -o '"acc":[^,]*' | xargs)" = \
    "$(grep -o '"task":[^}]*' one.json | grep -o '"acc":[^,]*' | xargs)" ]
check "and on the console" grep -qE '^step 20: some, acc 0\.[0-9]{4}, acc_norm 0\.[0-9]{4}, acc_bytes 0\.[0-9]{4} \(60 questions\)$' asked.err
check "and before how many they are" grep -qE '^150 questions of 4 tasks an evaluation, with [0-9]+ choices in [0-9]+ samples$' asked.err
check "the same weights" same_tensors asked trained 20
ranks() { "$root/scripts/launch.sh" -n "$1" -- "$mt" --config tiny.ini "${keys[@]}" run.dir="$2" "${@:3}" >/dev/null 2>"$2.err"; }
ranks 2 halves train.eval_tasks="$list" train.eval_every=10 parallel.pp=2 train.global_batch=15
check "of a pipeline: $(grep -m1 error halves.err)" [ "$(accs halves)" = "$(accs asked)" ]
ranks 2 slices train.eval_tasks="$list" train.eval_every=10 parallel.pp=2 parallel.slices=2
check "in slices: $(grep -m1 error slices.err)" [ "$(accs slices)" = "$(accs asked)" ]
# where sums may have any order, an evaluation of the run has that of the run: slices of sequences
run sums run.reproducible=run parallel.slices=4 parallel.attn_block=32 train.stop_at=4 train.eval_tasks=some.jsonl
last_loss() { grep -o '"valid_loss":[0-9.]*' sums/metrics.jsonl | tail -1 | cut -d: -f2; }
check "in slices, without a word on bits: $(grep -m1 error sums.err)" [ -n "$(last_loss)" ]
for n in 1 2; do
    "$root/scripts/launch.sh" -n $n -- "$mt" eval --run sums --json $([ $n = 1 ] || echo parallel.pp=2) >sums.json 2>sums.err
    check "eval has its loss on $n: $(last_loss), $(cat sums.json)" grep -qF "\"loss\":$(last_loss)," sums.json
    check "and its answers" [ "$(accs sums | grep -o '"acc":[^,]*')" = "$(grep -o '"acc":[^,]*' sums.json)" ]
done
run going train.eval_tasks="$list" train.eval_every=10 train.stop_at=12
run going train.eval_tasks="$list" train.eval_every=10
check "gone on: $(grep -m1 error going.err)" same_tensors going trained 20
check "the same lines, and those of the stop" [ "$(accs going | wc -l)" -eq 12 -a "$(accs going | sed 5,8d)" = "$(accs asked)" ]
run alone data.valid= train.eval_tasks=words.jsonl
check "without a validation set: $(accs alone)" [ "$(accs alone | wc -l)" -eq 1 ]
"$mt" eval --run asked --json >of_run.json 2>err.txt
check "eval of the run asks what the run did" [ "$(grep -o '"tasks":.*' of_run.json)" = "$(grep -o '"tasks":.*' one.json)" ]
check "report: $("$mt" report asked --output page.html 2>&1 | grep -m1 -E 'error|damaged')" [ -s page.html ]

# ---- refused
refused() { # LINE CODE TEXT
    printf '%s\n' "$1" >bad.jsonl
    expect "$2" "$3" ask --tasks bad.jsonl
}
refused '{"query":"a","choices":["b"],"gold":0' 3 "bad.jsonl:1"
refused $'\n{"query":"a","choices":["b"],"gold":0}\n[1]' 3 "bad.jsonl:3: a line is one object"
refused '{"query":"a"}' 3 "bad.jsonl:1: there is neither 'choices' nor 'context_options' nor 'continuation'"
refused '{"choices":["b"],"gold":0}' 3 "bad.jsonl:1: 'query' is missing"
refused '{"query":1,"choices":["b"],"gold":0}' 3 "bad.jsonl:1: 'query' is no string"
refused '{"query":"a","choices":"b","gold":0}' 3 "bad.jsonl:1: 'choices' is no list"
refused '{"query":"a","choices":[],"gold":0}' 3 "bad.jsonl:1: 'choices' is empty"
refused '{"query":"a","choices":["b",""],"gold":0}' 3 "bad.jsonl:1: choice 1 is empty"
refused '{"query":"a","choices":["b",2],"gold":0}' 3 "bad.jsonl:1: 'choices' is no string"
refused '{"query":"a","choices":["b"]}' 3 "bad.jsonl:1: 'gold' is missing"
refused '{"query":"a","choices":["b"],"gold":"0"}' 3 "bad.jsonl:1: 'gold' is no whole number"
refused '{"query":"a","choices":["b","c"],"gold":2}' 3 "bad.jsonl:1: 'gold' is 2: the choices are numbered from 0 to 1"
refused '{"query":"a","choices":["b","c"],"gold":-1}' 3 "bad.jsonl:1: 'gold' is -1"
refused '{"context_options":["a"],"gold":0}' 3 "bad.jsonl:1: 'continuation' is missing"
refused '{"continuation":"a"}' 3 "bad.jsonl:1: 'context' is missing"
refused $'{"context":"a","continuation":"b"}\n{"query":"a","choices":["b"],"gold":0}' 3 "bad.jsonl:2: a question of another form than those before: choices, not greedy"
refused "{\"query\":\"a\",\"choices\":[\"$(printf 'x%.0s' $(seq 32))\"],\"gold\":0}" 3 "bad.jsonl:1: choice 0 has 33 tokens, model.seq is 32"
refused "" 3 "'bad.jsonl' has no questions"
expect 3 "none.jsonl" ask --tasks none.jsonl
expect 2 "a file's name is empty" ask --tasks some.jsonl,
mkdir -p again
cp some.jsonl again
expect 2 "'some.jsonl' and 'again/some.jsonl' have the same name" ask --tasks some.jsonl,again/some.jsonl
expect 2 "there is nothing to evaluate on" ask
printf '{"query":1}\n' >bad.jsonl
expect 3 "bad.jsonl:1: there is neither" "$root/scripts/launch.sh" -n 2 -- "$mt" eval --config tiny.ini "${keys[@]}" \
    --tasks bad.jsonl parallel.tp=2
expect 0 "warning: train.eval_tasks: bad.jsonl:1: there is neither" "$mt" config check --config tiny.ini train.eval_tasks=bad.jsonl
expect 3 "bad.jsonl:1: there is neither" "$mt" --config tiny.ini "${keys[@]}" run.dir=none train.eval_tasks=bad.jsonl
mkdir -p host0 host1
printf '{"query":"a","choices":["b","c"],"gold":0}\n' | tee host0/q.jsonl >host1/q.jsonl
apart() { # two ranks, each in a folder of its own
    "$root/scripts/launch.sh" -n 2 -- bash -c "cd $work/host\$RANK && exec '$mt' eval --config $work/tiny.ini ${keys[*]} \
        run.dir=$work/trained data.valid= --tasks q.jsonl parallel.tp=2"
}
expect 0 "task q questions 1" apart
printf '{"query":"a","choices":["b","c"],"gold":1}\n' >host1/q.jsonl
expect 3 "the ranks do not read the same data: rank 1 and rank 0 differ: 'train.eval_tasks: q.jsonl: 1 questions, checksum" apart
finish
