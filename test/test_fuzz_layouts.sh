#!/usr/bin/env bash
# Can test/fuzz/layouts fail, and for the right reason? A megatrain with one wrong answer stands in for the program, a
# different one each time; each must be found, and nothing where no answer is wrong.
. "$(dirname "$0")/lib.sh"
real=$mt

# The program with a fault, by its name in FAULT. What a run left behind is spoilt by its rank 0, behind the run.
cat >liar.sh <<EOI
#!/usr/bin/env bash
real=$real
EOI
cat >>liar.sh <<'EOI'
dir=
for w in "$@"; do case $w in run.dir=*) dir=${w#run.dir=} ;; esac; done
is_run=$([ "$1" = --config ] && [ "${RANK:-0}" = 0 ] && echo 1)
several=$([ "${WORLD_SIZE:-1}" -gt 1 ] && echo 1)
if [ -n "$several$is_run" ] && [ "$1" = --config ]; then
    case $FAULT in
    hang) exec sleep 100 ;;
    status) [ -z "$several" ] || { echo "megatrain: error (out of memory): made up" >&2; exit 9; } ;;
    esac
fi
case $FAULT-$1-$2 in
warning-config-check) echo "case.ini: ok, but a run would not start here"; exit 0 ;;
blind-config-check) echo "case.ini: ok"; exit 0 ;;
crash-plan-*) kill -ABRT $$ ;;
silent-generate-*) kill -SEGV $$ ;;
class-config-from-hf) echo "megatrain: error (format): made up" >&2; exit 4 ;;
esac
"$real" "$@" >"$$.out" 2>"$$.err"
status=$?
case $FAULT-$1-$* in
read-plan-*/config.ini*) sed -i 's/"total":\([0-9]*\)/"total":1\1/' $$.out ;;
left-eval-*--json*) sed -i 's/"loss":/"loss":1/' $$.out ;;
esac
case $FAULT-$1 in
bytes-plan) sed -i 's/"total":\([0-9]*\)/"total":1\1/' $$.out ;;
other-plan) sed -i 's/error (configuration): ./&&/' $$.err ;;
tokens-eval) [ -z "$several" ] || sed -i 's/^tokens ./&0/' $$.out ;;
hint-*)
    sed -i '/^hint: /d' $$.err
    ! grep -q '^megatrain: error' $$.err || echo "hint: take parallel.tp_blocks=3" >>$$.err ;;
esac
if [ -n "$is_run" ] && [ $status -eq 0 ]; then
    case $FAULT-${several:-0}-$dir in
    loss-1-*) sed -i '1s/"loss":[0-9]*\.[0-9]\{5\}/&1/' "$dir/metrics.jsonl" ;;
    nan-*) sed -i '1s/"loss":[0-9.]*/"loss":NaN/' "$dir/metrics.jsonl" ;;
    far-1-*) sed -i '1s/"loss":/"loss":1/' "$dir/metrics.jsonl" ;;
    bit-1-* | repeat-1-again)
        shard=$(ls "$dir"/checkpoints/step-*/shard-*.safetensors | head -1)
        size=$(stat -c %s "$shard")
        printf '\x5a' | dd of="$shard" bs=1 seek=$((size - 1)) conv=notrunc 2>/dev/null ;;
    shift-1-*) sed -i 's/"shift":\([0-9]\)/"shift":1\1/' "$dir"/checkpoints/step-*/manifest.json ;;
    esac
fi
cat $$.out
cat $$.err >&2
rm $$.out $$.err
exit $status
EOI
chmod +x liar.sh

fuzz() { # FAULT OPTIONS...
    FAULT=$1 MEGATRAIN=$work/liar.sh timeout 500 /usr/bin/python3 "$root/test/fuzz/layouts" --seed 1 --jobs 2 "${@:2}" >fuzz.txt 2>&1
}
found() { # FAULT KIND OPTIONS...: each of the cases is found, and as that
    local fault=$1 kind=$2
    shift 2
    fuzz "$fault" "$@"
    check "$fault: exit $?, $(tail -1 fuzz.txt)" [ "$(grep -c "^FAIL: .*: $kind: " fuzz.txt)" -ge 1 ]
    check "$fault: nothing else is found: $(grep -m1 ^FAIL fuzz.txt | grep -v ": $kind: ")" \
        [ "$(grep -c ^FAIL fuzz.txt)" -eq "$(grep -c "^FAIL: .*: $kind: " fuzz.txt)" ]
    check "$fault: the line that runs it again" grep -q "^  again: .*--case [1-4]\." fuzz.txt
}
runs=(--count 1 --refused 0 --only)
# ---- what is drawn
/usr/bin/python3 "$root/test/fuzz/layouts" --keys >keys.txt
status=$?
check "a key is neither drawn nor left out with a reason: $(head -3 keys.txt)" [ $status -eq 0 ]
{
    cat "$root/src/config/config.def"
    echo 'INT (moe, never_drawn, 0, 0, 1, FREE, "made up")'
    echo 'PICK(optim, odd, OPTIM_ODD_A, C(OPTIM_ODD_A, "a") C(OPTIM_ODD_B, "b"), FREE, "made up")'
} >more.def
/usr/bin/python3 "$root/test/fuzz/layouts" --keys more.def >keys.txt
check "a new key is missed: $(cat keys.txt)" \
    [ "$(grep -c 'never_drawn\|optim.odd' keys.txt)-$(grep -vc 'never_drawn\|optim.odd' keys.txt)" = 2-0 ]

# ---- what is found
fuzz none --count 4 --refused 4
check "nothing wrong, nothing found: $(tail -3 fuzz.txt)" grep -q '^8 passed, 0 failed$' fuzz.txt
check "it says what was tried" grep -q '^  pairs of values tried: [1-9]' fuzz.txt
cp fuzz.txt once.txt
fuzz none --count 4 --refused 4
check "a seed is always the same" cmp -s once.txt fuzz.txt
found bit 'state differs' "${runs[@]}" train
found shift 'state differs' "${runs[@]}" resume
found loss 'metrics differ' "${runs[@]}" load
found nan 'not finite' "${runs[@]}" train
found tokens 'evaluation differs' "${runs[@]}" eval
found repeat 'state differs' "${runs[@]}" repeat
found far far --count 3 --refused 0 --only repeat # (schedules that update late promise no first loss)
found bytes 'plan differs' "${runs[@]}" train
found status 'exit 9' "${runs[@]}" train
found hang hang --limit 4 "${runs[@]}" train
found warning 'config check warns' "${runs[@]}" train
found crash 'exit -6' "${runs[@]}" train
found read 'config.ini plans otherwise' "${runs[@]}" train
found left 'evaluation differs' "${runs[@]}" train
found silent 'exit -11' "${runs[@]}" train
found class 'exit 4' --count 4 --refused 0 --only class=mistral # (with muP, as some are, it goes out as no class)
found blind 'refused by some' --count 0 --refused 1
found other 'refused otherwise' --count 0 --refused 1
found hint 'hint refused' --count 0 --refused 2

# ---- made smaller
fuzz bit --shrink --tries 40 "${runs[@]}" train
check "a finding is made smaller: $(grep -c ' = ' fuzz.txt) keys" grep -q '^  smallest: .*: state differs: ' fuzz.txt
check "with its command lines" grep -q '^  \$ .*megatrain --config case.ini run.dir=many' fuzz.txt
finish
