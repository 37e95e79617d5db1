#!/usr/bin/env bash
# scripts/cuda-toolkit.sh on toolkits as NVIDIA's installer, conda, PyPI's wheels and the HPC SDK lay them out: folders
# with an nvcc that says what such a one says, and with what `make` then compiles by, links with and misses.
. "$(dirname "$0")/lib.sh"
unset MAKEFLAGS MAKEOVERRIDES CUDA # `make test CUDA=0` is not what the makes here are asked
toolkit() { "$root/scripts/cuda-toolkit.sh" "$@"; }

# tree FOLDER: all that is needed, in include/ and LIB/ of it
tree() { # FOLDER LIB
    mkdir -p "$1"/include/{crt,nv,nvtx3} "$1/$2/stubs"
    touch "$1"/include/{cuda_runtime_api.h,crt/host_defines.h,nv/target,cublasLt.h,nvtx3/nvToolsExt.h} "$1/$2/libcudart_static.a"
}
# compiler FILE TOP INCLUDE LIB RELEASE ARCH...: an nvcc that says so of itself
compiler() {
    local file=$1 top=$2 include=$3 lib=$4 release=$5
    shift 5
    mkdir -p "$(dirname "$file")"
    cat >"$file" <<EOS
#!/bin/sh
case \$1 in
--dryrun) cat >&2 <<EOD
#\$ _TARGET_SIZE_=
#\$ TOP=$top
#\$ INCLUDES="-I$include"  
#\$ LIBRARIES=  "-L$lib/stubs" "-L$lib"
#\$ gcc "-I/not/this/one" -E
EOD
    ;;
--list-gpu-code) printf 'sm_%s\n' $* ;;
--version) echo "Cuda compilation tools, release $release, V$release.0" ;;
esac
EOS
    chmod +x "$file"
}
# found TOOLKIT HEADERS LIBRARIES: folders as `headers` and `libraries` tell them, and nothing is missing
found() {
    check "headers of $1: $(toolkit headers "$1")" [ "$(toolkit headers "$1")" = "$2 " ]
    check "libraries of $1: $(toolkit libraries "$1")" [ "$(toolkit libraries "$1")" = "$3 " ]
    check "complete: $1" toolkit check "$1"
}

# NVIDIA's installer: include and lib64 are links into targets/
tree nvidia/targets/x86_64-linux lib
ln -s targets/x86_64-linux/include nvidia/include
ln -s targets/x86_64-linux/lib nvidia/lib64
compiler nvidia/bin/nvcc "$work/nvidia/bin/.." "$work/nvidia/bin/../targets/x86_64-linux/include" \
    "$work/nvidia/bin/../targets/x86_64-linux/lib" 12.4 80 86 89 90
found "$work/nvidia" "$work/nvidia/targets/x86_64-linux/include" "$work/nvidia/targets/x86_64-linux/lib"

# conda: nothing in include/ and lib/ of the environment but what is not CUDA's
tree conda/targets/x86_64-linux lib
mkdir -p conda/include conda/lib
compiler conda/bin/nvcc "$work/conda/bin/.." "$work/conda/bin/../targets/x86_64-linux/include" \
    "$work/conda/bin/../targets/x86_64-linux/lib" 12.9 80 90 100 120
found "$work/conda" "$work/conda/targets/x86_64-linux/include $work/conda/include" \
    "$work/conda/targets/x86_64-linux/lib $work/conda/lib"

# PyPI's wheels: lib, where nvcc says lib64, in a path that it tells relative to where it was called
tree site/nvidia/cu13 lib
compiler site/nvidia/cu13/bin/nvcc ./site/nvidia/cu13/bin/.. ./site/nvidia/cu13/bin/..//include ./site/nvidia/cu13/bin/..//lib64 \
    13.0 75 80 90 100 120
found site/nvidia/cu13 "$work/site/nvidia/cu13/include" "$work/site/nvidia/cu13/lib"

# the HPC SDK: nvcc in compilers/, CUDA in cuda/VERSION/, cuBLASLt in math_libs/VERSION/
sdk=$work/sdk/24.5
tree "$sdk/cuda/12.4" lib64
mkdir -p "$sdk/math_libs/12.4/include" "$sdk/math_libs/12.4/lib64" "$sdk/math_libs/11.8/include" "$sdk/compilers/include"
mv "$sdk/cuda/12.4/include/cublasLt.h" "$sdk/math_libs/12.4/include"
compiler "$sdk/compilers/bin/nvcc" "$sdk/cuda/12.4/bin/.." "$sdk/cuda/12.4/bin/..//include" "$sdk/cuda/12.4/bin/..//lib64" \
    12.4 80 90
mkdir "$sdk/cuda/12.4/bin"
found "$sdk/compilers" "$sdk/cuda/12.4/include $sdk/compilers/include $sdk/math_libs/12.4/include" \
    "$sdk/cuda/12.4/lib64 $sdk/math_libs/12.4/lib64"

# headers alone, for the emulator
tree bare lib
check "headers without nvcc" [ "$(toolkit headers "$work/bare")" = "$work/bare/include " ]
check "libraries without nvcc" [ -z "$(toolkit libraries "$work/bare")" ]

