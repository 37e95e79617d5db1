#!/usr/bin/env bash
# passed.sh LANE: whether the emulator's lane of a sanitizer, emu-asan or emu-tsan, passed on the very files that it tries: on what
# runs under a sanitizer, and how. `passed.sh LANE record` writes their checksum to test/emu/passed, which is committed.
# The lanes take long, and CI leaves out one that could only say the same again (.ci/run).
cd "$(dirname "$0")/../.." || exit 1
file=test/emu/passed
read_by_it() { find cuda test/cuda test/emu src/comm src/device -type f ! -path "$file" ! -name '*.md'; ls test/*.h; }
now="$1 $({ read_by_it | LC_ALL=C sort | xargs sha256sum; grep -E 'EMU|ASAN' Makefile; } | sha256sum | cut -c1-32)"
if [ "${2:-}" = record ]; then
    { grep -v "^$1 " "$file" 2>/dev/null; echo "$now"; } >"$file.new" && mv "$file.new" "$file"
else
    grep -qxF "$now" "$file" 2>/dev/null
fi
