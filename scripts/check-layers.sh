#!/usr/bin/env bash
# Who may include whom. A folder includes itself and those named here, nothing else. scripts/architecture.py writes the table
# of docs/architecture.md from this array and from the lines `only`.
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A may=(
    [base]="" [config]="base" [boot]="base" [record]="base config"
    [device]="base" [cpu]="base device" [cuda]="base device comm" [gloo]="" [comm]="base boot device" [param]="base device comm"
    [layer]="base device comm param" [model]="base device comm param layer"
    [cost]="base config device comm" [measure]="base config device comm cost"
    [pipeline]="base" [optim]="base device comm param" [data]="base"
    [ckpt]="base device comm param" [hf]="base config device comm param layer model data ckpt"
    [engine]="base device comm param layer model pipeline optim data ckpt"
    [train]="base config boot record device comm param layer model pipeline optim data ckpt engine hf"
    [plan]="base config boot record device comm cost param layer model pipeline optim data ckpt engine train hf"
    [cli]="base config boot record device comm cost measure plan param layer model pipeline optim data ckpt engine train hf"
)
bad=0
complain() { echo "check-layers: $1"; bad=1; }
for folder in src/*/; do
    folder=${folder#src/}
    [[ -v may[${folder%/}] ]] || complain "src/$folder has no row here: say what it may include"
done
for module in "${!may[@]}"; do
    folder=src/$module
    [ "$module" != cuda ] || folder=cuda # (its own files are included by their names alone)
    [ -d "$folder" ] || complain "there is no folder '$folder'"
    while IFS=: read -r file line text; do
        target=$(sed -E 's/.*"([^"]+)".*/\1/' <<<"$text")
        case $module$target in
        */*) whose=${target%%/*} ;;
        cuda*) continue ;;
        *) complain "$file:$line: '$target' is not FOLDER/FILE"; continue ;;
        esac
        [[ " $module ${may[$module]} " == *" $whose "* ]] || complain "$file:$line: $module may not include $target"
    done < <(grep -nE '^#include "' -r "$folder" --include='*.[ch]' --include='*.cc' --include='*.cu' --include='*.cuh' --include='*.def' || true)
done
# these libraries have one door each: NAME HEADER FILES
only() { grep -lE "#include <$2" -r src | grep -v "^$3" && complain "<$2> belongs in $3 alone"; true; }
only Jansson 'jansson' src/base/json.c
only inih 'ini' src/config/
only utf8proc 'utf8proc' src/data/
only PCRE2 'pcre2' src/data/
only Gloo 'gloo/' src/comm/gloo
only hwloc 'hwloc' src/base/placement
only libsodium 'sodium' 'src/boot/\(greet\|secret\)'
# of the CUDA backend only communicators see comm
grep -nE '^#include "comm/' -r cuda | grep -vE '^cuda/(nccl_world\.h|staged\.c):' && complain "only communicators see comm"
grep -nE '^#include <nccl' -r cuda src && complain "what is used of NCCL is declared in cuda/nccl_api.h"
# what would break "same bits" (docs/determinism.md)
forbid() { grep -nE "$1" -r "${@:3}" --include='*.[ch]' --include='*.cc' | grep -vE '^\S+:\s*(\*|//|/\*)' && complain "$2"; true; }
forbid '\b(expf?|logf?|sinf?|cosf?|tanhf?|powf?|rsqrt)\(' "libm functions differ between versions: use base/mathx.h or cpu/vec.h" src/cpu src/device src/param src/layer src/model src/optim src/engine
forbid 'reduction\((\+|-|\*)' "a sum must not depend on the number of threads" src
forbid 'ffast-math|Ofast|funsafe' "fast-math changes results" src
# (the emulator contracts kernels as nvcc does)
grep -nE 'ffast-math|Ofast|funsafe' Makefile && complain "fast-math changes results"
grep -n 'ffp-contract=fast' Makefile | grep -v ':EMU_CONTRACT := -ffp-contract=fast$' && complain "contraction changes results"
exit $bad
