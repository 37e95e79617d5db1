#!/usr/bin/env bash
# Several ranks with device=cuda, as processes: losses beside the run of one rank, the same bits when repeated, staged
# through the host where ranks share a GPU, a rank that is lost. In make test-emu on the emulator (EMU: where it was
# built) with its NCCL; in make test on the GPUs of this machine, 2 to 8 of them.
# EMU_STREAMS=queue, where all streams share a queue, is about what waits for what: nothing is repeated there, and what has
# the same calls in 16 bits is left to the other pass.
[ -z "${EMU:-}" ] || MEGATRAIN=$EMU/megatrain
. "$(dirname "$0")/lib.sh"
queue=$([ "${EMU_STREAMS:-}" != queue ] || echo 1)
launch="$root/scripts/launch.sh"
export OMP_NUM_THREADS=1
make_tiny
steps=3 # (the emulator is slow)
make_ini ranks.ini model.layers=2 model.hidden=32 model.heads=4 model.seq=16 model.dropout=0.1 \
    model.attention_dropout=0.1 train.global_batch=8 train.steps=$steps optim.lr=3e-3

gpus() { "$mt" doctor 2>/dev/null | grep -c '^gpu [0-9]'; }
export EMU_DEVICES=8
count=$(gpus)
check "doctor counts GPUs: $count" [ -n "$count" ]
[ "$count" -le 8 ] || count=8
[ -z "${EMU:-}" ] || count=4 # as many processes as two cores bear
if [ "$count" -eq 0 ]; then
    skip "ranks with GPUs: layouts tp, dp, tp x dp over NCCL, staged: this machine or build has no GPU"
    finish
fi

# run DIR RANKS DEVICES words...: over the first DEVICES GPUs
run() {
    local visible
    visible=$(seq -s, 0 $(($3 - 1)))
    EMU_DEVICES=$3 CUDA_VISIBLE_DEVICES=$visible timeout 600 "$launch" -n "$2" -- "$mt" --config ranks.ini run.dir="$1" \
        run.device=cuda "${@:4}" >/dev/null 2>"$1.err" || bad "$1: $(grep -m1 error "$1.err")"
}
words() { # tp zero overlap
    echo "parallel.tp=$1 parallel.zero=$2 parallel.overlap_grad=$3 parallel.overlap_param=$([ "$2" = 1 ] && echo "$3" || echo false)"
}

memory() { grep -o '"memory_bytes":[0-9]*' "$1/metrics.jsonl" | head -1 | cut -d: -f2; }

layouts() { # for as many GPUs as there are: ranks tp zero overlap
    local n
    for n in 2 4 8; do
        [ "$n" -le "$count" ] || continue
        [ "$n" -gt 2 ] || echo "2 2 0 false"
        [ "$n" -gt 2 ] || printf '2 1 %s true\n' 1 3
        [ "$n" -lt 4 ] || echo "$n 2 1 true"
        [ "$n" -lt 4 ] || echo "$n $((n / 2)) 0 true"
    done
}

for precision in fp32 $([ -n "$queue" ] || echo bf16); do
    tolerance=$([ $precision = fp32 ] && echo 1e-5 || echo 1e-2)
    p="run.precision=$precision"
    run one-$precision 1 1 $p
    check "$precision: one rank" [ "$(losses one-$precision | wc -l)" -eq $steps ]
    while read -r n tp zero overlap; do
        d=$precision-$n-$tp-$zero
        run "$d" "$n" "$n" $p $(words "$tp" "$zero" "$overlap")
        check "$d: over NCCL" grep -q 'between GPUs: NCCL [0-9]' "$d.err"
        check "$d: losses within $tolerance of one rank's" near "$d" one-$precision $steps $tolerance
        [ -n "$queue" ] || run "$d-again" "$n" "$n" $p $(words "$tp" "$zero" "$overlap")
        [ -n "$queue" ] || check "$d: repeated" same_run "$d-again" "$d" $steps
        [ "$zero" = 3 ] || continue
        run "$d-host" "$n" "$n" $p $(words "$tp" "$zero" "$overlap") optim.states=host
        check "$d: the same with states in the host's memory" same_run "$d-host" "$d" $steps
        check "$d: and less of the GPU's" [ "$(memory "$d-host")" -lt "$(memory "$d")" ]
    done < <(layouts)
    # ranks that share a GPU
    while read -r n tp zero overlap; do
        d=staged-$precision-$n-$tp
        run "$d" "$n" 1 $p $(words "$tp" "$zero" "$overlap")
        check "$d: staged, and says so" grep -q 'warning: between GPUs: staged .*: all [0-9]* ranks share one GPU' "$d.err"
        check "$d: losses within $tolerance of one rank's" near "$d" one-$precision $steps $tolerance
        [ "$n" -eq 2 ] && [ -z "$queue" ] || continue
        run "$d-again" "$n" 1 $p $(words "$tp" "$zero" "$overlap")
        check "$d: repeated" same_run "$d-again" "$d" $steps
    done <<<$'2 2 1 true\n2 1 3 true\n4 2 2 true'
