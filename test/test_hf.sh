#!/usr/bin/env bash
# Models of transformers through `convert` and back, held to transformers itself: for small random models of each class
# the logits of a batch, in fp64 there and in fp32 here; the same bytes after out and in again; an export that transformers
# opens without a tensor too many or too few; weights in fp8 and MXFP4; modules of multi-token prediction; each key of a
# config.json changed alone (tools/hf_keys.py). Needs build/venv-hf (make deps-hf), or HF_PYTHON: a Python with torch and
# transformers. Words choose classes. With --page what was seen of them becomes their rows of docs/models.md.
. "$(dirname "$0")/lib.sh"
page=
[ "${1:-}" != --page ] || { page=yes; shift; }
python=${HF_PYTHON:-$root/${BUILD:-build}/venv-hf/bin/python}
cases() { "$python" "$root/test/tools/hf_cases.py" "$@" 2>>cases.err; }
check "its cases are Python" /usr/bin/python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read())' \
    "$root/test/tools/hf_cases.py"
if ! "$python" -c 'import torch, transformers, safetensors' 2>/dev/null; then
    skipped=1
    echo "  skipped: no transformers: make deps-hf"
    finish
fi
step=checkpoints/step-00000000
same_weights() { cmp -s "$1/$step/shard-00000.safetensors" "$2/$step/shard-00000.safetensors"; }
into() { "$mt" convert --from "$1" --to "$2" --format megatrain 2>err.txt; }
out() { "$mt" convert --from "$1" --to "$2" --format hf "${@:3}" 2>err.txt; }
says() { grep -m1 error err.txt; }
/usr/bin/python3 -c '
import random
random.seed(2)
for _ in range(3): print(*[random.randrange(300) for _ in range(40)])' >ids.txt
cases make c ids.txt "$@" || bad "$(tail -1 cases.err)"
make_tiny
"$mt" tokenizer train --input big.txt --vocab-size 290 --output tokenizer.json >/dev/null 2>err.txt || bad "$(says)"
for folder in c/*-0; do cp tokenizer.json $folder; done
if [ -d c/gpt2-0 ]; then # (as GPT-2 was published)
    /usr/bin/python3 "$root/test/tools/hf_folder.py" apart tokenizer.json c/gpt2-0
    rm c/gpt2-0/tokenizer.json
fi
: >seen.txt
seen() { echo "$*" >>seen.txt; } # CASE WHAT FIGURE: for the page
n=0
logits() { "$mt" eval --run "$1" --ids ids.txt --logits "$1/got.npy" 2>err.txt; }
for folder in c/*; do
    case=$(basename "$folder")
    if ! into $folder r/$case; then
        bad "$case: $(says)"
        continue
    fi
    n=$((n + 1))
    logits r/$case || bad "$case: $(says)"
    out r/$case e/$case
    check "$case goes out: $(says)" [ -s e/$case/config.json ]
    into e/$case again/$case
    check "$case: the same bytes after out and in: $(says)" same_weights r/$case again/$case
    same_weights r/$case again/$case && seen $case weights
done
check "$n cases" [ $n -ge 3 ]

if [ -d c/deepseek_v3-0 ]; then # blocks of 128 and what is left over
    for class in deepseek_v3-0 deepseek_v3-1; do
        cases fp8 c/$class fp8.$class || bad "$(tail -1 cases.err)"
        into fp8.$class fp8.$class.run || bad "fp8: $(says)"
        into fp8.$class.plain fp8.$class.plain.run || bad "fp8: $(says)"
        check "$class: fp8 is what its blocks stand for" same_weights fp8.$class.run fp8.$class.plain.run
    done
    cases mtp c/deepseek_v3-0 mtp || bad "$(tail -1 cases.err)"
    into mtp mtp.run
    check "multi-token prediction: $(says)" grep -q 'mtp.0.proj.weight' mtp.run/$step/manifest.json
    out mtp.run mtp.out
    values() { /usr/bin/python3 "$root/test/tools/hf_folder.py" values "$1"/*.safetensors; }
    check "its tensors go out as they came: $(says)" [ "$(values mtp)" = "$(values mtp.out)" ]
    logits mtp.run
    mkdir r/mtp && mv mtp.run/got.npy r/mtp # (they are those of the model without)
    cp -r c/deepseek_v3-0 c/mtp
fi
if [ -d c/gpt_oss-0 ]; then
    cases mxfp4 c/gpt_oss-0 mx || bad "$(tail -1 cases.err)"
    into mx mx.run || bad "MXFP4: $(says)"
    into mx.plain mx.plain.run || bad "MXFP4: $(says)"
    check "MXFP4 is what its blocks stand for" same_weights mx.run mx.plain.run
fi
if [ -d c/deepseek_v3-0 ]; then # (transformers saves no modules, and speaks of one)
    "$mt" config from-hf c/deepseek_v3-0 >module.ini 2>module.err
    check "a folder without modules has none: $(cat module.err)" bash -c '! grep -q mtp_layers module.ini'
    check "and that is said" grep -q 'has no weights of the modules' module.err
fi
if [ -d c/gpt2-0 ]; then # sequences shorter than its table of positions
    "$mt" config from-hf c/gpt2-0 >gpt2.ini
    one_step() { "$mt" --config gpt2.ini run.device=cpu data.train=a train.steps=1 train.global_batch=1 "$@" 2>err.txt; }
    one_step run.dir=short model.seq=32 checkpoint.load=c/gpt2-0
    check "GPT-2 in short: $(says)" [ -s short/metrics.jsonl ]
    one_step run.dir=long model.seq=128 checkpoint.load=c/gpt2-0
    check "and not in long: $(says)" grep -q "has shape .*and the model's configuration says" err.txt
fi
if [ -d c/mistral-0 ]; then # as the text model of one that sees images
    /usr/bin/python3 - "$root/test/tools" <<'P' || bad "no wrapped folder"
import json, os, sys
sys.path.insert(0, sys.argv[1])
import hf_folder
t = hf_folder.read("c/mistral-0/model.safetensors")
c = json.load(open("c/mistral-0/config.json"))
os.makedirs("wrapped")
outer = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": c}
json.dump(outer, open("wrapped/config.json", "w"))
hf_folder.write("wrapped/model.safetensors", {"language_model." + n: v for n, v in t.items()})
P
    into wrapped wrapped.run
    check "mistral3: $(says)" same_weights wrapped.run r/mistral-0
fi
if [ -d c/qwen3_5_moe-0 ]; then # so, too, with experts in one tensor and modules that are not read
    /usr/bin/python3 - "$root/test/tools" <<'P' || bad "no folder of Qwen3.5"
import json, os, sys
sys.path.insert(0, sys.argv[1])
import hf_folder
t = hf_folder.read("c/qwen3_5_moe-0/model.safetensors")
c = json.load(open("c/qwen3_5_moe-0/config.json"))
E, F, h = c["num_experts"], c["moe_intermediate_size"], c["hidden_size"]
out = {"model.language_model." + n[len("model."):] if n.startswith("model.") else n: v
       for n, v in t.items() if ".experts." not in n}
for i in range(c["num_hidden_layers"]):
    part = lambda e, what: t[f"model.layers.{i}.mlp.experts.{e}.{what}_proj.weight"][2]
    to = f"model.language_model.layers.{i}.mlp.experts."
    out[to + "gate_up_proj"] = ("F32", [E, 2 * F, h], b"".join(part(e, w) for e in range(E) for w in ("gate", "up")))
    out[to + "down_proj"] = ("F32", [E, h, F], b"".join(part(e, "down") for e in range(E)))
out["mtp.norm.weight"] = out["model.visual.merger.norm.weight"] = ("F32", [h], bytes(4 * h))
outer = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": c}
os.makedirs("seeing")
json.dump(outer, open("seeing/config.json", "w"))
hf_folder.write("seeing/model.safetensors", out)
P
    into seeing seeing.run
    check "qwen3_5_moe: $(says)" same_weights seeing.run r/qwen3_5_moe-0
    check "modules that are left out are named once" [ "$(grep -c '1 tensors of multi-token prediction' err.txt)" = 1 ]
    logits seeing.run
    check "and its logits: $(says)" cmp -s seeing.run/got.npy r/qwen3_5_moe-0/got.npy
fi
# ---- each key alone changes there what it changes here
"$python" "$root/test/tools/hf_keys.py" "$root" "$mt" ids.txt keys "$@" >keys.txt 2>>cases.err
check "keys one by one: $(tail -3 keys.txt)" grep -q ', 0 differences$' keys.txt
sed -n 's/^\(.*\): \([0-9]*\) keys$/\1 keys \2/p' keys.txt >>seen.txt
check "most keys change something" [ "$(grep -oE '[0-9]+ of them' keys.txt | grep -oE '^[0-9]+')" -ge 12 ] # (GPT-2 alone has 19 keys)

# ---- training goes on from a folder as PyTorch's AdamW does in fp64: 20 steps
tokens=$(stat -c %s big.txt)
/usr/bin/python3 "$root/test/tools/order.py" 1234 0 $(((tokens - 1) / 32)) >order.txt
"$python" -c 'import numpy as np
t = np.frombuffer(open("big.txt", "rb").read(), dtype=np.uint8).astype(np.int32)
np.save("samples.npy", np.stack([t[32 * int(i) : 32 * int(i) + 33] for i in list(open("order.txt"))[:160]]))'
follows() { # CASE KEY=VALUE...
    [ -d c/$1 ] || return 0
    make_ini follow.ini run.dir=f model.seq=32 model.vocab=300 data.seed=1234 train.steps=20 train.global_batch=8 \
        optim.lr=1e-3 optim.schedule=constant optim.weight_decay=0.1 "${@:2}"
    "$mt" --config follow.ini checkpoint.load=c/$1 run.dir=f/$1 optim.warmup=0 optim.clip=0 >/dev/null 2>err.txt
    losses f/$1 >ours.txt
    cases train c/$1 samples.npy 20 8 32 1e-3 >theirs.txt
    check "$1: 20 steps of training, $(paste -d' ' ours.txt theirs.txt | tail -1) $(says)" awk -v e="${within:-1e-6}" '
        FNR == NR { loss[$1] = $2; next }
        { d = $2 - loss[$1]; n++; if (!(d < e && d > -e)) wrong++ }
        END { exit !(n == 20 && !wrong) }' ours.txt theirs.txt
}
follows llama-0 model.arch=llama model.layers=3 model.hidden=48 model.heads=6 model.kv_heads=2 model.ffn=80
follows qwen3_moe-0 model.arch=llama model.layers=3 model.hidden=48 model.heads=6 model.kv_heads=2 model.ffn=80 \
    model.qk_norm=true model.norm_eps=1e-6 moe.experts=8 moe.topk=2 moe.ffn=24 moe.aux_coeff=0 moe.router=softmax_pre \
    moe.normalize=true
for case in gemma2-0 gemma3-0 olmo2-0 qwen3_next-0 qwen3_5-0 kimi_linear-0 olmo_hybrid-2 lara_mini-0; do
    [ -d c/$case ] || continue
    "$mt" config from-hf c/$case >keys.ini
    within=1e-5 follows $case $(awk '/^\[/ { section = substr($0, 2, length($0) - 2) }
        !/^(seq|vocab) / && sub(/^[a-z_]+ = /, section ".&") { sub(/ = /, "="); print }' keys.ini) $(grep -q '^experts' keys.ini && echo moe.aux_coeff=0) \
        $(grep -q '^balance = bias' keys.ini && echo moe.bias_rate=1e-9)
done

# ---- a step of SGD of each class: the loss of another batch behind it
step_of_sgd() { # CASE RUN KEYS...: two of them, from sgd.ini, with the words of `start`
    "${start[@]}" "$mt" --config sgd.ini checkpoint.load=c/$1 run.dir=$2 run.device=cpu model.seq=32 model.dropout=0 \
        model.attention_dropout=0 data.train=a data.seed=1234 checkpoint.every=0 train.steps=2 train.micro_batch=2 \
        train.global_batch=8 optim.name=sgd optim.beta1=0 optim.lr=0.1 optim.schedule=constant optim.weight_decay=0 \
        optim.clip=0 parallel.seq_blocks=8 parallel.attn_block=8 "${@:3}" >/dev/null 2>err.txt
}
in_layout() { # CASE WORDS KEYS...: four ranks have the bits of one
    local start=("$root/scripts/launch.sh" -n 4 --)
    rm -rf layout
    step_of_sgd $1 layout "${@:3}"
    check "$1 on $2: $(says)" same_run layout sgd/$1 2
    same_run layout sgd/$1 2 && seen $1 layout $2
}
start=()
cases sgd c samples.npy 8 0.1 >sgd.txt || bad "$(tail -1 cases.err)"
while read -r case first second; do
    "$mt" config from-hf c/$case 2>err.txt | grep -v '^seq' >sgd.ini
    grep -qE '^router = s(igmoid|qrt)' sgd.ini && echo 'bias_rate = 1e-9' >>sgd.ini
    step_of_sgd $case sgd/$case
    check "$case: a step of SGD: $first $second, here $(losses sgd/$case | tr '\n' ' ') $(says)" awk -v a="$first" -v b="$second" '
        { d = $2 - (NR == 1 ? a : b); n++; if (!(d < 1e-5 && d > -1e-5)) wrong++ }
        END { exit !(n == 2 && !wrong && (a - b > 1e-3 || b - a > 1e-3)) }' <(losses sgd/$case)
    seen $case step "$(losses sgd/$case | awk -v a="$first" -v b="$second" '
        { d = $2 - (NR == 1 ? a : b); d = d < 0 ? -d : d; if (!(d < most)) most = d } END { printf "%.1e", most }')"
    if grep -q '^mixer' sgd.ini; then # (whose heads tp and cp would have to divide)
        in_layout $case ZeRO-3 parallel.zero=3
        in_layout $case "pp 2, ZeRO-1" parallel.pp=2 parallel.zero=1
        continue
    fi
    in_layout $case "cp 2, ZeRO-2" parallel.cp=2 parallel.zero=2
    if grep -q '^experts' sgd.ini; then in_layout $case "tp 2, ep 2" parallel.tp=2 parallel.ep=2
    else in_layout $case "tp 2, pp 2" parallel.tp=2 parallel.pp=2; fi
done <sgd.txt
check "each class took a step: $(wc -l <sgd.txt)" [ "$(wc -l <sgd.txt)" = "$(ls -d c/*-0 | wc -l)" ]

# one line a case: its name, the largest difference of its logits by the largest, and what is wrong with the export
cases compare c r e ids.txt >lines.txt || bad "$(tail -1 cases.err)"
while read -r case figure wrong; do
    check "$case: logits differ by $figure" \
        awk -v x="$figure" 'BEGIN { exit !(x ~ /^[0-9.]+e[-+][0-9]+$/ && x + 0 < 1e-5) }'
    check "$case opens: $wrong" [ -z "$wrong" ]
    [ -n "$wrong" ] || seen $case logits $figure
done <lines.txt
check "all cases were compared: $(wc -l <lines.txt)" [ "$(wc -l <lines.txt)" -ge "$n" ]

# ---- a tokenizer goes in and out, and text goes on as in fp64: the most likely token, 12 times
prompt='Line 7 of a small text'
cases text c e "$prompt" 12 text || bad "$(tail -1 cases.err)"
ids=$("$mt" tokenize --tokenizer tokenizer.json < <(printf %s "$prompt"))
for folder in c/*-0; do
    case=$(basename $folder)
    check "$case: ids of the tokenizer that went in and out: $(cat text/$case.ids)" [ "$ids" = "$(cat text/$case.ids)" ]
    "$mt" generate --run r/$case --prompt "$prompt" --tokens 12 --temperature 0 --ignore-eod >text/$case.ours 2>err.txt
    check "$case: text goes on as there: $(says)" cmp -s text/$case.ours text/$case.theirs
    cmp -s text/$case.ours text/$case.theirs && seen $case text
    "$mt" convert --from r/$case --to $case.gguf --format gguf >/dev/null 2>err.txt || continue
    figure=$("$python" "$root/test/tools/gguf_file.py" logits $case.gguf ids.txt r/$case/got.npy 2>llama.err)
    check "$case: llama.cpp's log-probabilities differ by $figure" \
        awk -v x="${figure:-none}" 'BEGIN { exit !(x ~ /^[0-9.]+e[-+][0-9]+$/ && x + 0 < 1e-5) }'
    seen $case gguf $figure
done
[ -z "$page" ] || /usr/bin/python3 "$root/test/tools/models_page.py" write "$root" seen.txt c || bad "docs/models.md"
finish
