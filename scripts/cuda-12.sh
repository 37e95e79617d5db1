#!/usr/bin/env bash
# Compiles the CUDA backend by the oldest toolkit that it is for, CUDA 12.4: its headers and ptxas from PyPI's wheels, C by
# gcc, kernels by clang, which brings no headers of CUDA of its own. Nothing is linked; what is caught is a function, type or
# instruction that 12.4 does not have. Every kernel is checked; those with the newest instructions are also made into code.
#
# Needs PyPI once: wheels are unpacked in $BUILD/cuda-12.4. Without it, or without clang 16 or newer (scripts/install-deps.sh
# cuda-12), ends with status 1.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build}
kit=$build/cuda-12.4
bad=0
complain() { echo "cuda-12: $*" >&2; bad=1; }

clang=clang-19
command -v $clang >/dev/null || clang=clang

# ---- the toolkit
if [ ! -e "$kit/complete" ]; then
    rm -rf "$kit"
    mkdir -p "$kit/wheels"
    /usr/bin/python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$kit/wheels" \
        nvidia-cuda-{runtime,nvcc,cccl}-cu12==12.4.* nvidia-{cublas,nvtx}-cu12==12.4.* ||
        { complain "PyPI does not give the wheels of CUDA 12.4: is there a network?"; exit 1; }
    for wheel in "$kit"/wheels/*.whl; do /usr/bin/python3 -m zipfile -e "$wheel" "$kit/wheels"; done
    for part in "$kit"/wheels/nvidia/*/; do
        for folder in include bin nvvm; do [ ! -d "$part$folder" ] || cp -r "$part$folder" "$kit"; done
    done
    chmod +x "$kit/bin/ptxas"
    rm -r "$kit/wheels"
    touch "$kit/complete"
fi
headers=(-isystem "$kit/include")
version=$(echo CUDART_VERSION | gcc "${headers[@]}" -E -P -include cuda_runtime_api.h -x c - | tail -1)
[ "$version" = 12040 ] || { complain "the headers are of $version, not of 12.4"; exit 1; }

# from_elsewhere FILE...: headers of another toolkit that dependencies name
from_elsewhere() { cat "$@" | tr ' ' '\n' | grep -E '/(cuda[^/]*|crt|nvtx3|nv|cublas[^/]*)($|/)' | grep -vE "^(cuda|test|bench)/|^$kit/|/clang/" || true; }

# ---- C
own=()
for f in cuda/*.c test/cuda/*.c bench/cuda/*.c; do
    [ "$f" = test/cuda/programs.c ] || own+=("$f") # (that one by a list that make writes)
done
c=(gcc -std=gnu17 -fopenmp -D_GNU_SOURCE -DMEGATRAIN_CUDA -Isrc -Icuda -Itest "${headers[@]}")
"${c[@]}" -Wall -Werror -fsyntax-only "${own[@]}" || complain "C does not compile by CUDA 12.4's headers"
"${c[@]}" -M "${own[@]}" >"$kit/c.d"

# ---- kernels
cat >"$kit/include/left_out.h" <<'EOT'
/* What clang's own headers leave out of the toolkit's: launches it does not need to know, and stores past L1. */
#include <cuda_runtime.h>
extern "C" cudaError_t cudaConfigureCall(dim3, dim3, size_t = 0, cudaStream_t = nullptr);
#define PAST_L1(type, letters)                                                                                     \
    __device__ inline void __stcg(type *p, type v) { asm volatile("st.global.cg." letters ::"l"(p), PARTS_##type(v)); }
#define PARTS_int2(v) "r"(v.x), "r"(v.y)
#define PARTS_int4(v) "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
PAST_L1(int2, "v2.s32 [%0], {%1, %2};")
PAST_L1(int4, "v4.s32 [%0], {%1, %2, %3, %4};")
EOT
kernel() { # FILE flags...
    "$clang" -x cuda --cuda-path="$kit" "${headers[@]}" -include left_out.h --cuda-device-only -std=c++17 -Icuda -Isrc \
        -Wno-unknown-cuda-version -Wno-array-bounds -Wno-pass-failed -Werror "${@:2}" "$1" ||
        { complain "$1 does not compile by CUDA 12.4"; exit 1; }
}
# as many at once as there are processors, the longest first
most=$(nproc) running=0
one_ends() { wait -n || bad=1; running=$((running - 1)); }
beside() {
    [ $running -lt "$most" ] || one_ends
    "$@" &
    running=$((running + 1))
}
for f in cuda/{attention_fwd,grouped,norm}.cu; do
    beside kernel "$f" --cuda-gpu-arch=sm_90a -O1 -c -o "$kit/$(basename "$f").o"
done
rm -f "$kit"/*.cu.d
for f in cuda/*.cu; do beside kernel "$f" --cuda-gpu-arch=sm_80 -fsyntax-only -MD -MF "$kit/$(basename "$f").d"; done
while [ $running -gt 0 ]; do one_ends; done
cat "$kit"/*.cu.d >"$kit/cu.d"
[ -s "$kit/cu.d" ] || complain "the compiler does not say which headers it read"
elsewhere=$(from_elsewhere "$kit/c.d" "$kit/cu.d" | sort -u | head -3)
[ -z "$elsewhere" ] || complain "headers of another toolkit were read: $elsewhere"

kernels=(cuda/*.cu)
[ $bad -ne 0 ] || echo "cuda-12: ${#own[@]} files of C and ${#kernels[@]} of kernels compile by CUDA 12.4 and $($clang -dumpversion)"
exit $bad
