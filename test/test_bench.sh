#!/usr/bin/env bash
# The benchmarks in C run: each at a small shape, once, with the modes of its peers; their figures are positive numbers.
# How large these are says nothing here. (What they mean: bench/run.py.)
. "$(dirname "$0")/lib.sh"
bench=$root/${BUILD:-build}/bench

# figures FILE COUNT: JSON that has at least so many positive rates or times in its rows, and no other
figures() {
    python3 - "$@" <<'EOF'
import json, math, sys
rows = json.load(open(sys.argv[1]))["rows"]
values = [v for row in rows for k, v in row.items() if k.endswith(("gflops", "_ms", "speed_median"))]
sys.exit(not (len(values) >= int(sys.argv[2]) and all(math.isfinite(v) and v > 0 for v in values)))
EOF
}

# modes WORDS...: steps of these modes in turns end with as many finite losses and positive times
modes() {
    "$bench/bench_step" 1 64 4 2 32 2 "$1" 1 >steps.txt 2>steps.err || { tail -2 steps.err; return 1; }
    local count
    count=$(tr , '\n' <<<"$1" | wc -l)
    [ "$(grep -cE '^[a-z0-9-]+ step [0-2] loss 1[0-9]\.[0-9]+ ms [0-9.]*[1-9][0-9.]*$' steps.txt)" = $((3 * count)) ] &&
        [ "$(grep -cE '"min_ms":[0-9.]*[1-9][0-9.]*,' steps.txt)" = "$count" ]
}

check "products" "$bench/bench_gemm" --seconds 0 --no-blas --only 256x768x768 --json gemm.json
check "products' figures" figures gemm.json 6
check "attention" "$bench/bench_attention" --seconds 0 --only "B4 T64" --json attention.json
check "attention's figures" figures attention.json 3
check "attention in bf16" "$bench/bench_attention" --seconds 0 --only "B4 T64" --bf16 fma --json narrow.json
check "attention's figures in bf16" figures narrow.json 3
check "products of experts" "$bench/bench_grouped" --seconds 0 --json grouped.json
check "products' figures of experts" figures grouped.json 8
check "steps of each layout's bits, and of a run's" modes layout,run
check "steps in bf16" modes bf16-layout,bf16-fma,bf16-stream,bf16-narrow
finish
