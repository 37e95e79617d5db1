#!/usr/bin/env bash
# Damaged files and bad states, from outside: each ends with its exit code and one primary line that names what is
# wrong, and nothing half-written is taken for whole. Disk full and read-only folders are small file systems of
# their own, mounted in a name space that ends with this script; where that is not allowed those cases are skipped.
if [ -z "${BAD_INPUT_MOUNTS:-}" ]; then
    if [ "$(id -u)" -eq 0 ] && unshare -m true 2>/dev/null; then how=-m
    elif unshare -rm true 2>/dev/null; then how=-rm
    else how=; fi
    export BAD_INPUT_MOUNTS=${how:-none}
    [ -z "$how" ] || exec unshare $how bash "$0" "$@"
fi
. "$(dirname "$0")/lib.sh"
make_tiny

# ---- tools

# damage FILE OFFSET: one bit of that byte is turned; a negative offset counts from the end
damage() {
    local at=$2
    [ "$at" -ge 0 ] || at=$(($(stat -c %s "$1") + at))
    local byte
    byte=$(od -An -tu1 -j"$at" -N1 "$1")
    printf "\\x$(printf %02x $((byte ^ 4)))" | dd of="$1" bs=1 seek="$at" conv=notrunc status=none
}
# wait_for STEPS DIR PID: until that many steps are in its metrics, or the process is gone
wait_for() {
    while [ "$(losses "$2" 2>/dev/null | wc -l)" -lt "$1" ]; do
        kill -0 "$3" 2>/dev/null || return 1
        sleep 0.01
    done
}
tokens() { cp a.bin "$1.bin"; cp a.idx "$1.idx"; }                # another copy of the token files
train() { "$mt" --config tiny.ini train.stop_at=2 "$@"; }
refuse() { expect "$1" "$2" train run.dir=refused "${@:3}"; }     # starting a run
fresh() { rm -rf "$1"; cp -r good "$1"; }                         # a run of 6 steps, checkpoints of 3 and 6
rates() { sed -n 's/^{"step":\([0-9]*\),.*"lr":\([^,]*\),.*/\1 \2/p' "$1/metrics.jsonl"; }
ckpt() { echo "$1/checkpoints/step-$(printf %08d "$2")"; }
resume() { expect "$1" "$2" "$mt" --config tiny.ini checkpoint.every=3 train.stop_at=8 "${@:3}"; }
has_steps() { [ "$(losses "$1" | wc -l)" -eq "$2" ]; }
same_as_good() { # a folder that was refused is as it was
    [ "$(cd "$1" && find . ! -name lock -type f -exec cksum {} + | sort)" = \
        "$(cd good && find . ! -name lock -type f -exec cksum {} + | sort)" ]
}

# ---- configuration

ini() { printf '%s\n' "$@" >bad.ini; }
expect 2 "cannot open 'nowhere.ini'" "$mt" --config nowhere.ini
expect 2 "is not a regular file" "$mt" --config .
mkfifo pipe # that nobody writes to
expect 2 "'pipe' is not a regular file" timeout 20 "$mt" --config pipe
expect 3 "'pipe' is not a regular file" timeout 20 "$mt" preprocess --tokenizer byte --output p --input pipe
expect 2 "unknown command 'trane'" "$mt" trane
expect 2 "no option '--confg'" "$mt" --confg tiny.ini
ini '[model]' 'layrs = 2'
expect 2 "bad.ini:2" "$mt" --config bad.ini
check "an unknown key names the nearest" grep -q "model.layers" err.txt
ini '[modle]' 'layers = 2'
expect 2 "bad.ini:" "$mt" --config bad.ini
ini '[model]' 'layers = 2' 'hidden = 32' 'layers = 3'
expect 2 "bad.ini:4" "$mt" --config bad.ini
ini '[model]' 'layers = 0'
expect 2 "bad.ini:2" "$mt" --config bad.ini
ini '[train]' 'steps = many'
expect 2 "bad.ini:2" "$mt" --config bad.ini
ini '[train]' 'steps = 99999999999999999999'
expect 2 "bad.ini:2" "$mt" --config bad.ini
ini '[model]' 'layers ='
expect 2 "bad.ini:2" "$mt" --config bad.ini
ini '[model]' 'layers = 2' 'what is this'
expect 2 "bad.ini:3" "$mt" --config bad.ini
head -c 3000 a.bin >bad.ini
expect 2 "bad.ini" "$mt" --config bad.ini
ini '[data]' 'valid = a' 'split = 90,10'
expect 2 "give either valid or split" "$mt" --config bad.ini
ini '[train]' 'micro_batch = 3' 'global_batch = 4'
expect 2 "bad.ini:3: train.global_batch = '4'" "$mt" --config bad.ini
ini '[model]' 'hidden = 33' 'heads = 4' '[optim]' 'lr = -1' '[train]' 'stepss = 3' '[log]' 'color = blue'
expect 2 "4 mistakes" "$mt" --config bad.ini
for line in 2 5 7 9; do check "the mistake in line $line is named" grep -q "bad.ini:$line: " err.txt; done
refuse 2 "model.layres" model.layres=2
refuse 2 "parallel.tp = '2'" parallel.tp=2
refuse 2 CUDA run.device=cuda
refuse 2 "data.train is empty" data.train=
refuse 2 "command line: data.train: cannot read the data set" data.train="3 a b"
ini '[data]' 'train = 3 a b'
expect 2 "bad.ini:2: data.train: cannot read the data set '3 a b'" "$mt" --config bad.ini
expect 2 "hint: --output ~/x" "$mt" report r --output=~/x
refuse 2 "not a positive number" data.train="-1 a 2 b"
for o in keyed megatron; do refuse 2 "2 is nothing beside the others" data.train="1e299 a 1e-320 b" data.order=$o; done
refuse 2 "model.vocab is 100" model.vocab=100
check "nothing of a run with a wrong configuration is there" [ ! -e refused/config.ini ]
rm -rf refused