done
# norms over all heads, whose rows travel between ranks that cut these; two ranks on as many GPUs as there are
norms="run.precision=fp32 model.arch=llama model.block_norms=post model.qk_norm=full model.kv_heads=2"
run norms-one 1 1 $norms
run norms 2 $((count < 2 ? 1 : 2)) $norms parallel.tp=2
check "norms over all heads, tp 2: losses within 1e-5 of one rank's" near norms norms-one $steps 1e-5
if [ "$count" -lt 2 ]; then
    skip "layouts over NCCL: 1 GPU, two or more are needed"
    finish
fi
[ "$count" -ge 4 ] || skip "layouts of 4 and 8 ranks over NCCL: $count GPUs"
[ -n "${EMU:-}" ] || [ "$count" -ge 8 ] || [ "$count" -lt 4 ] || skip "layouts of 8 ranks over NCCL: $count GPUs"

# gradients of four ranks, whose sum depends on its order: repeated, it is the same, for NCCL is kept from adding in
# switches; with reproducible=off it may, and the emulated one then never adds in one order twice
if [ "$count" -ge 4 ] && [ -z "$queue" ]; then
    four=(run.precision=fp32 parallel.zero=1)
    for d in four four-again; do run $d 4 4 "${four[@]}"; done
    check "four replicas repeated" same_run four-again four $steps
    check "and says why: $(grep 'between GPUs' four.err)" grep -q 'between GPUs: NCCL [0-9.]*, without NVLS' four.err
    for d in any any-again; do run $d 4 4 "${four[@]}" run.reproducible=off; done
    check "four replicas, in any order: losses within 1e-5" near any four $steps 1e-5
    check "and says so: $(grep 'between GPUs' any.err)" grep -q 'between GPUs: NCCL [0-9.]*, with NVLS' any.err
    [ -z "${EMU:-}" ] || check "in any order: other bits in each run" [ "$(losses any)" != "$(losses any-again)" ]
fi
EMU_DEVICES=2 NCCL_ALGO=NVLS expect 2 "NCCL_ALGO=NVLS asks NCCL for NVLS" "$launch" -n 2 -- "$mt" --config ranks.ini \
    run.dir=asks run.device=cuda
EMU_DEVICES=2 NCCL_COLLNET_ENABLE=1 expect 0 "NCCL_COLLNET_ENABLE=1: the network's switches" "$launch" -n 2 -- "$mt" \
    --config ranks.ini run.dir=none run.device=cuda train.stop_at=1
EMU_DEVICES=2 NCCL_ALGO=allgather:nvls,ring NCCL_PROTO=simple expect 0 "NVLS for gathers alone" "$launch" -n 2 -- "$mt" \
    --config ranks.ini run.dir=gathers run.device=cuda train.stop_at=1
check "and what orders follow from: $(grep 'in the environment' err.txt)" \
    grep -q 'in the environment: NCCL_ALGO=allgather:nvls,ring NCCL_PROTO=simple; repeats need' err.txt
NCCL_NVLS_ENABLE=1 expect 0 "! NCCL_NVLS_ENABLE asks NCCL for NVLS" "$mt" doctor
check "doctor says what is kept out: $(grep '^nccl' out.txt)" grep -q '^nccl .*without NVLS' out.txt

# a rank that is lost comes again by itself: its supervisor has no GPU
if [ -n "${EMU:-}" ]; then
    run calm 2 2 checkpoint.every=1
    MEGATRAIN_RANK_FAULT=1:step:3:kill run again 2 2 checkpoint.every=1 run.restarts=1
    check "started again: $(grep restart again.err)" grep -q 'restart 1: rank 1 .*was lost' again.err
    check "and the losses are the same" same_losses again calm
