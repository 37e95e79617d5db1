#!/usr/bin/env bash
# What others on the network try with a run is harmless to it: it comes to the bits of a run that nobody disturbed, in a
# network namespace of its own where the system allows that (else on this machine's loopback address, and it says so).
#
#   test/test_network.sh                       the ports of a start, greetings with another secret, a replay, an impostor
#   MEGATRAIN_FAULTS=each test/test_network.sh also each kind of caller, two as one rank, one who passes on (make test-faults)
if [ -z "${MEGATRAIN_NETWORK:-}" ]; then
    if unshare -n true 2>/dev/null && command -v ip >/dev/null; then
        MEGATRAIN_NETWORK=own exec unshare -n "$0" "$@"
    elif unshare -Urn true 2>/dev/null && command -v ip >/dev/null; then
        MEGATRAIN_NETWORK=own exec unshare -Urn "$0" "$@"
    fi
fi
. "$(dirname "$0")/lib.sh"
if [ "${MEGATRAIN_NETWORK:-}" = own ]; then ip link set lo up
else skip "a network namespace (iproute2, and the right to make one): on this machine's loopback address"; fi
all=${MEGATRAIN_FAULTS:-}
attack="$root/test/tools/attack.py"
export OMP_NUM_THREADS=1
unset MEGATRAIN_SECRET MEGATRAIN_JOB RANK
make_tiny
make_ini net.ini model.layers=2 model.hidden=32 model.heads=4 model.seq=32 parallel.tp=2 parallel.zero=1 \
    parallel.timeout_s=30 train.global_batch=8 train.steps=8 optim.lr=3e-3
words=(--config "$work/net.ini")
port=$((15000 + RANDOM % 4000))

timeout 600 "$mt" "${words[@]}" run.dir=alone parallel.tp=1 parallel.zero=0 >/dev/null 2>alone.err
check "one process: exit $?" [ -s alone/metrics.jsonl ]
same() { same_run "$1" "$work/alone" 8; }

# begin DIR WORDS...: four ranks by hand, as the variables that are exported say; then end DIR WHAT
begin() {
    local r
    ranks=()
    for r in 0 1 2 3; do
        RANK=$r WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 600 "$mt" "${words[@]}" run.dir="$1" "${@:2}" \
            >/dev/null 2>"$1.err.$r" &
        ranks+=($!)
    done
}
end() {
    local p codes=
    for p in "${ranks[@]}"; do wait "$p"; codes+=" $?"; done
    check "$2: exits$codes, $(cat "$1".err.* | grep -m1 error)" [ "$codes" = ' 0 0 0 0' ]
    check "$2: other bits" same "$1"
    port=$((port + 20))
}
# in_background WORDS...: an attacker, which says "ready"
in_background() {
    : >attack.txt
    python3 -u "$attack" "$@" >attack.txt 2>&1 &
    attacker=$!
    wait_for grep -q ready attack.txt
}
wait_for() { local i; for ((i = 0; i < 3000; i++)); do "$@" && return; sleep 0.02; done; bad "not in 60 s: $*"; }
no_more() { kill "$attacker" 2>/dev/null; wait "$attacker" 2>/dev/null; }

# ---- the secret's file ----

begin file
wait_for [ -e "file/metrics.jsonl" ]
end file 'the secret in a file'
check "the secret's file is left" [ -z "$(ls -A file | grep secret)" ]
name_of_secret() { # of the next start
    python3 -c "
h = 0xCBF29CE484222325
for b in b\"environment '', 4 ranks, port $port, start 0\": h = (h ^ b) * 0x100000001B3 % 2**64
print('.secret-%016x' % h)"
}
for bytes in 0 10 64; do # what a start that was killed as it wrote, or a power cut, leaves
    mkdir torn-$bytes
    head -c $bytes /dev/zero >torn-$bytes/"$(name_of_secret)"
    chmod 600 torn-$bytes/.secret-*
    begin torn-$bytes
    end torn-$bytes "a secret of $bytes zeros"
done
name=$(name_of_secret)
mkdir readable
printf '%064d' 0 >readable/$name
chmod 644 readable/$name
mkdir -p pipe folder/"$name"
mkfifo -m 600 pipe/"$name"
bad_secret() { # the run's folder, and what is said of the secret there, by one rank
    local p codes=''
    begin "$1"
    for p in "${ranks[@]}"; do wait "$p"; codes+="$? "; done
    check "$1: exit $codes, $(cat "$1".err.0)" [ "$codes" = "5 5 5 5 " ]
    check "$1: $(cat "$1".err.?)" [ "$(cat "$1".err.? | grep -c 'megatrain: error')" -eq 1 ]
    check "$1: '$2' in $(cat "$1".err.?)" grep -q "error (storage).*$2" <(cat "$1".err.?)
}
bad_secret readable 'mode 644'
bad_secret pipe 'is a FIFO, and should be a plain file'
bad_secret folder 'is a folder, and should be a plain file'

# ---- a launcher in a launcher, where no file can be made ----

MEGATRAIN_LAUNCHER_LEFT=99 TMPDIR=$work/nowhere "$root/scripts/launch.sh" -n 1 -- bash -c 'echo "${MEGATRAIN_LAUNCHER_LEFT-none}"; exit 3' >out.txt 2>outer.txt
code=$?
check "launch.sh in a launcher: exit $code, $(cat out.txt outer.txt)" [ $code.$(cat out.txt).$(grep -vc '^mktemp: ' outer.txt) = 3.none.0 ]