# ---- token files

refuse 3 "no token file 'nowhere.idx'" data.train=nowhere
refuse 3 "no token file 'nowhere.idx'" data.valid=nowhere
refuse 3 "no token file 'nowhere.idx'" data.train="1 a 1 nowhere"
tokens t; rm t.bin
refuse 3 "t.bin" data.train=t
tokens t; rm t.idx
refuse 3 "no token file 't.idx'" data.train=t
tokens t; : >t.bin
refuse 3 "'t.bin' has 0 bytes" data.train=t
tokens t; truncate -s -1 t.bin
refuse 3 "token file 't.bin' has" data.train=t
tokens t; echo >>t.bin
refuse 3 "token file 't.bin' has" data.train=t
tokens t; rm t.bin; mkdir t.bin
refuse 3 "'t.bin' is not a regular file" data.train=t
rmdir t.bin
tokens t; cp b.bin t.bin
refuse 3 "token file 't.bin' has" data.train=t
tokens t; cp b.idx t.idx
refuse 3 "token file 't.bin' has" data.train=t
size=$(stat -c %s a.idx)
for n in 0 5 9 17 33 $((size - 1)); do
    tokens t; truncate -s "$n" t.idx
    refuse 3 "t.idx" data.train=t
done
tokens t; echo >>t.idx
refuse 3 "t.idx" data.train=t
# magic, version, type, number of sequences, of documents; length, pointer, document of the first sequence, the end
for at in 0 9 17 18 26 34 38 46 -1; do
    tokens t; damage t.idx $at
    refuse 3 "t.idx" data.train=t
done
refuse 3 "too few for one sample" data.valid= model.seq=1000000
refuse 3 "leaves none of its 1 document for valid" data.valid= data.split=99,1
"$mt" tokenizer train --input big.txt --vocab-size 400 --output bpe.json >/dev/null 2>&1
"$mt" preprocess --input big.txt --tokenizer bpe.json --output c >/dev/null 2>&1
rm c.crc # which would say so at once
check "nothing of a run without data is there" [ ! -e refused/config.ini ]
refuse 3 "outside the vocabulary" data.train=c # found where they are read: not a step is made of them
check "no step with ids that are none" [ ! -s refused/metrics.jsonl ]
rm -rf refused
refuse 3 "outside the vocabulary" data.valid=c # evaluations would read it much later
check "not a step before a bad validation set is found" [ ! -s refused/metrics.jsonl ]
rm -rf refused
expect 3 "t.idx" "$mt" inspect t
# the checksums beside them, which nothing needs
expect 0 "checksums every byte" "$mt" inspect a
tokens t
expect 0 "checksums none" "$mt" inspect t
cp a.crc t.crc; damage t.bin 100
expect 3 "'t.bin' is damaged: its checksum" "$mt" inspect t
tokens t; cp b.crc t.crc
refuse 3 "'t.bin' has" data.train=t
check "the way out is named" grep -q "remove PREFIX.crc" err.txt
rm t.crc
# and what the ids were made with: another tokenizer of as many of them
"$mt" tokenizer train --input text.txt --vocab-size 257 --output bytes.json >/dev/null 2>&1
refuse 3 "'a.bin' was made with another tokenizer than 'bytes.json'" data.tokenizer=bytes.json
refuse 3 "'b.bin' was made with another tokenizer than 'bytes.json'" data.tokenizer=bytes.json data.train=t
expect 3 "'a.bin' was made with another tokenizer than 'bytes.json'" "$mt" inspect a --document 0 --tokenizer bytes.json

