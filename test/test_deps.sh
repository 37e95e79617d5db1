#!/usr/bin/env bash
# scripts/install-deps.sh on machines that are made of stubs: package managers of Debian, Fedora, conda and none; with
# root and without; what is missing is missing from the PATH, or the stub of gcc says so. Nothing here changes what this
# machine has.
. "$(dirname "$0")/lib.sh"
bin=$work/bin log=$work/calls
real() { command -v "$1"; }

# machine PACKAGE-MANAGER USER-ID WORDS...: one on which these headers and programs are missing
machine() {
    local manager=$1 user=$2 p
    rm -rf "$bin" lacks log.txt
    mkdir "$bin" lacks
    : >"$log"
    for p in bash cat mkdir rm make; do ln -s "$(real $p)" "$bin/$p"; done
    for p in g++ xz bzip2 ps python3 ccache clang clang-format mpirun slurmctld slurmd munged sudo conda; do stub $p; done
    printf '#!%s\necho %s\n' "$(real bash)" "$user" >"$bin/id"
    # the compiler finds a header unless there is a file of its name in lacks/
    cat >"$bin/gcc" <<EOS
#!$(real bash)
echo "gcc \$*" >>"$work/gcc.txt"
text=\$(cat)
[[ \$text =~ include\(\<(.*)\>\) ]] && [ ! -e "$work/lacks/\${BASH_REMATCH[1]//\//_}" ] && echo found
EOS
    # the package manager says hello, and puts everything there
    [ "$manager" = none ] || cat >"$bin/$manager" <<EOS
#!$(real bash)
echo "$manager \$*" >>"$log"
echo "hello from $manager"
[[ \$* == *install* ]] && [ -e "$work/fails" ] && { echo "no route to the archive"; exit 100; }
[[ \$* == *install* ]] && [ ! -e "$work/lies" ] && rm -f "$work"/lacks/*
exit 0
EOS
    rm -f fails lies
    chmod +x "$bin"/*
    for p in "${@:3}"; do
        if [[ $p == *.h ]]; then : >"lacks/${p//\//_}"; else rm "$bin/$p"; fi
    done
}
# a program that does nothing but be there, and note that it was called
stub() { printf '#!%s\necho "%s $*" >>%s\n' "$(real bash)" "$1" "$log" >"$bin/$1"; }

# deps CODE WORDS...: runs it; in out.txt what it says
deps() {
    local code=$1 got
    env -i PATH="$bin" HOME="$work" ${conda:+CONDA_PREFIX=$conda} \
        "$bin/bash" "$root/scripts/install-deps.sh" "${@:2}" >out.txt 2>&1
    got=$?
    check "exit $got, want $code: $(cat out.txt)" [ $got -eq "$code" ]
}
says() { check "'$1' in: $(cat out.txt)" grep -qF -- "$1" out.txt; }
calls() { grep -v '^python3 ' "$log"; }
called() { check "called '$(calls)', want '$1'" [ "$(calls)" = "$1" ]; }
update='apt-get -q update'
install='apt-get install -y --no-install-recommends -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300'
conda=

# /usr/sbin is looked through, too, so no case takes a program of there away
machine apt-get 1000
deps 0
check "nothing missing: not a word" [ ! -s out.txt ]
called ""

machine apt-get 1000 ini.h hwloc.h gloo/context.h xz
deps 1
says "missing: libinih-dev libhwloc-dev libgloo-dev xz-utils"
says "    sudo apt-get install -y --no-install-recommends libinih-dev libhwloc-dev libgloo-dev xz-utils"
check "no word of conda" [ "$(grep -c conda out.txt)" -eq 0 ]
called ""
# the command that it names is all there is to do
machine apt-get 1000 ini.h gloo/context.h
deps 1
printf '#!%s\n"$@"\n' "$(real bash)" >"$bin/sudo"
env -i PATH="$bin" "$bin/bash" -c "$(sed -n 's/^ *\(sudo .*\)/\1/p' out.txt)" >/dev/null
deps 0

machine apt-get 0 zstd.h utf8proc.h
deps 0
called "$update"$'\n'"$install libutf8proc-dev libzstd-dev"
says "install-deps: apt-get install -y"
says "hello from apt-get"

machine apt-get 0 zstd.h
: >fails
deps 100
says "no route to the archive"
machine apt-get 0 zstd.h
: >lies
deps 1
says "still missing, though the package manager ended well: libzstd-dev"

machine apt-get 0 clang-format # (which the stub cannot install)
deps 1 dev
says "clang-format"
check "once as missing" grep -q "^install-deps: missing: .*clang-format" out.txt
machine apt-get 1000 mpirun
deps 1 launchers
says "openmpi-bin"

machine dnf 1000 ini.h zlib.h hwloc.h g++ ps
deps 1
says "    sudo dnf install -y gcc-c++ inih-devel zlib-devel hwloc-devel procps-ng"
called ""
machine dnf 0 ini.h zlib.h
deps 0
called "dnf install -y inih-devel zlib-devel"
says "hello from dnf"

conda=/home/me/env
machine apt-get 1000 ini.h gloo/context.h utf8proc.h hwloc.h
deps 1
says "sudo apt-get install -y --no-install-recommends libinih-dev libutf8proc-dev libhwloc-dev libgloo-dev"
says "    conda install -c conda-forge inih libutf8proc libhwloc"
says "has gloo/context.h"
called ""
conda=
for user in 0 1000; do
    machine none $user ini.h gloo/context.h
    deps 1
    says "libinih-dev libgloo-dev"
    says "inih-devel gloo-devel"
    says "conda install -c conda-forge inih"
    called ""
done

# by way of make: its compiler flags count, and nothing is built or asked of sudo
machine apt-get 1000 gloo/context.h
env -i PATH="$bin" HOME="$work" "$bin/make" -C "$root" all EXTRA_CFLAGS=-I/opt/gloo BUILD="$work/build" CUDA=0 \
    >out.txt 2>&1
check "make ends with 2 (got $?)" [ $? -eq 2 ]
says "sudo apt-get install -y --no-install-recommends libgloo-dev"
called ""
check "make's flags: $(head -1 gcc.txt)" grep -q '^gcc -I/opt/gloo -E' gcc.txt
check "nothing was built" [ ! -e build ]
finish
