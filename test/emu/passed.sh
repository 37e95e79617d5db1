#!/usr/bin/env bash
# passed.sh LANE: whether the emulator's lane of a sanitizer, emu-asan or emu-tsan, passed on the very files that it tries: on
# what runs under a sanitizer, and how. `passed.sh LANE sum` prints their checksum; `passed.sh LANE record SUM` writes what
# was printed before the lane ran to test/emu/passed, which is committed. The lanes take long, and CI leaves out one
# that could only say the same again (.ci/run), but not with FULL=1.
cd "$(dirname "$0")/../.." || exit 1
file=test/emu/passed
# what is compiled for it: kernels, their callers and tests, all headers; the library that they call is not instrumented
tried() {
    find cuda test/cuda test/emu src/comm src/device -type f ! -path "$file" ! -name '*.md'
    ls src/*/*.h test/*.h test/thread_ranks.c test/every_op.c test/run.sh Makefile
}
sum() { { tried | LC_ALL=C sort -u | xargs sha256sum; clang --version 2>/dev/null | head -1; } | sha256sum | cut -c1-32; }
case ${2:-} in
sum) sum ;;
record) { grep -v "^$1 " "$file" 2>/dev/null; echo "$1 $3"; } >"$file.new" && mv "$file.new" "$file" ;;
*) [ -z "${FULL:-}" ] && grep -qxF "$1 $(sum)" "$file" 2>/dev/null ;;
esac
