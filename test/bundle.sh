#!/usr/bin/env bash
# The folder of `make bundle`, copied to another place and run with an empty environment: it finds its libraries,
# trains on the CPU, and without a GPU says so.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
bundle=$root/${BUILD:-build}/bundle
[ -d "$bundle" ] || { bad "no $bundle: make bundle"; finish; }
tar -C "$bundle" -cf - . | (mkdir elsewhere && tar -C elsewhere -xf -)
cd elsewhere || exit 1
clean() { env -i PATH=/usr/bin:/bin HOME=/nonexistent OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive "$@"; }

for program in megatrain gpu/programs; do
    for lib in lib/*; do
        path=$(clean ldd $program | sed -n "s|^[[:space:]]*$(basename "$lib") => \([^ ]*\).*|\1|p")
        check "$program takes $(basename "$lib") from the bundle, not '$path'" \
            [ -z "$path" -o "$(realpath "${path:-.}")" = "$PWD/$lib" ]
    done
    check "$program: nothing is missing" [ "$(clean ldd $program | grep -c 'not found')" -eq 0 ]
done
check "no more than 50 MB" [ "$(du -sb . | cut -f1)" -lt 50000000 ]
check "no libcuda in it" [ -z "$(find . -name 'libcuda*' -o -name 'libcublas*')" ]
check "megatrain --version" grep -q '^megatrain [0-9]' <<<"$(clean ./megatrain --version)"
clean ./megatrain --config config/tiny.ini run.device=cpu train.steps=12 optim.warmup=2 >out.txt 2>err.txt
check "a run on the CPU: exit $?, $(tail -1 err.txt)" [ "$(wc -l <runs/tiny/metrics.jsonl)" -ge 12 ]
check "programs by their names" [ "$(find gpu -type l | wc -l)" -ge 8 ]
clean gpu/steps tiny --steps 1 >out.txt 2>err.txt
case $? in
0) ok ;;
2) check "no GPU, and it says so: $(head -1 err.txt)" grep -q 'CUDA finds no GPU' err.txt
   clean bash scripts/gpu-check.sh --quick >out.txt 2>err.txt
   check "gpu-check ends with 2 (got $?) and the reason" grep -q 'CUDA finds no GPU' err.txt ;;
*) bad "gpu/steps: $(head -1 err.txt)" ;;
esac
finish