# ---- tokenizers and text

refuse 3 "no tokenizer 'none.json'" data.tokenizer=none.json
mkdir -p folder
refuse 3 "no tokenizer in the folder 'folder'" data.tokenizer=folder
echo 'not JSON' >tok.json
refuse 3 "tok.json" data.tokenizer=tok.json
echo '{"model": {"type": "WordPiece", "vocab": {"a": 0}}}' >tok.json
refuse 3 "tok.json" data.tokenizer=tok.json
: >tok.json
refuse 3 "tok.json" data.tokenizer=tok.json
for n in 1 100 $(($(stat -c %s bpe.json) / 2)) $(($(stat -c %s bpe.json) - 3)); do
    head -c "$n" bpe.json >tok.json
    refuse 3 "tok.json" data.tokenizer=tok.json
done
printf 'good \xff bad' >bytes.txt
{ printf '{"model":['; yes '{},' | tr -d '\n' | head -c 12000000; printf '{}]}'; } >brackets.json
expect 3 "brackets.json' is JSON of 12000014 bytes that would take" "$mt" tokenize --tokenizer brackets.json </dev/null
expect 3 "byte offset 5" "$mt" tokenize --tokenizer bpe.json <bytes.txt
: >empty.txt
echo '{"text": "one"}' >good.jsonl
{ cat good.jsonl; echo '{"text": "cut of'; } >bad.jsonl
# prepare CODE TEXT words...: preprocess that fails leaves no token files
prepare() {
    expect "$1" "$2" "$mt" preprocess --tokenizer byte --output made "${@:3}"
    check "preprocess ${*:3} leaves files: $(ls made* 2>/dev/null)" [ -z "$(ls made* 2>/dev/null)" ]
}
prepare 3 "empty.txt" --input empty.txt
{ printf '\xef\xbb\xbf'; cat good.jsonl; } >bom.jsonl
expect 0 "1 document, 4 tokens" "$mt" preprocess --tokenizer byte --output bom --append-eod --format jsonl --input bom.jsonl
cat good.jsonl bom.jsonl >mid.jsonl # the mark inside, which a file joined from two has
prepare 3 "column 1: a line must hold one JSON object: save the file without a byte" --format jsonl --input mid.jsonl
prepare 3 "nowhere.txt" --input nowhere.txt
prepare 3 "folder" --input folder
prepare 3 "bad.jsonl" --input bad.jsonl --format jsonl
prepare 3 "no member 'body'" --input good.jsonl --format jsonl --key body
expect 3 "no tokenizer" "$mt" preprocess --input text.txt --tokenizer none.json --output made
expect 5 "text.txt" "$mt" preprocess --input text.txt --tokenizer byte --output text.txt/made
MEGATRAIN_FILE_FAULT=enospc@3 prepare 5 "No space left" --input text.txt
MEGATRAIN_FILE_FAULT=eio@5 prepare 5 "Input/output error" --input text.txt
gzip -c text.txt | head -c 300 >text.gz
expect 3 "'text.gz' cannot be decompressed at byte 300" "$mt" tokenizer train --input text.txt text.gz --vocab-size 300 --output made.json
expect 3 "no text" "$mt" tokenizer train --input empty.txt --vocab-size 300 --output made.json
expect 5 "text.txt" "$mt" tokenizer train --input text.txt --vocab-size 300 --output text.txt/made.json
check "no tokenizer is left of them" [ ! -e made.json ]

# ---- checkpoints: `good` has those of steps 3 and 6

