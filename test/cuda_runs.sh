# shellcheck shell=bash
# Tiny runs with device=cuda, on the emulator (or, with MEGATRAIN naming a CUDA build, on a GPU), of one configuration or
# another, for test_cuda_run.sh, test_cuda_resume.sh and test_cuda_hf.sh; evaluated on little, for the emulator is slow.
# Source it.
MEGATRAIN=${MEGATRAIN:-${BUILD:-build}/emu/megatrain}
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
make_tiny
steps=6 half=3
sed "s/^micro_batch = .*/micro_batch = 1/; s/^global_batch = .*/global_batch = 3/; s/^steps = .*/steps = $steps/; s/^eval_samples = .*/eval_samples = 6/
    s/^every = .*/every = $half/" tiny.ini >gpt2.ini
cat >llama.ini <<EOI
[model]
arch = llama
layers = 2
hidden = 48
heads = 4
kv_heads = 2
head_dim = 32
ffn = 64
seq = 24
qk_norm = true
window = 16,0
rope_layers = 0,1
rope_dim = 24
rope_scaling = yarn
[train]
micro_batch = 2
global_batch = 4
steps = $steps
eval_samples = 8
recompute = selective
[optim]
lr = 3e-3
warmup = 4
[data]
train = a
valid = b
[checkpoint]
every = $half
keep = 0
EOI
mixture() { # NAME KEYS...: NAME.ini, from llama.ini
    sed 's/^recompute = .*/recompute = none/; s/^seq = .*/seq = 24\nbias = false/' llama.ini >"$1.ini"
    printf '[moe]\n' >>"$1.ini"
    printf '%s\n' "${@:2}" >>"$1.ini"
}
mixture aux experts=6 topk=2 ffn=40 shared_ffn=32 shared_gate=true balance=aux aux_coeff=0.1 z_coeff=1e-3
mixture bias experts=16 topk=4 ffn=24 router=sigmoid scale=2.5 groups=4 group_topk=2 shared_ffn=32 \
    balance=bias bias_rate=0.02 aux_coeff=1e-2 every=0,1
mixture full experts=8 topk=2 ffn=40 router=softmax_pre balance=sinkhorn capacity=1 drop=position jitter=0.1

mixture biased experts=6 topk=2 ffn=40 shared_ffn=32 shared_gate=true
sed -i 's/^bias = .*/bias = true\nactivation = clamped_swiglu\nactivation_limit = 0.1/' biased.ini

sed 's/^qk_norm = .*/sinks = true\nattention_gate = true\nattention_softcap = 2/' llama.ini >variants.ini

latent="attention = mla\nq_lora_rank = 24\nkv_lora_rank = 32\nqk_nope_head_dim = 16\nqk_rope_head_dim = 8"
latent+="\nv_head_dim = 24\nrope_mscale_all = 1\nbias = true\nattention_gate = true"
sed "/^kv_heads/d; /^head_dim/d; /^rope_dim/d; s/^qk_norm = .*/$latent/" \
    llama.ini >latent.ini

hybrid="mixer = delta,attention\ndelta_key_heads = 2\ndelta_value_heads = 4\ndelta_key_dim = 16\ndelta_value_dim = 24"
sed "s/^qk_norm = .*/$hybrid/; s/^window = .*/window = 0,16/" llama.ini >hybrid.ini

kda="mixer = kda,attention\nkda_heads = 8\nkda_head_dim = 16"
sed "s/^qk_norm = .*/$kda/; s/^window = .*/window = 0,16/" llama.ini >kda.ini

mamba="mixer = mamba2,attention\nmamba_heads = 8\nmamba_head_dim = 16\nmamba_groups = 2\nmamba_state = 24"
sed "s/^qk_norm = .*/$mamba/; s/^window = .*/window = 0,16/" llama.ini >mamba.ini

mixture nemotron experts=6 topk=2 ffn=40 latent=24 shared_ffn=32 router=sigmoid scale=2.5 balance=bias bias_rate=0.02
letters="mixer = none,attention,mamba2,none\nffn_layers = 1,0*2\nactivation = relu2\nmamba_heads = 8\nmamba_head_dim = 16\nmamba_state = 24"
sed -i "s/^qk_norm = .*/$letters/; s/^window = .*/window = 0,16/; s/^layers = .*/layers = 4/" nemotron.ini

run() { # NAME CONFIG keys...
    EMU_REPORT=$PWD/$1.kernels "$mt" --config "$2" run.dir="$1" "${@:3}" >"$1.out" 2>"$1.err"
    local status=$?
    [ $status -eq 0 ] || { bad "exit $status: run $*"; head -3 "$1.err"; }
}

# close A B TOLERANCE: as many losses, each within the relative tolerance; NaN fails
close() {
    paste <(losses "$1") <(losses "$2") | awk -v tol="$3" -v steps=$steps '
        { d = $2 - $4; if (d < 0) d = -d; if (!($1 == $3 && d <= tol * $4)) bad = 1; n++ }
        END { exit !(n == steps && !bad) }'
}
