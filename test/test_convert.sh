#!/usr/bin/env bash
# `convert` and checkpoint.load on folders of Hugging Face's that a few lines of Python write (tools/hf_folder.py): every
# damage is found, by one line, and leaves nothing; both ways give the same bytes; every layout loads the same; memory
# does not grow with the model. That the numbers are those of transformers: test_hf.sh.
. "$(dirname "$0")/lib.sh"
folder() { /usr/bin/python3 "$root/test/tools/hf_folder.py" "$@"; }
values() { folder values "$1"/*.safetensors; }
convert() { "$mt" convert --from "$1" --to "$2" --format "$3" "${@:4}"; }
into() { convert "$1" "$2" megatrain "${@:3}"; }
out() { convert "$1" "$2" hf "${@:3}"; }
step=checkpoints/step-00000000
same_weights() { cmp -s "$1/$step/shard-00000.safetensors" "$2/$step/shard-00000.safetensors"; }

folder make one || bad "no folder"
folder make three --shards 3
folder make sixteen --dtype BF16 --shards 2 tie_word_embeddings=true
folder make half --dtype F16

# ---- in, out, in again
for f in one three sixteen half; do
    into $f $f.run 2>err.txt
    check "$f: $(head -1 err.txt)" [ -s $f.run/$step/manifest.json ]
    "$mt" inspect $f.run >inspect.txt 2>&1
    check "$f: $(tail -1 inspect.txt)" grep -q '^checksums' inspect.txt
    out $f.run $f.out 2>err.txt
    check "$f.out: $(head -1 err.txt)" [ -s $f.out/model.safetensors ]
    into $f.out $f.again 2>err.txt
    check "$f: the same bytes after out and in: $(head -1 err.txt)" same_weights $f.run $f.again
done
cp -r one odd && chmod u+w odd/model.safetensors && printf '\0\0\300\177' |
    dd of=odd/model.safetensors bs=1 seek=$(($(stat -c %s one/model.safetensors) - 4)) conv=notrunc 2>/dev/null
odd="NaN or infinite weights in 1 of 15 tensors, first in '"
expect 0 "warning: 'odd': $odd" into odd odd.run
for dtype in f32 bf16; do
    expect 0 "warning: 'odd.run/$step': $odd" out odd.run odd.$dtype --dtype $dtype
done
expect 0 "" out one.run fine.out
check "no warning of a whole one: $(grep NaN err.txt)" [ "$(grep -c NaN err.txt)" -eq 0 ]
check "one file or three" same_weights one.run three.run
check "what came in goes out" [ "$(values one)" = "$(values one.out)" ]
out sixteen.run sixteen.bf16 --dtype bf16 2>err.txt
check "bf16 goes out as it came: $(head -1 err.txt)" [ "$(values sixteen)" = "$(values sixteen.bf16)" ]
out one.run one.bf16 --dtype bf16 2>err.txt
/usr/bin/python3 - "$root/test/tools" <<'P' || bad "bf16 is not rounded to the nearest, halves to even"
import struct, sys
sys.path.insert(0, sys.argv[1])
import hf_folder
wide, narrow = (hf_folder.read(f"{f}/model.safetensors") for f in ("one", "one.bf16"))
assert wide.keys() == narrow.keys()
for name, (_, shape, data) in wide.items():
    x = struct.unpack(f"<{len(data) // 4}I", data)
    assert struct.pack(f"<{len(x)}H", *((v + 0x7FFF + (v >> 16 & 1)) >> 16 for v in x)) == narrow[name][2], name
P
ok
out half.run half.f16 --dtype f16 2>err.txt
check "f16 goes out as it came: $(head -1 err.txt)" [ "$(values half)" = "$(values half.f16)" ]

# the number of threads, and of files, is not in the result
into three three.t1 --threads 1 2>err.txt
into three three.t7 --threads 7 2>err.txt
check "threads" same_weights three.t1 three.t7
out three.run many --max-shard-size 0.02MB --threads 3 2>err.txt
check "files of 20 kB: $(ls many | wc -l)" [ "$(ls many | grep -c 'model-.*-of-')" -ge 6 ]
check "they hold the same" [ "$(values one)" = "$(values many)" ]
for f in many/model-*.safetensors; do
    check "$f is no larger, or one tensor" test "$(stat -c %s "$f")" -lt 21500 -o "$(folder values "$f" | wc -l)" -eq 1
done
into many many.run 2>err.txt
check "and come in again" same_weights one.run many.run
/usr/bin/python3 - <<'P' || bad "index or headers"
import json, struct, glob
index = json.load(open("many/model.safetensors.index.json"))
total = 0
for path in sorted(glob.glob("many/*.safetensors")):
    data = open(path, "rb").read()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    assert header.pop("__metadata__") == {"format": "pt"}, path
    assert (8 + n) % 8 == 0, path
    for name, t in header.items():
        assert index["weight_map"].pop(name) == path.split("/")[1], name
        total += t["data_offsets"][1] - t["data_offsets"][0]
assert not index["weight_map"] and index["metadata"]["total_size"] == total, index
P
ok

# ---- what is wrong with a folder: one line, exit 4, and nothing is left
for kind in $(folder damage list); do
    folder damage "$kind" three bad.$kind || bad "$kind was not made"
    expect 4 "'" into bad.$kind bad.$kind.run
    check "$kind: one line" [ "$(wc -l <err.txt)" -le 2 ]
    check "$kind leaves nothing" [ ! -e bad.$kind.run ]
done
# a link within the folder, and the hub's cache, whose snapshots are links to blobs beside them
cp -r three linked
mv linked/model-00002-of-00003.safetensors linked/other.safetensors
ln -s other.safetensors linked/model-00002-of-00003.safetensors
into linked linked.run 2>err.txt
check "a link within: $(head -1 err.txt)" same_weights linked.run one.run
mkdir -p hub/models--a--b/blobs hub/models--a--b/snapshots/0123
for f in three/*; do
    cp "$f" hub/models--a--b/blobs/"$(basename "$f").blob"
    ln -s ../../blobs/"$(basename "$f").blob" hub/models--a--b/snapshots/0123/"$(basename "$f")"
done
into hub/models--a--b/snapshots/0123 hub.run 2>err.txt
check "the hub's cache: $(head -1 err.txt)" same_weights hub.run one.run
# what goes along with a tokenizer is no way to this machine's other files
cp -r three leading
echo secret >elsewhere.txt
ln -sf ../elsewhere.txt leading/chat_template.jinja
expect 4 "is a link that leads out of the folder" into leading leading.run
check "nothing of it is kept" [ ! -e leading.run ]
# a million names in an index: each is looked up, sorted and met once (what took a million times as long would not end),
# and the file that is not there is the last one's
cp -r three million
/usr/bin/python3 - <<'P'
with open("million/model.safetensors.index.json", "w") as f:
    f.write('{"weight_map":{' + "".join([f'"x.{i}":"model-0000{i % 3 + 1}-of-00003.safetensors",' for i in range(1000000)]) +
            '"last":"y.safetensors"}}')
P
expect 4 "'million/y.safetensors' is missing, which the index names" into million million.run
# tables that older files hold are passed over
/usr/bin/python3 - "$root/test/tools" <<'P'
import os, shutil, sys
sys.path.insert(0, sys.argv[1])
import hf_folder
shutil.copytree("one", "tables")
t = hf_folder.read("one/model.safetensors")
for table in ("inv_freq", "cos_cached", "sin_cached"):
    t["model.layers.0.self_attn.rotary_emb." + table] = ("F32", [4], b"\0" * 16)
hf_folder.write("tables/model.safetensors", t)
shutil.copytree("one", "strange")
t = hf_folder.read("one/model.safetensors")
t.update({f"model.extra.{i}.weight": ("F32", [1], b"\0" * 4) for i in range(40)})
hf_folder.write("strange/model.safetensors", t)
# a tied model as its body alone saves it, without a prefix; beside it what other programs read
shutil.copytree("sixteen", "bare")
t = {}
for i in (1, 2):
    path = f"bare/model-0000{i}-of-00002.safetensors"
    t.update({name.removeprefix("model."): x for name, x in hf_folder.read(path).items()})
    os.remove(path)
os.remove("bare/model.safetensors.index.json")
hf_folder.write("bare/model.safetensors", t)
hf_folder.write("bare/consolidated.safetensors", {"tok_embeddings.weight": ("F32", [1], b"\0" * 4)})
os.mkdir("bare/original")
shutil.copy("bare/model.safetensors", "bare/original/model.safetensors")
# a tied model whose file holds the head as well
shutil.copytree("sixteen", "headed")
for name in os.listdir("headed"):
    if name != "config.json":
        os.remove("headed/" + name)
t = {}
for i in (1, 2):
    t.update(hf_folder.read(f"sixteen/model-0000{i}-of-00002.safetensors"))
t["lm_head.weight"] = t["model.embed_tokens.weight"]
hf_folder.write("headed/model.safetensors", t)
P
into tables tables.run 2>err.txt
check "rotary tables: $(head -1 err.txt)" same_weights tables.run one.run
into bare bare.run 2>err.txt
check "names without a prefix: $(head -1 err.txt)" same_weights bare.run sixteen.run
mkdir pickled
cp one/config.json pickled
touch pickled/pytorch_model-00001-of-00002.bin
expect 4 "has neither 'model.safetensors' nor" into pickled pickled.run
check "the line that converts: $(grep hint err.txt)" grep -q "M.from_pretrained('pickled', dtype='auto').save_pretrained" err.txt
into strange strange.run 2>err.txt
check "tensors without a place are named once, and counted: $(cat err.txt)" \
    grep -q "holds tensor 'model.extra.0.weight', and 39 others, which a model of its config.json does not have" err.txt
into headed headed.run 2>err.txt
check "a tied head that is there: $(head -1 err.txt)" same_weights headed.run sixteen.run

# ---- the tokenizer, and what transformers keeps beside it, comes in before the weights, and goes out as it came
cp -r one spoken
seq 400 | sed 's/.*/a line of numbers & and words/' >text.txt
"$mt" tokenizer train --vocab-size 280 --input text.txt --output spoken/tokenizer.json >/dev/null 2>&1
"$mt" tokenizer train --vocab-size 270 --input text.txt --output other.json >/dev/null 2>&1
echo '{"chat_template": "{{ messages }}", "eos_token": "<|endoftext|>"}' >spoken/tokenizer_config.json
echo '{"eos_token_id": [1, 2], "bos_token_id": 0}' >spoken/generation_config.json
echo '{{ messages }}' >spoken/chat_template.jinja
into spoken spoken.run 2>err.txt
check "a tokenizer comes in: $(head -1 err.txt)" cmp -s spoken/tokenizer.json spoken.run/tokenizer/tokenizer.json
for from in spoken.run spoken.run/$step; do
    rm -rf spoken.out
    out $from spoken.out 2>err.txt
    for f in tokenizer.json tokenizer_config.json generation_config.json chat_template.jinja; do
        check "$f goes out of $from: $(head -1 err.txt)" cmp -s spoken/$f spoken.out/$f
    done
done
# what a run of ours has no tokenizer_config.json for gets one
rm -rf spoken.out spoken.run/tokenizer/tokenizer_config.json
out spoken.run spoken.out 2>err.txt
check "a class for AutoTokenizer, and what ends a document: $(cat spoken.out/tokenizer_config.json)" \
    grep -q '"tokenizer_class":"PreTrainedTokenizerFast","eos_token":"<|endoftext|>"' spoken.out/tokenizer_config.json
# GPT-2's two files go out as one, too, with what ends a document
cp -r one apart
folder apart spoken/tokenizer.json apart
into apart apart.run 2>err.txt
out apart.run apart.out 2>>err.txt
check "two files are copied: $(cat err.txt)" cmp -s apart/merges.txt apart.out/merges.txt
check "a class for AutoTokenizer" grep -q '"eos_token":"<|endoftext|>"' apart.out/tokenizer_config.json
printf 'a line \\ of "words" &\n\n  \303\251 12' >some.txt
ids_of() { "$mt" tokenize --tokenizer "$1" <some.txt 2>&1; }
check "one file has the ids of two: $(ids_of apart.out/tokenizer.json)" [ "$(ids_of apart.out/tokenizer.json)" = "$(ids_of apart)" ]
check "and of the one that it was" [ "$(ids_of apart)" = "$(ids_of spoken/tokenizer.json)" ]
check "there is no warning: $(cat err.txt)" [ "$(grep -c warning err.txt)" = 0 ]
printf '<|endoftext|>' >some.txt
check "an end of a document is one token: $(ids_of apart.out/tokenizer.json)" [ "$(ids_of apart.out/tokenizer.json)" = 279 ]
mv apart.run/tokenizer/merges.txt apart.run/tokenizer/vocab.bpe && mv apart.run/tokenizer/vocab.json apart.run/tokenizer/encoder.json
out apart.run apart.older 2>err.txt
check "older names of two files: $(cat err.txt)" cmp -s apart.older/tokenizer.json apart.out/tokenizer.json
cp -r spoken.run changed.run
cp other.json changed.run/tokenizer/tokenizer.json
expect 4 "was not trained with the tokenizer 'changed.run" out changed.run changed.out
check "and leaves nothing" [ ! -e changed.out -a ! -e changed.out.partial ]
mkdir blocked
touch blocked/tokenizer
expect 5 "'blocked/tokenizer'" into spoken blocked
check "no weights without the tokenizer: $(ls blocked | paste -sd' ')" [ ! -e blocked/$step ]
folder make narrow vocab_size=270
cp spoken/tokenizer.json narrow
into narrow narrow.run 2>err.txt
check "a tokenizer larger than the model: $(head -1 err.txt)" grep -q "the tokenizer has 280 tokens, the model 270" err.txt
out narrow.run narrow.out 2>err.txt
check "and going out: $(head -1 err.txt)" grep -q "the tokenizer has 280 tokens, the model 270" err.txt

# ---- ids that end a text: kept without a tokenizer, too, for checkpoints that nobody has trained with one
ids() { grep -o '"eos_token_id": *\(\[[^]]*\]\|[0-9]*\)' "$1" | tr -d ' '; }
first() { "$mt" generate --run "$1" --prompt x --temperature 0 --tokens 8 "${@:2}" 2>&1; }
ends() { # 1: the first token ends the text, 0: it does not; or why there is none
    local text
    text=$(first "$@") || { echo "exit $?: $text"; return; }
    grep -c 'document ends after 0 of 8' <<<"$text"
}
folder make listed 'eos_token_id=[2, 106]'
into listed listed.run 2>err.txt
check "a list in config.json is kept" [ "$(ids listed.run/generation_config.json)" = '"eos_token_id":[2,106]' ]
out listed.run listed.out 2>err.txt
check "and goes out: $(cat err.txt)" [ "$(ids listed.out/config.json)" = '"eos_token_id":[2,106]' ]
check "in both files" cmp -s listed.run/generation_config.json listed.out/generation_config.json
check "the model begins with another id: $(ends listed.run)" [ "$(ends listed.run)" = 0 ]
next=$(first listed.run | tail -1 | cut -c2)
cp -r listed ended
echo "{\"eos_token_id\": [2, $(printf %d "'$next")], \"temperature\": 0.6}" >ended/generation_config.json
into ended ended.run 2>err.txt
check "an id of generation_config.json ends a text: $(ends ended.run)" [ "$(ends ended.run)" = 1 ]
out ended.run/$step ended.out 2>err.txt
check "the file goes out as it came: $(cat err.txt)" cmp -s ended/generation_config.json ended.out/generation_config.json
check "config.json has its ids" [ "$(ids ended.out/config.json)" = "$(ids ended/generation_config.json)" ]
# a tokenizer's own ids win: 64 of them with which a text ends (found by trying), and one with which it does not
cp -r spoken own && into own own.run 2>err.txt
for from in $(seq 0 64 256); do
    printf '{"eos_token_id": [%s]}\n' "$(seq -s, "$from" $((from + 63)))" >ending.json
    cp ending.json own/generation_config.json
    [ "$(ends own.run)" != 1 ] || break
done
echo "{\"eos_token_id\": $(((from + 64) % 256))}" >other.json
cp other.json own.run/generation_config.json
check "the tokenizer's ids end a text, the run's do not: $(ends own.run)" [ "$(ends own.run)" = 1 ]
mv ending.json own.run/generation_config.json
cp other.json own/generation_config.json
check "and the other way round: $(ends own.run)" [ "$(ends own.run)" = 0 ]
"$mt" preprocess --input text.txt --output more --tokenizer byte >/dev/null 2>&1
"$mt" config from-hf ended >ended.ini
"$mt" --config ended.ini run.dir=on checkpoint.load=ended.run data.train=more train.steps=1 train.global_batch=1 \
    train.micro_batch=1 run.device=cpu >err.txt 2>&1
cp ended.run/generation_config.json on
out on on.out 2>>err.txt
check "no ids of a run that was trained with a tokenizer: $(tail -1 err.txt)" \
    grep -q '"eos_token_id":null' on.out/config.json
echo '{"eos_token_id": [2, 3' >ended/generation_config.json
expect 4 "generation_config.json" into ended torn.run
check "and leaves nothing" [ ! -e torn.run ]

# ---- what is refused
expect 4 "holds checkpoints" into one one.run
expect 2 "holds files" out one.run many
mkdir -p models--me--x/snapshots && cp -r one models--me--x/snapshots/abc
for i in "config from-hf models--me--x" "convert --from models--me--x --to x.run --format megatrain"; do
    expect 4 "which has its files in snapshots: give 'models--me--x/snapshots/abc'" "$mt" $i
done
expect 4 "'models--me--x/snapshots' holds no model" into models--me--x/snapshots x.run
expect 2 "already" out one one.hf
expect 2 "already" into one.run two.run
expect 4 "no folder" into nothing two.run
expect 2 "none of hf, gguf and megatrain" convert one two.run onnx
expect 2 "none of f32" out one.run two --dtype f64
expect 2 "no amount of memory" out one.run two --max-shard-size 5
mkdir empty
out one.run empty 2>err.txt
check "an empty folder is filled: $(head -1 err.txt)" [ "$(values one)" = "$(values empty)" ]
check "nothing else was made" [ ! -e two.run ] && [ ! -e two ] && [ ! -e two.partial ]
cp -r one.run torn.run
/usr/bin/python3 -c '
f = open("torn.run/'$step'/shard-00000.safetensors", "r+b"); f.seek(-5, 2); b = f.read(1); f.seek(-5, 2); f.write(bytes([b[0] ^ 1]))'
expect 4 "shard-00000" out torn.run torn
check "a damaged checkpoint leaves nothing" [ ! -e torn ] && [ ! -e torn.partial ]
# a number that f16 has no place for
/usr/bin/python3 - "$root/test/tools" <<'P'
import shutil, struct, sys
sys.path.insert(0, sys.argv[1])
import hf_folder
shutil.copytree("one", "large")
t = hf_folder.read("one/model.safetensors")
d, s, b = t["model.norm.weight"]
t["model.norm.weight"] = (d, s, struct.pack("<f", 7e4) + b[4:])
hf_folder.write("large/model.safetensors", t)
P
into large large.run 2>err.txt
expect 4 "too large for f16" out large.run large.out --dtype f16
check "and leaves nothing" [ ! -e large.out ] && [ ! -e large.out.partial ]

# ---- interrupted at any file operation: nothing is taken for whole, and the next start finishes
ops() { MEGATRAIN_FILE_FAULT=count "$mt" convert --from "$1" --to "$2" --format "$3" 2>&1 | sed -n 's/^file operations: //p'; }
n=$(ops one count.run megatrain) m=$(ops one.run count.out hf)
check "operations: $n in, $m out" [ "${n:-0}" -gt 8 ] && [ "${m:-0}" -gt 8 ]
for ((i = 1; i <= n; i += 3)); do
    rm -rf cut.run
    { MEGATRAIN_FILE_FAULT=kill@$i "$mt" convert --from one --to cut.run --format megatrain; } >/dev/null 2>&1
    [ -e cut.run/$step ] && { check "killed at $i: whole" same_weights cut.run one.run; continue; }
    into one cut.run 2>err.txt
    check "killed at operation $i, started again: $(head -1 err.txt)" same_weights cut.run one.run
done
for ((i = 1; i <= m; i += 3)); do
    rm -rf cut.out cut.out.partial
    { MEGATRAIN_FILE_FAULT=kill@$i "$mt" convert --from one.run --to cut.out --format hf; } >/dev/null 2>&1
    [ -e cut.out ] && { check "killed at $i: whole" [ "$(values cut.out)" = "$(values one)" ]; continue; }
    out one.run cut.out 2>err.txt
    check "killed at operation $i, started again: $(head -1 err.txt)" [ "$(values cut.out)" = "$(values one)" ]
    check "nothing beside it" [ ! -e cut.out.partial ]
done
# with several files it goes on behind the last whole one, where checkpoint and options are the same
files=(--max-shard-size 0.02MB)
n=$(MEGATRAIN_FILE_FAULT=count "$mt" convert --from three.run --to counted --format hf "${files[@]}" 2>&1 |
    sed -n 's/^file operations: //p')
rm -rf counted
begun=0 gone_on=0
for ((i = 1; i <= n; i += 4)); do
    rm -rf on.out on.out.partial
    { MEGATRAIN_FILE_FAULT=kill@$i "$mt" convert --from three.run --to on.out --format hf "${files[@]}"; } >/dev/null 2>&1
    [ -e on.out ] && continue
    first=$(stat -c %i on.out.partial/model-00001-of-*.safetensors 2>/dev/null)
    out three.run on.out "${files[@]}" 2>err.txt
    check "$n operations, killed at $i: $(head -1 err.txt)" [ "$(values on.out)" = "$(values one)" ]
    check "$i: nothing else is there: $(ls on.out)" cmp -s <(ls on.out) <(ls many)
    begun=$((begun + 1))
    [ -z "$first" ] || [ "$first" != "$(stat -c %i on.out/model-00001-of-*.safetensors)" ] || gone_on=$((gone_on + 1))
done
check "$begun jobs were killed, $gone_on had made a file, which was kept" [ $gone_on -ge 8 -a $gone_on -lt $begun ]
for other in "three.run --max-shard-size 0.03MB" "three.run --max-shard-size 0.02MB --dtype bf16" "listed.run --max-shard-size 0.02MB"; do
    rm -rf on.out on.out.partial plain.out
    { MEGATRAIN_FILE_FAULT=kill@$((n / 2)) "$mt" convert --from three.run --to on.out --format hf "${files[@]}"; } >/dev/null 2>&1
    check "half of it is there" [ -e on.out.partial/job ]
    out ${other%% *} on.out ${other#* } 2>err.txt
    out ${other%% *} plain.out ${other#* } 2>>err.txt
    check "another job begins anew, $other: $(head -1 err.txt)" diff -r on.out plain.out
done
for ((i = 1; i <= m; i += 5)); do
    rm -rf full.out
    MEGATRAIN_FILE_FAULT=enospc@$i "$mt" convert --from one.run --to full.out --format hf >/dev/null 2>err.txt
    check "no space at operation $i leaves nothing: $(head -1 err.txt)" [ ! -e full.out.partial ]
done

# ---- checkpoint.load = FOLDER: the same in every layout as from the converted checkpoint
make_tiny
folder make six --shards 2 hidden_size=48 num_attention_heads=6 num_key_value_heads=2 vocab_size=301
folder make mixture --shards 3 hidden_size=48 num_attention_heads=6 num_key_value_heads=2 num_local_experts=4
into six six.run 2>err.txt && into mixture mixture.run 2>>err.txt || bad "$(head -1 err.txt)"
six=(model.vocab=301 model.ffn=56 model.layers=2)
mixture=(model.vocab=300 model.layers=2 moe.experts=4 moe.topk=2 moe.ffn=56 moe.normalize=true)
make_ini ranks.ini run.dir=r model.arch=llama model.hidden=48 model.heads=6 model.kv_heads=2 model.head_dim=8 \
    model.seq=32 train.steps=4 train.global_batch=8 parallel.tp_blocks=2 parallel.seq_blocks=8 parallel.attn_block=4 \
    optim.lr=1e-2 2>err.txt || bad "$(head -1 err.txt)"
digest() { "$mt" inspect "$1" 2>&1 | grep ^digest; }
# loads MODEL: what the checkpoint gives, then what the folder gives in each layout of stdin
loads() {
    local -n model=$1
    local count words
    "$mt" --config ranks.ini "${model[@]}" run.dir=$1.one checkpoint.load=$1.run >/dev/null 2>one.err
    check "$1: $(grep -m1 error one.err)" [ -n "$(digest $1.one)" ]
    while read -r count words; do
        rm -rf l
        "$root/scripts/launch.sh" -n "$count" -- "$mt" --config ranks.ini "${model[@]}" run.dir=l checkpoint.load=$1 $words \
            >/dev/null 2>l.err
        check "$1, $count ranks, $words: $(grep -m1 error l.err)" [ "$(digest l)" = "$(digest $1.one)" ]
    done
}
loads six <<'T'
1
2 parallel.tp=2
2 parallel.tp=2 parallel.zero=1
2 parallel.pp=2
2 parallel.pp=2 parallel.schedule=dualpipe
2 parallel.cp=2
2 parallel.zero=1
2 parallel.zero=3
4 parallel.tp=2 parallel.pp=2
T
loads mixture <<'T'
1
2 parallel.ep=2
2 parallel.tp=2
2 parallel.tp=2 parallel.etp=2
4 parallel.ep=2 parallel.pp=2
T
keys=(model.arch=llama model.layers=2 model.hidden=40 model.heads=5 model.kv_heads=1 model.head_dim=8 model.ffn=56
    model.seq=32 model.vocab=300)
for from in odd odd.run; do
    expect 0 "': $odd" "$mt" --config ranks.ini run.dir=$from.1 "${keys[@]}" checkpoint.load=$from
    expect 0 "': $odd" "$root/scripts/launch.sh" -n 2 -- "$mt" --config ranks.ini run.dir=$from.2 "${keys[@]}" checkpoint.load=$from \
        parallel.pp=2
    check "once: $(grep -c NaN err.txt)" [ "$(grep -c "$odd" err.txt)" -eq 1 ]
done
cp -r three broken
rm broken/model-00003-of-00003.safetensors
expect 4 "is missing" "$mt" --config ranks.ini run.dir=refused "${keys[@]}" checkpoint.load=broken
"$root/scripts/launch.sh" -n 2 -- "$mt" --config ranks.ini run.dir=refused "${keys[@]}" checkpoint.load=broken parallel.pp=2 \
    >/dev/null 2>err.txt
check "of two ranks one says so: $(grep -c 'error (' err.txt)" [ "$(grep -c 'error (checkpoint)' err.txt)" -eq 1 ]
expect 4 "and the model's configuration says" "$mt" --config ranks.ini run.dir=refused "${keys[@]}" model.ffn=64 checkpoint.load=one
"$mt" --config ranks.ini run.dir=other "${keys[@]}" model.rope_base=500000 checkpoint.load=one >/dev/null 2>err.txt
check "another base is said: $(head -2 err.txt)" grep -q "model.rope_base is 500000 in this run and 10000 in the folder" err.txt

rm -rf other
"$mt" --config ranks.ini run.dir=other "${keys[@]}" model.window=16 checkpoint.load=one >/dev/null 2>err.txt
check "and what the folder does not speak of: $(head -2 err.txt)" \
    grep -q "model.window is 16 in this run and 0 in the folder" err.txt
check "what only training has is not: $(grep -c 'in this run and' err.txt)" [ "$(grep -c 'in this run and' err.txt)" -eq 1 ]

# ---- a router with sigmoid that another way balances: its bias for choosing, which is 0, goes out and comes in again
rm -rf other
"$mt" --config ranks.ini run.dir=other "${mixture[@]}" model.vocab=300 moe.router=sigmoid moe.balance=aux >/dev/null 2>err.txt
out other other.hf 2>>err.txt
check "a bias of 0 goes out: $(grep -m1 error err.txt)" \
    [ "$(values other.hf | grep -c e_score_correction_bias)" = 2 ]
into other.hf other.run 2>err.txt
check "and comes in: $(head -1 err.txt)" [ -s other.run/$step/manifest.json ]

# ---- memory: 128 MB of weights, and far less than that
folder make large128 --dtype BF16 --sparse --shards 2 hidden_size=1024 intermediate_size=4096 num_hidden_layers=3 \
    num_attention_heads=8 num_key_value_heads=8 head_dim=128 vocab_size=8192
peak() { # MiB that a command takes
    /usr/bin/python3 -c '
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stderr=open("peak.err", "w"))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024 if code == 0 else 99999)' "$@"
}
small=$(peak "$mt" convert --from one --to small.run --format megatrain --threads 2)
in=$(peak "$mt" convert --from large128 --to large128.run --format megatrain --threads 2)
back=$(peak "$mt" convert --from large128.run --to large128.out --format hf --dtype bf16 --threads 2)
check "$small MiB for a small model, $in MiB in, $back MiB out: $(head -1 peak.err)" \
    [ "$in" -lt $((small + 64)) -a "$back" -lt $((small + 64)) ]
finish
