#!/usr/bin/env bash
# Installs, by package name, what building and testing need. Does nothing when all of it is there.
# As root or with sudo; `scripts/install-deps.sh dev` adds what lint, sanitizers and benchmarks use, `... launchers` what
# starts ranks (mpirun, Slurm, torchrun).
set -euo pipefail
packages=(gcc g++ make libc6-dev libinih-dev libjansson-dev libpcre2-dev libutf8proc-dev zlib1g-dev libzstd-dev libgloo-dev xz-utils bzip2 procps python3)
[ "${1:-}" = dev ] && packages+=(clang clang-format libclang-rt-dev libopenblas0-openmp python3-torch)
[ "${1:-}" = launchers ] && packages+=(openmpi-bin slurm-wlm munge python3-torch)

missing=()
for p in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
    echo "install-deps: this is not Debian or Ubuntu; please install: ${missing[*]}" >&2
    exit 1
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "install-deps: run as root, or install sudo; missing: ${missing[*]}" >&2; exit 1; }
    sudo=sudo
fi
echo "install-deps: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
