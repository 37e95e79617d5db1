#!/usr/bin/env bash
# A model of each class of transformers on the device: a folder of a tiny one, as `convert --format hf` writes it, is what
# two steps in bf16 begin from. The losses are those of the CPU in fp32 but for rounding, and the same when it is repeated.
. "$(dirname "$0")/cuda_runs.sh"
steps=2
cat >begin.ini <<EOI
[train]
micro_batch = 2
global_batch = 4
steps = 12
[optim]
lr = 1e-2
warmup = 1
[data]
train = a
EOI
sed 's/^steps = .*/steps = 2/; s/^lr = .*/lr = 2e-3/; s/^warmup = .*/warmup = 0/' begin.ini >on.ini
# class NAME KEYS...: trained until it has learnt something, so that a model which was not read would be told by its loss
n=0
class() {
    local name=$1 device
    n=$((n + 1))
    run $name.begun begin.ini run.device=cpu model.layers=2 model.hidden=64 model.heads=4 model.seq=16 \
        model.ffn=48 "${@:2}"
    "$mt" convert --from $name.begun --to $name --format hf 2>err.txt || { bad "$name: $(grep -m1 error err.txt)"; return; }
    check "$name is the class of its folder" grep -q "\"model_type\": *\"$name\"" $name/config.json
    { "$mt" config from-hf $name; cat on.ini; } >$name.ini 2>err.txt
    run $name.cpu $name.ini run.device=cpu run.precision=fp32 checkpoint.load=$name
    for device in cuda again; do run $name.$device $name.ini run.device=cuda run.precision=bf16 checkpoint.load=$name; done
    check "$name: has learnt, and learns: $(losses $name.cpu | tr '\n' ' ')" \
        awk '{ loss[NR] = $2 } END { exit !(NR == 2 && loss[1] < 4 && loss[2] < 4 && loss[1] != loss[2]) }' <(losses $name.cpu)
    check "$name: losses in bf16 $(losses $name.cuda | tr '\n' ' ')" close $name.cuda $name.cpu 3e-3
    check "$name: the same once more" same_losses $name.again $name.cuda
    check "$name: the same tensors once more" same_tensors $name.again $name.cuda $steps
}
llama=(model.arch=llama model.kv_heads=2)
experts=(moe.experts=4 moe.topk=2 moe.ffn=24)
latent=(model.arch=llama model.attention=mla model.norm_eps=1e-6 model.kv_lora_rank=16
    model.qk_nope_head_dim=8 model.qk_rope_head_dim=8 model.v_head_dim=8 moe.every=0,1 moe.shared_ffn=24 "${experts[@]}")
gemma=("${llama[@]}" model.tied=true model.activation=geglu model.block_norms=both model.embed_scale=8 model.window=8,0
    model.attention_scale=0.5)
class gpt2
class llama "${llama[@]}"
class mistral "${llama[@]}" model.window=8
class qwen2 "${llama[@]}" model.attention_bias=qkv
class qwen3 "${llama[@]}" model.qk_norm=true
class qwen3_moe "${llama[@]}" model.qk_norm=true "${experts[@]}" moe.router=softmax_pre moe.normalize=true
class mixtral "${llama[@]}" "${experts[@]}"
class deepseek_v2 "${latent[@]}" moe.router=softmax_pre
class deepseek_v3 "${latent[@]}" model.q_lora_rank=16 moe.router=sigmoid moe.balance=bias
class gpt_oss "${llama[@]}" "${experts[@]}" model.bias=true model.sinks=true model.activation=clamped_swiglu model.window=8,0
class gemma2 "${gemma[@]}" model.attention_softcap=50 model.final_softcap=30
class gemma3_text "${gemma[@]}" model.qk_norm=true model.rope_base_local=100
class olmo2 "${llama[@]}" model.block_norms=post model.qk_norm=full
class phi3 "${llama[@]}" model.rope_dim=6
class granite "${llama[@]}" model.embed_scale=8 model.residual_scale=0.3 model.attention_scale=0.2 model.logits_scale=0.5
class nemotron "${llama[@]}" model.norm=layernorm model.activation=relu2 model.rope_dim=6
class gpt_neox "${llama[@]}" model.kv_heads=4 model.norm=layernorm model.activation=gelu_erf model.block_norms=parallel_two \
    model.bias=true model.rope_dim=6
class qwen3_next "${llama[@]}" model.mixer=delta,attention model.delta_key_heads=2 model.delta_value_heads=4 \
    model.delta_key_dim=16 model.delta_value_dim=16 model.qk_norm=true model.attention_gate=true model.rope_dim=4 \
    "${experts[@]}" moe.router=softmax_pre moe.normalize=true moe.shared_ffn=24 moe.shared_gate=true
class nemotron_h "${llama[@]}" model.position=none model.activation=relu2 model.mixer=mamba2,none,attention,none \
    model.ffn_layers=0,1 model.layers=4 model.mamba_heads=8 model.mamba_head_dim=16 model.mamba_state=16 "${experts[@]}" \
    moe.router=sigmoid moe.balance=bias moe.latent=16 moe.shared_ffn=24 moe.every=0,1,0,0
class kimi_linear "${latent[@]}" model.position=none model.mixer=kda,attention model.kda_heads=8 model.kda_head_dim=16 \
    model.tied=false moe.router=sigmoid moe.balance=bias
class olmo_hybrid "${llama[@]}" model.mixer=delta,attention model.delta_key_heads=2 model.delta_value_heads=4 \
    model.delta_key_dim=16 model.delta_value_dim=16 model.qk_norm=full model.block_norms=post model.state_norms=pre \
    model.delta_negative=true
class bamba "${llama[@]}" model.mixer=mamba2,attention model.mamba_heads=8 model.mamba_head_dim=16 model.mamba_state=16 \
    model.rope_dim=4
# (their layers are those above in other combinations; test_hf.sh holds their logits to transformers')
combined=(qwen2_moe olmoe olmo3 smollm3 glm4_moe minimax_m2 dots1 solar_open hy_v3 ernie4_5 seed_oss gemma exaone4 youtu
    starcoder2 stablelm exaone_moe flex_olmo ministral cwm helium glm arcee jais2
    vaultgemma hyperclovax granitemoe granitemoeshared granitemoehybrid glm4_moe_lite minicpm3 afmoe gpt_bigcode falcon
    qwen3_5_text qwen3_5_moe_text lara_mini
    cohere cohere2 internlm3 iquestcoder exaone sarvam_moe
    mellum flint granite_swa aria_text phi gptj)
rows=$(sed -n '/^## Classes/,/^## /p' "$root/docs/huggingface.md" | grep '^| `' | grep -v '^| `model_type`')
for c in "${combined[@]}"; do check "docs/huggingface.md has $c" grep -q "^| \`$c\`" <<<"$rows"; done
# (a row of Gemma has two that are tried)
check "all classes of docs/huggingface.md: $n and ${#combined[@]}" [ $((n - 1 + ${#combined[@]})) = "$(wc -l <<<"$rows")" ]
finish