"$mt" --config tiny.ini run.dir=good checkpoint.every=3 train.stop_at=6 2>good.err
check "the good run" [ -s "$(ckpt good 6)/manifest.crc" -a -s "$(ckpt good 3)/manifest.crc" ]
shard=shard-00000.safetensors

# each kind of damage: to the newest (the older one is taken, and the run goes on to the same bits), to both (4)
"$mt" --config tiny.ini run.dir=whole checkpoint.every=3 train.stop_at=8 2>/dev/null
flip_data() { damage "$1/$shard" -100; }
flip_header() { damage "$1/$shard" 40; }
cut_shard() { truncate -s -64 "$1/$shard"; }
no_shard() { rm "$1/$shard"; }
flip_manifest() { damage "$1/manifest.json" 100; }
cut_manifest() { truncate -s 200 "$1/manifest.json"; }
empty_manifest() { : >"$1/manifest.json"; }
no_manifest() { rm "$1/manifest.json"; }
flip_crc() { damage "$1/manifest.crc" 2; }
no_crc() { rm "$1/manifest.crc"; }
swap_shard() { cp "$(ckpt good $((9 - 10#${1##*-})))/$shard" "$1/$shard"; } # of the other step: the same size
for hurt in flip_data flip_header cut_shard no_shard flip_manifest cut_manifest empty_manifest no_manifest flip_crc \
    no_crc swap_shard; do
    fresh r; $hurt "$(ckpt r 6)"
    resume 0 "resuming from r/checkpoints/step-00000003" run.dir=r
    check "$hurt: the older checkpoint is taken with a warning" grep -q 'warning: .*step-00000006' err.txt
    check "$hurt: losses after falling back" same_losses r whole
    check "$hurt: tensors after falling back" same_tensors r whole 8
    fresh r; $hurt "$(ckpt r 3)"; $hurt "$(ckpt r 6)"
    expect 4 "none is valid" "$mt" --config tiny.ini run.dir=r
    check "$hurt: neither is valid, nothing is trained or lost" has_steps r 6
    expect 4 "none is valid" "$mt" eval --config tiny.ini run.dir=r
    expect 4 "none is valid" "$mt" generate --run r --tokens 1
done
# a damaged one that was passed over is none of the two that stay
fresh r; flip_data "$(ckpt r 6)"
expect 0 "resuming from r/checkpoints/step-00000003" "$mt" --config tiny.ini run.dir=r \
    checkpoint.keep=2 checkpoint.every=0 train.stop_at=5
check "the good one stays beside the new one: $(ls r/checkpoints | tr '\n' ' ')" \
    [ -d "$(ckpt r 3)" -a -d "$(ckpt r 5)" -a ! -d "$(ckpt r 6)" ]
fresh r; flip_data "$(ckpt r 6)"
expect 4 "$shard' is damaged" "$mt" inspect r
expect 4 "$shard' is damaged" "$mt" inspect "$(ckpt r 6)"
expect 4 "$shard' is damaged" train run.dir=other checkpoint.resume="$(ckpt r 6)"
fresh r; cut_shard "$(ckpt r 6)"
expect 0 "step-00000003" "$mt" eval --run r
check "a damaged one is named once: $(grep -c 'is passed over' err.txt)" [ "$(grep -c 'is passed over' err.txt)" = 1 ]
rm -r "$(ckpt r 3)" "$(ckpt r 6)"; mkdir "$(ckpt r 6)"
expect 4 "none is valid" "$mt" --config tiny.ini run.dir=r
expect 0 "" "$mt" inspect good
fresh r; printf '{"step":\033[2J\302\2331m\377}\n' >>r/metrics.jsonl
expect 0 'last metrics: {"step":?[2J??1m?}' "$mt" inspect r
check "what others wrote is printed as text" bash -c '! LC_ALL=C grep -q "[[:cntrl:]]" out.txt'