# ---- few descriptors ----

# few COUNT: so many and none that whoever began this test left open (bash has its script as 255)
few() {
    local fd
    for fd in /proc/"$BASHPID"/fd/*; do
        fd=${fd##*/}
        [ "$fd" -le 2 ] || [ "$fd" -eq 255 ] || eval "exec $fd>&-"
    done
    ulimit -n "$1"
}
for files in 6 10 12; do # from where on bash cannot set its own descriptors aside to where it could say more
    (few $files; "$root/scripts/launch.sh" -n 2 -- true 2>few.txt)
    code=$?
    check "launch.sh with $files descriptors: exit $code, $(cat few.txt)" \
        [ $code = 10 -a "$(cat few.txt)" = "launch: ulimit -n is $files: 16 file descriptors are needed to start ranks; raise it" ]
done
for files in 16 18 27; do # for the watches of ranks that have met, and for the files of a run whose ranks are connected
    (few $files; exec timeout 120 "$root/scripts/launch.sh" -n 4 -- "$mt" "${words[@]}" run.dir=few >/dev/null 2>few.txt)
    code=$?
    check "four ranks with $files descriptors each: exit $code, $(cat few.txt)" \
        [ $code.$(grep -c '^megatrain: error (rendezvous)' few.txt) = 10.1 -a -n "$(grep "ulimit -n, now $files" few.txt)" ]
done

for rank in 0 1; do
    (few 9; export RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port
        exec timeout 120 "$mt" "${words[@]}" run.dir=few >/dev/null 2>few.txt)
    code=$?
    check "rank $rank with 9 descriptors: exit $code, $(cat few.txt)" \
        [ $code = 10 -a -n "$(grep '8 file descriptors are left' few.txt)" -a -n "$(grep 'ulimit -n, now 9:' few.txt)" ]
done

# ---- ports of a start ----

called() { [ "$(grep -c port attack.txt)" -ge "$1" ]; } # ports, 40 times each

kinds=(bare)
[ -z "$all" ] || kinds=(bare zeros garbage half slow call)
for kind in "${kinds[@]}"; do
    in_background spray "$kind" 60
    MEGATRAIN_RANK_FAULT=3:connect:stop begin spray-$kind # the others listen for it, until all their ports were called
    wait_for called 4
    pkill -CONT -P "${ranks[3]}"
    end spray-$kind "every port is called: $kind"
    no_more
done

# ---- greetings ----

export MEGATRAIN_SECRET=the-secret-of-test_network MEGATRAIN_JOB=net
job="environment 'net', 4 ranks, port $port, start 0"
heard() { # TEXT WORDS...: what an attacker hears
    local text=$1 said
    said=$(timeout 20 python3 "$attack" "${@:2}" 2>&1)
    check "${*:2:1}: heard '$said', want '$text'" [ "$said" = "$text" ]
}
begin greetings debug.comm_delay_ms=20
wait_for [ -e greetings/metrics.jsonl ]
for role in 0 1; do
    for rank in 0 1; do
        heard 'wrong answer, then 0 bytes and a close' knock $port another-secret-of-a-stranger "$job" $rank $role
    done
done
heard 'wrong answer, then 0 bytes and a close' knock $port $MEGATRAIN_SECRET 'another job' 1 0
# (with the secret: the model is right)
said=$(timeout 20 python3 "$attack" knock $port $MEGATRAIN_SECRET "$job" 1 0 2>&1)
check "with the secret: $said" grep -q '^right answer, proven welcome 1 two processes are rank 1' <<<"$said"
heard 'first 624 second 0' replay $port $MEGATRAIN_SECRET "$job"
timeout 30 python3 "$attack" flood $port 400 >/dev/null
end greetings 'greetings of strangers'
check "lines of strangers: $(grep -c 'has not this run' greetings.err.0)" [ "$(grep -c 'has not this run' greetings.err.0)" -eq 1 ]
check "a terminal's codes from a stranger" [ -z "$(grep -l $'\e' greetings.err.?)" ]

# rank 0 does not wait for strangers when all ranks have ended
in_background versions $port
begin versions parallel.timeout_s=90
end versions 'calls of another version to the end and beyond'
no_more

if [ -n "$all" ]; then
    # before all have met: two that say they are rank 1
    job="environment 'net', 4 ranks, port $port, start 0"
    begin early
    for i in 1 2; do timeout 20 python3 "$attack" knock $port another-secret-of-a-stranger "$job" 1 0 >/dev/null 2>&1; done
    end early 'two greetings of a stranger as rank 1'
fi

# ---- somebody else where rank 0 is looked for ----

in_background impostor $port
begin impostor
end impostor 'an impostor of rank 0'
check "what an impostor heard: $(sort -u attack.txt)" [ "$(sort -u attack.txt)" = $'heard 0 bytes more\nready' ]
no_more
[ -n "$all" ] || finish
in_background relay $port $((port + 1))
begin relay
end relay 'one who passes on'
check "what was passed on: $(sort -u attack.txt)" [ -z "$(grep passed attack.txt | grep -v 'passed 48')" ]
check "nothing was passed on" grep -q 'passed 48' attack.txt
no_more
finish
