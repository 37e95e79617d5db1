#!/usr/bin/env bash
# Every configuration key is alive: set away from its default, it changes something that can be seen from outside.
# One row for each key; a key of `megatrain config explain` without a row fails, and so does a row without a key.
#
#   key | other value | what is seen | context: further keys, for both runs
#
# seen:  loss                the losses of three steps differ
#        same TEXT           the losses are the same bits, and stderr says TEXT, which it does not say without
#        same memory         the losses are the same bits, the memory of the run is another
#        rows N              N steps are in metrics.jsonl, not 3
#        valid               the losses are the same bits, those of the evaluations are not
#        file NAME           the run leaves this file and does not without; no file NAME: the other way round
#        line TEXT           stderr says TEXT, which it does not say without
#        no line TEXT        stderr does not say TEXT, which it says without
#        elsewhere           the run is in other/place
#        refused CODE TEXT   the run ends with that exit code and one error line that says TEXT
# context: RANKS=N            both runs are of N processes
#          LATENT             both have latent attention
#          FP8_EXPERTS        both have experts and operands of 8 bits
#          ALONE              the run is one of two ranks, of which the other never comes; it is compared with nothing
. "$(dirname "$0")/lib.sh"

table() {
    cat <<'EOT'
run.dir                    | other/place  | elsewhere
run.name                   | otter        | same otter:
run.device                 | cuda         | refused 2 CUDA
run.precision              | bf16         | loss
run.fp8                    | blockwise    | loss | run.precision=fp8 model.layers=3
run.fp8_weights            | true         | same memory | run.precision=fp8 model.layers=3
run.fp8_keep               | 0            | loss | run.precision=fp8 model.layers=3
run.fp8_experts            | false        | loss | FP8_EXPERTS
run.fp32_residual          | false        | loss | run.precision=bf16
run.fp32_vectors           | false        | loss | run.precision=bf16
run.fp32_row_sums          | false        | loss | run.precision=bf16 moe.experts=4 model.bias=false
run.seed                   | 5            | loss
run.reproducible           | run          | loss
run.graphs                 | true         | refused 2 only device=cuda
run.autotune               | true         | refused 2 only device=cuda
run.bind                   | core         | same run.bind=core | RANKS=2
run.restarts               | 2            | same run.restarts is on | RANKS=2
model.arch                 | llama        | loss
model.layers               | 2            | loss
model.hidden               | 64           | loss
model.heads                | 2            | loss
model.kv_heads             | 2            | loss
model.head_dim             | 4            | loss
model.ffn                  | 64           | loss
model.seq                  | 64           | loss
model.vocab                | 300          | loss
model.position             | none         | loss
model.rope_base            | 10           | loss | model.position=rope
model.rope_base_local      | 10           | loss | model.position=rope model.window=5
model.rope_layers          | 0,1          | loss | model.position=rope model.layers=2
model.rope_dim             | 4            | loss | model.position=rope
model.rope_scaling         | linear       | loss | model.position=rope
model.rope_factor          | 4            | loss | model.position=rope model.rope_scaling=linear
model.rope_original        | 16           | loss | model.position=rope model.rope_scaling=llama3
model.rope_slow            | 0.5          | loss | model.position=rope model.rope_scaling=llama3 model.rope_original=16
model.rope_fast            | 8            | loss | model.position=rope model.rope_scaling=llama3 model.rope_original=16
model.rope_magnitude       | 2            | loss | model.position=rope model.rope_scaling=yarn
model.rope_mscale_all      | 1            | loss | LATENT model.rope_scaling=yarn
model.rope_truncate        | false        | loss | model.position=rope model.rope_scaling=yarn model.rope_original=64
model.norm                 | rmsnorm      | loss
model.norm_bias            | false        | loss | model.norm=layernorm
model.norm_eps             | 1e-2         | loss
model.block_norms          | post         | loss | model.bias=false
model.state_norms          | pre          | loss | model.bias=false model.block_norms=post model.mixer=delta
model.embed_scale          | 8            | loss | model.position=rope
model.residual_scale       | 0.5          | loss
model.head_bias            | true         | loss
model.logits_scale         | 0.5          | loss
model.final_softcap        | 0.01         | loss
model.activation           | swiglu       | loss
model.activation_limit     | 0.05         | loss | model.activation=clamped_swiglu
model.bias                 | false        | loss
model.attention_bias       | qkv          | loss
model.tied                 | false        | loss
model.dropout              | 0.1          | loss
model.attention_dropout    | 0.1          | loss
model.qk_norm              | true         | loss
model.attention_scale      | 3            | loss
model.attention_softcap    | 0.01         | loss
model.sinks                | true         | loss
model.attention_gate       | true         | loss
model.init_std             | 0.03         | loss
model.attention            | mla          | loss | model.position=rope
model.q_lora_rank          | 8            | loss | LATENT
model.kv_lora_rank         | 16           | loss | LATENT
model.qk_nope_head_dim     | 8            | loss | LATENT
model.qk_rope_head_dim     | 8            | loss | LATENT
model.latent_norm_eps      | 0.1          | loss | LATENT
model.v_head_dim           | 8            | loss | LATENT
model.mixer                | delta,attention | loss | model.layers=2
model.ffn_layers           | 1,0          | loss | model.layers=2
model.delta_key_heads      | 2            | loss | model.mixer=delta
model.delta_value_heads    | 16           | loss | model.mixer=delta
model.delta_key_dim        | 16           | loss | model.mixer=delta
model.delta_value_dim      | 16           | loss | model.mixer=delta
model.delta_conv           | 3            | loss | model.mixer=delta
model.delta_norm_eps       | 0.1          | loss | model.mixer=delta
model.delta_negative       | true         | loss | model.mixer=delta
model.kda_heads            | 2            | loss | model.mixer=kda
model.kda_head_dim         | 16           | loss | model.mixer=kda
model.kda_conv             | 3            | loss | model.mixer=kda
model.kda_bound            | -5           | loss | model.mixer=kda
model.mamba_heads          | 2            | loss | model.mixer=mamba2
model.mamba_head_dim       | 16           | loss | model.mixer=mamba2
model.mamba_groups         | 2            | loss | model.mixer=mamba2
model.mamba_state          | 16           | loss | model.mixer=mamba2
model.mamba_conv           | 3            | loss | model.mixer=mamba2
model.mamba_conv_bias      | false        | loss | model.mixer=mamba2
model.mamba_dt_min         | 0.5          | loss | model.mixer=mamba2
model.window               | 4,0          | loss | model.layers=2
model.mtp_layers           | 1            | loss | model.position=none
model.mtp_weight           | 0.5          | loss | model.position=none model.mtp_layers=1
moe.experts                | 4            | loss | model.bias=false
moe.topk                   | 1            | loss | moe.experts=4 model.bias=false
moe.ffn                    | 64           | loss | moe.experts=4 model.bias=false
moe.shared_ffn             | 64           | loss | moe.experts=4 model.bias=false
moe.shared_gate            | true         | loss | moe.experts=4 model.bias=false moe.shared_ffn=64
moe.latent                 | 24           | loss | moe.experts=4 model.bias=false
moe.every                  | 0,1          | loss | moe.experts=4 model.bias=false model.layers=2
moe.router                 | sigmoid      | loss | moe.experts=4 model.bias=false
moe.normalize              | true         | loss | moe.experts=4 model.bias=false moe.router=softmax_pre
moe.scale                  | 2.5          | loss | moe.experts=4 model.bias=false
moe.balance                | aux          | loss | moe.experts=4 model.bias=false
moe.aux_coeff              | 0.1          | loss | moe.experts=4 model.bias=false moe.balance=aux
moe.unit                   | 2            | loss | moe.experts=4 model.bias=false moe.balance=aux moe.aux_coeff=1 train.micro_batch=2
moe.bias_rate              | 0.5          | loss | moe.experts=4 model.bias=false moe.balance=bias moe.router=sigmoid
moe.z_coeff                | 0.1          | loss | moe.experts=4 model.bias=false
moe.jitter                 | 0.1          | loss | moe.experts=4 model.bias=false
moe.groups                 | 2            | loss | model.bias=false moe.experts=8
moe.group_topk             | 2            | loss | model.bias=false moe.experts=8 moe.groups=4
moe.group_best             | 1            | loss | model.bias=false moe.experts=8 moe.groups=2 moe.topk=4
moe.capacity               | 1            | loss | moe.experts=4 model.bias=false
moe.drop                   | position     | loss | moe.experts=4 model.bias=false moe.capacity=1
moe.pad                    | true         | refused 2 no capacity to pad to | moe.experts=4 model.bias=false
moe.slack                  | 1.9          | same memory | RANKS=2 moe.experts=4 model.bias=false parallel.ep=2
moe.overflow               | drop         | refused 2 give slack | moe.experts=4 model.bias=false run.reproducible=run
moe.dispatcher             | allgather    | same memory | RANKS=2 moe.experts=4 model.bias=false parallel.ep=2
parallel.tp                | 2            | same memory | RANKS=2
parallel.pp                | 2            | same memory | RANKS=2 model.layers=2
parallel.vpp               | 2            | same memory | RANKS=2 model.layers=4 parallel.pp=2
parallel.cp                | 2            | same memory | RANKS=2 parallel.seq_blocks=4
parallel.slices            | 2            | same memory | RANKS=2 model.layers=2 parallel.pp=2 parallel.seq_blocks=2 parallel.attn_block=8
parallel.cp_heads | 4 | same memory | RANKS=4 parallel.cp=4 parallel.cp_comm=hierarchical parallel.seq_blocks=8 parallel.attn_block=8
parallel.cp_comm           | ring         | same memory | RANKS=2 parallel.cp=2 parallel.seq_blocks=4 parallel.attn_block=8
parallel.cp_cut            | contiguous   | same memory | RANKS=2 parallel.cp=2 parallel.seq_blocks=4
parallel.ep                | 2            | same memory | RANKS=2 moe.experts=4 model.bias=false
parallel.etp               | 2            | same memory | RANKS=2 moe.experts=4 model.bias=false
parallel.sp                | false        | same memory | RANKS=2 parallel.tp=2
parallel.order             | tp-cp-ep-pp-dp | same numbered tp, pp, dp | RANKS=2 model.layers=2 parallel.pp=2
parallel.schedule          | gpipe        | same memory | RANKS=2 model.layers=2 parallel.pp=2 train.global_batch=16
parallel.group             | 4            | same memory | RANKS=2 model.layers=4 parallel.pp=2 parallel.vpp=2 train.global_batch=16
parallel.layout            | Et|ttL       | same memory | RANKS=2 model.layers=3 parallel.pp=2
parallel.zero              | 1            | same memory | RANKS=2
parallel.reshard           | never        | same memory | RANKS=2 parallel.zero=3
parallel.zero_group        | 2            | same memory | RANKS=4 parallel.zero=2 train.micro_batch=1
parallel.bucket_mb         | 1            | line 3 gradient buckets | RANKS=2 model.hidden=128
parallel.tp_blocks         | 1            | loss
parallel.seq_blocks        | 2            | loss
parallel.attn_block        | 8            | loss
parallel.overlap_grad      | true         | same reduced during backward | RANKS=2
parallel.overlap_param     | true         | same gathered during forward | RANKS=2 parallel.zero=1
parallel.overlap_tp        | 2            | same in 2 bands | RANKS=2 parallel.tp=2
parallel.overlap_moe       | true         | same memory | RANKS=2 moe.experts=4 model.bias=false parallel.ep=2 parallel.schedule=dualpipev train.global_batch=16 model.layers=2
parallel.auto              | true         | refused 2 doctor --calibrate
parallel.auto_device       | h100         | refused 2 nothing is planned
parallel.staged            | true         | refused 2 only device=cuda
parallel.data_port         | 28000        | same data ports from 28000 on | RANKS=2
parallel.timeout_s         | 1            | refused 10 waited 1 s | ALONE
parallel.freeze_s          | 5            | same frozen after 5 s | RANKS=2
parallel.stall_s           | 5            | same hung after 5 s | RANKS=2
parallel.nccl.tp.min_ctas  | 4            | refused 2 only device=cuda
parallel.nccl.tp.max_ctas  | 4            | refused 2 only device=cuda
parallel.nccl.dp.min_ctas  | 4            | refused 2 only device=cuda
parallel.nccl.dp.max_ctas  | 4            | refused 2 only device=cuda
train.micro_batch          | 1            | same memory
train.global_batch         | 8            | loss
train.steps                | 4            | rows 4
train.tokens               | 250          | rows 2
train.stop_at              | 2            | rows 2
train.max_minutes          | 1e-9         | refused 75 train.max_minutes
train.eval_every           | 2            | valid
train.eval_batches         | 3            | valid | train.eval_samples=0
train.eval_samples         | 12           | valid
train.eval_tasks           | asked.jsonl  | same step 3: asked, acc
train.recompute            | full*1,none  | same memory | model.layers=2
train.offload              | 1            | same memory
optim.name                 | muon         | loss
optim.lr                   | 1e-2         | loss
optim.min_lr               | 1e-3         | loss
optim.min_lr_ratio         | 0.5          | loss
optim.schedule             | constant     | loss
optim.warmup               | 2            | loss
optim.decay_steps          | 6            | loss
optim.wsd_decay            | 2            | loss | optim.schedule=wsd
optim.weight_decay         | 0            | loss
optim.beta1                | 0.5          | loss
optim.beta2                | 0.5          | loss
optim.moments              | bf16         | loss
optim.states               | host         | same the device is the host
optim.eps                  | 1e-3         | loss
optim.clip                 | 0            | loss
optim.mup_base             | 16           | loss
optim.mup_head_dim         | 2            | loss | optim.mup_base=16
optim.qk_clip              | 0.01         | loss
optim.qk_clip_alpha        | 0.9          | loss | optim.qk_clip=0.01
optim.muon_momentum        | 0.5          | loss | optim.name=muon
optim.muon_nesterov        | false        | loss | optim.name=muon
optim.muon_coefficients    | quintic      | loss | optim.name=muon
optim.muon_steps           | 3            | loss | optim.name=muon
optim.muon_scale           | shape        | loss | optim.name=muon
optim.muon_split           | head         | loss | optim.name=muon
optim.muon_router          | adamw        | loss | optim.name=muon moe.experts=4 model.bias=false
data.train                 | b            | loss
data.start                 | 7            | loss
data.valid                 | a            | valid
data.split                 | 50,50        | loss | data.valid=
data.tokenizer             | bpe.json     | loss | data.train=plain data.valid=plain
data.seed                  | 5            | loss
data.mask_eod              | true         | loss | data.train=d
data.reset_at_eod          | true         | loss | data.train=d
data.order                 | megatron     | loss
checkpoint.every           | 2            | file checkpoints/step-00000002/manifest.json
checkpoint.keep            | 0            | file checkpoints/step-00000001/manifest.json | checkpoint.every=1
checkpoint.keep_every      | 1            | file checkpoints/step-00000001/manifest.json | checkpoint.every=1
checkpoint.keep_best       | 1            | file checkpoints/step-00000001/manifest.json | checkpoint.every=1 train.eval_every=1 optim.lr=0
checkpoint.best_set        | nowhere      | refused 2 no validation set 'nowhere' | checkpoint.every=1 train.eval_every=1 checkpoint.keep_best=1
checkpoint.resume          | base/checkpoints/step-00000003 | rows 0
checkpoint.load            | base         | loss
checkpoint.upcycle         | true         | refused 2 checkpoint.upcycle
checkpoint.fail_after      | -1           | refused 2 checkpoint.fail_after
checkpoint.async           | true         | same memory
log.every                  | 2            | no line step 1/3
log.tensorboard            | true         | file events.out.tfevents.*
log.jsonl                  | false        | no file metrics.jsonl
log.prometheus             | now.prom     | file now.prom
log.max_attention_logit    | true         | same max logit
log.color                  | always       | same [1;36m
log.trace_every            | 3            | file timeline.json
log.trace_steps            | 2-3          | file timeline.json
log.trace_ranks            | 1            | refused 2 must be ranks of the run
debug.isa                  | c            | same c kernels
debug.dot                  | OTHER_DOT    | line bf16 by OTHER_DOT | run.precision=bf16
debug.threads              | 7            | same 7 threads
debug.poison               | true         | same debug.poison
debug.comm_check           | true         | refused 2 debug.comm_check
debug.comm_delay_ms        | 5            | refused 2 debug.comm_delay_ms
debug.ranks_per_host       | 2            | refused 2 only moe.dispatcher=node goes by hosts | moe.experts=4 model.bias=false
debug.extra_shift          | 30           | line done again
debug.dump                 | layers.1.mlp.fc1.weight | file dump-0.safetensors | run.precision=fp8 model.layers=3
EOT
}

# ---- data: two token files of several documents, one of many short ones, a vocabulary; a model of one block
make_tiny
echo '{"context":"Line","continuation":"1"}' >asked.jsonl
for i in 1 2 3 4; do cat text.txt; echo; done >some.txt
for i in 1 2 3; do tac text.txt; echo; done >other.txt
sed 's/ of .*/\n/' text.txt >short.txt
for i in a:some b:other d:short; do
    "$mt" preprocess --force --input ${i#*:}.txt --tokenizer byte --output ${i%:*} --append-eod --split-blank-lines \
        >/dev/null 2>&1 || bad "preprocess"
done
"$mt" tokenizer train --input text.txt --vocab-size 300 --output bpe.json >/dev/null 2>&1
for i in bin idx; do cp a.$i plain.$i; done # without PREFIX.crc: ids of no tokenizer that is known
cat >keys.ini <<'EOI'
[run]
name = keys
[model]
layers = 1
hidden = 32
heads = 4
seq = 32
[train]
micro_batch = 2
global_batch = 4
eval_samples = 4
[optim]
lr = 3e-3
[data]
EOI

# run DIR WORDS...: in DIR, with these data and 3 steps unless the words say otherwise; stderr in DIR.err
run() {
    local dir=$1 words=() launch=() w
    for w in "${@:2}"; do
        case $w in
        LATENT) words+=(model.attention=mla model.position=rope) ;;
        FP8_EXPERTS) words+=(run.precision=fp8 run.fp8=blockwise run.fp8_keep=0 model.hidden=128 moe.ffn=128 moe.experts=4
                             model.bias=false) ;;
        RANKS=*) launch=("$root/scripts/launch.sh" -n "${w#*=}" --) ;;
        ALONE) [ $# -gt 2 ] || return 0; launch=(env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1) ;;
        *) words+=("$w") ;;
        esac
    done
    [[ " ${words[*]}" == *" run.dir="* ]] || words+=("run.dir=$dir")
    [[ " ${words[*]}" == *" data.train="* ]] || words+=(data.train=a)
    [[ " ${words[*]}" == *" data.valid="* ]] || words+=(data.valid=b)
    [[ " ${words[*]}" == *" train.steps="* || " ${words[*]}" == *" train.tokens="* ]] || words+=(train.steps=3)
    "${launch[@]}" "$mt" --config keys.ini "${words[@]}" >/dev/null 2>"$dir.err"
}
valids() { sed -n 's/.*"step":\([0-9]*\),.*"valid_loss":\([^,}]*\)[,}].*/\1 \2/p' "$1/metrics.jsonl"; }
memory() { sed -n 's/.*"memory_bytes":\([0-9]*\),.*/\1/p' "$1/metrics.jsonl" | head -1; }
one_error() { [ "$(grep -cE '^megatrain: (error|stopped)' "$1")" -eq 1 ]; }
says() { grep -qF -- "$2" "$1.err"; }

