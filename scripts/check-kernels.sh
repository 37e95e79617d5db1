#!/usr/bin/env bash
# What ptxas and the PTX say about the kernels, without a GPU (docs/gpu.md):
#   - launches, shared memory and PTX stand in cuda/common.cuh alone, Hopper's PTX in cuda/hopper.cuh
#   - ptxas neither waits for each wgmma by itself nor leaves setmaxnreg out (it says so in a line of information)
#   - no kernel spills registers, on any architecture that there is object code for (Makefile: CUDA_ARCHS)
#   - every kernel says by __launch_bounds__ how many threads its blocks have (the emulator holds launches to it), and a
#     multiprocessor's 65,536 registers are enough for a block of so many
#   - kernels that are bound by memory move 16 bytes at a time; attention runs on mma.sync m16n8k16 or wgmma
# and a table of registers and shared memory. Reads what `make CUDA=1` leaves beside the objects ($BUILD/cuda/*.ptxas,
# *.ptx), making it first. Without nvcc, or with CUDA=0, only the first is checked.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build}
bad=0
complain() { echo "check-kernels: $*"; bad=1; }

# ---- the device language has one place
while IFS= read -r line; do complain "outside cuda/common.cuh: $line"; done < <(
    grep -rnE '<<<|>>>\(|__shared__|\basm\b' cuda --include='*.cu' --include='*.cuh' --include='*.c' --include='*.h' |
        grep -vE '^cuda/(common|hopper)\.cuh:' | grep -vE '^[^:]*:[0-9]*: *(\*|//|/\*)')