# object code for what the compiler knows, or for what was asked for; compressed where every driver reads it
flags() { check "flags of $2: $(toolkit flags "${@:2}")" [ "$(toolkit flags "${@:2}")" = "$1" ]; }
flags '-gencode=arch=compute_80,code=[compute_80,sm_80] -gencode=arch=compute_90a,code=sm_90a' "$work/nvidia"
flags '-gencode=arch=compute_80,code=[compute_80,sm_80,sm_100,sm_120] -gencode=arch=compute_90a,code=sm_90a' "$work/conda"
flags '-gencode=arch=compute_80,code=[compute_80,sm_80,sm_100,sm_120] -gencode=arch=compute_90a,code=sm_90a -compress-mode=size' \
    site/nvidia/cu13
flags '-gencode=arch=compute_80,code=[compute_80] -gencode=arch=compute_90a,code=sm_90a' "$work/conda" 90a
flags '-gencode=arch=compute_80,code=[compute_80,sm_89]' "$work/conda" 89

# what make passes on
made() { make -s -C "$root" BUILD="$work/build" CUDA_HOME="$1" -n "${@:2}" 2>&1; }
cc=$(made "$sdk/compilers" "$work/build/cuda/gemm.o")
check "cuBLASLt's folder in: $cc" grep -qF -- "-isystem $sdk/math_libs/12.4/include" <<<"$cc"
nvcc=$(made "$work/conda" CUDA_ARCHS=120 "$work/build/cuda/loss.o")
check "one architecture in: $nvcc" grep -qF -- 'code=[compute_80,sm_120] ' <<<"$nvcc"
check "no other in: $nvcc" [ "$(grep -c sm_90a <<<"$nvcc")" -eq 0 ]
ld=$(made "$work/conda" megatrain)
check "libraries" grep -qF -- "-L$work/conda/targets/x86_64-linux/lib" <<<"$ld"

# the demo builds kernels where a GPU is seen, where some were built before, or where it is told to
demo_makes() { # RESULT VARIABLE=VALUE...
    local got
    got=$(make -s -C "$root" BUILD="$work/demo" CUDA_HOME="$work/conda" -n demo "${@:2}" 2>/dev/null |
        grep -o 'CUDA=[01] megatrain')
    check "the demo with ${*:2}: $got" [ "$got" = "$1 megatrain" ]
}
demo_makes CUDA=0 SEES_GPU=
demo_makes CUDA=1 SEES_GPU=/dev/nvidia0
demo_makes CUDA=0 SEES_GPU=/dev/nvidia0 CUDA=0
demo_makes CUDA=1 SEES_GPU= CUDA=1
mkdir -p demo && touch demo/.cuda-1
demo_makes CUDA=1 SEES_GPU=

# the executable as it was built: its addresses are bound before main and then read-only, the guards of stacks and of the
# libraries' copies are in it, no stack is executable, and no folder of a user's is looked into for libraries
if [ -z "${MEGATRAIN_SANITIZED:-}" ]; then
    readelf -dW "$mt" >dynamic.txt && readelf -lW "$mt" >segments.txt && readelf --dyn-syms -W "$mt" >symbols.txt || bad "readelf"
    check "addresses are bound at the start" grep -q 'BIND_NOW' dynamic.txt
    check "and read-only then" grep -q 'GNU_RELRO' segments.txt
    check "at an address of each start's own" grep -q 'Elf file type is DYN' segments.txt
    check "no stack is executable: $(grep GNU_STACK segments.txt)" grep -q 'GNU_STACK .* RW  *0x' segments.txt
    check "guards of stacks" grep -q '__stack_chk_fail' symbols.txt
    for f in memcpy snprintf vsnprintf; do check "$f is guarded" grep -q "__${f}_chk" symbols.txt; done
    grep 'RPATH\|RUNPATH' dynamic.txt | grep -v '\[$ORIGIN/lib:$ORIGIN/\.\./lib[]:]' >path.txt
    check "no path of libraries but with CUDA the bundle's: $(cat path.txt)" [ ! -s path.txt ]
fi

# a word that no fault's name contains is no pass
for list in mutants cuda_bugs layout_controls; do
    "$root/test/$list.sh" "no such fault" >out.txt 2>&1
    check "status of $list.sh" [ $? -eq 2 ]
    check "a line of $list.sh: $(cat out.txt)" grep -qF "no record's name contains 'no such fault'" out.txt
done

# what is missing: one line, before any compiler has been called, with where it was looked for and what helps
rm conda/targets/x86_64-linux/include/cublasLt.h
for asked in cuda/gemm.o cuda/loss.o; do
    make -s -C "$root" BUILD="$work/build" CUDA_HOME="$work/conda" "$work/build/$asked" >out.txt 2>&1
    check "status of make" [ $? -eq 2 ]
    for text in "$work/conda/bin/nvcc has no cublasLt.h" "$work/conda/targets/x86_64-linux/include" libcublas-dev CUDA=0; do
        check "'$text' in: $(cat out.txt)" grep -qF -- "$text" out.txt
    done
    check "one line beside make's own: $(cat out.txt)" [ "$(grep -vc '^make' out.txt)" -eq 1 ]
done
rm nvidia/targets/x86_64-linux/lib/libcudart_static.a
toolkit check "$work/nvidia" 2>out.txt
check "the library: $(cat out.txt)" grep -qF "has no libcudart_static.a (looked in $work/nvidia/targets/x86_64-linux/lib" out.txt
finish