# a link that is another's is not followed, neither to read nor to write
fresh r; mv r/checkpoints r/elsewhere; ln -s elsewhere r/checkpoints
resume 0 "resuming from r/checkpoints/step-00000006" run.dir=r
if [ "$(id -u)" -eq 0 ] && chown -h 65534 r/checkpoints 2>/dev/null; then
    expect 5 "'r/checkpoints' is a link, and it belongs to another user" "$mt" inspect r
    expect 5 "'r/checkpoints' is a link" train run.dir=r checkpoint.resume=none
    chown -h 0 r/checkpoints; chown 65534 r/elsewhere
    resume 5 "what it leads to belongs to another user" run.dir=r
    expect 5 "what it leads to belongs to another user" train run.dir=r checkpoint.resume="$(ckpt good 6)" train.stop_at=7
    fresh r; mv "$(ckpt r 6)" r/six; ln -s ../six "$(ckpt r 6)"; chown -h 65534 "$(ckpt r 6)"
    expect 5 "step-00000006' is a link" "$mt" inspect r
    for way in "$(ckpt r 6)" "$(ckpt r 6)/"; do # named outright, it is no other's folder either
        expect 5 "'$way' is a link, and it belongs to another user" "$mt" inspect "$way"
        expect 5 "'$way' is a link, and it belongs to another user" train run.dir=other checkpoint.resume="$way"
    done
else
    skip "links of another user, which root alone can make"
fi

# temporary folders of a save that was killed are not checkpoints
fresh r; mv "$(ckpt r 6)" "$(ckpt r 6).tmp-1"
resume 0 "resuming from r/checkpoints/step-00000003" run.dir=r
check "a temporary folder is not resumed from" same_losses r whole

# no checkpoint where one is wanted
expect 4 "no checkpoint in 'void'" "$mt" eval --config tiny.ini run.dir=void
expect 4 "no checkpoint in 'void'" "$mt" generate --run void
expect 4 "there is no 'void'" "$mt" inspect void
expect 4 "void" train run.dir=other checkpoint.resume=void
expect 4 "void" train run.dir=other checkpoint.load=void
fresh r; rm -r "$(ckpt r 6)"
expect 0 "resuming from $(ckpt r 3)" "$mt" --config tiny.ini run.dir=r checkpoint.resume="$(ckpt r 3)" train.stop_at=4
for from in good "$(ckpt good 3)"; do
    rm -rf new
    expect 0 "weights from good/checkpoints/step-" train run.dir=new checkpoint.load="$from"
    check "with them the learning rate begins anew: $(rates new | xargs)" [ "$(rates new)" = "$(rates good | head -2)" -a -n "$(rates new)" ]
done
expect 4 "text.txt' is no checkpoint" "$mt" inspect text.txt
check "commands that only read make no folder" [ ! -e void ]

# checkpoints that belong to something else
fresh r
resume 4 "holds checkpoints" run.dir=r checkpoint.resume=none
check "the way out is named" grep -q "another run.dir" err.txt
resume 4 "optim.lr" run.dir=r optim.lr=0.5
check "both values are named" grep -q "0.003.*0.5\|0.5.*0.003" err.txt
resume 4 "model.hidden" run.dir=r model.hidden=64
resume 4 "data.seed" run.dir=r data.seed=7
tokens t
resume 4 "the training data is not the checkpoint's: a token file: 't: " run.dir=r data.train=t
for f in bin idx crc; do mv a.$f keep.$f; cp b.$f a.$f; done
resume 4 "training data is not the checkpoint's: a token file: 'a: " run.dir=r
check "both are described" grep -q "'a: $(stat -c %s a.bin) bytes, .* documents, .* index .*' now, 'a: $(stat -c %s keep.bin) bytes, .*' then" err.txt
check "the way out is named" grep -q "another run.dir and checkpoint.load" err.txt
# other tokens of the same lengths are noticed where there are checksums
cp keep.idx a.idx; cp keep.bin a.bin; rm a.crc
printf '\x41\x00\x42\x00' | dd of=a.bin conv=notrunc status=none
resume 0 "resuming" run.dir=r
fresh r
printf 'bin crc32c 00000000 size %d\n%s\n' "$(stat -c %s a.bin)" "$(grep ^idx keep.crc)" >a.crc
resume 4 "training data is not the checkpoint's: a token file: 'a: " run.dir=r
check "their content" grep -q "content 00000000' now" err.txt
for f in bin idx crc; do mv keep.$f a.$f; done
resume 4 "is newer" run.dir=r checkpoint.resume="$(ckpt r 3)"
check "a run that was refused is untouched" same_as_good r
expect 4 "shape" train run.dir=other checkpoint.load=good model.hidden=64
expect 4 "model" train run.dir=other checkpoint.load=good model.layers=3
expect 4 "model" train run.dir=other checkpoint.load=good model.layers=1
check "nothing was trained from them" [ ! -s other/metrics.jsonl ]

# ---- the run folder