# ---- nvcc 13.0 drops a loop with a pragma without a word, where it follows `if constexpr` with an `else` of a loop
# without braces of its own
while IFS= read -r line; do complain "a loop to be unrolled behind one that ends deeper: $line"; done < <(
    for f in cuda/*.cu cuda/*.cuh; do
        awk -v f="$f" '/^ *UNROLL/ && before ~ /^ *}$/ && match(before, /}/) > match($0, /U/) { print f ":" NR }
            NF && !/^ *(\/\*|\*)/ { before = $0 }' "$f"
    done)

if [ "${CUDA:-1}" != 1 ]; then
    echo "check-kernels: no nvcc, so registers and PTX are not checked"
    exit $bad
fi
sources=(cuda/*.cu)
objects=("${sources[@]/#/$build/}")
make -s --no-print-directory -j"$(nproc)" BUILD="$build" CUDA=1 "${objects[@]/%.cu/.o}"

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# ---- what each kernel must show in its PTX: the first line whose pattern is found in its name counts
#   loads16, stores16   16-byte accesses of global memory      whole   and none of 1 or 2 bytes beside them
#   async16             cp.async of 16 bytes                   mma     mma.sync m16n8k16 (k32), ldmatrix
#   from89   of code for 8.9 and later alone
#   wgmma    wgmma and copies by TMA; of these kernels only what is compiled for sm_90a, all else is empty
#   -                   nothing, for the reason behind it
cat >"$tmp/rules" <<'EOT'
attention_(dq|dkv)_kernel<MmaEngine         mma async16 stores16 whole
attention_(dq|dkv)_hopper_kernel            wgmma
attention_fwd_kernel<MmaEngine              mma async16 stores16
attention_fwd_hopper_kernel                 wgmma
attention_(fwd|dq|dkv)_kernel<FmaEngine     async16 stores16 whole
attention_lows_kernel                       - one number a tile of queries
attention_sink_kernel                       - a number a row and head
bias_grad_runs_kernel<.*,true>              loads16 whole
grouped_bias_grad_kernel<.*,true>           loads16 whole
norm_grad_kernel<.*,true>                   loads16 whole
norm_bwd_rows_kernel                        async16 stores16 whole
(bias|norm)_grad_sum_kernel                 - a few numbers a column
qkv_kernel<[^,]*,true,                      loads16 stores16 whole
qkv_kernel<[^,]*,false,                     - rows that are not aligned
mla_move_kernel<[^,]*,true,                 loads16 stores16 whole
mla_move_kernel<[^,]*,false,                - rows that are not aligned
delta_(fwd|bwd)_kernel                      - a plain form, products from L2
delta_(solve|chain|chain_bwd|rows_bwd)_kernel  mma async16 stores16
kda_(fwd|bwd)_kernel                        - a plain form, products from L2
mamba_(states|rows)_(fwd|bwd)_kernel        - a plain form, products from L2
mamba_added_kernel                          mma async16
mamba_chain_kernel                          loads16 stores16 whole
mamba_(rows|heads|keys)_tiles_kernel        mma async16 stores16
(conv_silu_(fwd|dx|dw)|unit_(fwd|bwd))_kernel  - a plain form, element by element
((delta|mamba|kda)_gates_(fwd|bwd)|gated_norm_(fwd|dw|dx))_kernel  - a plain form, element by element
slices_sum_kernel                           - a few numbers a column
embedding_(count|place|keys)_kernel         - 24 bytes a token and pass, beside rows of D elements
permute_(count|scan|place)_kernel           - 20 bytes a choice, beside rows of D elements
choice_drop_kernel                          - numbers and weights of choices, beside rows of D elements
choice_groups_kernel                        - 8 bytes a choice, beside rows of D elements
room_limits_kernel                          - a number an expert and rank
dispatch_scan_kernel                        - a number a run of rows
dispatch_choices_kernel                     - 4 bytes a row, beside rows of D elements
router_(fwd|bwd|balance)_kernel             - scores by lanes, which step over neighbours; bound by the choice
sinkhorn_kernel                             - a unit's logits in L2, in neighbours by lanes
router_even_kernel                          - 4 bytes an expert, in neighbours
router_count_kernel                         - 4 bytes a choice, beside rows of D elements
expert_(count|bias)_kernel                  - a few numbers an expert
(fp8_)?grouped_wgmma_kernel                 wgmma stores16
grouped_mma_kernel<.*,2,true>               mma async16
grouped_mma_kernel<.*,true>                 mma async16 stores16 whole
grouped_mma_kernel<.*,false>                mma
xent_stats_kernel                           loads16
xent_(bwd|row)_kernel                       loads16 stores16
(xent_loss|loss_sum|step_finish)_kernel     - a few numbers a row or tensor
fp8_amax_kernel                             loads16 whole
fp8_(lines|turned|both)_kernel              loads16 stores16 - factors of mxfp8 are bytes
fp8_(squares|runs)_kernel                   loads16 stores16 whole
fp8_begins_kernel                           - a number a run of rows
fp8_grouped_(add_)?kernel                   mma async16 from89
fp8_values_kernel                           - codes back to numbers, which tests alone do on a GPU
fingerprint_kernel                          - a few times for each shape of a run
zero_kernel                                 stores16
add_acc_kernel                              - neighbours of 4 or 8 bytes a thread, one table a step
grad_stats_kernel                           loads16
adamw_kernel                                loads16 stores16
one_moment_kernel                           loads16 stores16
qk_clip_kernel                              - rows that begin anywhere, in the few steps with too large scores
muon_moment_kernel                          loads16 stores16
(muon_pack|muon_apply|box_copy)_kernel      - rectangles that begin anywhere, in neighbours
(row_squares|norm_factor|norm_scale)_kernel  - beside products of the same matrix
cast_kernel<.*,float>                       loads16
cast_kernel<float,                          stores16
cast_kernel                                 - four neighbours of 16 bits a thread: 8 bytes at a time
norm_fwd_kernel<[^,]*,[^,]*,[^,]*,[^,]*,false,  - rows that are not aligned
norm_fwd_kernel<float,__[^,]*,[^,]*,[^,]*,true,false>  loads16 whole
residual_kernel<float,__[^,]*,float,true>   loads16 whole
_kernel<.*[<,]true[,>]                      loads16 stores16 whole
_kernel<.*[<,]false[,>]                     - rows that are not aligned
EOT

# Kernels that may spill: patterns, with the reason behind them. None has to.
: >"$tmp/may_spill"

# The name of a kernel without arguments and blanks: in ptxas' lines between quotes, in PTX behind .entry.
names='function plain(s) { sub(/^void /, "", s); sub(/\(.*/, "", s); gsub(/ /, "", s); return s }'

