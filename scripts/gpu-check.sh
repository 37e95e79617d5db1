#!/usr/bin/env bash
# Everything that needs a GPU, in one command (docs/gpu.md): kernel tests on the device, the same under
# compute-sanitizer, 50 training steps CPU against GPU, every op against its roofline, whole steps. Writes one JSON
# and prints a summary. Runs in a checkout (builds first) and in the folder that `make bundle` makes.
#
#   scripts/gpu-check.sh [--quick] [--minutes N] [--peer] [--name NAME] [--out FILE] [--only PARTS] [--tiny]
#
#   --quick    about 4 minutes of device time, 6 with several GPUs: memcheck alone, for a minute at most; one model
#   --minutes  everything, what teaches most first, and no longer than N minutes (9.5, say): a part begins only if there
#              is time left, and is cut where that ends
#   --peer     alternates whole steps with bench/torch_gpu.py (a python3 whose PyTorch sees the GPU, or PYTHON=path)
#   --name     of the machine, for the JSON's name; else the GPU's
#   --out      the JSON; else bench/results/gpu-NAME-DATE.json
#   --only     a comma-separated choice of: tests cpu_gpu nccl steps rooflines candidates slice eager long ranks one_gpu
#              shared host variants counters peer sanitizer; those from candidates on to counters, but for ranks, run
#              with --minutes, or if they are named
#   --tiny     tiny sizes, for the emulator (PROGRAMS=build/emu MEGATRAIN=build/emu/megatrain)
#
# The JSON is written again after each part, so that what is cut off keeps what was done. Beside it lie FILE.log, what
# the parts printed, and FILE.clock.csv, the GPU's clocks, power, temperature and reasons to throttle every 20 ms.
#
# PROGRAMS: folder of test_cuda_*, links, rooflines and steps. SANITIZER: path of compute-sanitizer.
# Exit status: 0 all correct; 1 something is not; 2 no GPU, or usage; 3 nothing is wrong, but something about
# correctness did not finish in its time.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
started=$SECONDS
quick=false peer=false tiny=false name='' out='' minutes='' only=''
usage() { sed -n '2,/^set -u/s/^# \{0,1\}//p' scripts/gpu-check.sh | sed '$d' >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
    --quick | --peer | --tiny) printf -v "${1#--}" true ;;
    --name | --out | --only | --minutes) [ $# -ge 2 ] || usage; printf -v "${1#--}" %s "$2"; shift ;;
    *) usage ;;
    esac
    shift
done
until=999999
if [ -n "$minutes" ]; then
    [[ $minutes =~ ^[0-9]+(\.[0-9]+)?$ ]] || usage
    until=$(awk -v m="$minutes" 'BEGIN { printf "%d", 60 * m }')
    peer=true
fi
parts=(tests cpu_gpu nccl steps rooflines candidates slice eager long ranks one_gpu shared host variants counters peer
    sanitizer)
[ -n "$only" ] || [ -n "$minutes" ] || only=tests,cpu_gpu,nccl,steps,rooflines,ranks,peer,sanitizer
only=${only:-$(IFS=,; echo "${parts[*]}")}
export OMP_WAIT_POLICY=passive NO_COLOR=1
tmp=$(mktemp -d "${TMPDIR:-/tmp}/gpu-check.XXXXXX") || exit 2
sampler=''
trap '[ -z "$sampler" ] || kill "$sampler" 2>/dev/null; rm -rf "$tmp"' EXIT

