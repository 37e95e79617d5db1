#!/usr/bin/env bash
# docs/checkpoints.md, Tensors: the first table has every tensor that checkpoints hold, with its shape, and no other.
. "$(dirname "$0")/lib.sh"
make_tiny
sed -i 's/^hidden = 32/hidden = 24/; s/^heads = 4/heads = 6/; s/^dropout/kv_heads = 2\nhead_dim = 8\nffn = 40\ndropout/' tiny.ini
declare -A size=([D]=24 [H]=6 [K]=2 [C]=8 [F]=40 [V]=257 [T]=32 [E]=3 [G]=16 [W]=24 [S]=56
    [q]=10 [l]=12 [n]=5 [r]=4 [v]=8 [Q]=3 [U]=6 [d]=4 [e]=7 [c]=5 [M]=6 [m]=5 [J]=3 [s]=7 [N]=3 [a]=4)

# rows of the table: name | shapes, gelu's and gated ones' apart where they differ | where it is there
sed -n '/^## Tensors/,/^The same tensors/s/^| `\([a-z_0-9MN.]*\)` | \(.*\) | \(.*\) |$/\1|\2|\3/p' "$root/docs/checkpoints.md" >table.txt
check "rows: $(wc -l <table.txt)" [ "$(wc -l <table.txt)" -ge 20 ]

numbers() { # "[(H + 2 K) C, D]": its numbers, a product where two factors stand side by side
    local text=$1 k
    for k in "${!size[@]}"; do text=${text//$k/${size[$k]}}; done
    text=$(sed -E 's/\) ?([0-9(])/) * \1/g; s/([0-9]) ([0-9(])/\1 * \2/g; s/([0-9]) ([0-9(])/\1 * \2/g' <<<"${text//[\[\]]/}")
    local out=() part
    IFS=, read -ra parts <<<"$text"
    for part in "${parts[@]}"; do out+=($((part))); done
    echo "[$(sed 's/ /, /g' <<<"${out[*]}")]"
}
# shape_of NAME ACTIVATION: what the table says; the first brackets behind the activation's name, or the first at all
shape_of() {
    local text
    text=$(grep -F "$1|" table.txt | cut -d'|' -f2)
    if [[ $text == *"$2 ["* ]]; then text=${text#*"$2 "}; elif [[ $text == *" or ["* && $2 = gated ]]; then text=${text#* or }; fi
    numbers "[$(sed 's/^[^[]*\[\([^]]*\)\].*/\1/' <<<"$text")]"
}

: >seen.txt
# holds NAME ACTIVATION KEYS...: the tensors of a run with these keys
holds() {
    "$mt" --config tiny.ini run.dir="$1" train.steps=1 optim.warmup=0 checkpoint.every=0 "${@:3}" >/dev/null 2>"$1.err"
    "$mt" inspect "$1/checkpoints/step-00000001" >"$1.txt" 2>/dev/null
    local name shape n=0
    while read -r name shape; do
        n=$((n + 1))
        name=$(sed 's/layers\.[0-9]*\./layers.N./; s/^mtp\.[0-9]*\.\(norm[12]\|attn\|mlp\)\./layers.N.\1./
            s/^mtp\.[0-9]*\./mtp.M./' <<<"$name")
        echo "$name" >>seen.txt
        check "$1: $name $shape, the table says '$(shape_of "$name" "$2")'" [ "$(shape_of "$name" "$2")" = "$shape" ]
    done < <(sed -n 's/^\([a-z_0-9.]*\)  *F32 \(\[[0-9, ]*\]\) .*/\1 \2/p' "$1.txt")
    check "$1: $n tensors, $(grep -m1 error "$1.err")" [ $n -gt 5 ]
    for name in $(sed -n 's/|.*|always$//p' table.txt); do
        check "$1: $name is always there" grep -qE "^${name//N/[0-9]+} " "$1.txt"
    done
}
holds gpt2 gelu model.tied=false
holds llama gated model.arch=llama model.qk_norm=true
holds norms full model.qk_norm=full model.block_norms=both model.bias=false model.position=rope
holds sunk gated model.arch=llama model.sinks=true model.rope_dim=4
holds gated 'attention_gate`' model.attention_gate=true
latent=(model.arch=llama model.attention=mla model.kv_heads=0 model.head_dim=0 model.kv_lora_rank=12
    model.qk_nope_head_dim=5 model.qk_rope_head_dim=4 model.v_head_dim=8)
holds latent gated "${latent[@]}"
holds latents gated "${latent[@]}" model.q_lora_rank=10 model.bias=true model.attention_gate=true
holds beside gelu model.block_norms=parallel model.head_bias=true
holds besides gelu model.block_norms=parallel_two
delta=(model.delta_key_heads=3 model.delta_value_heads=6 model.delta_key_dim=4 model.delta_value_dim=7 model.delta_conv=5)
holds delta gated model.arch=llama model.mixer=delta "${delta[@]}" model.kv_heads=0 model.attention_dropout=0
holds hybrid gelu model.mixer=delta,attention "${delta[@]}" model.position=rope
kda=(model.kda_heads=3 model.kda_head_dim=4 model.kda_conv=5)
holds kda gated model.arch=llama model.mixer=kda "${kda[@]}" model.kv_heads=0 model.attention_dropout=0
mamba=(model.mamba_heads=6 model.mamba_head_dim=5 model.mamba_groups=3 model.mamba_state=7 model.mamba_conv=5)
holds mamba gated model.arch=llama model.mixer=mamba2 "${mamba[@]}" model.kv_heads=0 model.head_dim=0 \
    model.attention_dropout=0
holds unbiased gelu model.norm=layernorm model.norm_bias=false model.mtp_layers=1 model.position=none
check "norm_bias=false: no norm has a bias" [ "$(grep -c 'norm.*bias' unbiased.txt)" = 0 ]
check "each row of a norm's bias names norm_bias" \
    [ -z "$(grep -E '^[^|]*norm[12]?\.bias' table.txt | grep -v '`norm_bias`$')" ]
holds further gelu model.mtp_layers=2 model.position=none
holds queries gated model.arch=llama model.attention_bias=qkv
holds biased gated model.arch=llama model.bias=true
holds mixture gated model.arch=llama moe.experts=3 moe.ffn=16 moe.shared_ffn=56 moe.shared_gate=true moe.every=0,1
holds biases gelu moe.experts=3 moe.ffn=16
holds geglu gated model.arch=llama model.activation=geglu
holds clamped gated model.arch=llama model.bias=true model.activation=clamped_swiglu moe.experts=3 moe.ffn=16
holds gelus gelu moe.experts=3 moe.ffn=16 moe.shared_ffn=56
holds singles gelu model.mixer=attention,none model.ffn_layers=0,1
check "a block of attention alone has one norm" [ "$(grep -c '^layers.0.norm' singles.txt)" = "$(grep -c '^layers.0.norm1' singles.txt)" ]
size[W]=9
holds latent_experts gated model.arch=llama moe.experts=3 moe.ffn=16 moe.shared_ffn=56 moe.latent=9
for name in $(cut -d'|' -f1 table.txt); do check "$name is in some checkpoint" grep -qxF "$name" seen.txt; done
finish