# seen KEY STATUS RUN BASE WHAT...: true if RUN shows it against BASE
seen() {
    local key=$1 status=$2 r=$3 base=$4 what=$5 rest=("${@:6}")
    case $what in
    refused) [ "$status" -eq "${rest[0]}" ] && one_error "$r.err" && says "$r" "${rest[*]:1}"; return ;;
    esac
    [ "$status" -eq 0 ] || return
    case $what in
    loss) [ "$(losses "$r" | wc -l)" -eq 3 ] && ! same_losses "$r" "$base" ;;
    rows) [ "$(losses "$r" | wc -l)" -eq "${rest[0]}" ] ;;
    valid) same_losses "$r" "$base" && [ -n "$(valids "$r")" ] && [ "$(valids "$r")" != "$(valids "$base")" ] ;;
    file) compgen -G "$r/${rest[0]}" >/dev/null && ! compgen -G "$base/${rest[0]}" >/dev/null ;;
    elsewhere) [ -s other/place/metrics.jsonl ] && [ ! -e "$r" ] ;;
    line) says "$r" "${rest[*]}" && ! says "$base" "${rest[*]}" ;;
    same)
        same_losses "$r" "$base" || return
        if [ "${rest[*]}" = memory ]; then [ "$(memory "$r")" != "$(memory "$base")" ]
        else says "$r" "${rest[*]}" && ! says "$base" "${rest[*]}"; fi ;;
    no)
        if [ "${rest[0]}" = file ]; then [ ! -e "$r/${rest[1]}" ] && [ -s "$base/${rest[1]}" ]
        else ! says "$r" "${rest[*]:1}" && says "$base" "${rest[*]:1}"; fi ;;
    *) echo "no such observation: $what"; return 1 ;;
    esac
}