# ---- results: rows of the summary, JSON, and what the exit status needs
say() { printf '\n== %s\n' "$*"; }
stop() { echo "gpu-check: $*" >&2; exit 2; }
rows=() wrong=false unfinished=false logs=''
row() { rows+=("$(printf '%-34s %-10s %s' "$@")"); }
judge() { # the status of something about correctness
    case $1 in ok | skipped) ;; unfinished | unbegun) unfinished=true ;; *) wrong=true ;; esac
}
# (what `save` reads has one meaning: no function may have a variable of its own by that name)
# object KEY VALUE KEY= TEXT ...: a JSON object; a key that ends with = is followed by text, others by JSON
object() {
    local all='' key value
    while [ $# -gt 0 ]; do
        key=$1 value=${2:-null}
        [ "$key" = "${key%=}" ] || value=\"$(printf %s "$2" | tr -d '\000-\037' | sed 's/[\\"]/\\&/g')\"
        all+="${all:+,}\"${key%=}\":$value"
        shift 2
    done
    printf '{%s}' "$all"
}
add() { printf -v "$1" '%s' "${!1:+${!1},}$2"; } # to a list

# limited SECONDS LOG command...: sets `status` (ok, failed, unfinished, skipped, unbegun: no time is left) and `took`
limited() {
    local seconds=$1 log=$2 began=$SECONDS code left=$((until - 5 - (SECONDS - started)))
    shift 2
    : >"$log"
    status=unbegun took=0
    [ $left -ge 5 ] || return 0
    [ "$seconds" -le $left ] || seconds=$left
    timeout -k 5 "$seconds" "$@" >"$log" 2>&1
    code=$? took=$((SECONDS - began)) status=failed
    [ $code -ne 0 ] || status=ok
    [ $code -ne 77 ] || status=skipped # a benchmark that this GPU is too small for
    # 137 is also what a program that something else killed ends with
    [ $code -ne 124 ] && { [ $code -ne 137 ] || [ $took -lt "$seconds" ]; } || status=unfinished
    [ -z "$logs" ] || { echo "==== $*: $status, $took s"; tail -c 60000 "$log"; } >>"$logs"
}

# ---- what to run
if [ -z "${PROGRAMS:-}" ] && [ -f Makefile ]; then
    say "building"
    PROGRAMS=${BUILD:-build}/gpu
    make --no-print-directory -j"$(nproc)" CUDA=1 megatrain gpu-programs >"$tmp/build.log" 2>&1 ||
        { tail -20 "$tmp/build.log" >&2; stop "the build failed"; }
fi
PROGRAMS=$(realpath "${PROGRAMS:-gpu}")
MEGATRAIN=$(realpath "${MEGATRAIN:-megatrain}")
export MEGATRAIN
kernel_tests=()
for t in "$PROGRAMS"/test_cuda_*; do
    case $t in *.o | *.d | *_comm | *_nccl) ;; *) [ -x "$t" ] && kernel_tests+=("$t") ;; esac
