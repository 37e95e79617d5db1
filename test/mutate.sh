# shellcheck shell=bash
# Shared by mutants.sh and layout_controls.sh: faults applied one at a time to a copy of the tree. Source it.
#
# A list of faults is a text of records, separated by blank lines; '#' begins a comment line:
#
#   name  what is broken, in words
#   file  the file it is applied to
#   from  a piece of it, which must occur exactly once; a blank stands for any white space, line ends too
#   to    what stands there instead (nothing: it is left out)
#
# and one more field for what is expected ('test' or 'differ', see the two scripts). The copy has a copy of the
# folder of objects too, so that a fault costs the compilation of one file.
#
# FULL=1 tries every record. Without it one in so many is tried as the script's variable `every` says, others at each commit
# (turn.sh); of the rest is only seen that they find their place.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=${BUILD:-build}
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
work=$(mktemp -d "${TMPDIR:-/tmp}/megatrain-mutants.XXXXXX")
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0
unset EXTRA_CFLAGS # (of -Werror: what a fault leaves unused is no error)

# The best instruction set of this processor, as src/cpu/ names them.
isa=c
has() { local f; for f in "$@"; do grep -qw "$f" /proc/cpuinfo || return 1; done; }
if has avx2 fma; then isa=avx2; fi
if has avx512f avx512dq avx512vl avx512bw fma; then isa=avx512; fi

# copy_tree PROGRAM...: the tree and its objects in $work, test programs built. The caller's folder is then $work.
copy_tree() {
    (cd "$root" && cp -a Makefile main.c config src test scripts bench cuda "$work") || exit 1
    mkdir -p "$work/$build"
    if [ -d "$root/$build/src" ]; then cp -a "$root/$build/src" "$work/$build/" || exit 1; fi
    if [ -d "$root/$build/test" ]; then
        mkdir "$work/$build/test"
        find "$root/$build/test" -name '*.[od]' -exec cp -p -t "$work/$build/test" {} +
    fi
    cd "$work" || exit 1
    if ! make_tests "$@"; then
        tail -20 "$work/make.log"
        echo "0 passed, 1 failed"
        exit 1
    fi
}

# make_tests PROGRAM... [NAME=VALUE]
make_tests() {
    make -s -j"$(nproc)" CUDA=0 BUILD="$build" "${@/#test_/$build/test/test_}" >"$work/make.log" 2>&1
}

# With a fault in one file, which is compiled without optimisation: that is faster, and the results are the same. (The
# kernels of src/cpu/ set their own, and are compiled for this machine's instruction set alone: a test compares it with the
# others, which stay sound. ALL_SETS is for programs that run several sets.)
build_tests() {
    local object unchanged=()
    [ -n "${ALL_SETS:-}" ] || for object in $(cd "$work/kept" && find . -path "*/src/cpu/*.o" ! -path "*/src/cpu/$isa/*"); do unchanged+=(-o "${object#./}"); done
    make_tests "$@" OPT=-O0 "${unchanged[@]}"
}

# field FIELD: of the record in $record
field() {
    sed -n "s/^$1 *//p" <<<"$record"
}

# What is built from a file: objects whose dependencies name it.
objects_of() {
    grep -rlF --include='*.d' " $1" "$build" | sed 's/d$/o/' | xargs -r ls 2>/dev/null
}

# The record's fault is put into the copy; says why it cannot be. The file and, of a record that is tried, objects as they
# were go to $work/kept.
mutate() {
    local file
    file=$(field file)
    if [ ! -f "$file" ]; then echo "no file '$file'"; return 1; fi
    rm -rf "$work/kept"
    mkdir "$work/kept"
    # shellcheck disable=SC2046
    cp -p --parents "$file" $([ -z "$chosen" ] || objects_of "$file") "$work/kept"
    FROM=$(field from) TO=$(field to) perl -0777 -i -pe '
        my $from = join "\\s+", map { quotemeta } split " ", $ENV{"FROM"};
        my @found = length $from ? /$from/g : ();
        if (@found == 1) { s/$from/$ENV{"TO"}/; $done = 1 }
        END { exit($done ? 0 : 1) }' "$file" && ! cmp -s "$file" "$work/kept/$file" && return 0
    echo "'$(field from)' is not there exactly once in $file"
    restore
    return 1
}

# Puts file and objects back with their times; the next fault's object makes the library anew.
restore() {
    cp -rp "$work/kept/." .
}

# check_word LIST: ends the script where names are to contain $only and none does
check_word() {
    [ -z "$only" ] || grep '^name ' "$1" | grep -qF -- "$only" || { echo "no record's name contains '$only' ($1)" >&2; exit 2; }
}

# each_record LIST FUNCTION: calls it with $record set, and $chosen where the record is to be tried; HALF=first or
# second: every other record of either kind, so that two scripts share a list
each_record() {
    local line number=0 tried=0 others=0 turn
    turn=$("$root/test/turn.sh" "$every")
    record=
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
        '#'*) ;;
        '')
            [ -n "$record" ] || continue
            chosen=${FULL:+1}
            [ $((number % every)) -ne "$turn" ] || chosen=1
            number=$((number + 1))
            if [ -n "$chosen" ]; then tried=$((tried + 1)); else others=$((others + 1)); fi
            case ${HALF:-}$(((chosen ? tried : others) % 2)) in first0 | second1) ;; *) "$2" ;; esac
            record= ;;
        *) record+=$line$'\n' ;;
        esac
    done < <(cat "$1"; printf '\n\n')
}

# NAME: of a record that is not tried
find_place() {
    local why
    if why=$(mutate); then
        restore
        good
    else
        printf '%-58s NOT APPLIED: %s\n' "$1" "$why"
        bad
    fi
}

good() { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); }

finish() {
    local tail=
    [ $skipped -eq 0 ] || tail=", $skipped skipped"
    echo "$passed passed, $failed failed$tail"
    [ "$failed" -eq 0 ]
}