run base
check "the run all others are compared with: $(tail -1 base.err)" [ "$(losses base | wc -l)" -eq 3 ]
declare -A base=([none]=base) row
n=0
# (the kind of products that this processor does not take by itself)
dot=$("$mt" doctor 2>/dev/null | grep -q '^bf16 dots *vdpbf16' && echo fma || echo vdpbf16)
while IFS= read -r line; do
    # the value of parallel.layout holds a bar: columns are parted by a bar between blanks
    IFS=$'\t' read -r key value what context <<<"$(sed 's/  *| */\t/g; s/^ *//; s/ *$//' <<<"$line")"
    [ -z "${row[$key]:-}" ] || bad "$key has two rows"
    row[$key]=1 n=$((n + 1))
    against=${base[${context:-none}]:-}
    if [ -z "$against" ]; then
        against=base$n base[$context]=base$n
        run "$against" $context || bad "the run with $context fails: $(tail -1 "$against.err")"
    fi
    run "k$n" $context "$key=$value"
    status=$?
    if seen "$key" $status "k$n" "$against" $what; then ok
    else bad "$key = $value: exit $status, not seen: $what: $(grep -m1 'error' "k$n.err")"; fi
done < <(table | sed "s/OTHER_DOT/$dot/g")

keys=$("$mt" config explain | sed -n 's/^\([a-z]*\.[a-z0-9_.]*\) = .*/\1/p')
check "there are keys" [ "$(wc -l <<<"$keys")" -gt 100 ]
for key in $keys; do check "$key has a row" [ -n "${row[$key]:-}" ]; unset "row[$key]"; done
check "rows without a key: ${!row[*]}" [ ${#row[@]} -eq 0 ]
finish
