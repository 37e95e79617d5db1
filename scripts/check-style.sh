#!/usr/bin/env bash
# Format (make fmt mends it), lines, tabs, leftovers; and a build with warnings as errors.
set -euo pipefail
cd "$(dirname "$0")/.."
bad=0
complain() { echo "check-style: $1"; bad=1; }
files=$(git ls-files '*.c' '*.cc' '*.h' '*.def')
# (the limit of .clang-format, which lays out src/ alone: for comments, and for code that is laid out by hand)
grep -nE '.{121,}' $(git ls-files src bench cuda test | grep -E '^(src|bench)/|\.(c|h|cpp|hpp|cu|cuh)$' | grep -v '^bench/results/') &&
    complain "lines over 120 columns"
grep -nP '\t' $files && complain "tabs"
grep -nE '[ ]+$' $files && complain "blanks at the end of a line"
grep -nE 'TODO|FIXME' $files && complain "unfinished places"
{ clang-format --dry-run -Werror src/*/*.[ch] src/*/*.cc main.c 2>&1 || true; } | grep -m 20 . && complain "format: make fmt"
# (a build whose warnings are errors has said them all)
[[ ${EXTRA_CFLAGS:-} == *-Werror* ]] || {
    build=${BUILD:-build}-lint
    make --no-print-directory -j"$(nproc)" BUILD="$build" CUDA=0 EXTRA_CFLAGS=-Werror "$build/main.o" "$build/libmegatrain.a" >/dev/null || complain "warnings"
}
exit $bad
