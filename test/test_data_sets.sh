#!/usr/bin/env bash
# What [data] can ask for, as whole runs: Megatron's order, several validation sets, documents kept apart.
. "$(dirname "$0")/lib.sh"
make_tiny
run() { "$mt" --config tiny.ini run.dir="$1" "${@:2}" >/dev/null 2>"$1.err"; }
valids() { grep -o '"step":[0-9]*,.*"valid_loss":[^,}]*' "$1/metrics.jsonl" | sed 's/"tokens":[0-9]*,//'; }

# ---- data.order = megatron: the same run in two pieces, in another layout, and not for another number of epochs
m=(data.order=megatron train.eval_samples=15) o=("${m[@]}" train.steps=20)
run whole "${o[@]}"
check "Megatron's order: $(tail -1 whole.err)" [ "$(losses whole | wc -l)" -eq 20 ]
check "it says what the order costs" grep -q 'order of 300 samples, [0-9.]* MiB on each rank' whole.err
run half "${o[@]}" train.stop_at=7
run half "${o[@]}"
check "stopped and resumed: losses" same_losses half whole
check "stopped and resumed: tensors" same_tensors half whole 20
run keyed train.steps=20 train.eval_samples=15
check "another order than the keyed one" [ "$(losses keyed)" != "$(losses whole)" ]
"$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir=two "${o[@]}" train.global_batch=15 train.micro_batch=5 \
    parallel.tp=2 >/dev/null 2>two.err
check "on two ranks: losses" same_losses two whole
run longer "${o[@]}" train.stop_at=7
expect 4 "train.steps, too" "$mt" --config tiny.ini run.dir=longer "${m[@]}" train.steps=2000
expect 0 "resuming" "$mt" --config tiny.ini run.dir=longer "${m[@]}" train.steps=19

# ---- shards are the file that holds all their documents: the same bits, also resumed, in another layout and order
mkdir text shards empty
for i in $(seq 0 39); do tail -c +$((i * 37 + 1)) text.txt | head -c $((300 + i * 20)) >"text/$(printf %02d "$i").txt"; done
"$mt" preprocess --input text --tokenizer byte --output one --append-eod >/dev/null 2>&1 || bad "preprocess: a folder"
for i in 0 1 2 3; do
    "$mt" preprocess --input text/${i}?.txt --tokenizer byte --output shards/part-$i --append-eod >/dev/null 2>&1
    echo "shards/part-$i" >>list.txt