fi

# a GPU that fails in a step: all ranks end with its status, and one line names it
if [ -n "${EMU:-}" ]; then
    EMU_DEVICES=2 EMU_FAIL=214:200:1 expect 11 "GPU 1 of $(uname -n), 00000000:2B:00.0, GPU-656d7520-4750-" "$launch" -n 2 -- \
        "$mt" --config ranks.ini run.dir=failed run.device=cuda
    check "and CUDA's word: $(grep 'device failed' err.txt)" grep -q 'ECC error.* (cudaErrorECCUncorrectable)' err.txt
    check "and what mends it: $(grep hint err.txt)" grep -q 'hint: .*nvidia-smi --gpu-reset.*--exclude' err.txt
    check "in the log, as step.sh reads it" grep -q 'error (device failed).*GPU [0-9]* of [^ ,]*,' failed/log.txt
fi

# GPUs of their own without NCCL are an error, unless data are to go through the host; an older NCCL serves, and what it
# cannot do is said
if [ -n "${EMU:-}" ]; then
    without=(env EMU_DEVICES=2 EMU_NCCL_VERSION=22005 "$launch" -n 2 -- "$mt" --config ranks.ini run.device=cuda)
    expect 2 "has a GPU of its own, but no NCCL: libnccl.so.2 is NCCL 2.20.5" "${without[@]}" run.dir=without
    check "and what to do: $(grep hint err.txt)" grep -q 'hint: .*NCCL_HOME.*parallel.staged=true' err.txt
    EMU_NCCL_VERSION=22005 run wanted 2 2 run.precision=fp32 $(words 2 1 true) parallel.staged=true
    EMU_NCCL_VERSION=22105 run older 2 2 run.precision=fp32 $(words 1 1 true)
    check "an older NCCL: the same bits" same_run older fp32-2-1-1 $steps
    check "and says what it cannot do" grep -q 'warning: NCCL 2.21.5 does not start kernels of several groups' older.err
else
    run wanted 2 2 run.precision=fp32 $(words 2 1 true) parallel.staged=true
fi
check "staged as asked: $(grep 'between GPUs' wanted.err)" \
    grep -q 'warning: between GPUs: staged through the host: parallel.staged=true' wanted.err
check "as between ranks that share a GPU" same_run wanted staged-fp32-2-2 $steps

# fewer GPUs than ranks is a GPU that is missing, unless all ranks share one or the way through the host is asked for
if [ -n "${EMU:-}" ]; then
    few=("$launch" -n 3 -- "$mt" --config ranks.ini run.device=cuda train.stop_at=1 train.global_batch=6)
    EMU_DEVICES=2 expect 2 "ranks 0 and 2 share a GPU: host '$(uname -n)' has 3 ranks, which see 2 GPUs" "${few[@]}" run.dir=few
    check "and what to do: $(grep hint err.txt)" grep -q 'hint: .*nvidia-smi.*parallel.staged=true' err.txt
    EMU_DEVICES=2 expect 0 "staged through the host: parallel.staged=true" "${few[@]}" run.dir=few-asked parallel.staged=true
    EMU_DEVICES=3 expect 0 "between GPUs: NCCL" "${few[@]}" run.dir=few-none
    # (ranks that see one GPU each, as --gpus-per-task=1 shows it, take that one)
    each=("$launch" -n 2 -- bash -c 'CUDA_VISIBLE_DEVICES=$((6 - LOCAL_RANK)) exec "$@"' each)
    expect 0 "between GPUs: NCCL" "${each[@]}" "$mt" --config ranks.ini run.dir=one-each run.device=cuda \
        run.precision=fp32 $(words 2 0 false)
    check "one GPU each: the bits of ranks that see both" same_run one-each fp32-2-2-0 $steps
    EMU_DEVICES=2 expect 2 "ranks 0 and 1 share a GPU: host '$(uname -n)' has 3 ranks, which see 1 GPU" \
        "$launch" -n 3 -- bash -c 'CUDA_VISIBLE_DEVICES=$((LOCAL_RANK / 2)) exec "$@"' each "${few[@]:4}" run.dir=few-each
fi