expect 5 "text.txt" train run.dir=text.txt
expect 5 "text.txt" train run.dir=text.txt/below
rm -rf other; mkdir -p other/starts other/metrics.jsonl
expect 5 "metrics.jsonl" train run.dir=other
rm -rf other; mkdir -p other; : >other/checkpoints
expect 4 "checkpoints': Not a directory" train run.dir=other
rm -rf other; mkdir -p other/starts other/config.ini/x
expect 5 "config.ini" train run.dir=other

"$mt" --config tiny.ini run.dir=held train.steps=100000000 checkpoint.every=0 >/dev/null 2>held.err &
pid=$!
wait_for 2 held $pid
expect 5 "held by another run" train run.dir=held train.steps=100000000
check "the holder is named" grep -q "host and process: '$(hostname) $pid'" err.txt
check "the first run goes on" kill -0 $pid
expect 4 "no checkpoint in 'held'" "$mt" eval --config tiny.ini run.dir=held
kill -USR1 $pid
wait $pid
check "SIGUSR1: exit 75 (got $?)" [ $? -eq 75 ]
check "one line says so at once, one at the end" [ "$(grep '^megatrain: ' held.err | cut -d' ' -f2 | xargs)" = "finishing stopped" ]
step=$(losses held | wc -l)
check "with a checkpoint of step $step" [ -s "$(ckpt held "$step")/manifest.crc" ]

# ---- SIGINT: the first asks, the second leaves at once. A step of seconds, so that both fall into one.
slow=(model.hidden=256 model.seq=512 debug.isa=c debug.threads=1 train.global_batch=60)
for between in '' TERM; do
    "$mt" --config tiny.ini run.dir=slow "${slow[@]}" >/dev/null 2>slow.err &
    pid=$!
    until grep -qs 'step 0 of' slow.err; do kill -0 $pid 2>/dev/null || break; sleep 0.02; done
    sleep 0.1
    for signal in INT $between INT; do
        kill -$signal $pid
        while has_pending $pid "$(kill -l $signal)"; do sleep 0.01; done # two at once would be one
    done
    wait $pid
    status=$?
    check "SIGINT twice, between them '$between': exit 130 (got $status)" [ $status -eq 130 ]
    check "nothing is left that looks like a checkpoint" [ -z "$(ls slow/checkpoints 2>/dev/null)" ]
    rm -rf slow
done
"$mt" --config tiny.ini run.dir=once train.steps=100000000 checkpoint.every=0 >/dev/null 2>once.err &
pid=$!
wait_for 2 once $pid
kill -INT $pid
wait $pid
check "SIGINT once: exit 75 (got $?)" [ $? -eq 75 ]
check "with a checkpoint" [ -s "$(ckpt once "$(losses once | wc -l)")/manifest.crc" ]

# ---- memory: refused before any of it is taken

limited() { # to 4 GB of addresses; sanitizers want more for themselves
    if [ -n "${MEGATRAIN_SANITIZED:-}" ]; then "$@"; else bash -c 'ulimit -v 4000000; exec "$0" "$@"' "$@"; fi
}
spent() { # spent: seconds of processors, by what was run (of this shell: a subshell has none yet)
    times >times.txt
    spent=$(awk -F '[ms ]+' 'NR == 2 { print int(60 * ($1 + $3) + $2 + $4) }' times.txt)
}
spent
start=$spent
for huge in "model.layers=64 model.hidden=16384 model.heads=64" \
    "train.micro_batch=65536 train.global_batch=65536 model.seq=512" \
    "train.micro_batch=64 train.global_batch=16777216 model.seq=2048"; do
    expect 9 "this run needs" train run.dir=refused $huge
    expect 9 "this run needs" limited "$mt" --config tiny.ini run.dir=refused $huge
    expect 0 "total" limited "$mt" plan --config tiny.ini $huge
done
if [ -z "${MEGATRAIN_SANITIZED:-}" ]; then
    expect 9 "hint: ulimit -v is 4000000 KiB of address space" \
        limited "$mt" --config tiny.ini run.dir=none model.layers=2 model.hidden=4096 model.heads=32