done
[ ! -x "$PROGRAMS/test_cuda_comm" ] || kernel_tests+=("$PROGRAMS/test_cuda_comm") # last: it is the longest
for f in "$PROGRAMS/steps" "$PROGRAMS/rooflines" "$MEGATRAIN"; do [ -x "$f" ] || stop "no $f"; done
[ ${#kernel_tests[@]} -gt 0 ] || stop "no $PROGRAMS/test_cuda_*"

# cuBLASLt is the machine's own: where the loader does not find it by itself, look where it usually lies.
python_folder() { # of the library in a Python package
    "${PYTHON:-python3}" -c "import importlib as i; print(list(i.import_module('$1').__path__)[0] + '/lib')" 2>/dev/null
}
find_cublas() { # when a program said that it did not find it
    local soname dir
    soname=$(sed -n 's/.*cuBLASLt is not to be had: \(libcublasLt[^:]*\):.*/\1/p' "$tmp/smoke.log")
    [ -n "$soname" ] || return 1
    for dir in /usr/local/cuda*/lib64 /usr/local/cuda*/targets/x86_64-linux/lib /usr/lib/x86_64-linux-gnu \
        "$(python_folder nvidia.cu13)" "$(python_folder nvidia.cublas)"; do
        [ -e "$dir/$soname" ] || continue
        echo "cuBLASLt: $dir/$soname"
        export LD_LIBRARY_PATH=$dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        return 0
    done
    stop "$soname is not found: it is part of CUDA ${soname##*.}; put its folder into LD_LIBRARY_PATH"
}

say "the machine"
smoke() { limited 120 "$tmp/smoke.log" "$PROGRAMS/steps" tiny --steps 1 --json "$tmp/smoke.json"; }
smoke
[ $status = ok ] || ! find_cublas || smoke
[ $status = ok ] || { cat "$tmp/smoke.log" >&2; stop "a tiny model does not train on this machine's GPU"; }
head -1 "$tmp/smoke.log"
smi() { nvidia-smi -i 0 "$@" --format=csv,noheader 2>/dev/null; }
gpu=$(sed -n 's/.*"device":"\([^"]*\)".*/\1/p' "$tmp/smoke.json")
others=$(smi --query-compute-apps=pid | grep -cE '^[0-9]')
[ "$others" -eq 0 ] || echo "other processes use this GPU ($others): figures suffer"
[ -n "$name" ] || name=$(printf %s "$gpu" | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9-')
[ -n "$out" ] || out=bench/results/gpu-$name-$(date -u +%Y-%m-%d).json
mkdir -p "$(dirname "$out")" || exit 2
logs=${out%.json}.log
: >"$logs" || exit 2
nvidia-smi -i 0 --format=csv,nounits -lms 20 \
    --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active,memory.used \
    >"${out%.json}.clock.csv" 2>/dev/null &
sampler=$!

# ---- kernel tests
tests_json=''
run_tests() {
    local t base line p f k limit=300 all=("${kernel_tests[@]}")
    ! $quick || limit=150 # (ranks that share one GPU take long to start)
    [ -z "$minutes" ] || limit=45
    $tiny || $quick || [ -n "$minutes" ] || all+=(test/test_cuda_run.sh test/test_cuda_resume.sh)
    say "kernel tests on the device, and the program as a whole"
    for t in "${all[@]}"; do
        base=$(basename "$t")
        limited $limit "$tmp/$base.log" "$t"
        line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$tmp/$base.log" | tail -1)
        read -r p _ f _ k _ <<<"${line//,/}"
        [ "$status" != ok ] || { [ -n "$line" ] && [ "$f" -eq 0 ]; } || status=failed
        [ "$status" = ok ] || grep -vE '^(ok|skip) |^    skipped' "$tmp/$base.log" | tail -25
        judge "$status"
        row "test $base" "$status" "${line:-no closing line} ($took s)"
        add tests_json "$(object test= "$base" status= "$status" passed "${p:-0}" failed "${f:-0}" skipped "${k:-0}" \
            seconds $took)"
        echo "${rows[-1]}"
        save
    done
}

# ---- the same under compute-sanitizer. Products are the library's kernels: their test runs under memcheck alone.
sanitizer_json='' sanitizer_why=''
find_sanitizer() {
    local c
    for c in ${SANITIZER:+"$SANITIZER"} compute-sanitizer /usr/local/cuda*/bin/compute-sanitizer \
        /usr/local/cuda*/compute-sanitizer/compute-sanitizer /opt/nvidia/*/compute-sanitizer; do
        command -v "$c" && return
    done
}
sanitizer_refusal() { # why it cannot be used here; nothing if it can
    [ -n "$1" ] || { echo "compute-sanitizer is not on this machine"; return; }
    limited 120 "$tmp/refusal.log" "$1" --tool memcheck "$PROGRAMS/rooflines" --tiny --only loss_sum
    [ "$status" = ok ] || grep -iE 'not supported|unable to|failed to initialize' "$tmp/refusal.log" | head -1
}
sanitize() { # SANITIZER TOOL TEST SECONDS
    local log=$tmp/sanitizer.log
    limited "$4" "$log" "$1" --tool "$2" --report-api-errors no --error-exitcode 42 "$3"
    [ "$status" != failed ] || grep -E '^=========|FAIL' "$log" | head -25
    # in the quick check it is enough that the time there is finds nothing
    ! $quick || [ "$status" != unfinished ] || grep -qE '^========= (Invalid|Error|Race|Uninit|Barrier)' "$log" ||
        status=skipped
}
run_sanitizer() {
    local sanitizer tool t base tools='memcheck racecheck initcheck synccheck' limit=240 enough=999999
    say "kernel tests under compute-sanitizer"
    sanitizer=$(find_sanitizer)
    sanitizer_why=$(sanitizer_refusal "$sanitizer")
    if [ -n "$sanitizer_why" ]; then
        row sanitizer skipped "$sanitizer_why"
        echo "${rows[-1]}"
        return
    fi
    ! $quick || { tools=memcheck limit=45 enough=$((SECONDS + 75)); }
    [ -z "$minutes" ] || { tools=memcheck limit=60; }
    for tool in $tools; do
        for t in "${kernel_tests[@]}"; do
            base=$(basename "$t")
            [[ $base != test_cuda_gemm && $base != test_cuda_fp8 ]] || [ "$tool" = memcheck ] || continue
            [ "$base" != test_cuda_comm ] || continue # processes of its own, and NCCL's kernels
            [ "$base" != test_cuda_hopper ] || continue # instructions one by one, some with what must go wrong
            [ "$base" != test_cuda_far ] || continue # tens of GB, most of which nobody wrote
            status=skipped took=0
            [ $SECONDS -ge $enough ] || sanitize "$sanitizer" "$tool" "$t" $limit
            judge "$status"
            row "$tool $base" "$status" "$took s"
            add sanitizer_json "$(object tool= "$tool" test= "$base" status= "$status" seconds $took)"
            echo "${rows[-1]}"
            save
        done
    done
}

# ---- training on both devices
cpu_gpu_json=''
run_cpu_gpu() {
    local steps=50 line who most allowed
    ! $tiny || steps=3
    say "$steps training steps, CPU against GPU"
    GPU_STEPS=$steps limited 300 "$tmp/cpu_gpu.log" bash test/gpu_steps.sh
    cat "$tmp/cpu_gpu.log"
    judge "$status"
    while read -r line; do
        who=${line%%:*}
        most=$(sed -n 's/.*difference \([^ ]*\) .*/\1/p' <<<"$line")
        allowed=$(sed -n 's/.*allowed \([^)]*\)).*/\1/p' <<<"$line")
        row "$steps steps $who" '' "differs by $most of the loss (allowed $allowed)"
        [ "$most" != none ] || most=null
        add cpu_gpu_json "$(object what= "$who" steps "$steps" largest "$most" allowed "$allowed")"
    done < <(grep 'largest difference' "$tmp/cpu_gpu.log")
    row "CPU against GPU" "$status" "$(tail -1 "$tmp/cpu_gpu.log")"
    cpu_gpu_json=$(object status= "$status" runs "[$cpu_gpu_json]")
}

# ---- NCCL with one GPU: a communicator of one rank; several ranks that share the GPU
nccl_json='' one_gpu_json=''
run_nccl() {
    local limit=60
    [ -x "$PROGRAMS/test_cuda_nccl" ] || { row nccl skipped "no $PROGRAMS/test_cuda_nccl"; return; }
    [ -z "$minutes" ] || limit=30
    say "a communicator of one rank"
    limited $limit "$tmp/nccl.log" "$PROGRAMS/test_cuda_nccl"
    cat "$tmp/nccl.log"
    judge "$status"
    row nccl "$status" "$(grep ' us a call' "$tmp/nccl.log" | head -1 | tr -s ' ')"
    local calls='s/^\(.*[^ ]\)  *\([0-9.]*\) us a call .*, *\([0-9.]*\) with .*/{"call":"\1","host_us":\2,"us":\3}/p'
    nccl_json=$(object status= "$status" seconds $took calls "[$(sed -n "$calls" "$tmp/nccl.log" | paste -sd, -)]" \
        text= "$(grep -E '^NCCL|^opening|MiB' "$tmp/nccl.log" | paste -sd';' -)")
}
one_gpu() { # NAME SECONDS command...
    local what=$1 limit=$2
    shift 2
    limited "$limit" "$tmp/one_gpu.log" "$@"
    cat "$tmp/one_gpu.log"
    judge "$status"
    row "one GPU, $what" "$status" "$(tail -1 "$tmp/one_gpu.log") ($took s)"
    add one_gpu_json "$(object what= "$what" status= "$status" seconds $took layouts \
        "$(grep -c ' GPUs, last loss' "$tmp/one_gpu.log")")"
    save
}
run_one_gpu() {
    local few='' limit=300
    local lo=(env CUDA_VISIBLE_DEVICES=0 EMU_DEVICES=1 NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_MAX_CTAS=4)
    ! $tiny || [ -n "${FULL:-}" ] || few=1
    say "ranks that share this GPU, over NCCL"
    one_gpu calls 60 "${lo[@]}" "$PROGRAMS/test_cuda_comm" one_gpu
    one_gpu links 45 "${lo[@]}" "$PROGRAMS/links" --ranks 2 --tiny
    [ -z "$minutes" ] || limit=200
    ! $tiny || limit=1800 # (the emulator is slow)
    one_gpu layouts $limit env GPU_SHARED=1 GPU_FEW=$few bash test/gpu_ranks.sh
}

# ---- several GPUs: repeats, and what goes between them
ranks_json='' links_json=''
run_ranks() {
    local most=4
    ! $quick && ! $tiny || most=2
    say "several GPUs, a rank each: every layout twice"
    GPU_RANKS=$most limited 180 "$tmp/ranks.log" bash test/gpu_ranks.sh
    cat "$tmp/ranks.log"
    ! grep -q '^ *skipped' "$tmp/ranks.log" || status=skipped
    judge "$status"
    row "several GPUs" "$status" "$(tail -1 "$tmp/ranks.log")"
    ranks_json=$(object status= "$status" layouts "$(grep -c ' GPUs, last loss' "$tmp/ranks.log")")
    [ "$status" != skipped ] || return 0
    say "what NCCL moves between them"
    limited 120 "$tmp/links.log" "$PROGRAMS/links" $(! $tiny || echo --tiny) --json "$tmp/links.json"
    cat "$tmp/links.log"
    judge "$status"
    row links "$status" "$(grep 'GB/s' "$tmp/links.log" | head -1)"
    [ "$status" != ok ] || links_json=$(cat "$tmp/links.json")
}

# ---- rooflines
rooflines_json='' tuned_json='' beside_json=''
run_rooflines() {
    local size=()
    say "each op against its roofline"
    ! $tiny || size=(--tiny)
    limited 240 "$tmp/rooflines.log" "$PROGRAMS/rooflines" "${size[@]}" --json "$tmp/rooflines.json"
    cat "$tmp/rooflines.log"
    judge "$status"
    row rooflines "$status" "$(sed -n 2p "$tmp/rooflines.log")"
    row '' '' "$(tail -1 "$tmp/rooflines.log")"
    [ "$status" != ok ] || rooflines_json=$(cat "$tmp/rooflines.json")
    ! $quick || return
    say "products again, each by the fastest of the library's algorithms"
    limited 300 "$tmp/tuned.log" "$PROGRAMS/rooflines" "${size[@]}" --only linear_ --autotune --json "$tmp/tuned.json"
    grep linear_ "$tmp/tuned.log"
    [ "$status" != ok ] || tuned_json=$(cat "$tmp/tuned.json")
    local leave=16 # (as many as a group takes whose calls run beside products: docs/comm.md)
    ! $tiny || leave=1
    say "and by those that leave $leave multiprocessors free"
    limited 300 "$tmp/beside.log" "$PROGRAMS/rooflines" "${size[@]}" --only linear_ --autotune --leave $leave \
        --json "$tmp/beside.json"
    grep linear_ "$tmp/beside.log"
    [ "$status" != ok ] || beside_json=$(cat "$tmp/beside.json")
}

# ---- whole steps
steps_json='' count=20 models='124m 350m 1.3b' mixture=moe
! $quick || models=124m
! $tiny || { models=tiny count=2 mixture=tiny-moe; }
run_steps() {
    local m
    for m in $models $mixture; do
        say "whole steps, $m"
        limited 240 "$tmp/steps.log" "$PROGRAMS/steps" "$m" --steps $count --json "$tmp/$m.json"
        cat "$tmp/steps.log"
        judge "$status"
        row "steps $m" "$status" "$(sed -n 2p "$tmp/steps.log")"
        [ ! -s "$tmp/$m.json" ] || add steps_json "$(cat "$tmp/$m.json")"
        save
    done
}

# ---- every algorithm that the library has for each product
candidates_json=''
run_candidates() {
    local m turns=3
    ! $tiny || turns=1
    for m in $models $mixture; do
        say "algorithms of each product, $m"
        rm -f "$tmp/candidates.json"
        limited 30 "$tmp/candidates.log" "$PROGRAMS/steps" "$m" --candidates --steps $turns \
            --json "$tmp/candidates.json"
        cat "$tmp/candidates.log"
        judge "$status"
        row "candidates $m" "$status" "$(grep -c ' algorithms' "$tmp/candidates.log") products, of which $(
            grep -c '<$' "$tmp/candidates.log") are a tenth faster with other bits ($took s)"
        [ ! -s "$tmp/candidates.json" ] || add candidates_json "$(cat "$tmp/candidates.json")"
        save
    done
}

# ---- the peer, in turns
peer_json=''
tokens_s() { sed -n 's/.*"tokens_s": *\([0-9.e+]*\).*/\1/p' "$1" 2>/dev/null; }
run_peer() {
    local m r rounds=3 python=${PYTHON:-python3} ours torch
    say "in turns with PyTorch"
    if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        row peer skipped "$python has no PyTorch that sees a GPU"
        echo "${rows[-1]}"
        return
    fi
    ! $quick && [ -z "$minutes" ] || rounds=1
    for m in $models; do
        for r in $(seq 1 $rounds); do
            rm -f "$tmp/ours.json" "$tmp/torch.json"
            limited 240 "$tmp/ours.log" "$PROGRAMS/steps" "$m" --steps $count --json "$tmp/ours.json"
            limited 600 "$tmp/torch.log" "$python" bench/torch_gpu.py "$m" --steps $count --json "$tmp/torch.json"
            [ "$status" = ok ] || tail -3 "$tmp/torch.log"
            ours=$(tokens_s "$tmp/ours.json") torch=$(tokens_s "$tmp/torch.json")
            row "peer $m, round $r" '' "$(awk -v a="${ours:-0}" -v b="${torch:-0}" 'BEGIN {
                printf "%.0f against %.0f tokens/s", a, b; if (b > 0) printf ": %.2f", a / b }')"
            echo "${rows[-1]}"
            add peer_json "$(object model= "$m" round "$r" megatrain "$(cat "$tmp/ours.json" 2>/dev/null)" \
                torch "$(cat "$tmp/torch.json" 2>/dev/null)")"
            save
        done
    done
}

# ---- the program itself: slices of a large model, two ranks that share the GPU

# trains NAME SECONDS RANKS KEYS...: a run, whose lines of metrics are its result
runs_json=''
trains() {
    local what=$1 limit=$2 ranks=$3 how=("$MEGATRAIN") lines
    shift 3
    [ "$ranks" -eq 1 ] || how=(scripts/launch.sh -n "$ranks" -- "$MEGATRAIN")
    limited "$limit" "$tmp/run.log" "${how[@]}" "$@" run.device=cuda run.dir="$tmp/$what" checkpoint.every=0 \
        train.eval_every=0 log.every=1
    lines=$(grep -s '^{"step"' "$tmp/$what/metrics.jsonl" | paste -sd, -)
    judge "$status"
    row "$what" "$status" "$(grep -E '^(step|megatrain: error)' "$tmp/run.log" | tail -1 | cut -c1-100) ($took s)"
    echo "${rows[-1]}"
    add runs_json "$(object run= "$what" status= "$status" seconds $took keys= "$*" metrics "[$lines]")"
    save
    rm -rf "${tmp:?}/$what"
}

# 8 of Llama-8B's layers
slice=(--config config/llama3-8b.ini model.layers=8 parallel.tp=1 parallel.sp=false parallel.zero=0 train.micro_batch=1
    train.global_batch=4 train.stop_at=9 data.train=data/tiny data.valid=data/tiny data.tokenizer=byte)
! $tiny || slice+=(model.layers=2 model.hidden=64 model.heads=4 model.kv_heads=2 model.ffn=128 model.seq=32
    model.vocab=512 train.stop_at=2)
run_slice() {
    local how
    say "8 of Llama-8B's layers: bf16, fp8"
    trains slice-bf16 60 1 "${slice[@]}" run.precision=bf16
    for how in tensorwise blockwise; do trains slice-$how 60 1 "${slice[@]}" run.precision=fp8 run.fp8=$how; done
}
run_host() {
    say "the optimizer's states in the host's memory"
    trains slice-host 60 1 "${slice[@]}" run.precision=bf16 optim.states=host
}
run_shared() {
    local keys
    say "two ranks on this GPU, through the host"
    for keys in parallel.tp=2 parallel.zero=3 "parallel.zero=1 run.graphs=true"; do
        # shellcheck disable=SC2086
        trains "shared-${keys//[^a-z0-9]/-}" 45 2 --config config/tiny.ini run.precision=bf16 train.stop_at=8 $keys
    done
}

# ---- whole steps in other ways
more_json=''
more_steps() { # NAME SECONDS [VARIABLE=VALUE] MODEL OPTIONS...
    local what=$1 limit=$2
    shift 2
    rm -f "$tmp/more.json"
    limited "$limit" "$tmp/more.log" env "$@" --json "$tmp/more.json"
    judge "$status"
    row "$what" "$status" "$(sed -n 2p "$tmp/more.log") ($took s)"
    echo "${rows[-1]}"
    add more_json "$(object run= "$what" status= "$status" seconds $took steps "$(cat "$tmp/more.json" 2>/dev/null)")"
    save
}
run_variants() {
    local large=("$PROGRAMS/steps" 1.3b --batch 4 --llama --kv 4 --vocab 128256 --steps 6) how
    say "whole steps of other architectures, precisions and sizes"
    ! $tiny || large=("$PROGRAMS/steps" tiny --llama --kv 1 --vocab 300 --steps 2)
    for how in bf16 tensorwise blockwise; do more_steps "llama, $how" 30 "${large[@]}" --precision $how; done
    more_steps "states on the host, 4 micro-batches" 30 "${large[@]}" --states host --micro 4
    if $tiny; then more_steps "T 32" 60 "$PROGRAMS/steps" tiny --seq 32 --batch 4 --steps 1
    else more_steps "T 4096" 30 "$PROGRAMS/steps" 124m --seq 4096 --batch 16 --steps 6; fi
}
run_eager() {
    local m=124m
    ! $tiny || m=tiny
    say "all modules loaded at the start, as several ranks have it"
    more_steps eager 60 CUDA_MODULE_LOADING=EAGER "$PROGRAMS/steps" $m --steps 2
}
run_long() {
    say "long sequences, and eight micro-batches of Muon"
    if $tiny; then
        more_steps "T 512" 60 "$PROGRAMS/steps" 1,64,2,1,512 --steps 1
    else
        more_steps "T 32768" 45 "$PROGRAMS/steps" 4,2048,16,1,32768 --steps 4
        more_steps "T 131072" 60 "$PROGRAMS/steps" 2,2048,16,1,131072 --steps 3
        more_steps "Muon, 8 micro-batches" 45 "$PROGRAMS/steps" 124m --muon --micro 8 --steps 4
    fi
}

# ---- why a kernel takes its time: the profiler's counters, in the log alone
counters_json=''
run_counters() {
    say "counters of six kernels"
    if ! command -v ncu >/dev/null; then
        row counters skipped "ncu is not on this machine"
        echo "${rows[-1]}"
        return
    fi
    limited 70 "$tmp/ncu.log" ncu --clock-control none --set detailed --launch-skip 40 --launch-count 8 \
        -k 'regex:attention_fwd_hopper|attention_dkv|attention_dq|xent_row|norm_bwd' \
        "$PROGRAMS/steps" 124m --steps 1 --no-graphs
    row counters "$status" "$took s; see $(basename "$logs")"
    echo "${rows[-1]}"
    counters_json=$(object status= "$status" seconds $took)
}

# ---- all of it
flip() { if $1; then echo false; else echo true; fi; }
seconds=() begun=() # by part: how long, and when (as in the clock's file)
save() { # what there is, whole: what is killed while it writes leaves the one before
    local why_not=null
    [ -z "$sanitizer_why" ] || why_not=$(object why= "$sanitizer_why")
    object date= "$date" name= "$name" version= "$version" source= "$source" quick $quick tiny $tiny \
        minutes "${minutes:-null}" correct "$(flip $wrong)" finished "$(flip $unfinished)" \
        seconds "$(object "${seconds[@]}")" begun "$(object "${begun[@]}")" gpu= "$gpu" driver= "$driver" \
        clocks_and_power= "$clocks" cpu= "$cpu" other_processes "$others" \
        tests "[$tests_json]" sanitizer_refused "$why_not" sanitizer "[$sanitizer_json]" cpu_gpu "$cpu_gpu_json" \
        nccl "$nccl_json" one_gpu "[$one_gpu_json]" \
        ranks "$ranks_json" links "$links_json" rooflines "$rooflines_json" rooflines_autotuned "$tuned_json" \
        rooflines_beside "$beside_json" \
        steps "[$steps_json]" candidates "[$candidates_json]" more_steps "[$more_json]" runs "[$runs_json]" \
        counters "$counters_json" \
        peer "[$peer_json]" >"$out.tmp" && echo >>"$out.tmp" && mv "$out.tmp" "$out" || stop "cannot write $out"
}
date=$(date -u +%Y-%m-%dT%H:%M:%SZ) version=$("$MEGATRAIN" --version | head -1)
source=$(cat SOURCE 2>/dev/null || git describe --always --dirty 2>/dev/null)
driver=$(smi --query-gpu=driver_version) clocks=$(smi --query-gpu=clocks.max.sm,clocks.max.memory,power.limit)
cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -1)
save
for part in "${parts[@]}"; do
    [[ ,$only, == *",$part,"* ]] || continue
    [ $part != peer ] || $peer || continue
    began=$SECONDS
    begun+=("$part=" "$(date '+%Y/%m/%d %H:%M:%S.%3N')")
    "run_$part"
    seconds+=("$part" $((SECONDS - began)))
    save
done

say "summary: $gpu, $((SECONDS - started)) s"
printf '%s\n' "${rows[@]}"
printf '\nresults in %s\n' "$out"
! $wrong || { echo "something is wrong: see 'failed' above"; exit 1; }
! $unfinished || { echo "nothing wrong was seen, but something did not finish in its time"; exit 3; }
echo "all correct"
