#!/usr/bin/env bash
# Collects what a machine with a GPU and CUDA's libraries needs to run scripts/gpu-check.sh, in one folder that can
# be copied anywhere: $BUILD/bundle (make bundle builds first). Shared libraries that such a machine may lack lie in
# lib/, where the programs look first ($ORIGIN); glibc, the driver's libcuda and CUDA's cuBLASLt are the machine's.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build}
out=$build/bundle
limit_mb=50
rm -rf "$out"
mkdir -p "$out"/{gpu,lib,scripts,test/tools,bench,config,docs,data}

strip -o "$out/megatrain" megatrain
strip -o "$out/gpu/programs" "$build/gpu/programs"
for link in "$build"/gpu/*; do
    [ ! -L "$link" ] || ln -s programs "$out/gpu/$(basename "$link")"
done

cp scripts/gpu-check.sh scripts/launch.sh "$out/scripts/"
cp test/gpu_steps.sh test/gpu_ranks.sh test/cuda_runs.sh test/test_cuda_{run,resume}.sh test/lib.sh "$out/test/"
cp test/tools/npy.py "$out/test/tools/"
cp bench/torch_gpu.py "$out/bench/"
cp -r config/*.ini config/devices "$out/config/"
cp docs/gpu.md "$out/docs/"
cp LICENSE "$out/"
git describe --always --dirty >"$out/SOURCE" 2>/dev/null || echo unknown >"$out/SOURCE"

# config/tiny.ini trains on data/tiny
./megatrain preprocess --input README.md --tokenizer byte --output "$out/data/tiny" --append-eod >/dev/null 2>&1

ours() { # is this library to be taken along?
    case $1 in
    linux-vdso* | ld-linux* | libc.so* | libm.so* | libpthread.so* | libdl.so* | librt.so*) return 1 ;;
    libcuda.so* | libcudart.so* | libcublas* | libnvidia*) return 1 ;;
    esac
}
for program in megatrain "$build/gpu/programs"; do
    ldd "$program" | while read -r name _ path _; do
        if [[ $name != lib* ]] || ! ours "$name"; then continue; fi
        [ -e "$path" ] || { echo "bundle: $program needs $name, which is not here" >&2; exit 1; }
        [ -e "$out/lib/$name" ] || cp -L "$path" "$out/lib/$name"
    done
done

bytes=$(du -sb "$out" | cut -f1)
echo "$out: $((bytes / 1000000)) MB, $(find "$out" -type f | wc -l) files; lib: $(cd "$out/lib" && echo *)"
[ "$bytes" -lt $((limit_mb * 1000000)) ] || { echo "bundle: more than $limit_mb MB" >&2; exit 1; }
