#!/usr/bin/env bash
# What building and testing need. Says what is missing, by the names of this system's packages, and the one command
# that installs it; as root it runs that command itself, with apt or dnf. It asks for nobody else's rights: whoever
# wants that says `sudo make deps`.
#
#   scripts/install-deps.sh [dev|launchers|cuda-12]   dev adds what lint, sanitizers and benchmarks use, launchers what
#                                             starts ranks (mpirun, Slurm, torchrun), cuda-12 what compiles by CUDA 12.4
#
# What counts is whether a header, program or library is found, not who put it there. CC and EXTRA_CFLAGS are make's.
set -euo pipefail
set -f
PATH=$PATH:/usr/sbin:/sbin

# how it is looked for | Debian, Ubuntu | Fedora | conda-forge ("-": not there)
needs() {
    cat <<'EOT'
command:gcc          gcc                 gcc                 gcc
command:g++          g++                 gcc-c++             gxx
command:make         make                make                make
header:stdlib.h      libc6-dev           glibc-devel         sysroot_linux-64
header:ini.h         libinih-dev         inih-devel          inih
header:jansson.h     libjansson-dev      jansson-devel       jansson
header:pcre2.h       libpcre2-dev        pcre2-devel         pcre2
header:utf8proc.h    libutf8proc-dev     utf8proc-devel      libutf8proc
header:zlib.h        zlib1g-dev          zlib-devel          zlib
header:zstd.h        libzstd-dev         libzstd-devel       zstd
header:sodium.h      libsodium-dev       libsodium-devel     libsodium
header:hwloc.h       libhwloc-dev        hwloc-devel         libhwloc
header:gloo/context.h libgloo-dev        gloo-devel          -
command:xz           xz-utils            xz                  xz
command:bzip2        bzip2               bzip2               bzip2
command:ps           procps              procps-ng           procps-ng
command:python3      python3             python3             python
EOT
    case ${1:-} in
    dev) cat <<'EOT' ;;
command:ccache       ccache              ccache              ccache
command:clang        clang               clang               clang
command:clang-format clang-format        clang-tools-extra   clang-format
command:ip           iproute2            iproute             iproute2
sanitizers:          libclang-rt-dev     compiler-rt         compiler-rt
library:libopenblas.so.0 libopenblas0-openmp openblas-openmp libopenblas
command:faketime     faketime            libfaketime         libfaketime
module:torch         python3-torch       python3-torch       pytorch
EOT
    launchers) cat <<'EOT' ;;
command:mpirun       openmpi-bin         openmpi             openmpi
command:slurmctld    slurm-wlm           slurm-slurmctld     -
command:slurmd       slurm-wlm           slurm-slurmd        -
command:munged       munge               munge               -
module:torch         python3-torch       python3-torch       pytorch
EOT
    cuda-12) cat <<'EOT' ;;
clang:16             clang-19            clang               clang
module:pip           python3-pip         python3-pip         pip
EOT
    esac
}

# there KIND:NAME
there() {
    local name=${1#*:} found
    case $1 in
    command:*) command -v "$name" >/dev/null ;;
    header:*) # (without a compiler none counts as found)
        found=$(printf '#if __has_include(<%s>)\nfound\n#endif\n' "$name" |
            ${CC:-gcc} ${EXTRA_CFLAGS:-} -E -P -x c - 2>/dev/null)
        [[ $found == *found* ]] ;;
    sanitizers:) set +f; compgen -G "$(clang -print-resource-dir 2>/dev/null)/lib/*/libclang_rt.asan*" >/dev/null ;;
    clang:*) # one of this version or newer
        clang-19 --version >/dev/null 2>&1 || [ "$(clang -dumpversion 2>/dev/null | cut -d. -f1)" -ge "$name" ] 2>/dev/null ;;
    library:*) python3 -c "import ctypes; ctypes.CDLL('$name')" 2>/dev/null ;;
    module:*) # of Debian's Python, which tests and benchmarks call (docs/ranks.md)
        /usr/bin/python3 -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$name'))" 2>/dev/null ;;
    esac
}

# missing WORDS...: their names in each system, each once; what conda has not in conda_lacks
missing() {
    local what a d c
    apt='' dnf='' conda='' conda_lacks=''
    while read -r what a d c; do
        (there "$what") && continue
        [[ " $apt " == *" $a "* ]] || apt+=${apt:+ }$a
        [[ " $dnf " == *" $d "* ]] || dnf+=${dnf:+ }$d
        if [ "$c" = - ]; then conda_lacks+=${conda_lacks:+, }${what#*:}
        else conda+=${conda:+ }$c; fi
    done < <(needs "$@")
    [ -n "$apt" ]
}

say() { echo "install-deps: $*" >&2; }
show() { say "$*"; "$@"; }

conda_way() {
    [ -z "$conda" ] || echo "    conda install -c conda-forge $conda" >&2
    [ -z "$conda_lacks" ] || echo "    (no channel of conda's own has $conda_lacks: build it into the environment)" >&2
    echo "    make EXTRA_CFLAGS=\"-isystem \$CONDA_PREFIX/include\" EXTRA_LDFLAGS=\"-L\$CONDA_PREFIX/lib" \
        "-Wl,-rpath,\$CONDA_PREFIX/lib\"" >&2
}

missing "$@" || exit 0
if command -v apt-get >/dev/null; then tool=apt
elif command -v dnf >/dev/null; then tool=dnf
else
    say "no apt-get and no dnf here; please install what is missing:"
    printf '    %-16s %s\n' "Debian, Ubuntu:" "$apt" "Fedora:" "$dnf" "conda:" >&2
    conda_way
    exit 1
fi
say "missing: ${!tool}"
install=(dnf install -y)
[ $tool = dnf ] || install=(apt-get install -y --no-install-recommends)

if [ "$(id -u)" -ne 0 ]; then
    say "nothing was installed, for that takes root:"
    echo "    sudo ${install[*]} ${!tool}" >&2
    [ -z "${CONDA_PREFIX:-}" ] || { say "or without root, in the conda environment:"; conda_way; }
    exit 1
fi
if [ $tool = apt ]; then
    export DEBIAN_FRONTEND=noninteractive
    install+=(-q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300) # (a machine's own updates may hold the lock)
    show apt-get -q update
fi
show "${install[@]}" ${!tool}
hash -r
missing "$@" || exit 0
say "still missing, though the package manager ended well: ${!tool}"
exit 1
