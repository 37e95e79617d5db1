#!/usr/bin/env bash
# Can the tests fail? Applies the small faults of test/mutants.txt one at a time to a copy of the tree and runs
# the test that must notice. A fault that passes, does not compile, or no longer finds its place is a failure. A record
# may have a field `needs`, a flag of /proc/cpuinfo without which no test can see the fault: it is skipped there.
#
#   FULL=1 test/mutants.sh      all of them; without it some (mutate.sh)
#   test/mutants.sh WORD        those whose name contains WORD
. "$(dirname "${BASH_SOURCE[0]}")/mutate.sh"
only=${1:-} FULL=${FULL:-${1:+1}}
every=12
list=$root/test/mutants.txt
check_word "$list"

# run_test: the record's test program and case, or a whole shell test; its output in $work/test.log
run_test() {
    case $program in
    *.sh) timeout 120 "test/$program" >"$work/test.log" 2>&1 ;;
    *) timeout 120 "$build/test/$program" "$filter" >"$work/test.log" 2>&1 ;;
    esac
}

# made: what the test runs
choose_test() {
    read -r program filter <<<"$(field test)"
    made=${program/*.sh/megatrain}
}

# Whether this processor lacks what the record needs.
lacking() {
    local flag
    flag=$(field needs)
    [ -n "$flag" ] && ! grep -qw "$flag" /proc/cpuinfo
}

# Every test that is to turn red must be green before.
check_green() {
    [ -n "$chosen" ] || return
    case $(field name) in *"$only"*) ;; *) return ;; esac
    choose_test
    case $name_of_run in *"|$program $filter|"*) return ;; esac
    name_of_run+="|$program $filter|"
    if ! run_test; then
        echo "RED BEFORE ANY FAULT: $program $filter"
        tail -5 "$work/test.log"
        bad
    fi
}

killer() {
    local red
    red=$(sed -n 's/^FAIL:\{0,1\} \(.\{1,60\}\).*/\1/p' "$work/test.log" | head -1)
    case $program in *.sh) ;; *) red=${red%% *} ;; esac
    echo "$program ${red:-$filter (ended with status $1)}"
}

try_fault() {
    local name status why
    name=$(field name)
    case $name in *"$only"*) ;; *) return ;; esac
    [ -n "$chosen" ] || { find_place "$name"; return; }
    if lacking; then
        printf '%-62s skipped: this processor has no %s\n' "$name" "$(field needs)"
        skipped=$((skipped + 1))
        return
    fi
    choose_test
    if ! why=$(mutate); then
        printf '%-62s NOT APPLIED: %s\n' "$name" "$why"
        bad
        return
    fi
    if ! build_tests "$made"; then
        printf '%-62s DOES NOT COMPILE: %s\n' "$name" "$(grep -m1 error "$work/make.log")"
        bad
    else
        run_test
        status=$?
        if [ $status -eq 0 ]; then
            printf '%-62s ALIVE: %s passes\n' "$name" "$program $filter"
            bad
        else
            printf '%-62s killed by %s\n' "$name" "$(killer $status)"
            good
        fi
    fi
    restore
}

programs=$(sed -n 's/^test *\([^ ]*\).*/\1/p' "$list" | sed 's/.*\.sh$/megatrain/' | sort -u)
# shellcheck disable=SC2086
copy_tree $programs
name_of_run=
each_record "$list" check_green
each_record "$list" try_fault
finish
