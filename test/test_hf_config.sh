#!/usr/bin/env bash
# megatrain config from-hf: the command, sizes of published models, and what transformers says of the same files, where
# build/venv-hf is (make deps-hf), or HF_PYTHON: a Python with torch and transformers.
. "$(dirname "$0")/lib.sh"
python=${HF_PYTHON:-$root/${BUILD:-build}/venv-hf/bin/python}
golden=$root/test/golden/hf
models=$(cd "$golden" && printf '%s\n' *.ini | sed 's/\.ini$//')
for name in $models; do
    mkdir -p "published/$name"
    cp "$golden/$name.json" "published/$name/config.json"
done

# ---- the command ----
"$mt" config from-hf published/llama-3.1-8b >llama.ini 2>err.txt
check "its sections" cmp -s <(tail -n +3 llama.ini) "$golden/llama-3.1-8b.ini"
check "keys that change nothing, in a line: $(sed -n 2p llama.ini)" \
    [ "$(sed -n 2p llama.ini)" = "; ignored, since they change nothing here: pretraining_tp, torch_dtype, transformers_version, use_cache" ]
check "nothing else" [ ! -s err.txt ]
check "a configuration" "$mt" config dump --config llama.ini >/dev/null
expect 2 "takes one folder" "$mt" config from-hf
expect 2 "takes one folder" "$mt" config from-hf a b
expect 4 "nothing/config.json" "$mt" config from-hf nothing
for place in ". published/llama-3.1-8b/config.json" "published/llama-3.1-8b config.json" "/ $PWD/published/llama-3.1-8b/config.json"; do
    (cd ${place% *} && "$mt" config from-hf ${place#* }) >of_file.ini 2>err.txt
    check "the file for its folder, $place: $(cat err.txt)" cmp -s of_file.ini llama.ini
done
expect 2 "'llama.ini' is a file, and neither a folder nor its config.json" "$mt" config from-hf llama.ini
mkdir -p bad
echo '{"model_type":"llama"' >bad/config.json
expect 4 "bad/config.json" "$mt" config from-hf bad
echo '{"model_type":"rwkv"}' >bad/config.json
expect 2 "'model_type' is 'rwkv'" "$mt" config from-hf bad
check "classes are named: $(grep hint err.txt)" grep -q 'it reads gpt2, llama, mistral' err.txt
echo '{"model_type":"llama","omega":true}' >bad/config.json
expect 2 "'omega' is true (not a key that megatrain knows of this class)" "$mt" config from-hf bad
check "a way out" grep -qE "if (it does|they do) not, take (it|them) out of config.json" err.txt
expect 2 "did you mean 'from-hf'?" "$mt" config from-h x

sections() { "$mt" config from-hf "$1" | grep -v '^; ignored'; } # (files of one model may say more or less)

# ---- sizes ----
parameters() { # of a model, with these keys beside
    "$mt" config from-hf "published/$1" >model.ini 2>err.txt || { cat err.txt; return; }
    "$mt" plan --config model.ini "${@:2}" --json 2>err.txt | sed -n 's/.*"parameters":\([0-9]*\).*/\1/p'
}
# size NAME WANT KEYS...: as published
size() {
    local got
    got=$(parameters "$1" "${@:3}")
    check "$1: $got parameters, published are $2" [ "$got" = "$2" ]
    echo "$1 $2" >>sizes.txt
}
size gpt2 124439808
size llama-3.1-8b 8030261248
size llama-3.1-70b 70553706496
size llama-3.1-405b 405853388800
size llama-3.2-1b 1235814400
size mistral-7b-v0.1 7241732096
size qwen2.5-7b 7615616512
size qwen3-0.6b 596049920
size qwen3-30b-a3b 30532122624
size qwen3-235b-a22b 235093634560
size mixtral-8x22b 140630071296
size deepseek-v2-lite 15706484224
size deepseek-v3 671026404352 model.mtp_layers=0
size gpt-oss-120b 116829156672
size phi-3-mini-4k 3821079552
size gemma-2-9b 9241705984
size gemma-3-27b 27009346304
size olmo-2-7b 7298617344
size qwen1.5-moe-a2.7b 14315784192
size olmoe-1b-7b 6919161856
size olmo-3-7b 7298011136
size smollm3-3b 3075098624
size minimax-m2 228689748992
size dots.llm1 142774373888
size solar-open-100b 102651793408
size hy3 295033528320
size ernie-4.5-0.3b 360748032
size gemma-7b 8537680896
size exaone-4.0-32b 32003216384
size youtu-llm-2b 1961560064
size starcoder2-3b 3030371328
size stablelm-2-1.6b 1644515328
size k-exaone-236b 236571150336
size flexolmo-7x7b 33270665216
size ministral 7241732096
size cwm 32581097472
size helium-1-preview 2172643840
size glm-4-9b-chat 9399951360
size glm-4-9b-0414 9400279040
size granite-3.1-1b-a400m 1334628352
size moonlight-16b-a3b 15960108544
size glm-4.7-flash 29943390976 model.mtp_layers=0
size glm-4.5-air 106852245504 model.mtp_layers=0
size seed-oss-36b 36151104512 model.seq=4096
size kimi-linear-48b 49122675072 model.seq=4096

# (files that nothing was filled into: published/README.md)
others=$(sed -n 's/^| \([a-z][a-z0-9.-]*\) | .* | \([0-9]*\) |$/\1 \2/p' "$golden/published/README.md")
check "published files and their README" [ "$(wc -l <<<"$others")" = "$(ls "$golden/published"/*.json | wc -l)" ]
while read -r name count; do
    mkdir -p "published/$name"
    cp "$golden/published/$name.json" "published/$name/config.json"
    size $name $count
done <<<"$others"
said=$(/usr/bin/python3 "$root/test/tools/models_page.py" check "$root")
check "$said" [ -z "$said" ]

# ---- transformers ----
if ! "$python" -c 'import torch, transformers' 2>/dev/null; then
    skip "transformers: $python has none (make deps-hf)"
    finish
fi
theirs() { "$python" "$root/test/tools/hf_config.py" "$@" 2>>theirs.txt; }

check "sizes as transformers counts them: $(diff sizes.txt <(theirs sizes $(sed 's/^/published\//; s/ .*//' sizes.txt)))" \
    cmp -s sizes.txt <(theirs sizes $(sed 's/^/published\//; s/ .*//' sizes.txt))

# What is absent is what transformers takes.
types="gpt2 llama mistral qwen2 qwen3 qwen3_moe mixtral deepseek_v3 gpt_oss gemma2 gemma3_text olmo2 phi3 qwen2_moe olmoe
    olmo3 smollm3 minimax_m2 solar_open hy_v3 ernie4_5 seed_oss gemma exaone4 youtu starcoder2 stablelm exaone_moe flex_olmo ministral cwm helium glm glm4
    granite arcee jais2 nemotron vaultgemma hyperclovax granitemoe granitemoeshared
    glm4_moe_lite minicpm3 afmoe gpt_bigcode qwen3_5_text qwen3_5_moe_text qwen3_next granitemoehybrid bamba nemotron_h kimi_linear olmo_hybrid lara_mini gpt_neox falcon cohere cohere2
    internlm3 iquestcoder exaone sarvam_moe sarvam_mla mellum flint granite_swa granitemoe_swa aria_text phi gptj"
theirs defaults written $types
theirs every every $types
for type in $types; do
    mkdir -p "bare/$type"
    echo "{\"model_type\":\"$type\"}" >"bare/$type/config.json"
    sections "bare/$type" >ours.ini 2>err.txt
    sections "written/$type" >theirs.ini 2>>err.txt
    check "$type of which nothing is said: $(cat err.txt) $(diff ours.ini theirs.ini)" cmp -s ours.ini theirs.ini
    sections "every/$type" >every.ini 2>>err.txt
    check "$type with every key: $(cat err.txt) $(diff ours.ini every.ini)" cmp -s ours.ini every.ini
done

# Each class of theirs is read, or is in the list of those that are not.
theirs decoders decoders
refused=$(sed '/^#/d; s/.*://' "$root/test/models_refused.txt" | tr ' ' '\n' | sed '/^$/d' | sort)
for folder in decoders/*; do
    type=${folder#*/}
    if "$mt" config from-hf $folder >ours.ini 2>err.txt; then
        check "$type is read, and test/models_refused.txt has it" bash -c '! grep -qx "$1" <<<"$2"' - $type "$refused"
    elif grep -q "megatrain does not read it" err.txt; then
        check "$type is not in test/models_refused.txt" grep -qx -- $type <<<"$refused"
    else # (a class without a default for a key)
        check "$type: $(cat err.txt)" grep -qE "is missing" err.txt
    fi
done
for type in $refused; do check "test/models_refused.txt: $type is no class of theirs" [ -d decoders/$type ]; done

# What we write is read by transformers, to the same values, and what it makes of that is the same model.
tests=$root/${BUILD:-build}/test/test_hf_config
if [ ! -x "$tests" ]; then
    skip "what is written: $tests is not built"
    finish
fi
mkdir -p ours again same
(cd "$root" && MEGATRAIN_HF_OUT=$work/ours "$tests" written) >out.txt 2>&1
check "models are written: $(ls ours | wc -l)" [ "$(ls ours | wc -l)" -gt 40 ]
theirs again ours again
check "transformers writes them again: $(ls again | wc -l) $(tail -2 theirs.txt)" [ "$(ls again | wc -l)" = "$(ls ours | wc -l)" ]
for folder in ours/*; do
    name=${folder#ours/}
    sections "ours/$name" >ours.ini 2>err.txt
    sections "again/$name" >theirs.ini 2>>err.txt
    check "$name, written again: $(cat err.txt) $(diff ours.ini theirs.ini)" cmp -s ours.ini theirs.ini
done
others="phi-3-mini-4k dots.llm1 solar-open-100b hy3 ernie-4.5-0.3b seed-oss-36b youtu-llm-2b cwm helium-1-preview glm-4.7-flash" # (another class says them)
for name in $models; do # (of Gemma 3 the text model is written)
    [[ " $others gemma-3-27b " = *" $name "* ]] || cp -r "published/$name" same/
done
check "published values: $(theirs same same ours)" theirs same same ours
finish
