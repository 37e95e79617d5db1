#!/usr/bin/env bash
# Can test_layouts fail, and for the right reason? Breaks one rule of docs/determinism.md at a time in a copy of
# the tree (test/layout_controls.txt) and runs a few layouts: exactly those that use the rule must differ from
# the reference.
#
#   FULL=1 test/layout_controls.sh      all of them; without it some (mutate.sh)
#   test/layout_controls.sh WORD        those whose name contains WORD
# shellcheck disable=SC2034  # variables that conditions name

. "$(dirname "${BASH_SOURCE[0]}")/mutate.sh"
only=${1:-} FULL=${FULL:-${1:+1}}
every=6
# names in the conditions; own: the reference's isa
avx512=1 avx2=2 c=3 own=0 gather=1 ring=2 a2a=3 both=4
export MEGATRAIN_LAYOUTS=short
ALL_SETS=1 # (layouts draw instruction sets)

# compare CASE CONDITION: prints what was seen; false if a layout did not do as it should
compare() {
    local reference='' line dp tp sp cp way ep etp zero overlap micro threads isa hash want seen differ=0 count=0
    local wrong=''
    timeout 300 "$build/test/test_layouts" "$1" >"$work/test.log" 2>&1
    while read -r line; do
        read -r dp tp sp cp way ep etp zero overlap micro threads isa hash < <(sed -nE \
            -e 's/^dp([0-9]+) tp([0-9]+)(\+sp)? +cp([0-9]+)([a-z0-9]+) (ep.*)/\1 \2 0\3 \4 \5 \6/' \
            -e 's/ ep([0-9]+) etp([0-9]+) ([a-z]+[24]?) zero(.)\/[0-9]+ overlap(.) micro([0-9]+) threads([0-9]+) ([a-z0-9]+) +([0-9a-f]{16}).*/ \1 \2 \4 \5 \6 \7 \8 \9/p' \
            <<<"$line")
        [ -n "$hash" ] || continue
        [ "$sp" = 0 ] || sp=1
        if [ -z "$reference" ]; then reference=$hash own=$isa; continue; fi
        want=$(($2)) seen=0
        [ "$hash" = "$reference" ] || seen=1
        count=$((count + 1)) differ=$((differ + seen))
        [ $want -eq $seen ] || wrong+=" [${line%% [0-9a-f][0-9a-f][0-9a-f]*}]"
    done < <(grep '^ *dp[0-9]' "$work/test.log")
    if grep -A1 'err == ERR_OK' "$work/test.log" >"$work/ended"; then # what it was when it ended says nothing of a rule
        echo "a layout ended in an error: $(sed -n 's/^ *//; 2p' "$work/ended")"
        return 1
    fi
    if [ $count -eq 0 ]; then echo "no layouts ran: $(tail -1 "$work/test.log")"; return 1; fi
    if [ -n "$wrong" ]; then echo "$differ of $count differ; not as they should:$wrong"; return 1; fi
    echo "$differ of $count differ: ${2}"
}

# report NAME CASE CONDITION
report() {
    local said
    if said=$(compare "$2" "$3"); then good; else bad; said="WRONG: $said"; fi
    printf '%-58s %-5s %s\n' "$1" "$2" "$said"
}

try_control() {
    local name why
    name=$(field name)
    case $name in *"$only"*) ;; *) return ;; esac
    [ -n "$chosen" ] || { find_place "$name"; return; }
    if ! why=$(mutate); then
        printf '%-58s NOT APPLIED: %s\n' "$name" "$why"
        bad
        return
    fi
    if build_tests test_layouts; then
        report "$name" "$(field case)" "$(field differ)"
    else
        printf '%-58s DOES NOT COMPILE: %s\n' "$name" "$(grep -m1 error "$work/make.log")"
        bad
    fi
    restore
}

check_word "$root/test/layout_controls.txt"
copy_tree test_layouts
report "nothing" gpt2 0
report "nothing" llama 0
report "nothing" mixtral 0
each_record "$root/test/layout_controls.txt" try_control
finish