done
check "a folder's shards hold one file's tokens" cmp -s one.bin <(cat shards/part-?.bin)
s=(train.steps=12 train.eval_every=6 data.split=80,20 data.valid=)
for order in keyed megatron; do
    run one-$order "${s[@]}" data.order=$order data.train=one
    for spec in shards 'shards/p*' @list.txt; do
        name=of-${spec//[^a-z]/-}$order
        run "$name" "${s[@]}" data.order=$order data.train="$spec" train.stop_at=5
        "$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir="$name" "${s[@]}" data.order=$order \
            data.train="$spec" parallel.tp=2 >/dev/null 2>"$name.err"
        check "$spec, $order: $(grep -m1 error "$name.err")" same_run "$name" one-$order 12
        check "$spec, $order: evaluations" [ "$(valids "$name" | tail -2)" = "$(valids one-$order | tail -2)" ]
    done
done
run blend "${s[@]:0:2}" data.train="0.7 shards 0.3 a"
run blend_one "${s[@]:0:2}" data.train="0.7 one 0.3 a"
check "in a blend they are one source: $(grep -m1 error blend.err)" same_run blend blend_one 12
expect 0 "" "$mt" config check --config tiny.ini data.train=shards
check "config check finds them" [ "$(grep -c data.train err.txt)" -eq 0 ]
run grows "${s[@]}" data.train=shards train.stop_at=5
cp shards/part-0.idx shards/part-9.idx
cp shards/part-0.bin shards/part-9.bin
expect 4 "a token file: 'shards: 5 files, 63100 bytes" "$mt" --config tiny.ini run.dir=grows "${s[@]}" data.train=shards
rm shards/part-9.*
mv shards/part-3.bin 3.bin
expect 3 "shards/part-3.bin" "$mt" --config tiny.ini "${s[@]}" data.train=shards
mv 3.bin shards/part-3.bin
mkdir many
for i in $(seq 1000 2999); do ln -s ../shards/part-0.bin many/$i.bin && ln -s ../shards/part-0.idx many/$i.idx; done
(ulimit -n 100 && run many train.stop_at=2 train.eval_every=0 data.train=many)
check "2,000 shards and 100 descriptors: $(grep -m1 error many.err)" [ "$(losses many | wc -l)" -eq 2 ]
expect 2 "lies in the folder 'text'" "$mt" preprocess --input text --tokenizer byte --output text/one
expect 3 "holds no files" "$mt" preprocess --input empty --tokenizer byte --output never

# ---- several validation sets
sed -i 's/^warmup = 4/warmup = 1/' tiny.ini
run named train.steps=4 train.eval_every=2 data.valid="sea: b  mixed: 0.25 a 0.75 b"
check "two sets, two evaluations: $(tail -1 named.err)" [ "$(valids named | wc -l)" -eq 4 ]
run sea train.steps=4 train.eval_every=2 data.valid=b
run mixed train.steps=4 train.eval_every=2 data.valid="0.25 a 0.75 b"
for s in sea mixed; do
    check "$s alone has the same losses" [ "$(valids named | grep -F "\"valid\":\"$s\"," | sed 's/"valid":"[a-z]*",//')" = "$(valids $s)" ]
    check "$s alone has no name" [ "$(grep -c '"valid":' $s/metrics.jsonl)" -eq 0 ]
    check "the terminal says $s" [ "$(grep -c "^step [24]: validation loss [0-9.]* on $s\$" named.err)" -eq 2 ]
    check "the picture says $s" grep -q "validation $s<" named/loss.svg
    "$mt" eval --config tiny.ini run.dir=named data.valid="$(sed -n "s/^valid = //p" $s/config.ini)" >$s.txt 2>/dev/null
done
"$mt" eval --config tiny.ini run.dir=named data.valid="sea: b  mixed: 0.25 a 0.75 b" >named.txt 2>/dev/null
check "eval: both, under their names" cmp -s named.txt <(echo "valid sea"; cat sea.txt; echo "valid mixed"; cat mixed.txt)
check "eval: losses" [ "$(grep -c '^loss [0-9.]*$' named.txt)" -eq 2 ]
run named train.steps=6 train.eval_every=2 data.valid="mixed: 0.25 a 0.75 b  sea: b"
check "other sets after a resume" [ "$(valids named | wc -l)" -eq 6 ]
expect 2 "two sets have the name 'sea'" "$mt" --config tiny.ini data.valid="sea: b  sea: a"
expect 3 "validation set 'gone'" "$mt" --config tiny.ini data.valid="sea: b  gone: no"

# ---- documents kept apart, their ends out of the loss: fewer tokens count, in every layout the same bits
for i in 1 2 3 4 5 6 7 8 9 10; do sed "s/\$/\n/" text.txt; done >lines.txt
"$mt" preprocess --input lines.txt --tokenizer byte --output d --append-eod --split-blank-lines >/dev/null 2>&1 || bad "preprocess"
d=(data.train=d data.valid=d train.steps=12 data.mask_eod=true data.reset_at_eod=true)
run apart "${d[@]}"
check "documents apart: $(tail -1 apart.err)" [ "$(losses apart | wc -l)" -eq 12 ]
check "nothing to say of the ends" [ "$(grep -c 'end-of-document' apart.err)" -eq 0 ]
"$mt" preprocess --input text.txt --tokenizer byte --output bare >/dev/null 2>&1
run bare "${d[@]:1}" data.train=bare
check "data.train without ends: $(grep end-of bare.err)" grep -q "^warning: 'bare' does not end with an end-of-doc" bare.err
run apart_half "${d[@]}" train.stop_at=5
run apart_half "${d[@]}"
check "stopped and resumed: losses" same_losses apart_half apart
check "stopped and resumed: tensors" same_tensors apart_half apart 12
for layout in "2 parallel.tp=2" "3 parallel.zero=1 parallel.overlap_grad=true train.micro_batch=5"; do
    n=${layout%% *} name=ranks${layout%% *}
    "$root/scripts/launch.sh" -n $n -- "$mt" --config tiny.ini run.dir=$name "${d[@]}" ${layout#* } >/dev/null 2>$name.err
    check "on $n ranks: $(tail -1 $name.err)" same_run $name apart 12
done
for key in mask_eod reset_at_eod; do
    run only_$key "${d[@]:0:3}" data.$key=true
    check "data.$key alone is something else" [ "$(losses only_$key)" != "$(losses apart)" ]
    "$mt" eval --config tiny.ini run.dir=apart "${d[@]:0:3}" data.$key=true >$key.txt 2>/dev/null
done
counted() { sed -n 's/^tokens //p' "$1"; }
check "eval counts $(counted mask_eod.txt) of $(counted reset_at_eod.txt) tokens" \
    [ "$(counted mask_eod.txt)" -lt "$(counted reset_at_eod.txt)" ]
check "a document's bytes are those that count" \
    [ "$(sed -n 's/^bytes //p' mask_eod.txt)" -lt "$(sed -n 's/^bytes //p' reset_at_eod.txt)" ]
expect 0 "" "$mt" generate --run apart --prompt "Line 1" --tokens 5
expect 4 "data.reset_at_eod" "$mt" --config tiny.ini run.dir=apart "${d[@]:0:4}"
"$mt" tokenizer train --input text.txt --vocab-size 300 --output bpe.json >/dev/null 2>&1
sed 's/<|endoftext|>/<|other|>/g' bpe.json >noend.json
"$mt" preprocess --input text.txt --tokenizer noend.json --output n >/dev/null 2>&1 || bad "preprocess without an end"
expect 2 "data.mask_eod needs a token that ends a document" "$mt" --config tiny.ini run.dir=n data.tokenizer=noend.json \
    data.train=n data.valid=n data.mask_eod=true

# ---- the tokenizer belongs to the model: another one of as many ids reads and writes other text
tr a-z n-za-m <text.txt >other.txt
for t in text other; do "$mt" tokenizer train --input $t.txt --vocab-size 290 --output $t.json >/dev/null 2>&1; done
cp text.json t.json
"$mt" preprocess --input big.txt --tokenizer t.json --output c --append-eod >/dev/null 2>&1
"$mt" preprocess --force --input text.txt text.txt --tokenizer t.json --output d --append-eod >/dev/null 2>&1
own=(data.train=c data.valid=d data.tokenizer=t.json)
run own "${own[@]}" train.steps=2
expect 0 "bits_per_byte" "$mt" eval --config tiny.ini run.dir=own "${own[@]}"
expect 0 "Line" "$mt" generate --run own --prompt Line --tokens 3
# ids of single bytes: the same text in both tokenizers, and the same bytes, whatever the end of a document is spelled
"$mt" tokenizer train --input text.txt --vocab-size 257 --output bytes.json >/dev/null 2>&1
{ sed 's/$/\n/' text.txt; echo 'straße née 中文 🙂'; } >lines.txt # (a token is a part of a character, too)
for t in byte bytes.json; do
    "$mt" preprocess --input lines.txt lines.txt --split-blank-lines --tokenizer $t --output e-$t --append-eod >/dev/null 2>&1
    run of-$t data.train=e-$t data.valid=e-$t data.tokenizer=$t train.steps=2
    "$mt" eval --config tiny.ini run.dir=of-$t data.valid=e-$t data.tokenizer=$t >$t.eval 2>/dev/null
done
check "bytes of text, also of characters in parts: $(grep '^bytes' byte.eval bytes.json.eval)" \
    [ -n "$(grep '^bytes' byte.eval)" -a "$(grep '^bytes' byte.eval)" = "$(grep '^bytes' bytes.json.eval)" ]
/usr/bin/python3 -c 'import json
t = json.load(open("bytes.json"))
t["added_tokens"].append(dict(id=257, content="<|début|>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True))
json.dump(t, open("debut.json", "w"))'
printf 'a<|début|>é' | "$mt" tokenize --tokenizer debut.json >debut.ids 2>err.txt
check "an added token beyond ASCII comes back: $(head -1 err.txt)" \
    [ "$(grep -cw 257 debut.ids)-$("$mt" tokenize --tokenizer debut.json --decode <debut.ids)" = '1-a<|début|>é' ]
mkdir elsewhere
expect 0 "Line" env -C elsewhere "$mt" generate --run ../own --prompt Line --tokens 3
rm -r own/tokenizer # the copy that it took
expect 3 "relative to the folder where the run was trained" env -C elsewhere "$mt" generate --run ../own
check "and says what to do: $(tail -1 err.txt)" grep -q "start megatrain in that folder" err.txt
cp other.json t.json
rm c.crc d.crc # which would tell before
for c in "eval --config tiny.ini run.dir=own ${own[*]}" "generate --run own"; do
    expect 4 "the tokenizer is not the checkpoint's: its checksum is '" "$mt" $c
    check "and says what to do: $(tail -1 err.txt)" grep -q "hint: put data.tokenizer back" err.txt
    check "and prints nothing" [ ! -s out.txt ]
done
expect 0 "warning: checkpoint.load: the tokenizer is not the checkpoint's" "$mt" --config tiny.ini run.dir=new \
    "${own[@]}" train.steps=2 checkpoint.load=own
cp text.json t.json
expect 0 "weights from" "$mt" --config tiny.ini run.dir=new2 "${own[@]}" train.steps=2 checkpoint.load=own
check "the same tokenizer is no warning" [ "$(grep -c warning err.txt)" -eq 0 ]

# ---- a tokenizer that a run was trained with is not replaced without a word, and if it was, the run has its own
"$mt" tokenizer train --input text.txt --vocab-size 290 --output twice.json >/dev/null 2>&1
"$mt" preprocess --input big.txt --tokenizer twice.json --output twice --append-eod >/dev/null 2>&1
cp twice.json first.json
twice=(data.tokenizer=twice.json data.train=twice data.valid=twice train.steps=2 optim.warmup=1)
run twice-run "${twice[@]}"
expect 2 "'twice.json' is there already" "$mt" tokenizer train --input text.txt --vocab-size 300 --output twice.json
check "it stays" cmp -s twice.json first.json
expect 0 "vocabulary 300" "$mt" tokenizer train --input text.txt --vocab-size 300 --output twice.json --force
expect 0 "warning: 'twice.json' is not the run's tokenizer any more: the run's copy in 'twice-run/tokenizer' is taken" \
    "$mt" generate --run twice-run --prompt Line --tokens 3
cp first.json twice.json
expect 0 "loss " "$mt" eval --run twice-run
check "the same data are no warning" [ "$(grep -c warning err.txt)" -eq 0 ]
mv twice.crc kept.crc
expect 0 "loss " "$mt" eval --run twice-run data.seed=5
check "nor is another seed, or a missing .crc: $(grep -m1 'warning: the valid' err.txt)" \
    [ "$(grep -c 'warning: the valid' err.txt)" -eq 0 ]
mv kept.crc twice.crc
"$mt" preprocess --force --input text.txt --tokenizer twice.json --output twice --append-eod >/dev/null 2>&1
expect 0 "warning: the validation data are not those that the checkpoint of step 2 was evaluated on" "$mt" eval --run twice-run
expect 0 "loss " "$mt" eval --run twice-run data.valid=twice
check "other data that are asked for are no warning" [ "$(grep -c 'warning: the valid' err.txt)" -eq 0 ]
# what a command did not write it does not replace
echo "a list" >notes.txt
for c in "report twice-run --output notes.txt" "simulate --schedule 1f1b --stages 2 --microbatches 4 --svg notes.txt" \
    "plan --config tiny.ini --device h100 --svg notes.txt"; do
    expect 2 "'notes.txt' is there already, and is no file that this command writes" "$mt" $c
done
for i in 1 2; do "$mt" report twice-run --output page.html 2>err.txt; check "a page is replaced by one: $(head -1 err.txt)" [ $? -eq 0 ]; done

# ---- ranks that would read other files under the same names: refused before step 1
mkdir host0 host1
cp a.* b.* host0 && cp a.* b.* host1
apart() { # KEYS...: two ranks, each in a folder of its own
    "$root/scripts/launch.sh" -n 2 -- bash -c "cd $work/host\$RANK && exec '$mt' --config $work/tiny.ini run.dir=$work/hosts \
        train.steps=2 optim.warmup=1 train.micro_batch=1 train.global_batch=2 $*"
}
tr a-m n-z <text.txt >other.txt
"$mt" preprocess --input other.txt --tokenizer byte --output other --append-eod >/dev/null 2>&1
differ="rank 1 and rank 0 differ: '"
for f in bin idx crc; do cp other.$f host1/b.$f; done # another number of samples
expect 3 "the ranks do not read the same data: ${differ}data.valid: b: " apart
cp b.* host1
head -c 100 other.bin | dd of=host1/a.bin conv=notrunc status=none # other tokens, which index and .crc do not tell
expect 3 "the ranks do not read the same data: ${differ}data.train: a.bin: sampled " apart parallel.pp=2
cp a.* host1
for i in 0 1; do run host$i/w train.steps=1 optim.warmup=0 train.eval_every=0 model.dropout=0 run.seed=$i; done
mv host0/w host0/weights && mv host1/w host1/weights
expect 4 "the ranks do not load the same weights: ${differ}weights/checkpoints/step-00000001/manifest.json: " \
    apart parallel.tp=2 checkpoint.load=weights
rm -r host1/weights
expect 4 "${differ}weights: no folder' there, 'weights: a run's folder' here" apart checkpoint.load=weights
check "no step was done" [ ! -s hosts/metrics.jsonl ]
cp -r host0/weights host1
expect 0 "done: step 2" apart checkpoint.load=weights
# ---- a run folder that the ranks do not share (here its name begins in a folder of each)
expect 5 "does not see what rank 0 wrote into run.dir = 'mine'" \
    "$root/scripts/launch.sh" -n 2 -- bash -c "cd $work/host\$RANK && exec '$mt' --config $work/tiny.ini run.dir=mine \
        train.micro_batch=1 train.global_batch=2 parallel.timeout_s=2"
check "no step was done" [ ! -e host0/mine/metrics.jsonl ]
finish
