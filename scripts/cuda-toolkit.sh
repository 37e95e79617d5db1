#!/usr/bin/env bash
# Where a CUDA toolkit has its headers and libraries, and what its compiler is told. nvcc itself is asked: conda, PyPI's
# wheels and the HPC SDK have other folders than NVIDIA's installer.
#
#   scripts/cuda-toolkit.sh headers|libraries TOOLKIT      one line: folders
#   scripts/cuda-toolkit.sh flags TOOLKIT [ARCH...]        one line: nvcc's flags for object code of these, by default of ours
#   scripts/cuda-toolkit.sh check TOOLKIT                  nothing if all is there, else a line and status 2
#
# TOOLKIT/bin/nvcc is the compiler; of a folder without one (the emulator needs headers alone) its include/ counts.
set -euo pipefail

# A100 (8.6 and 8.9 run the same), Hopper, B200 and B300, Blackwell's RTX and GB10: of these, what the compiler knows
ours='80 90a 100 120'

asked() { "$nvcc" --dryrun -c -x cu /dev/null 2>&1; }
# said NAME: the folders of a line of it, as `#$ NAME="-IFOLDER" "-isystem" "FOLDER"`
said() { asked | sed -n "s/^#\\$ $1= *//p" | grep -oE '"[^"]+"' | sed 's/^"\(-[IL]\)\{0,1\}//; s/ *"$//' | grep / || true; }
# existing: those of the folders on stdin that exist, each once. (/usr/include has its place in the compiler's own list.)
existing() {
    local folder real seen=' '
    while IFS= read -r folder; do
        folder=$(cd "$folder" 2>/dev/null && pwd) && real=$(cd "$folder" && pwd -P) || continue
        [[ $seen != *" $real "* && $real != /usr/include ]] || continue
        seen+="$real "
        printf '%s ' "$folder"
    done
}
# beside include|lib|lib64: where packages have it that nvcc is not told of: PyPI lib, whatever nvcc says of lib64; the HPC
# SDK cuBLASLt, in a folder of the toolkit's version
beside() {
    local top
    top=$(cd "$(asked | sed -n 's/^#\$ TOP=//p')" 2>/dev/null && pwd -P) || top=$toolkit
    printf '%s\n' "$top/$1" "$toolkit/$1" "$top/../../math_libs/${top##*/}/$1" "$top/../../math_libs/$1"
}
headers() {
    [ -x "$nvcc" ] || { printf '%s\n' "$toolkit"/include{,/cccl} | existing; return; }
    { said INCLUDES; said SYSTEM_INCLUDES; beside include; } | existing
}
libraries() {
    [ -x "$nvcc" ] || return 0
    { said LIBRARIES | sed '/\/stubs$/d'; beside lib64; beside lib; } | existing
}
# flags [ARCH...]: a GPU's own features (90a) take PTX of their own; all others share one, which every later GPU runs from
flags() {
    local a codes=compute_80 own='' known
    known=" $("$nvcc" --list-gpu-code 2>/dev/null | tr '\n' ' ')"
    if [ $# -eq 0 ]; then for a in $ours; do [[ $known != *" sm_${a%a} "* ]] || set -- "$@" "$a"; done; fi
    for a in "$@"; do
        case $a in *a) own+=" -gencode=arch=compute_$a,code=sm_$a" ;; *) codes+=,sm_$a ;; esac
    done
    # code in a seventh of the size; drivers older than 550 cannot read it, but those cannot run what CUDA 13 compiled
    [[ $("$nvcc" --version) != *"release 1"[3-9]* ]] || own+=" -compress-mode=size"
    echo "-gencode=arch=compute_80,code=[$codes]$own"
}

# there FOLDERS FILE
there() {
    local folder
    for folder in $1; do [ ! -e "$folder/$2" ] || return 0; done
    return 1
}
missing() { # FILE FOLDERS DEBIAN CONDA PYPI
    echo "cuda-toolkit: $nvcc has no $1 (looked in ${2:-its folders, of which none exists}): NVIDIA's packages call it $3," \
        "conda $4, PyPI $5; CUDA_HOME=FOLDER takes another toolkit, CUDA=0 builds without GPUs" >&2
    exit 2
}
check() {
    local folders file debian conda pypi
    while read -r file debian conda pypi; do
        folders=$(headers)
        [[ $file != lib* ]] || folders=$(libraries)
        there "$folders" "$file" || missing "$file" "$folders" "$debian" "$conda" "$pypi"
    done <<'EOT'
cuda_runtime_api.h    cuda-cudart-dev cuda-cudart-dev    nvidia-cuda-runtime
crt/host_defines.h    cuda-crt        cuda-crt           nvidia-cuda-crt
nv/target             cuda-cccl       cuda-cccl          nvidia-cuda-cccl
cublasLt.h            libcublas-dev   libcublas-dev      nvidia-cublas
nvtx3/nvToolsExt.h    cuda-nvtx       cuda-nvtx-dev      nvidia-nvtx
libcudart_static.a    cuda-cudart-dev cuda-cudart-static nvidia-cuda-runtime
EOT
}

usage() { sed -n '5,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
verb=$1 toolkit=$2 nvcc=$2/bin/nvcc
shift 2
case $verb in
headers | libraries | flags | check) "$verb" "$@" ;;
*) usage ;;
esac
