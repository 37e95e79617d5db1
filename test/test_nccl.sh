#!/usr/bin/env bash
# NCCL without its header, and wherever its library lies: what cuda/nccl_api.h declares is what the headers that there are
# declare; stand-ins for the library are found in each of its places. Needs no GPU. HEADERS: further ones, a blank between two.
. "$(dirname "$0")/lib.sh"
cc=${CC:-cc}

# ---- declarations
for cuda in "${CUDA_HOME:-}" "$(dirname "$(dirname "$(command -v nvcc)")")" /usr/local/cuda; do
    [ -f "$cuda/include/cuda_runtime_api.h" ] && break
    cuda=
done
facts() { # OUTPUT FLAGS...
    "$cc" -std=gnu17 -Werror -I"$root/cuda" -I"$cuda/include" "${@:2}" -o facts "$root/test/nccl_facts.c" 2>facts.err &&
        ./facts >"$1"
}
python_package() { "${PYTHON:-python3}" -c "import importlib as i; print(list(i.import_module('nvidia.nccl').__path__)[0])" 2>/dev/null; }
if [ -z "$cuda" ]; then
    skip "declarations of NCCL: no headers of CUDA"
else
    check "our declarations: $(head -3 facts.err 2>&1)" facts ours.txt
    compared=0
    for header in ${HEADERS:-} "$cuda/include/nccl.h" /usr/include/nccl.h /usr/local/include/nccl.h \
        "${NCCL_HOME:-/nowhere}/include/nccl.h" "$(python_package)/include/nccl.h"; do
        [ -f "$header" ] || continue
        compared=$((compared + 1))
        if facts theirs.txt -include "$header"; then
            check "$header: otherwise are $(grep -Fvxf ours.txt theirs.txt | paste -sd,)" [ -z "$(grep -Fvxf ours.txt theirs.txt)" ]
            check "$header has $(wc -l <theirs.txt) facts" [ "$(wc -l <theirs.txt)" -ge 30 ]
        else bad "$header: $(head -3 facts.err)"; fi
    done
    [ $compared -gt 0 ] || skip "declarations of NCCL: no nccl.h to compare with"
fi

# ---- the library
if [ -z "$cuda" ]; then
    skip "where NCCL is found: no headers of CUDA"
    finish
fi
cat >find.c <<'EOM'
#include <stdio.h>
#include "comm/gpu.h"
int main(void)
{
    const char *why;
    if (nccl_available(&why)) return printf("%s %s\n", nccl_version(), nccl_path()), 0;
    return puts(why), 1;
}
EOM
# (not the program itself, which would first find what lies beside its CUDA)
"$cc" -std=gnu17 -D_GNU_SOURCE -fopenmp -I"$root/src" -I"$root/cuda" -I"$cuda/include" -o find find.c "$root/cuda/nccl_library.c" \
    "$(realpath "$root/${BUILD:-build}/libmegatrain.a")" -ldl -lm 2>find.err || bad "a program that looks for NCCL: $(head -3 find.err)"
functions=$(sed -n '/define NCCL_FUNCTIONS/,/^$/p' "$root/cuda/nccl_world.h" | grep -oE 'F\([A-Z][A-Za-z]+\)' | sed 's/F(\(.*\))/\1/')
stand_in() { # FOLDER VERSION [FUNCTIONS...]: a library with all functions, or these
    local f
    mkdir -p "$1"
    {
        printf 'int ncclGetVersion(int *v) { *v = %s; return 0; }\n' "$2"
        for f in ${3:-$functions}; do [ "$f" = GetVersion ] || printf 'int nccl%s(void) { return 1; }\n' "$f"; done
    } | "$cc" -shared -fPIC -Wl,-soname,libnccl.so.2 -o "$1/libnccl.so.2" -xc -
}
found() { # WHAT LINE VARIABLE=VALUE...
    local line
    line=$(env -u LD_LIBRARY_PATH -u NCCL_HOME -u CONDA_PREFIX -u NVHPC_ROOT PATH=/usr/bin:/bin "${@:3}" ./find)
    check "$1: $line" grep -qxE "$2" <<<"$line"
}
l=/libnccl.so.2 loader=LD_LIBRARY_PATH=$PWD/loader
stand_in home/lib 22105
stand_in loader 22807
found "NCCL_HOME" "2.21.5 .*/home/lib$l" NCCL_HOME="$PWD/home"
found "the loader" "2.28.7 .*/loader$l" "$loader"
found "NCCL_HOME goes before the loader" "2.21.5 .*/home/lib$l" NCCL_HOME="$PWD/home" "$loader"
found "NCCL_HOME without one" "NCCL_HOME: no libnccl.so.2 in .*/none/lib" NCCL_HOME="$PWD/none" "$loader"
stand_in old/lib 22005
stand_in short/lib 22809 "AllGather AllReduce"
found "NCCL_HOME with one that is too old" ".*/old/lib$l is NCCL 2.20.5; 2.21 or newer is needed" NCCL_HOME="$PWD/old" "$loader"
found "NCCL_HOME with one of too few functions" ".*/short/lib$l has no nccl[A-Z].*" NCCL_HOME="$PWD/short" "$loader"
# (the loader may find one of this machine's: an old one hides it)
loader=LD_LIBRARY_PATH=$PWD/old/lib
packages=venv/lib/python3.12/site-packages/nvidia/nccl/lib
stand_in conda/lib 22304
stand_in $packages 22605
stand_in sdk/comm_libs/nccl/lib 22203
mkdir -p venv/bin
python=PATH=$PWD/venv/bin:/usr/bin:/bin
found "conda" "2.23.4 .*/conda/lib$l" "$loader" CONDA_PREFIX="$PWD/conda" "$python"
found "a Python's packages" "2.26.5 .*/nvidia/nccl/lib$l" "$loader" "$python" NVHPC_ROOT="$PWD/sdk"
found "the HPC SDK" "2.22.3 .*/sdk/comm_libs/nccl/lib$l" "$loader" NVHPC_ROOT="$PWD/sdk"
found "too old" "libnccl.so.2 is NCCL 2.20.5; 2.21 or newer is needed" "$loader"
found "a function is missing" ".*/short/lib$l has no nccl[A-Z].*" "$loader" CONDA_PREFIX="$PWD/short"
finish
