#!/usr/bin/env bash
# Ranks over NCCL on the GPUs of this machine: a few steps of a tiny model in each way to cut it, twice, which must have
# the same bits, losses and all tensors. 2 ranks, and 4, a GPU each, where there are so many (GPU_RANKS: another most).
# GPU_SHARED=1: all of them on one GPU, which NCCL then takes for several hosts (docs/comm.md). There a layout's losses
# are compared with those through the host, too, and a rank is killed. GPU_FEW=1: a few of these layouts.
# MEGATRAIN names a binary with the CUDA backend; the emulated one will do.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch=$root/scripts/launch.sh
steps=4 layers=4
[ -z "${GPU_FEW:-}" ] || steps=3 layers=2
shared=${GPU_SHARED:+1}
count=$("$mt" doctor 2>/dev/null | grep -c '^gpu [0-9]')
if [ "$count" -lt $((shared ? 1 : 2)) ]; then
    skip "ranks on GPUs: $count GPU, $([ -n "$shared" ] && echo one is || echo two or more are) needed"
    finish
fi
most=${GPU_RANKS:-4}
if [ -n "$shared" ]; then
    # (the first alone; sockets of this host; room for several ranks' kernels and buffers)
    export EMU_DEVICES=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*} NCCL_IB_DISABLE=1
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
    export NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-4} NCCL_BUFFSIZE=${NCCL_BUFFSIZE:-1048576}
elif [ "$most" -gt "$count" ]; then most=$count
fi
make_tiny
make_ini ranks.ini model.layers=$layers model.hidden=64 model.heads=4 model.seq=16 model.dropout=0.1 \
    train.global_batch=8 train.steps=$steps train.eval_every=0 optim.lr=3e-3
dense='model.arch=llama model.kv_heads=4 model.dropout=0'
one='train.micro_batch=1'
mixture='model.arch=llama model.bias=false moe.experts=4 moe.topk=2 moe.ffn=32'

rank_env=() # of each rank, in which RANK is its number
train() { # DIR RANKS KEYS...
    timeout 120 "$launch" -n "$2" -- "${rank_env[@]}" "$mt" --config ranks.ini run.dir="$1" run.device=cuda "${@:3}" \
        >/dev/null 2>"$1.err" || echo "$1: exit $?, $(grep -m1 error "$1.err")" >"$1.failed"
}
# Runs of a layout side by side where there are processors for them: most of their time they start.
beside() { if [ "$(nproc)" -ge 8 ]; then "$@" & else "$@"; fi; }

layout() { # NAME RANKS TOLERANCE KEYS...: of losses beside those through the host
    local name=$1 ranks=$2 tolerance=$3 again
    shift 3
    beside train "$name" "$ranks" ${shared:+parallel.staged=false} "$@"
    beside train "$name-again" "$ranks" ${shared:+parallel.staged=false} "$@"
    [ -z "$shared" ] || beside train "$name-staged" "$ranks" parallel.staged=true "$@" run.graphs=auto
    wait
    for again in '' -again -staged; do [ ! -f "$name$again.failed" ] || bad "$(cat "$name$again.failed")"; done
    check "$name: over NCCL: $(grep 'between GPUs' "$name.err")" grep -q 'between GPUs: NCCL' "$name.err"
    check "$name, $ranks ranks, repeated: other bits" same_run "$name-again" "$name" $steps
    [ -z "$shared" ] || check "$name: losses within $tolerance of those through the host" \
        near "$name" "$name-staged" $steps "$tolerance"
    echo "$name on $ranks GPUs, last loss $(losses "$name" | sed -n '$s/.* //p')"
}
layouts() { # those of the list, of no more ranks than there may be
    local name ranks tolerance keys
    while read -r name ranks tolerance keys; do
        [ "$ranks" -le "$most" ] || continue
        # shellcheck disable=SC2086
        layout "$name" "$ranks" "$tolerance" $keys
    done
}
if [ -z "$shared" ]; then
    layouts <<EOM
dp2 2 1 parallel.zero=1
tp2 2 1 parallel.tp=2
ep2 2 1 $mixture parallel.ep=2 parallel.zero=1
pp2 2 1 parallel.pp=2 parallel.schedule=zb-h1
dp4 4 1 parallel.zero=1
tp2-dp2 4 1 parallel.tp=2
ep2-pp2 4 1 $mixture parallel.ep=2 parallel.pp=2
EOM
    finish
fi

layouts <<EOM
zero1 2 1e-5 run.precision=fp32 parallel.zero=1
tp2 2 1e-2 run.precision=bf16 parallel.tp=2
EOM

# ranks that are of one host, whoever says so; 2.30.3 takes them, if it is asked to
cat >of-hosts.sh <<'EOM'
NCCL_HOSTID=h$((RANK / of)) exec "$@"
EOM
rank_env=(env of=2 bash "$PWD/of-hosts.sh")
expect 2 "ranks 0 and 1 share a GPU and NCCL_HOSTID=h0, which NCCL" "$launch" -n 2 -- "${rank_env[@]}" "$mt" \
    --config ranks.ini run.dir=one-host run.device=cuda parallel.staged=false
