#!/usr/bin/env bash
# Would the emulator's lanes notice a bug in a kernel? Puts the bugs of test/cuda_bugs.txt one at a time into a copy
# of the tree and runs the test that must fail, in the lane that must see it (test/emu/README.md): forward, reverse,
# random:SEED, streams (by chance), asan, tsan, or on the GPU of a compute capability, 8.6, in an order
# too, 8.9:random:1. A bug that passes there, does not compile, or no longer finds its place is a failure. So is one whose
# test does not end within two minutes, unless its record says `hangs yes`.
#
#   FULL=1 test/cuda_bugs.sh        all of them; without it some (mutate.sh)
#   test/cuda_bugs.sh WORD          those whose name contains WORD
#   test/cuda_bugs.sh -a [WORD]     in every lane; says which see it
#
# Only the file with the bug is instrumented in asan and tsan. That makes no false report: what is not instrumented
# is not watched, and synchronisation is told to the sanitizers by the emulator, not seen by them. The file is linked
# first, so that of functions which several files have (emu.h's) the watched ones are taken.
. "$(dirname "${BASH_SOURCE[0]}")/mutate.sh"
every_lane=
if [ "${1:-}" = -a ]; then every_lane=1 FULL=1; shift; fi
only=${1:-} FULL=${FULL:-${1:+1}}
every=12
list=$root/test/cuda_bugs.txt
check_word "$list"

# ---- a lane ----

# Folder of objects, in the copy.
folder() {
    case $lane in asan | tsan) echo "$build/bugs-$lane" ;; *) echo "$build/emu" ;; esac
}