fi
huge="model.layers=64 model.hidden=262144 model.heads=1024"
expect 9 "more than 32 TiB" train run.dir=refused $huge
expect 9 "more than 32 TiB" "$mt" plan --config tiny.ini $huge
spent
check "in no time: $((spent - start)) s of processors" [ $((spent - start)) -le 15 ]
check "nothing of a run that is too large is there" [ ! -e refused/config.ini ]
# less than the machine has to give, more than the process may take
[ -n "${MEGATRAIN_SANITIZED:-}" ] ||
    expect 9 "cannot get" limited "$mt" --config tiny.ini run.dir=refused model.hidden=1024 model.layers=20

# ---- numbers: weights that grow a hundredfold each step

expect 6 "20 steps in a row" "$mt" --config tiny.ini run.dir=wild train.steps=100 optim.schedule=constant optim.lr=10 \
    optim.weight_decay=10 optim.warmup=0
check "each of these steps is reported" [ "$(grep -c 'warning: step .* skipped' err.txt)" -eq 20 ]
check "and recorded" [ "$(grep -c '"skipped":true' wild/metrics.jsonl)" -eq 20 ]
check "with the loss and the norm that they do not have" \
    [ "$(grep -c '"loss":null,"grad_norm":null,.*"skipped":true,.*"nonfinite":true' wild/metrics.jsonl)" -eq 20 ]

# ---- disk: a failing checkpoint on the way warns, the one at the end is exit 5

