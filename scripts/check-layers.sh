#!/usr/bin/env bash
# Who may include whom (docs/architecture.md). A module includes its own folder and those named here, nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A may=(
    [base]="" [config]="base" [boot]="base" [record]="base config"
    [device]="base" [cpu]="base device" [comm]="base boot device" [param]="base device comm"
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
for module in "${!may[@]}"; do
    while IFS=: read -r file line text; do
        target=$(sed -E 's/.*"([^"]+)".*/\1/' <<<"$text")
        case $target in */*) folder=${target%%/*} ;; *) complain "$file:$line: '$target' is not FOLDER/FILE"; continue ;; esac
        [[ " $module ${may[$module]} " == *" $folder "* ]] || complain "$file:$line: $module may not include $target"
    done < <(grep -nE '^#include "' -r "src/$module" --include='*.[ch]' --include='*.cc' --include='*.def' || true)
done
# these libraries have one door each
only() { grep -lE "#include <$1" -r src | grep -v "^$2" && complain "<$1> belongs in $2 alone"; true; }
only 'jansson' src/base/json.c
only 'ini' src/config/
only 'utf8proc' src/data/
only 'pcre2' src/data/
only 'gloo/' src/comm/gloo
only 'hwloc' src/base/placement
only 'sodium' 'src/boot/\(greet\|secret\)'
# the CUDA backend sees base and device, and its communicators comm
grep -nE '^#include "comm/' -r cuda | grep -vE '^cuda/(nccl_world\.h|staged\.c):' && complain "only communicators see comm"
grep -nE '^#include <nccl' -r cuda src && complain "what is used of NCCL is declared in cuda/nccl_api.h"
grep -nE '^#include "(param|layer|model|pipeline|optim|data|ckpt|engine|train|cli|cpu)/' -r cuda && complain "cuda may not include these"
# what would break "same bits" (docs/determinism.md)
forbid() { grep -nE "$1" -r "${@:3}" --include='*.[ch]' --include='*.cc' | grep -vE '^\S+:\s*(\*|//|/\*)' && complain "$2"; true; }
forbid '\b(expf?|logf?|sinf?|cosf?|tanhf?|powf?|rsqrt)\(' "libm functions differ between versions: use base/mathx.h or cpu/vec.h" src/cpu src/device src/param src/layer src/model src/optim src/engine
forbid 'reduction\((\+|-|\*)' "a sum must not depend on the number of threads" src
forbid 'ffast-math|Ofast|funsafe' "fast-math changes results" src
# (the emulator contracts kernels as nvcc does)
grep -nE 'ffast-math|Ofast|funsafe|ffp-contract=fast' Makefile | grep -v ':EMU_CONTRACT := -ffp-contract=fast$' &&
    complain "fast-math changes results"
exit $bad