! "$mt" doctor 2>/dev/null | grep -q "^gpu .*Emulated" || export EMU_NCCL_VERSION=23003
version=$("$mt" doctor 2>/dev/null | sed -n 's/^nccl *\([0-9.]*\) .*/\1/p')
export NCCL_MULTI_RANK_GPU_ENABLE=1
if [ "$(printf '%s\n' 2.30.3 "$version" | sort -V | head -1)" = 2.30.3 ]; then
    layout switch 2 1e-2 run.precision=bf16 parallel.tp=2
    [ -n "${GPU_FEW:-}" ] || [ "$most" -lt 4 ] || layout two-hosts 4 1e-2 run.precision=bf16 parallel.tp=2
    check "and says by what" grep -q '(ranks 0 and 1 share a GPU: NCCL_MULTI_RANK_GPU_ENABLE)' switch.err
else skip "several ranks of a host on a GPU: NCCL $version, 2.30.3 or later is needed"; fi
unset NCCL_MULTI_RANK_GPU_ENABLE EMU_NCCL_VERSION
rank_env=()

# a rank is killed: exit 7, its number is named, and nobody is left behind
killed=killed-$$
timeout 300 "$launch" -n 2 -- "$mt" --config ranks.ini run.dir="$killed" run.device=cuda train.steps=100000 \
    optim.decay_steps=100000 parallel.staged=false parallel.tp=2 >/dev/null 2>killed.err &
pid=$!
for _ in $(seq 1200); do
    sleep 0.1
    grep -q 'step 2/' killed.err && break
done
victim=''
for p in $(pgrep -f "run.dir=$killed "); do
    [ "$(tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | sed -n 's/^RANK=//p')" = 1 ] &&
        [ "$(readlink "/proc/$p/exe")" = "$mt" ] && victim=$p
done
check "rank 1 runs: $(tail -1 killed.err)" [ -n "$victim" ]
[ -z "$victim" ] || kill -9 "$victim"
wait "$pid"
status=$?
check "rank 1 is killed: exit 7, got $status" [ $status -eq 7 ]
check "and named: $(grep -m1 error killed.err)" grep -q 'error (peer lost): rank 1 .* was lost' killed.err
check "nobody is left" [ -z "$(pgrep -f "run.dir=$killed ")" ]
[ -z "${GPU_FEW:-}" ] || finish

layouts <<EOM
zero0 2 1e-5 run.precision=fp32 parallel.zero=0
zero2 2 1e-5 run.precision=fp32 parallel.zero=2
zero3 2 1e-5 run.precision=fp32 parallel.zero=3
tp2-bands 2 1e-2 run.precision=bf16 parallel.tp=2 parallel.overlap_tp=2
pp-1f1b 2 1e-2 run.precision=bf16 parallel.pp=2
pp-zb 2 1e-2 run.precision=bf16 parallel.pp=2 parallel.schedule=zb-h1
pp-dual 2 1e-2 run.precision=bf16 parallel.pp=2 parallel.schedule=dualpipev
ep 2 1e-2 run.precision=bf16 $mixture parallel.ep=2 parallel.zero=1
ep-gather 2 1e-2 run.precision=bf16 $mixture parallel.ep=2 moe.dispatcher=allgather
ep-node 2 1e-2 run.precision=bf16 $mixture parallel.ep=2 moe.dispatcher=node debug.ranks_per_host=1
cp-ring 2 1e-2 run.precision=bf16 $dense parallel.cp=2 parallel.cp_comm=ring
cp-gather 2 1e-2 run.precision=bf16 $dense parallel.cp=2 parallel.cp_comm=allgather
cp-a2a 2 1e-2 run.precision=bf16 $dense parallel.cp=2 parallel.cp_comm=a2a
muon 2 1e-2 run.precision=bf16 optim.name=muon parallel.zero=1
states 2 1e-5 run.precision=fp32 parallel.zero=1 optim.states=host
offload 2 1e-5 run.precision=fp32 parallel.zero=1 train.offload=2
graphs 2 1e-5 run.precision=fp32 parallel.zero=1 run.graphs=true
zero3-4 4 1e-5 run.precision=fp32 parallel.zero=3
tp2-dp2 4 1e-2 run.precision=bf16 parallel.tp=2
ep-node-4 4 1e-2 run.precision=bf16 $mixture parallel.ep=4 moe.dispatcher=node debug.ranks_per_host=2 $one
ep2-pp2 4 1e-2 run.precision=bf16 $mixture parallel.ep=2 parallel.pp=2
cp4 4 1e-2 run.precision=bf16 $dense parallel.cp=4 parallel.cp_comm=ring
EOM
check "steps are recorded" grep -q "graphs: " graphs.err
check "recorded steps beside NCCL: other bits" same_run graphs zero1 $steps
check "states in the host's memory: other bits" same_run states zero1 $steps
check "offloaded activations: other bits" same_run offload zero1 $steps
finish