# lane_make TARGET...: $unit is linked first; of what depends on $file only what is missing is built.
lane_make() {
    local kernels flags=EMU_FLAGS=-O1
    kernels=$(printf '%s\n' cuda/*.cu | grep -vxF "$unit" | tr '\n' ' ')
    case $unit in *.cu) kernels="$unit $kernels" ;; esac
    case $lane in asan | tsan) flags=EMU_LANE=$lane ;; esac
    make -s -j"$(nproc)" -o "$file" BUILD="$build" EMU="$(folder)" CUDA_CU="$kernels" "$flags" "$@" \
        >"$work/make.log" 2>&1
}

# Its exit status; what it printed is in $work/test.log.
run_test() {
    local order=$lane gpu=9.0 streams=late
    case $lane in
    asan | tsan) order=forward ;;
    [0-9]*.[0-9]:*) order=${lane#*:} gpu=${lane%%:*} ;;
    *[0-9].[0-9]) order=forward gpu=$lane ;;
    streams) order=forward streams=random ;;
    esac
    EMU_CLOSED=0 EMU_ORDER=$order EMU_STREAMS=$streams EMU_GPU=$gpu ASAN_OPTIONS=detect_leaks=0:handle_sigill=1 TSAN_OPTIONS=halt_on_error=1 \
        timeout 120 "$(folder)/$program" "$filter" >"$work/test.log" 2>&1
}

# Did the test fail? In a sanitizer's lane: and is it the sanitizer that says so? A test that does not end is one that
# fails where the record says that it hangs.
caught() {
    local says= status
    case $lane in asan) says=AddressSanitizer ;; tsan) says='ThreadSanitizer: data race' ;; esac
    run_test
    status=$?
    [ $status -ne 0 ] && { [ $status -ne 124 ] || [ -n "$hangs" ]; } && { [ -z "$says" ] || grep -qE "$says" "$work/test.log"; }
}

# The line of the test's output that tells.
witness() {
    local text
    text=$(grep -m1 -E '^SUMMARY: |^emu: |^ *test/cuda/.*: ' "$work/test.log" | sed 's/^SUMMARY: //')
    [ -n "$text" ] || text=$(grep -m1 '^FAIL' "$work/test.log")
    [ -n "$text" ] || text=$(tail -1 "$work/test.log")
    echo "${text:-no end in its time}" | cut -c1-130
}

# ---- records ----

# false: not asked for
read_record() {
    name=$(field name) file=$(field file) unit=$(field unit) own_lane=$(field lane) hangs=$(field hangs)
    read -r program filter <<<"$(field test)"
    unit=${unit:-$file} lanes=$own_lane
    [ -z "$every_lane" ] || lanes="forward reverse random:1 asan tsan"
    case $name in *"$only"*) ;; *) return 1 ;; esac
}

# What the record needs: a line LANE UNIT PROGRAM FILTER for each of its lanes.
needs() {
    [ -n "$chosen" ] && read_record && printf "%s $unit $program $filter\n" $lanes
}

objects_of() { # (the library, too, where it has the object: what stays behind would be in all later programs)
    case $unit in src/*) echo "$build/${unit%.c}.o" "$build/libmegatrain.a" ;; *.cu) echo "$(folder)/$unit.o" ;; *) echo "$(folder)/${unit%.c}.o" ;; esac
}

# ---- the copy ----

# A lane's folder. A sanitizer's: the plain objects, but for the emulator and the units that will have bugs.
make_folder() {
    local units
    mapfile -t units < <(awk -v l="$lane" '$1 == l { print $2 }' "$work/needs" | sort -u)
    [ ${#units[@]} -gt 0 ] || return 0
    unit=${units[0]} file=none
    if [ ! -d "$(folder)" ]; then
        cp -a "$build/emu" "$(folder)"
        rm -rf "$(folder)"/test/emu "$(folder)"/test_*
        for u in "${units[@]}"; do rm -f "$(folder)/${u%.cu}.cu.o"; done
    fi
    mapfile -t programs < <(awk -v l="$lane" -v f="$(folder)" '$1 == l { print f "/" $3 }' "$work/needs" | sort -u)
    lane_make "${programs[@]}"
}

copy_emu() {
    cp -a "$root"/Makefile "$root"/main.c "$root"/src "$root"/test "$root"/scripts "$root"/cuda "$work" || exit 1
    mkdir -p "$work/$build/emu"
    # (with the stamps of make, which would else compile all kernels again, by nvcc)
    cp -a "$root/$build"/{src,cuda,libmegatrain.a,emu,.cuda-*,.toolkit*} "$work/$build" 2>/dev/null
    cd "$work" || exit 1
    each_record "$list" needs | sort -u >"$work/needs"
    for lane in $(cut -d ' ' -f 1 "$work/needs" | sort -u); do
        make_folder && continue
        tail -20 "$work/make.log"
        echo "0 passed, 1 failed"
        exit 1
    done
}

# Without a bug every test passes.
check_green() {
    while read -r lane unit program filter; do
        run_test && continue
        echo "RED WITHOUT A BUG: $lane $program $filter: $(witness)"
        bad
    done < <(awk '{ print $1, "-", $3, $4 }' "$work/needs" | sort -u)
}

# ---- a bug ----

# The record's bug in $lane, applied. Prints what came of it; true if it was caught.
try_lane() {
    # shellcheck disable=SC2046
    rm -f $(objects_of) "$(folder)/$program"
    if ! lane_make "$(folder)/$program"; then
        echo "DOES NOT COMPILE: $(grep -m1 error "$work/make.log")"
        return 1
    fi
    if caught; then echo "$lane: $(witness)"; return 0; fi
    echo "$lane: ALIVE, $program $filter: $(witness)"
    return 1
}

try_bug() {
    local text result
    read_record || return
    [ -n "$chosen" ] || { lane=forward; find_place "$name"; return; }
    for lane in $lanes; do
        if ! text=$(mutate); then
            text="NOT APPLIED: $text" result=1
        else
            text=$(try_lane)
            result=$?
            restore
        fi
        printf '%-58s %s\n' "$name" "$text"
        [ "$lane" = "$own_lane" ] || continue
        if [ $result -eq 0 ]; then good; else bad; fi
    done
}

copy_emu
check_green
each_record "$list" try_bug
finish
