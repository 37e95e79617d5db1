#!/usr/bin/env bash
# `convert --format gguf`: every number of the file against the folder that `--format hf` writes, by a reader of its own;
# halves and q8_0 by value; keys; what is refused. And llama.cpp itself (the package xllamacpp in build/venv-hf, make
# deps-hf, or in HF_PYTHON's): log-probabilities of all tokens within 1e-5, since a file that computes nonsense opens too.
. "$(dirname "$0")/lib.sh"
make_tiny
python=${HF_PYTHON:-$root/${BUILD:-build}/venv-hf/bin/python}
"$python" -c 'import xllamacpp' 2>/dev/null || python=
[ -n "$python" ] || { skipped=1; echo "  skipped: log-probabilities by llama.cpp, no xllamacpp: make deps-hf"; }
tool() { /usr/bin/python3 "$root/test/tools/gguf_file.py" "$@" 2>tool.err; }
into() { "$mt" convert --from "$1" --to "$2" --format gguf "${@:3}" 2>err.txt; }
/usr/bin/python3 -c '
import random
random.seed(3)
for _ in range(2): print(*[random.randrange(32, 122) for _ in range(30)])' >ids.txt

# trains a little, so that no number is what it began as, and writes all forms
n=0
model() {
    local name=$1 figure
    shift
    n=$((n + 1))
    "$mt" --config tiny.ini run.dir=$name model.arch=llama model.dropout=0 model.attention_dropout=0 model.hidden=64 \
        model.heads=4 model.ffn=96 train.steps=8 train.eval_every=0 optim.lr=0.01 optim.warmup=1 "$@" >/dev/null 2>err.txt ||
        { bad "$name: $(grep -m1 error err.txt)"; return; }
    into $name $name.gguf || { bad "$name: $(grep -m1 error err.txt)"; return; }
    "$mt" convert --from $name --to $name.hf --format hf 2>err.txt || bad "$name to hf: $(grep -m1 error err.txt)"
    check "$name: $(tail -1 tool.err 2>/dev/null)" tool same $name.gguf $name.hf
    [ -n "$python" ] || return
    "$mt" eval --run $name --ids ids.txt --logits want.npy 2>err.txt
    figure=$("$python" "$root/test/tools/gguf_file.py" logits $name.gguf ids.txt want.npy 2>llama.err)
    check "$name: log-probabilities differ by '$figure' $(grep -m1 -E 'Error' llama.err)" \
        awk -v x="${figure:-none}" 'BEGIN { exit !(x ~ /^[0-9.]+e[-+][0-9]+$/ && x + 0 < 1e-5) }'
}
model llama model.kv_heads=2
# a weight that is NaN goes out, with a warning, but for q8_0
last=$(ls llama.hf/*.safetensors | tail -1)
printf '\0\0\300\177' | dd of="$last" bs=1 seek=$(($(stat -c %s "$last") - 4)) conv=notrunc 2>/dev/null
"$mt" convert --from llama.hf --to nan --format megatrain 2>err.txt || bad "$(grep -m1 error err.txt)"
into nan nan.gguf --dtype f16
check "a warning: $(tail -1 err.txt)" grep -q "warning: 'nan/.*': NaN or infinite weights in 1 of [0-9]* tensors, first in '" err.txt
expect 4 "which q8_0 has no place for" "$mt" convert --from nan --to nan.q8 --format gguf --dtype q8_0
model wide model.kv_heads=2 model.head_dim=24 model.tied=true model.rope_scaling=llama3 model.rope_factor=8 \
    model.rope_original=32 model.rope_base=10000
model linear model.rope_scaling=linear model.rope_factor=4 model.bias=true
model yarn model.rope_scaling=yarn model.rope_factor=4 model.rope_original=16 model.attention_bias=qkv
model mixtral model.kv_heads=2 moe.experts=4 moe.topk=2 moe.ffn=80
model qwen3 model.qk_norm=true model.heads=5 model.head_dim=32 model.tied=true
model qwen3moe model.kv_heads=2 model.qk_norm=true moe.experts=8 moe.topk=3 moe.ffn=48 moe.router=softmax_pre \
    moe.normalize=true
check "$n models" [ $n = 7 ]

# ---- keys
tool keys wide.gguf >keys.txt
for line in 'general.architecture string llama' 'general.file_type u32 0' 'llama.attention.head_count_kv u32 2' \
    'llama.attention.key_length u32 24' 'llama.attention.layer_norm_rms_epsilon f32 1e-05' 'llama.block_count u32 2' \
    'llama.context_length u32 32' 'llama.rope.dimension_count u32 24' 'llama.rope.freq_base f32 10000' \
    'llama.vocab_size u32 257' 'tokenizer.ggml.eos_token_id u32 256' 'tokenizer.ggml.model string gpt2' \
    'tokenizer.ggml.add_bos_token bool False'; do
    check "no '$line'" grep -qxF "$line" keys.txt
done
check "mixture's keys" [ "$(tool keys mixtral.gguf | grep -cE '^llama\.(expert_count u32 4|expert_used_count u32 2|feed_forward_length u32 80)$')" = 3 ]
check "the name of the experts' class" [ "$(tool keys qwen3moe.gguf | grep -c '^qwen3moe\.')" -ge 12 ]

# ---- the model's name
into llama/ named.gguf || bad "$(grep -m1 error err.txt)"
check "the name of a path with a slash at its end" grep -qxF 'general.name string llama' <(tool keys named.gguf)
(cd llama && "$mt" convert --from . --to ../named.gguf --format gguf 2>err.txt) || bad "$(grep -m1 error err.txt)"
check "the name of the folder that one stands in" grep -qxF 'general.name string llama' <(tool keys named.gguf)
for name in my-Phi-3x PHI3 Modern-BERT $'not\xff8'; do
    cp -r llama "$name"
    into "$name" named.gguf || bad "$(grep -m1 error err.txt)"
    check "a name that is not to be written: $name" [ "$(tool keys named.gguf | grep -c '^general.name')" = 0 ]
done

# ---- fewer bits
for dtype in bf16 f16 q8_0; do
    into qwen3moe $dtype.gguf --dtype $dtype || bad "$dtype: $(grep -m1 error err.txt)"
    kinds=$(tool near $dtype.gguf qwen3moe.gguf)
    case $dtype in bf16) want="BF16 F32" ;; f16) want="F16 F32" ;; *) want="F16 F32 Q8_0" ;; esac
    check "$dtype: '$kinds', not '$want' $(tail -1 tool.err 2>/dev/null)" [ "$kinds" = "$want" ]
done
# (rows that are no whole blocks stay halves: 48 columns of an expert's second matrix)
into llama again.gguf --threads 1
check "one thread gives other bytes" cmp -s llama.gguf again.gguf

# ---- a vocabulary of merges
"$mt" tokenizer train --input text.txt --vocab-size 300 --output t.json >/dev/null 2>&1 || bad "tokenizer-train"
"$mt" preprocess --input big.txt --tokenizer t.json --output m --append-eod >/dev/null 2>&1 || bad "preprocess"
"$mt" --config tiny.ini run.dir=merges model.arch=llama model.dropout=0 model.attention_dropout=0 data.train=m data.valid=m \
    data.tokenizer=t.json train.steps=1 optim.warmup=0 train.eval_every=0 >/dev/null 2>err.txt || bad "$(grep -m1 error err.txt)"
into merges merges.gguf || bad "$(grep -m1 error err.txt)"
tool keys merges.gguf >keys.txt
merges=$(/usr/bin/python3 -c 'import json; print(len(json.load(open("t.json"))["model"]["merges"]))')
check "$merges merges" grep -q "^tokenizer.ggml.merges array $merges: " keys.txt
check "the file's tokens and merges: $(tail -1 tokens.err 2>/dev/null)" /usr/bin/python3 - "$root" 2>tokens.err <<'EOP'
import json, sys
sys.path.insert(0, sys.argv[1] + "/test/tools")
import gguf_file

keys = gguf_file.Reader("merges.gguf").keys
model = json.load(open("t.json"))["model"]
spelled = {id: token for token, id in model["vocab"].items()}
kinds = keys["tokenizer.ggml.token_type"][1]
tokens = keys["tokenizer.ggml.tokens"][1]
assert len(tokens) == len(kinds) == len(spelled) and len(set(tokens)) == len(tokens)
for id, token in enumerate(tokens):
    assert token == spelled[id] and kinds[id] == (3 if token == "<|endoftext|>" else 1), (id, token, kinds[id])
assert keys["tokenizer.ggml.merges"][1] == [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
assert keys["tokenizer.ggml.pre"][1] == "gpt-2"
EOP

# ---- a folder whose tokenizer is not there, or not understood, has not `byte`
cp -r llama.hf none.hf
rm -f none.hf/tokenizer*
"$mt" convert --from none.hf --to none --format megatrain 2>err.txt || bad "$(grep -m1 error err.txt)"
into none none.gguf || bad "$(grep -m1 error err.txt)"
check "one warning" [ "$(grep -c 'no tokenizer is written: ' err.txt)" = 1 ]
check "a tokenizer that nobody gave" [ "$(tool keys none.gguf | grep '^tokenizer')" = 'tokenizer.ggml.model string none' ]

# ---- what is refused, with nothing left behind
refused() { # TEXT KEY...: a run of a model that GGUF cannot say
    rm -rf odd
    "$mt" --config tiny.ini run.dir=odd model.arch=llama model.dropout=0 model.attention_dropout=0 train.steps=1 \
        optim.warmup=0 train.eval_every=0 "${@:2}" >/dev/null 2>err.txt || { bad "$1: $(grep -m1 error err.txt)"; return; }
    expect 2 "$1" "$mt" convert --from odd --to odd.gguf --format gguf
    check "$1 leaves a file" [ -z "$(ls odd.gguf* .tmp-* 2>/dev/null)" ]
}
refused "model.window" model.window=8
refused "moe.every" model.qk_norm=true moe.experts=4 moe.topk=2 moe.router=softmax_pre moe.normalize=true moe.every=2
refused "moe.normalize" model.qk_norm=true moe.experts=4 moe.topk=2 moe.router=softmax_pre moe.normalize=false
refused "hidden / heads of this class" model.attention_bias=qkv model.head_dim=24
refused "gpt2, of which no GGUF file" model.arch=gpt2
refused "512 blocks" model.layers=513 model.hidden=8 model.heads=1 model.ffn=8
refused "1024 experts" model.hidden=8 model.heads=1 model.ffn=8 moe.experts=1025 moe.topk=2 moe.ffn=4
refused "model.attention_bias" model.qk_norm=true model.attention_bias=all
refused "model.attention_bias" model.qk_norm=true model.attention_bias=all moe.experts=4 moe.topk=2 \
    moe.router=softmax_pre moe.normalize=true
expect 2 "none of f32, bf16, f16 and q8_0" "$mt" convert --from llama --to x.gguf --format gguf --dtype q4_0
expect 2 "none of f32, bf16 and f16" "$mt" convert --from llama --to x --format hf --dtype q8_0
expect 2 "first make it --format megatrain" "$mt" convert --from llama.hf --to x.gguf --format gguf
expect 5 "is a folder" "$mt" convert --from llama --to llama.hf --format gguf
expect 5 "error (storage): '" "$mt" convert --from llama --to llama.hf --format gguf
expect 5 "error (storage): cannot create" "$mt" convert --from llama --to no/where/x.gguf --format gguf
expect 5 "no/where" "$mt" convert --from llama --to no/where/x.gguf --format gguf
printf GGUFold >kept.gguf
for at in 1 2 3 4; do
    MEGATRAIN_FILE_FAULT=enospc@$at "$mt" convert --from llama --to kept.gguf --format gguf >/dev/null 2>err.txt &&
        bad "fault $at goes unseen"
    check "fault $at: $(grep -m1 error err.txt)" grep -q "^megatrain: error (storage): " err.txt
done
check "a file that could not be replaced is as it was" [ "$(cat kept.gguf)" = GGUFold ]
check "nothing half-written is left" [ -z "$(ls kept.gguf.* .tmp-* 2>/dev/null)" ]
finish
