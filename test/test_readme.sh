#!/usr/bin/env bash
# The README's commands, as they stand there, in its order: those of its first lines, of "Your own text", "Continue a
# Llama", of "Several processes" that need no launcher of others, of "Which layout?" and of "A pipeline". Then the
# commands of docs/*.md, in the same folder. Only the models are made small first, the demo's text is short, and a
# small random Llama stands for the hub's.
# The book is our own documentation.
. "$(dirname "$0")/lib.sh"
ln -s "$mt" megatrain
ln -s "$root/scripts" scripts
cp "$root/README.md" .
cat "$root"/README.md "$root"/docs/*.md >book.txt
mkdir config data
cp "$root/config/tiny.ini" config
sed -e 's/^layers = .*/layers = 2/; s/^hidden = .*/hidden = 48/; s/^seq = .*/seq = 32/; s/^warmup = .*/warmup = 2/' \
    -e 's/^steps = .*/steps = 6/; s/^\(eval_\)*every = .*/\1every = 3/' \
    -e 's/^\(train\|valid\) = .*/\1 = numbers/; s/^tokenizer = .*/tokenizer = byte/' "$root/config/demo.ini" >config/demo.ini

# The commands in the first block of code below a heading, each in a line, without what is said of them.
block() {
    awk -v heading="# $1" '$0 == heading || $0 == "#" heading { on = 1 } on && /^```$/ { exit } code { print } on && $0 == "```sh" { code = 1 }' \
        README.md | sed -e 's/  *#.*//' -e ':more; /\\$/ { N; s/\\\n *//; b more }'
}

# as after `make demo`: a run of that name is there, of other data
seq 2000 >numbers.txt
"$mt" preprocess --input numbers.txt --tokenizer byte --output numbers --append-eod >/dev/null 2>&1 &&
    OMP_NUM_THREADS=1 "$mt" --config config/demo.ini 2>/dev/null
check "a demo that was made before" [ -e runs/demo/metrics.jsonl ]
bash -c "$(grep '^./megatrain convert --from runs/demo ' README.md)" 2>err.txt
check "leaves as a Qwen3: $(tail -1 err.txt)" grep -q '"Qwen3ForCausalLM"' demo-hf/config.json
"$mt" convert --from runs/demo --to demo.gguf --format gguf 2>err.txt
check "and to llama.cpp: $(tail -1 err.txt)" [ -s demo.gguf ]

ran=0 keys=
while read -r line; do
    case $line in make* | srun* | torchrun* | mpirun* | sbatch*) continue ;; esac
    ran=$((ran + 1))
    case $line in keys=*) eval "${line//train.steps=200/train.steps=6}"; export keys ;;
    *from-hf*) # with the tokenizer that was trained above
        /usr/bin/python3 "$root/test/tools/hf_folder.py" make my-llama vocab_size=4200 max_position_embeddings=512
        cp data/tok.json my-llama/tokenizer.json ;;
    esac
    line=${line//train.steps=200/train.steps=6}
    case $line in *--search*) line=${line//llama3-70b.ini --world 64/tiny.ini --world 2} line=${line//tp=8/tp=2} ;; esac
    if OMP_NUM_THREADS=1 bash -c "$line" </dev/null >out.txt 2>err.txt; then ok
    else bad "exit $?: $line"; tail -4 err.txt; fi
    case $line in
    *--compare*) check "plan: where two layouts stand" [ "$(grep -c '^  parallel\.[tp]p=2$' out.txt)" -eq 2 ] ;;
    *--search*) check "plan: the best layout" grep -q '^the best, to paste' out.txt ;;
    *' plan '*) check "plan: bytes" grep -q '^ *total ' out.txt ;;
    *' eval '*) check "eval: bits per byte" grep -q '^bits_per_byte [0-9]' out.txt ;;
    *=runs/pipe\ *) check "a pipeline: the step as it ran, below it as planned" grep -q 'zb-h1' runs/pipe/timeline.svg ;;
    *' simulate '*) check "simulate: the schedule on paper" grep -q '^messages ' out.txt ;;
    *' generate --run runs/tiny '*) check "generate: a tiny GPT" grep -q '^The .' out.txt ;;
    *' generate '*) check "generate: the prompt goes on" grep -q '^Once.' out.txt ;;
    esac
done < <(for heading in megatrain "Your own text" "Continue a Llama" "Several processes" "Which layout?" "A pipeline"; do
    block "$heading"
done)
check "$ran commands, want 21" [ $ran -eq 21 ]
check "the model of one's own text has left as a Qwen3" grep -q '"Qwen3ForCausalLM"' book-hf/config.json
"$mt" convert --from our-llama --to runs/again --format megatrain >/dev/null 2>err.txt
check "the Llama opens again: $(tail -1 err.txt)" [ -s runs/again/tokenizer/tokenizer.json ]
for f in config.ini metrics.jsonl loss.svg checkpoints/step-00000006/manifest.json; do
    check "a run leaves $f" [ -s "runs/book/$f" ]
done
check "four ranks trained as one" same_losses runs/tiny runs/tp
check "100 steps" [ "$(losses runs/tp | wc -l)" -eq 100 ]
# what the README shows of a plan is what it prints
awk '/^layout  4 ranks/ { on = 1 } /^```$/ { on = 0 } on' README.md >shown.txt
"$mt" plan --config config/tiny.ini --world 4 parallel.tp=2 parallel.zero=1 2>/dev/null | grep -E '^(layout|groups)' >plan.txt
check "the README's plan: $(diff shown.txt plan.txt)" cmp -s shown.txt plan.txt
check "a report of all" "$mt" report runs/demo runs/book runs/tiny --output page.html 2>/dev/null