# ---- ptxas: "KERNEL ARCH REGISTERS SHARED_BYTES STACK_BYTES SPILLED_BYTES" a line
cat "$build"/cuda/*.ptxas | c++filt | awk -F"'" "$names"'
    /Compiling entry function/ { name = plain($2); arch = $4 }
    /bytes stack frame/ { split($0, w, " "); stack += w[1]; spilled += w[5] + w[9] }
    /Used [0-9]+ registers/ {
        registers = shared = 0
        if (match($0, /Used [0-9]+/)) registers = substr($0, RSTART + 5, RLENGTH - 5)
        if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH - 11)
        print name, arch, registers, shared, stack + 0, spilled + 0
        stack = spilled = 0
    }' | sort >"$tmp/usage"
[ -s "$tmp/usage" ] || complain "no kernel in $build/cuda/*.ptxas"

awk 'FILENAME == ARGV[1] { allowed[$1]; next }
    $6 > 0 {
        ok = 0
        for (p in allowed) if ($1 ~ p) ok = 1
        if (!ok) { printf "check-kernels: %s spills %d bytes on %s\n", $1, $6, $2; bad = 1 }
    }
    END { exit bad }' "$tmp/may_spill" "$tmp/usage" || bad=1

# C75xx: "wgmma ... serialized", waits or fences put in; setmaxnreg ignored
while IFS= read -r line; do complain "$line"; done < <(
    grep -hE 'Potential Performance Loss|\(C75[0-9]+\)' "$build"/cuda/*.ptxas | c++filt | cut -c1-240 | sort -u)

# ---- PTX: bounds, "KERNEL THREADS" a line
cat "$build"/cuda/*.ptx | c++filt | awk "$names"'
    function tell() { if (name != "") print name, threads + 0 }
    /^\.visible \.entry/ { tell(); sub(/^\.visible \.entry /, ""); name = plain($0); threads = 0 }
    /^ *\.maxntid/ { gsub(/[^0-9 ]/, " "); threads = $1 * ($2 ? $2 : 1) * ($3 ? $3 : 1) }
    END { tell() }' | sort -u >"$tmp/bounds"

awk 'FILENAME == ARGV[1] {
        threads[$1] = $2
        if (!$2) { print "check-kernels: " $1 " has no __launch_bounds__"; bad = 1 }
        next
    }
    {
        needs = int(($3 + 7) / 8) * 8 * threads[$1] # registers are given out by eights
        if (!($1 in threads)) { print "check-kernels: no PTX of " $1; bad = 1 }
        if (needs > 65536) {
            print "check-kernels: blocks of " threads[$1] " threads of " $1 " need " needs " registers on " $2
            bad = 1
        }
    }
    END { exit bad }' "$tmp/bounds" "$tmp/usage" || bad=1

# ---- PTX: accesses
for f in "$build"/cuda/*.ptx; do
    awk -v file="$(basename "$f")" "$names"'
        /^\.visible \.entry/ { sub(/^\.visible \.entry /, ""); name[++k] = plain($0) }
        /[ \t](ld|st)\.[a-z0-9.:]*global/ {
            wide = /\.v4\.[busf]32|\.v2\.[busf]64|\.b128/
            if (wide && /ld\./) loads[k]++
            if (wide && /st\./) stores[k]++
            if (!/\.v[248]\./ && /\.[busf](8|16)[ \t]/) narrow[k]++
        }
        /cp\.async\.cg\.shared\.global/ && /, 16/ { async[k]++ }
        /mma\.sync\.aligned\.m16n8k(16|32)/ { mma[k]++ }
        /ldmatrix\.sync/ { matrix[k]++ }
        /wgmma\.mma_async/ { wgmma[k]++ }
        /cp\.async\.bulk\.tensor/ { tma[k]++ }
        END { for (i = 1; i <= k; i++)
            print name[i], file, loads[i] + 0, stores[i] + 0, narrow[i] + 0, async[i] + 0, mma[i] + 0,
                matrix[i] + 0, wgmma[i] + 0, tma[i] + 0 }' < <(c++filt <"$f")
done | sort >"$tmp/accesses"
[ -s "$tmp/accesses" ] || complain "no kernel in $build/cuda/*.ptx"

awk 'FILENAME == ARGV[1] {
        if (!match($0, /  +/)) { print "check-kernels: no two blanks behind the pattern: " $0; bad = 1; next }
        pattern[++n] = substr($0, 1, RSTART - 1)
        wants[n] = substr($0, RSTART + RLENGTH)
        next
    }
    {
        for (r = 1; r <= n && $1 !~ pattern[r]; r++) continue
        if (r > n) { print "check-kernels: no rule says what " $1 " must show: add one"; bad = 1; next }
        used[r] = 1
        if (wants[r] ~ /^-/) next
        if (wants[r] ~ /wgmma/ && $2 !~ /_90a/) next
        if (wants[r] ~ /from89/ && $2 ~ /_8[0-8]/) next
        lacks = ""
        if (wants[r] ~ /loads16/ && !$3) lacks = lacks " 16-byte loads"
        if (wants[r] ~ /stores16/ && !$4) lacks = lacks " 16-byte stores"
        if (wants[r] ~ /whole/ && $5) lacks = lacks " accesses of whole packs alone (" $5 " are of 1 or 2 bytes)"
        if (wants[r] ~ /async16/ && !$6) lacks = lacks " cp.async of 16 bytes"
        if (wants[r] ~ /wgmma/ && (!$9 || !$10)) lacks = lacks " wgmma or copies by TMA"
        if (wants[r] ~ /(^| )mma/ && (!$7 || !$8)) lacks = lacks " mma.sync or ldmatrix"
        if (lacks != "") { print "check-kernels: " $1 " in " $2 " lacks" lacks; bad = 1 } else seen++
    }
    END {
        for (r = 1; r <= n; r++) if (!used[r]) { print "check-kernels: no kernel for the rule " pattern[r]; bad = 1 }
        printf "%d kernels in PTX show 16-byte accesses or mma.sync as their rules ask\n", seen
        exit bad
    }' "$tmp/rules" "$tmp/accesses" || bad=1

# ---- the table: a line a family and architecture
awk '{
        family = $1; sub(/<.*/, "", family)
        engine = $1 ~ /MmaEngine/ ? " mma" : $1 ~ /FmaEngine/ ? " fma" : ""
        key = sprintf("%-32s %-7s", family engine, $2)
        if (!(key in count)) { order[++n] = key; least[key] = $3 }
        count[key]++
        if ($3 < least[key]) least[key] = $3
        if ($3 > most[key]) most[key] = $3
        if ($4 > shared[key]) shared[key] = $4
        if ($5 > stack[key]) stack[key] = $5
        spilled[key] += $6
    }
    END {
        printf "%-32s %-7s %5s %11s %8s %6s %7s\n", "kernel", "arch", "forms", "registers", "shared", "stack", "spilled"
        for (i = 1; i <= n; i++) {
            k = order[i]
            printf "%s %5d %11s %8d %6d %7d\n", k, count[k], least[k] == most[k] ? most[k] : least[k] "-" most[k],
                shared[k], stack[k], spilled[k]
        }
    }' "$tmp/usage"
exit $bad