mount_tmpfs() { mkdir -p "$1" && [ "$BAD_INPUT_MOUNTS" != none ] && mount -t tmpfs -o "$2" none "$1" 2>/dev/null; }
if mount_tmpfs disk size=1m; then
    expect 5 "cannot save the checkpoint of step 6" \
        "$mt" --config tiny.ini run.dir=disk/run train.steps=6 checkpoint.every=1
    check "said at the start" grep -q "warning: checkpoints take up to [45][0-9.]* KiB each, .* MiB for the 6 that .* 'disk/run/checkpoints' has .* free" err.txt
    check "failing checkpoints warn" grep -q 'warning: .*step 5.*training goes on' err.txt
    check "training goes on to the end" has_steps disk/run 6
    check "no rest of a checkpoint is left" [ -z "$(ls disk/run/checkpoints | grep tmp)" ]
    expect 0 "every byte" "$mt" inspect disk/run
    expect 5 "No space left" "$mt" preprocess --input big.txt big.txt big.txt big.txt --tokenizer byte --output disk/t
    check "no rest of token files is left" [ -z "$(ls disk | grep '^t')" ]
    rm -r disk/run
    # 1 MiB has room for one of two that stay and the one that comes; a folder with room says nothing
    "$mt" --config tiny.ini run.dir=disk/run train.stop_at=6 checkpoint.every=1 checkpoint.keep=2 2>err.txt
    check "three do not fit" grep -q "warning: checkpoints take up to .* for the 3 that there may be" err.txt
    rm -r disk/run
    "$mt" --config tiny.ini run.dir=disk/one train.stop_at=1 checkpoint.keep=2 2>err.txt
    check "one does" [ -z "$(grep 'checkpoints take' err.txt)" ]
    rm -r disk/one
    head -c 2000000 /dev/zero >disk/fill 2>/dev/null
    expect 5 "disk" train run.dir=disk/run
    umount disk
    # what a killed save left and nobody can remove (here: a mount point) is warned of once, and in no save's way
    mount_tmpfs left/checkpoints/step-00000001.tmp-abc size=64k
    expect 0 "step-00000001.tmp-abc': Device or resource busy, what an earlier save left; saving goes on" \
        "$mt" --config tiny.ini run.dir=left train.steps=6 checkpoint.every=1
    check "once" [ "$(grep -c tmp-abc err.txt)" -eq 1 ]
    check "all is saved" [ "$(ls left/checkpoints | grep -c '^step-.......[1-6]$')" -eq 6 ]
    umount left/checkpoints/*.tmp-abc
else skip "full disk: no small file system can be mounted here"; fi

# no file may be larger than 100 KiB: as a full disk, and not the end by SIGXFSZ

small_files() { (ulimit -c 0 -f 100 && exec "$@"); }
expect 5 "cannot save the checkpoint of step 6" small_files \
    "$mt" --config tiny.ini run.dir=small train.steps=6 checkpoint.every=1
check "checkpoints beyond ulimit -f warn" grep -q 'warning: .*step 5.*File too large; training goes on' err.txt
check "training goes on to the end" has_steps small 6
check "no rest of a checkpoint is left" [ -z "$(ls small/checkpoints | grep tmp)" ]
expect 5 "File too large" small_files "$mt" preprocess --input big.txt big.txt --tokenizer byte --output small/t
check "no rest of token files is left" [ -z "$(ls small | grep '^t')" ]
expect 0 "every byte" small_files "$mt" inspect good

# no frame is so large that a stack of 512 KiB ends a run by a signal; a smaller one is refused

small_stack() { (ulimit -c 0 -s "$1" && exec "${@:2}"); }
expect 0 "checkpoint of step 2" small_stack 512 "$mt" --config tiny.ini run.dir=stack train.stop_at=2
expect 9 "the stack's limit is 256 KiB" small_stack 256 "$mt" --config tiny.ini run.dir=stack train.stop_at=2

# a thread that the system refuses, the first, the second, ... of a command, ends it with the limits' names

if [ -z "${MEGATRAIN_SANITIZED:-}" ]; then
    ${CC:-cc} -shared -fPIC -o refuse.so -xc - -ldl <<'EOM'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *arg)
{
    static atomic_int calls;
    const char *rank = getenv("RANK");
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = (typeof(real))dlsym(RTLD_NEXT, __func__);
    if ((!rank || *rank == '0') && ++calls == atoi(getenv("REFUSED"))) return EAGAIN;
    return real(thread, how, run, arg);
}
EOM
    # without_thread COUNT command...: it starts so many; OUT in its words is a name that is new each time
    without_thread() {
        local i count=$1
        shift
        for i in $(seq "$count"); do
            expect 9 ": no thread: Resource temporarily unavailable" \
                env OMP_NUM_THREADS=1 LD_PRELOAD="$PWD/refuse.so" REFUSED="$i" "${@//OUT/refused-$i}"
            check "thread $i of $2: the limits' names" grep -q '^hint: raise ulimit -u, pids.max of the control group' err.txt
        done
        check "$2 with all of its threads: exit $?" env OMP_NUM_THREADS=1 LD_PRELOAD="$PWD/refuse.so" REFUSED=$((count + 1)) \
            "${@//OUT/whole}" 2>err.txt >out.txt
    }
    without_thread 2 "$mt" --config tiny.ini run.dir=thread-OUT train.stop_at=2 checkpoint.async=true
    without_thread 2 "$mt" preprocess --input big.txt --tokenizer byte --output thread-OUT --threads 3
    without_thread 2 "$mt" convert --from good --to hf-OUT --format hf --threads 2
    without_thread 8 timeout 120 "$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir=ranks-OUT \
        train.stop_at=2 parallel.pp=2 parallel.timeout_s=60
fi

# a message of a failing save that is longer than its record in the metrics is cut between two characters
umlauts=$(printf '\303\274%.0s' $(seq 120))
for i in x xx; do
    MEGATRAIN_FILE_FAULT=enospc@1:shard- "$mt" --config tiny.ini run.dir="$i$umlauts/$umlauts/$umlauts" train.stop_at=5 \
        checkpoint.every=3 2>err.txt
    check "a failing save does not end the run (got $?)" grep -q 'step 3: cannot create .*training goes on' err.txt
    "$mt" --config tiny.ini run.dir="$i$umlauts/$umlauts/$umlauts" train.stop_at=6 2>err.txt
    check "no line of the metrics is dropped: $(cat err.txt)" [ "$(grep -c "damaged" err.txt)" -eq 0 ]
    check "each step is there" has_steps "$i$umlauts/$umlauts/$umlauts" 6
done
read_only() { # a folder ro, with a run in it: by a file system of its own, or by permissions where those count
    if mount_tmpfs ro size=16m; then cp -r good ro/run && mount -o remount,bind,ro ro
    else [ "$(id -u)" -ne 0 ] && mkdir -p ro && cp -r good ro/run && chmod -R a-w ro; fi
}
if read_only; then
    expect 5 "ro/run" "$mt" --config tiny.ini run.dir=ro/run
    expect 5 "ro/new" train run.dir=ro/new
    expect 5 "ro/t" "$mt" preprocess --input text.txt --tokenizer byte --output ro/t
    expect 0 "loss" "$mt" eval --config tiny.ini run.dir=ro/run
    expect 0 "every byte" "$mt" inspect ro/run
    expect 0 "" "$mt" generate --run ro/run --tokens 2
    umount ro 2>/dev/null || chmod -R u+w ro
else skip "read-only folder: no file system can be mounted here"; fi
finish