# a rank is bound to the processors that are near its GPU: of two sockets, of one processor and one GPU each
socket() { # NUMBER MASK BUS...
    local sets="cpuset='$2' complete_cpuset='$2' nodeset='$2' complete_nodeset='$2'" bus id=4
    echo "<object type='Package' os_index='$1' gp_index='1$1' $sets>
        <object type='NUMANode' os_index='$1' gp_index='2$1' local_memory='1000000' $sets/>
        <object type='PU' os_index='$1' gp_index='3$1' $sets/>"
    for bus in "${@:3}"; do
        echo "<object type='Bridge' gp_index='$id$1' bridge_type='0-1' depth='0' bridge_pci='0000:[$bus-$bus]'>
            <object type='PCIDev' gp_index='$((id + 1))$1' pci_busid='0000:$bus:00.0' pci_type='0302 [10de:2330] [10de:1] a1'
                pci_link_speed='0'/></object>"
        id=$((id + 2))
    done
    echo "</object>"
}
{
    echo "<?xml version='1.0' encoding='UTF-8'?><!DOCTYPE topology SYSTEM 'hwloc2.dtd'><topology version='2.0'>
        <object type='Machine' os_index='0' gp_index='1' cpuset='0x3' complete_cpuset='0x3' allowed_cpuset='0x3'
            nodeset='0x3' complete_nodeset='0x3' allowed_nodeset='0x3'>"
    socket 0 0x1 1b
    socket 1 0x2 2b
    echo "</object></topology>"
} >sockets.xml
if [ -n "${EMU:-}" ] && [ -z "$queue" ] && [ "$(env -u OMP_NUM_THREADS taskset -c 0,1 nproc)" = 2 ]; then
    placed() { # DIR KEYS...: where the two ranks' threads may run, and the lines about it
        local pid kids=() r
        EMU_DEVICES=2 HWLOC_XMLFILE=$PWD/${topology:-sockets}.xml HWLOC_THISSYSTEM=1 MEGATRAIN_RANK_FAULT=1:step:1:stop \
            "$launch" -n 2 -- "$mt" --config ranks.ini run.dir="$1" run.device=cuda train.stop_at=1 "${@:2}" 2>"$1.err" &
        pid=$!
        until [ ${#kids[@]} -ge 2 ] && stands_still "${kids[1]}" || ! kill -0 $pid 2>/dev/null; do
            sleep 0.02
            read -ra kids <"/proc/$pid/task/$pid/children"
        done 2>/dev/null
        where=
        for r in 0 1; do
            where+=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/${kids[r]}/task/"*/status | sort -u | tr '\n' ' ')
        done
        kill -CONT "${kids[1]}"
        wait $pid
        check "$1 ends well: $(tail -1 "$1.err")" [ $? -eq 0 ]
    }
    placed bound run.bind=node
    check "each where its GPU is: $where" [ "$where" = "0 1 " ]
    check "and says so: $(grep run.bind bound.err)" grep -q \
        'run.bind=node: this rank is bound where its GPU is: PCI device 0000:1b:00.0 is near memory node 0, processors 0' bound.err
    placed free run.bind=none
    check "not bound where that is asked for: $where" [ "$where" != "0 1 " ]
    CUDA_VISIBLE_DEVICES=1,0 placed turned run.bind=node
    check "by the GPU, not by the rank: $where" [ "$where" = "1 0 " ]
    expect 0 "PCI device 0000:2b:00.0 is near memory node 1, processors 1" \
        env EMU_DEVICES=2 HWLOC_XMLFILE="$PWD/sockets.xml" "$mt" doctor
    EMU_DEVICES=2 expect 0 "run.bind=node: this rank is not bound: hwloc does not see PCI device 0000:2b:00.0" "$launch" -n 2 -- \
        "$mt" --config ranks.ini run.dir=unseen run.device=cuda train.stop_at=1 run.bind=node
    # both GPUs at the first socket: two ranks have no room on its one processor
    {
        sed '/^ *<object type=.Package/,$d' sockets.xml
        socket 0 0x1 1b 2b
        socket 1 0x2
        echo "</object></topology>"
    } >crowd.xml
    topology=crowd placed crowd run.bind=node
    check "two ranks on no processor that has room for one: $where" [ "$where" != "0 0 " ]
    for rank in 0 1; do
        check "rank $rank says so: $(grep run.bind crowd.err)" grep -q \
            "^\[rank $rank\] warning: run.bind=node: this rank is not bound: 2 ranks of 1 thread on the 1 processor near" crowd.err
    done
fi

# parts of matrices travel to their owners and back
muon="optim.name=muon run.precision=bf16"
run muon-one 1 1 $muon
for cut in parallel.zero=1 parallel.tp=2; do
    run "muon-$cut" 2 2 $muon $cut
    check "muon, $cut: losses within 1e-2 of one rank's" near "muon-$cut" muon-one $steps 1e-2
    [ -z "$queue" ] || continue
    run "muon-$cut-again" 2 2 $muon $cut
    check "muon, $cut: repeated" same_run "muon-$cut-again" "muon-$cut" $steps
done

# pipelines of 2 ranks, over NCCL and staged: near one rank's losses as other layouts are
deep=(model.layers=4 run.precision=bf16)
run deep 1 1 "${deep[@]}"
while read -r schedule vpp devices; do
    d=pipe-$schedule-$devices
    run "$d" 2 "$devices" "${deep[@]}" parallel.pp=2 parallel.schedule="$schedule" parallel.vpp="$vpp"
    check "$d: losses within 1e-2 of one rank's" near "$d" deep $steps 1e-2
    check "$d: $([ "$devices" = 2 ] && echo 'over NCCL' || echo staged)" \
        grep -q "between GPUs: $([ "$devices" = 2 ] && echo 'NCCL [0-9]' || echo staged)" "$d.err"
done <<<$'1f1b 1 2\n1f1b 1 1\ninterleaved 2 2\ninterleaved 2 1\nzb-h1 1 2\nzb-h1 1 1'
[ -n "$queue" ] || run pipe-again 2 2 "${deep[@]}" parallel.pp=2 parallel.schedule=zb-h1
[ -n "$queue" ] || check "a pipeline over NCCL repeated" same_run pipe-again pipe-zb-h1-2 $steps

# the head behind a module of multi-token prediction: two tensors between the last stages, the table on three ranks
if [ "$count" -ge 4 ]; then
    further=("${deep[@]}" model.mtp_layers=1 model.position=rope model.tied=true)
    run further 1 1 "${further[@]}"
    run further-apart 3 3 "${further[@]}" parallel.pp=3 "parallel.layout=Ett|ttm|L"
    check "a module apart from the head: losses within 1e-2 of one rank's" near further-apart further $steps 1e-2
fi

# timed products: rank 0's file has the shapes of both stages
timed=("${deep[@]}" train.micro_batch=2 train.stop_at=1)
shapes() { awk 'NR > 1 { print $1, $2, $3, $4, $5, $6, $7 }' "$1/gemm-algorithms.txt" | sort -u; }
run timed-one 1 1 "${timed[@]}"
run timed 2 2 "${timed[@]}" parallel.pp=2
check "algorithms of $(shapes timed | wc -l) shapes are kept, of one rank $(shapes timed-one | wc -l)" \
    [ "$(shapes timed)" = "$(shapes timed-one)" -a -s timed/gemm-algorithms.txt ]

# what is one and the same sum in any order is the same over NCCL and staged: 2 ranks
check "2 ranks: NCCL's sums of two are the tree's" near staged-fp32-2-2 fp32-2-2-0 $steps 1e-6

# a rank that is slow to enqueue its work is named, by waits of the device's streams: over NCCL, and staged. (Work that is
# staged runs at once, as on a GPU: on the emulator it would wait for its reader.)
named() { grep -o '"slowest_rank":1,"lag_ms":1[5-9][0-9]\|"slowest_rank":1,"lag_ms":[2-9][0-9][0-9]' "$1/metrics.jsonl" | wc -l; }
while read -r d devices streams; do
    [ -z "${EMU_STREAMS:-}" ] || break # (once: each case has its own)
    EMU_STREAMS=$streams MEGATRAIN_RANK_FAULT=1:forward:1:slow run "$d" 2 "$devices" run.precision=fp32 train.micro_batch=1 \
        train.global_batch=2 train.steps=8 train.eval_every=0
    # (what else the machine does may hide it in a step, in which rank 0 was kept longer, but not in all)
    check "$d: rank 1 is named in $(named "$d") of 8 steps" [ "$(named "$d")" -gt 0 ]
done <<<$'slow-nccl 2 late\nslow-staged 1 now'

# two ranks that share the model's only kv head
llama=(model.arch=llama model.kv_heads=1 run.precision=fp32)
run kv-one 1 1 "${llama[@]}"
run kv 2 2 "${llama[@]}" parallel.tp=2
check "a shared kv head: losses within 1e-5 of one rank's" near kv kv-one $steps 1e-5

# rows in bands beside products, over NCCL and staged, with and without sharded rows: the bits of rows that pass whole where
# products sum a row alike however many there are, as on the emulator; near them on GPUs
if [ "$count" -ge 4 ]; then
    while read -r name devices bands keys; do
        # shellcheck disable=SC2086
        run "whole-$name" 4 "$devices" run.precision=bf16 parallel.tp=4 parallel.overlap_tp=1 $keys
        # shellcheck disable=SC2086
        run "bands-$name" 4 "$devices" run.precision=bf16 parallel.tp=4 parallel.overlap_tp="$bands" $keys
        check "bands-$name: in bands, and says so" grep -q "in $bands bands" "bands-$name.err"
        [ -z "${EMU:-}" ] || check "bands-$name: the bits of whole rows" same_run "bands-$name" "whole-$name" $steps
        check "bands-$name: losses within 1e-2 of whole rows'" near "bands-$name" "whole-$name" $steps 1e-2
    done <<<$'nccl 4 2 train.recompute=selective\nstaged 1 4 model.arch=llama\nunsharded 4 4 parallel.sp=false'
    [ -n "$queue" ] || run bands-again 4 4 run.precision=bf16 parallel.tp=4 parallel.overlap_tp=2 train.recompute=selective
    [ -n "$queue" ] || check "bands repeated" same_run bands-again bands-nccl $steps
    run bands-fp32 4 4 run.precision=fp32 parallel.tp=4 parallel.overlap_tp=2
    check "bands in fp32: losses within 1e-5 of one rank's" near bands-fp32 one-fp32 $steps 1e-5
fi

# sequences over two ranks: keys part by part, gathered, for heads; documents and windows
long=(model.arch=llama model.kv_heads=2 model.window=9,0 data.reset_at_eod=true train.global_batch=4 train.eval_samples=4)
while read -r precision tolerance way devices; do
    d=cp-$precision-$way
    [ -d long-$precision ] || run long-$precision 1 1 "${long[@]}" run.precision=$precision
    run "$d" 2 "$devices" "${long[@]}" run.precision="$precision" parallel.cp=2 parallel.cp_comm="$way"
    check "$d: losses within $tolerance of one rank's" near "$d" long-$precision $steps $tolerance
done <<<$'fp32 1e-5 ring 2\nfp32 1e-5 allgather 1\nfp32 1e-5 a2a 2\nbf16 1e-2 ring 1\nbf16 1e-2 a2a 2'

# a ring of four turns; messages that are late change nothing
if [ "$count" -ge 4 ]; then
    ring=("${long[@]}" run.precision=fp32 parallel.cp=4 parallel.cp_comm=ring)
    run ring 4 4 "${ring[@]}"
    check "a ring of 4: losses within 1e-5 of one rank's" near ring long-fp32 $steps 1e-5
    run ring-late 4 4 "${ring[@]}" debug.comm_delay_ms=20
    check "a ring of 4 with late messages: the same bits" same_run ring-late ring $steps
fi

# sequences in slices along a pipeline: keys of earlier ones read where they were kept, or kept beside what is made again
while read -r precision tolerance slices recompute; do
    d=slices-$precision
    run "$d" 2 1 "${long[@]}" run.precision="$precision" parallel.pp=2 parallel.slices="$slices" train.micro_batch=1 \
        train.recompute="$recompute"
    check "$d: losses within $tolerance of one rank's" near "$d" long-$precision $steps $tolerance
done <<<$'fp32 1e-5 4 none\nbf16 1e-2 2 full'

# and slices that two ranks share
while read -r precision tolerance slices way; do
    d=shared-$precision
    run "$d" 2 1 "${long[@]}" run.precision="$precision" parallel.cp=2 parallel.slices="$slices" parallel.cp_comm="$way" \
        train.micro_batch=1
    check "$d: losses within $tolerance of one rank's" near "$d" long-$precision $steps $tolerance
done <<<$'fp32 1e-5 2 ring,allgather\nbf16 1e-2 2 a2a,ring'

# states of recurrences handed from rank to rank, over NCCL and staged, and round to the next slice; with one group, too
states=(model.seq=128 model.dropout=0 model.attention_dropout=0 data.reset_at_eod=true train.global_batch=2 train.micro_batch=1
    train.eval_samples=2 parallel.tp_blocks=1)
delta=(run.precision=fp32 model.mixer=delta,attention model.delta_key_heads=4 model.delta_key_dim=8)
mamba=(run.precision=bf16 model.mixer=mamba2,attention model.mamba_heads=8 model.mamba_head_dim=8 model.mamba_state=16 model.seq=256)
while read -r name devices tolerance keys; do
    [[ $name == delta* ]] && words=("${states[@]}" "${delta[@]}") || words=("${states[@]}" "${mamba[@]}")
    # shellcheck disable=SC2086
    run "$name-one" 1 1 "${words[@]}" ${keys##*:}
    # shellcheck disable=SC2086
    run "$name" 2 "$devices" "${words[@]}" parallel.cp=2 parallel.cp_comm=state,allgather ${keys/:/ }
    check "$name from rank to rank: losses within $tolerance of one rank's" near "$name" "$name-one" $steps $tolerance
done <<<$'delta-nccl 2 1e-5 train.recompute=selective:
delta-slices 1 1e-5 parallel.slices=2 parallel.cp_cut=contiguous:model.seq=256
mamba-group 2 1e-2 :'

# mixtures: experts on several ranks, rows to them over NCCL and staged; and the other layouts (short runs, for products
# of experts are slow on the emulator)
mixture=(model.arch=llama model.bias=false moe.experts=6 moe.topk=2 moe.ffn=24 moe.shared_ffn=16 moe.shared_gate=true
    moe.balance=aux moe.aux_coeff=0.1 train.global_batch=4 train.eval_samples=4)
for precision in fp32 $([ -n "$queue" ] || echo bf16); do
    tolerance=$([ $precision = fp32 ] && echo 1e-5 || echo 1e-2)
    moe=("${mixture[@]}" run.precision=$precision)
    run moe-$precision 1 1 "${moe[@]}"
    while read -r name n devices keys; do
        [ "$n" -le "$count" ] && [ "$devices" -le "$count" ] || continue
        case $precision-$name in fp32-* | *-ep | *-etp) ;; *) continue ;; esac # (16 bits: what moves rows)
        d=moe-$precision-$name
        # shellcheck disable=SC2086
        run "$d" "$n" "$devices" "${moe[@]}" $keys
        check "$d: losses within $tolerance of one rank's" near "$d" moe-$precision $steps $tolerance
    done <<'EOM'
ep 2 2 parallel.ep=2 parallel.zero=1
ep-staged 2 1 parallel.ep=2 parallel.zero=1
pairs 2 2 parallel.ep=2 parallel.schedule=dualpipev parallel.overlap_moe=true train.micro_batch=1
dp 2 2 parallel.zero=1
ep-group 4 4 parallel.ep=2 parallel.zero=3 parallel.zero_group=2 train.micro_batch=1
tp 2 2 parallel.tp=2
pp 2 2 parallel.pp=2 parallel.schedule=zb-h1
etp 2 2 parallel.etp=2
ep-tp 4 4 parallel.ep=2 parallel.tp=2 parallel.etp=2 moe.dispatcher=allgather
node 2 2 parallel.ep=2 moe.dispatcher=node debug.ranks_per_host=1
node-etp 4 4 parallel.ep=2 parallel.etp=2 moe.dispatcher=node debug.ranks_per_host=2 train.micro_batch=1
node-staged 4 1 parallel.ep=2 parallel.etp=2 moe.dispatcher=node debug.ranks_per_host=2 train.micro_batch=1
ep-pp 4 4 parallel.ep=2 parallel.pp=2 parallel.schedule=zb-h1 train.recompute=selective
EOM
done
[ -n "$queue" ] || run moe-again 2 2 "${moe[@]}" parallel.ep=2 parallel.zero=1
[ -n "$queue" ] || check "experts on two ranks repeated" same_run moe-again moe-bf16-ep $steps

# limits of a group reach NCCL, each its own; what sums gradients leaves products the rest while it does so: at most in
# the last backward of a step and the first forward of the next one, 17 + 34 of a step's 204 products, and not before
# the first step has shown when gradients are complete
wide=(run.precision=fp32 model.layers=4 model.hidden=128 train.micro_batch=1 data.valid=)
few() { awk '$2 " " $3 == "cublasLtMatmul on" { n = $1 } END { print n + 0 }' "$1.kernels"; }
counted() { # DIR KEYS...: without timing, but with what was chosen in the run `timed-wide`
    mkdir -p "$1"
    cp timed-wide/gemm-algorithms.txt "$1"
    NCCL_DEBUG=INFO EMU_REPORT=$PWD/$1.kernels run "$1" 2 2 "${wide[@]}" parallel.zero=1 "${@:2}"
}
if [ -n "${EMU:-}" ]; then
    run timed-wide 2 2 "${wide[@]}" parallel.zero=1 train.stop_at=1
    counted first train.stop_at=1
    counted beside
    check "beside products without being told" grep -q 'reduced during backward, gathered during forward' beside.err
    check "dp beside products: 16 at most" grep -q 'communicator dp0, CTAs from any to 16' beside.err
    check "no product of the first step is beside dp: $(few first)" [ "$(few first)" -eq 0 ]
    check "products beside dp in two steps, for half of the 4 multiprocessors: $(few beside)" \
        [ "$(few beside)" -gt 0 -a "$(few beside)" -le 102 ]
    run alone 2 2 "${wide[@]}" parallel.zero=1 parallel.overlap_grad=false parallel.overlap_param=false
    check "beside dp and alone: the same bits" same_run beside alone $steps
    NCCL_DEBUG=INFO run limits 4 4 parallel.tp=2 parallel.nccl.tp.min_ctas=2 parallel.nccl.tp.max_ctas=8 \
        parallel.nccl.dp.max_ctas=4
    check "names and limits of groups" [ "$(grep -oE 'communicator (tp|sp|dp|world)[0-9]+, .*' limits.err | sort | uniq -c |
        awk '{ print $3, $1, $6, $8 }' | paste -sd' ')" = \
        "dp0, 2 any 4 dp1, 2 any 4 sp0, 2 2 8 sp2, 2 2 8 tp0, 2 2 8 tp2, 2 2 8 world0, 4 any any" ]
fi

# a rank is killed: exit 7, and its number is named; nobody is left behind
lost() { # DIR RANKS DEVICES KEYS...: rank 1 is killed in a step
    local tries pid status victim=''
    EMU_DEVICES=$3 CUDA_VISIBLE_DEVICES=$(seq -s, 0 $(($3 - 1))) timeout 300 "$launch" -n "$2" -- "$mt" --config ranks.ini \
        run.dir="$1" run.device=cuda train.steps=100000 optim.decay_steps=100000 "${@:4}" >/dev/null 2>"$1.err" &
    pid=$!
    for tries in $(seq 2000); do
        sleep 0.1
        grep -q 'step 2/' "$1.err" && break
    done
    for p in $(pgrep -f "run.dir=$1 "); do
        [ "$(tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | sed -n 's/^RANK=//p')" = 1 ] &&
            [ "$(readlink "/proc/$p/exe")" = "$mt" ] && victim=$p
    done
    check "$1: rank 1 runs after $tries looks" [ -n "$victim" ]
    kill -9 "$victim"
    wait "$pid"
    status=$?
    check "$1: exit 7, got $status" [ $status -eq 7 ]
    check "$1: names rank 1: $(grep -m1 error "$1.err")" grep -q "error (peer lost): rank 1 .* was lost" "$1.err"
    check "$1: nobody is left" [ -z "$(pgrep -f "run.dir=$1 ")" ]
}
lost killed 2 2
EMU_NCCL=silent lost killed-silent 2 2
# NCCL hangs when it is given up, and the wall clock is set back after each look at it: the rank itself makes an end
# (the launcher, which would, has patience)
if [ -n "${EMU:-}" ]; then
    sed 's/grace [14]\b/grace 100/' "$launch" >patient.sh && chmod +x patient.sh
    ${CC:-cc} -shared -fPIC -o set-back.so -xc - <<'EOM'
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *t)
{
    const int rc = (int)syscall(SYS_clock_gettime, clock, t);
    if (clock == CLOCK_REALTIME) t->tv_sec += 3600;
    return rc;
}
EOM
    launch=$PWD/patient.sh EMU_NCCL=stuck LD_PRELOAD=$PWD/set-back.so lost killed-stuck 2 2
fi
lost killed-staged 2 1
lost killed-experts 2 2 "${mixture[@]}" parallel.ep=2
finish