# ---- a table's row that stands alone, behind an empty line, is shown as text
lone() {
    awk 'FNR == 1 { first = code = 0 } /^```/ { code = !code } first && !/^\| -/ { print FILENAME ":" FNR - 1 }
         { first = /^\|/ && before !~ /^\|/ && !code; before = $0 }' "$root"/README.md "$root"/docs/*.md
}
check "rows behind a table: $(lone | xargs)" [ -z "$(lone)" ]

# ---- the pages, one after the other. A line is a command where it stands in a block of sh, or set in, and begins with one.
# A word in capitals (FILE, N) makes it a template; what builds, times GPUs or needs a launcher of others is not run here.
pages() {
    awk '/^```sh$/ { on = 1; next } /^```/ { on = 0 }
         on || /^    (\.\/|scripts\/)?(megatrain|launch\.sh|device-file\.py) / || (more && /^     /) {
             sub(/^ +/, ""); sub(/ +#.*/, ""); more = sub(/\\$/, ""); printf "%s%s", $0, more ? "" : "\n"; next } { more = 0 }' "$1"
}
sed -i 's/^steps = .*/steps = 20/; s/^warmup = .*/warmup = 2/; s/^\(eval_\)*every = .*/\1every = 10/' config/tiny.ini
sed -e 's/^steps = .*/steps = 4/; s/^warmup = .*/warmup = 1/; s/^\(eval_\)*every = .*/\1every = 2/; s/^layers = .*/layers = 2/' \
    "$root/config/mixtral-tiny.ini" >config/mixtral-tiny.ini
sed -e 's/^steps = .*/steps = 4/; s/^warmup = .*/warmup = 1/; s/^\(eval_\)*every = .*/\1every = 2/' \
    "$root/config/qwen3-next-tiny.ini" >config/qwen3-next-tiny.ini
sed -e 's/^steps = .*/steps = 4/; s/^warmup = .*/warmup = 1/; s/^\(eval_\)*every = .*/\1every = 2/' \
    "$root/config/nemotron-3-tiny.ini" >config/nemotron-3-tiny.ini
sed -e 's/^steps = .*/steps = 4/; s/^warmup = .*/warmup = 1/; s/^\(eval_\)*every = .*/\1every = 2/' \
    "$root/config/kimi-linear-tiny.ini" >config/kimi-linear-tiny.ini
cp "$root"/config/{qwen3-30b-a3b,gpt2-124m}.ini config
rm -rf runs/tiny
"$mt" --config config/tiny.ini 2>/dev/null || bad "a first run"
ran=0
for page in "$root"/docs/*.md; do
    pages "$page" >lines.txt
    while IFS= read -r line; do
        case $line in
        '' | make\ * | mpirun\ * | curl\ * | build/* | test/* | /usr/bin/python3\ * | python3\ * | cmp\ * | done | export\ *) continue ;;
        scripts/gpu-check.sh* | scripts/check-*.sh* | scripts/toys.py*) continue ;;
        *' 'FILE* | *' 'N\ * | *RESULTS*) continue ;;
        for\ *\ do) line="$line $(grep -F -A9 "$line" lines.txt | sed '1d; /^done$/q' | sed '$!s/$/;/' | tr '\n' ' ')" ;;
        "./megatrain --config config/tiny.ini run.dir=runs/lr-\$lr"*) continue ;; # (the loop's)
        esac
        line=${line//train.steps=150/train.steps=25} line=${line//qwen3-30b-a3b.ini --world 64 --device h100 --search/tiny.ini --world 2 --device h100 --search}
        ran=$((ran + 1))
        PATH="$work:$PATH" OMP_NUM_THREADS=1 bash -c "$line" </dev/null >out.txt 2>err.txt
        rc=$?
        check "${page##*/}: exit $rc: $line: $(grep -m1 error err.txt)" [ $rc -eq 0 ]
    done <lines.txt
done
check "$ran commands of pages, want 20 or more" [ $ran -ge 20 ]
check "four ranks give the file of one" cmp -s runs/one-hf/model.safetensors runs/four-hf/model.safetensors

# ---- nothing is there but a configuration and text: the error's own commands make the rest
mkdir bare bin
ln -s "$mt" bin/megatrain
cat >bare/gpt.ini <<'EOI'
[model]
layers = 1
hidden = 16
heads = 2
seq = 16
vocab = 300
[train]
micro_batch = 2
global_batch = 2
steps = 2
[data]
train = data/own/train
tokenizer = data/own/tokenizer.json
EOI
cd bare || exit 1
export OMP_NUM_THREADS=1
"$mt" --config gpt.ini 2>err.txt
check "no tokenizer: exit $?" [ $? -eq 3 ]
sed -n 's/^hint: made from text: \(.*\) (published.*/\1/p' err.txt | sed 's/; then /\n/; s/TEXT/..\/book.txt/g' >commands.sh
check "the hint has two commands: $(cat err.txt)" [ "$(wc -l <commands.sh)" -eq 2 ]
check "they run" env PATH="$work/bin:$PATH" bash -e commands.sh >/dev/null 2>&1
check "and so does the configuration" "$mt" --config gpt.ini 2>/dev/null
finish
