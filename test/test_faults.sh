#!/usr/bin/env bash
# A rank that dies, freezes, hangs or never comes, at every place of a run: the culprit is named in one error line over
# all ranks, the launcher's exit code is the documented one, nothing is left behind, and a restart comes to the bits of
# the run that nobody disturbed. Each fault must be noticed in its own way: the limits of the others are out of reach.
#
#   test/test_faults.sh                        some of each kind
#   MEGATRAIN_FAULTS=each test/test_faults.sh  every place, of one rank after the other (make test-faults)
#   MEGATRAIN_FAULTS=all test/test_faults.sh   kill -9 of every rank at every place, stops and loops of every rank (make
#                                              test-faults FULL=1); started again after one rank's fault of each place
. "$(dirname "$0")/lib.sh"
all=${MEGATRAIN_FAULTS:-}
launch=$root/scripts/launch.sh
export OMP_NUM_THREADS=1
freeze_s=4 stall_s=6 # where a case is about them. (A busy machine keeps all waiting for seconds.)
# Runs are written to memory where there is a folder of that kind: a busy disk may keep a checkpoint waiting for longer than
# stall_s. What is executed stays on the disk: such a folder may forbid it.
programs=$work
if memory=$(mktemp -d /dev/shm/megatrain-test.XXXXXX 2>/dev/null); then
    work=$memory
    trap 'rm -rf "$programs" "$work"' EXIT
    cd "$work" || exit 1
fi
make_tiny
cat >faults.ini <<EOI
[model]
layers = 2
hidden = 32
heads = 4
seq = 32
dropout = 0.1
[parallel]
tp = 2
zero = 1
bucket_mb = 1
seq_blocks = 8
attn_block = 4
freeze_s = 900
stall_s = 900
timeout_s = 20
[train]
micro_batch = 2
global_batch = 8
steps = 8
[optim]
lr = 3e-3
warmup = 2
[data]
train = a
valid = b
[checkpoint]
every = 3
keep = 0
EOI
overlap=(parallel.overlap_grad=true parallel.overlap_param=true)

# the times, by what was done; the counts
close() {
    awk '{ n[$1]++; k[$1] = $2 > k[$1] ? $2 : k[$1]; g[$1] = $3 > g[$1] ? $3 : g[$1]; ks[$1] += $2 }
        END { for (a in n) printf "    %-15s %3d cases: error line after %.2f s, at most %.2f s; the others gone after at most %.2f s\n",
              a, n[a], ks[a] / n[a] / 1e6, k[a] / 1e6, g[a] / 1e6 }' times
    finish
}

# ---- running ----

mkfifo never
exec {never}<>never
pause() { read -rt "$1" -u $never; } # without a process
us() { echo "${EPOCHREALTIME/[.,]/}"; }

# wrapped TEXT: the ranks' program, with TEXT in front, which sees its arguments. It notes each rank's pid: who looks for
# its process comes too late for one that dies early.
wrapped() {
    printf '#!/bin/bash\necho $$ >"%s/pid.$RANK"\n%s\nexec "%s" "$@"\n' "$work" "$1" "$mt" >"$programs/rank.sh"
    chmod +x "$programs/rank.sh"
}
wrapped ''
note_ranks() { # ranks: as far as they have come
    local r pid
    for r in 0 1 2 3; do { read -r pid <pid.$r; } 2>/dev/null && ranks[r]=$pid; done
    [ ${#ranks[@]} -eq 4 ]
}
listeners() { # of port..port+15
    local p p16 wanted=
    for ((p = port; p < port + 16; p++)); do printf -v p16 :%04X "$p"; wanted+=$p16'|'; done
    grep -hE "^ *[0-9]+: [0-9A-F]+(${wanted%|}) [0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6
}
# (not where other tests, the other half, launch.sh or the kernel choose theirs)
base=$([ "${HALF:-}" = second ] && echo 14500 || echo 10000)
new_port() {
    port=$((base + RANDOM % 4400))
    while [ -n "$(listeners)" ]; do port=$((base + RANDOM % 4400)); done
}
begin() { # DIR WORDS...: starts the run; port, launcher, ranks
    rm -f pid.*
    : >run.err
    "$launch" -n 4 -p "$port" -- "$programs/rank.sh" --config "$work/faults.ini" run.dir="$1" "${@:2}" >/dev/null 2>run.err &
    launcher=$! ranks=()
    while kill -0 $launcher 2>/dev/null && ! note_ranks; do pause 0.01; done
    note_ranks
}
end_all() { kill -KILL $launcher "${ranks[@]}" 2>/dev/null; }

# follow CULPRIT: to the end of the run. code; known_us: from the fault to the error line; gone_us: to the end of all
# other ranks; begun_us: when the fault was.
follow() {
    local culprit=$1 text turn now left r over=
    begun_us='' known_us='' gone_us=''
    for ((turn = 0; turn < 9000; turn++)); do
        kill -0 $launcher 2>/dev/null || over=yes # first: what is looked at after it is how the run ended
        now=${EPOCHREALTIME/[.,]/}
        IFS= read -rd '' text <run.err
        [ -n "$begun_us" ] || [[ $text != *fault:* ]] || { begun_us=$now; [ -z "$on_fault" ] || $on_fault; }
        [ -n "$known_us" ] || [[ $text != *'megatrain: error'* ]] || known_us=$((now - ${begun_us:-now}))
        left=0
        for r in "${!ranks[@]}"; do [ "$r" = "$culprit" ] || ! kill -0 "${ranks[r]}" 2>/dev/null || left=1; done
        [ -n "$gone_us" ] || [ $left = 1 ] || [ -z "$begun_us" ] || gone_us=$((now - begun_us))
        [ -z "$over" ] || break
        pause 0.01
    done
    [ $turn -lt 9000 ] || { end_all; bad "$what: not over in 90 s"; }
    wait $launcher 2>/dev/null
    code=$?
}
on_fault=

same() { same_run "$1" undisturbed 8; }

# ---- what every case asserts ----

# ends CODES PATTERN: exit code (or one of "7|137"), one error line that matches, nothing left behind
ends() {
    [[ $code =~ ^($1)$ ]] && ok || bad "$what: exit $code, want $1: $(grep -v 'step ' run.err | tail -3)"
    local line='^megatrain: (error|stopped)'
    check "$what: $(grep -cE "$line" run.err) error lines: $(grep -E "$line" run.err | head -4)" \
        [ "$(grep -cE "$line" run.err)" -eq 1 ]
    check "$what: '$2' is not in: $(grep -Em1 "$line" run.err)" grep -qE "^megatrain: (error.*)?($2)" run.err
    check "$what: processes left: $(pgrep -af "$work/faults.ini")" [ -z "$(pgrep -f "$work/faults.ini")" ]
    check "$what: a port is left open: $(listeners)" [ -z "$(listeners)" ]
}
noted() { # KIND: the times, for the table at the end
    check "$what: no error line while it ran" [ -n "$known_us" ]
    check "$what: the others did not end" [ -n "$gone_us" ]
    echo "$1 ${known_us:-0} ${gone_us:-0}" >>times
}
restarts() { # DIR WORDS...
    timeout 600 "$launch" -n 4 -- "$mt" --config "$work/faults.ini" run.dir="$1" "${@:2}" >/dev/null 2>again.err
    check "$what: started again: exit $?, $(grep -m1 error again.err)" same "$1"
    rm -rf "$1"
}

# at RANK POINT N ACTION [WORDS...]; again=no: not started again. HALF=first: two of three of these cases; second: the third,
# and all others.
again=yes
cases=0
at() {
    local rank=$1 action=$4 words=("${@:5}") limit=
    cases=$((cases + 1))
    case ${HALF:-}$((cases % 3)) in first0 | second[12]) return ;; esac
    case $action in
    stop) limit=parallel.freeze_s=$freeze_s ;;
    loop) limit=parallel.stall_s=$stall_s ;;
    esac
    what="rank $1: $4 at $2, call $3"
    new_port
    MEGATRAIN_RANK_FAULT=$1:$2:$3:$4 begin run "${words[@]}" $limit
    follow "$rank"
    check "$what: the place was never reached" [ -n "$begun_us" ]
    case $action in
    kill | exit)
        ends 7 "rank $rank \(host .*, pid ${ranks[rank]}\) was lost"
        noted "$action" ;;
    stop)
        ends 7 "rank $rank \(host .*, pid ${ranks[rank]}\) (gave no sign of life|was lost or is frozen)"
        noted stop ;;
    loop)
        ends 8 "no rank got on for $stall_s s; the first to look at is rank $rank \(host .*, pid ${ranks[rank]}\)"
        noted loop ;;
    esac
    if [ $again = yes ]; then restarts run "${words[@]}"; else rm -rf run; fi
}

# (one process: any layout has its bits)
timeout 600 "$mt" --config faults.ini run.dir=undisturbed parallel.tp=1 parallel.zero=0 >/dev/null 2>run.err
check "the undisturbed run: exit $?, $(grep -m1 error run.err)" same undisturbed

# ---- a rank at a place ----

# of the collectives the calls in the middle of a run; counts are messages waited for
places='met 1,load 1,step 1,step 5,forward 9,backward 9,reduce 5,norm 5,update 5,save 1,save 2,all-gather 40
reduce-scatter-tree 40,reduce-scatter-i64 5,sum-i64 20,max-i64 20'
# of each rank PLACE ACTION WORDS...: another one of them each time is followed by a start, or is the only one
turn=0
of_each() {
    for rank in 0 1 2 3; do
        if [ $((turn % 4)) = $rank ]; then again=yes; elif [ "$all" = all ]; then again=no; else continue; fi
        at $rank "${1% *}" "${1##* }" "${@:2}"
    done
    turn=$((turn + 1)) again=yes
}
# of one rank, each time another
of_one() {
    at $((turn % 4)) "${1% *}" "${1##* }" "${@:2}"
    turn=$((turn + 1))
}
if [ -n "$all" ]; then
    while read -r place; do of_each "$place" kill "${overlap[@]}"; done < <(tr , '\n' <<<"$places")
    of_each 'reduce-tree 40' kill parallel.sp=false
    of_each 'backward 9' exit
    of_each 'step 1' stop
    of_each 'max-i64 20' stop
    again=no
    for rank in 1 2 3; do at $rank end 1 kill; done # (rank 0 has nobody left to tell)
    for place in 'met 1' 'forward 9' 'save 1' 'end 1'; do of_one "$place" stop; done
    of_each 'backward 9' loop "${overlap[@]}"
    for place in 'step 1' 'reduce-scatter-i64 5' 'update 5' 'save 2'; do of_one "$place" loop "${overlap[@]}"; done
else
    again=no
    at 0 backward 9 kill "${overlap[@]}"
    at 1 forward 9 stop
    at 2 reduce-scatter-i64 5 loop
    again=yes
    at 2 save 2 kill
fi

# ---- a rank of a pipeline ----

# Most ranks of a chain wait in a message for one that waits, too: the culprit is the one that nobody is waited for by.
# (with empty stages for embedding and head: the bits of the same run)
chain=(parallel.tp=1 parallel.pp=4 'parallel.layout=E|t|t|L')
vee=(parallel.tp=1 parallel.pp=2 'parallel.layout=E|t|t|L' parallel.schedule=zb-v "${overlap[@]}")
if [ -n "$all" ]; then
    for place in 'forward 9' 'backward 9' 'messages 20' 'exchange 20' 'norm 5' 'update 5' 'sum-i64 5' 'save 2'; do
        of_each "$place" kill "${chain[@]}"
    done
    for place in 'dgrad 9' 'wgrad 9' 'exchange 12' 'reduce 5'; do of_each "$place" kill "${vee[@]}"; done
    for rank in 0 2 3; do
        for place in "forward 9" "backward 9" "exchange 20"; do at $rank ${place% *} ${place#* } loop "${chain[@]}"; done
        at $rank exchange 20 stop "${chain[@]}"
    done
    of_each 'messages 12' loop "${vee[@]}"
    at 1 exchange 12 stop "${vee[@]}"
else
    again=no
    at 0 forward 9 loop "${chain[@]}"
    at 3 exchange 20 stop "${chain[@]}"
    again=yes
    at 2 backward 9 kill "${chain[@]}"
fi

# ---- a rank that has a part of each sequence ----

# All wait in an exchange of keys, for one that does not come to it.
ring=(parallel.tp=1 parallel.zero=0 parallel.cp=4 parallel.cp_comm=ring)
if [ -n "$all" ]; then
    of_each 'exchange 60' kill "${ring[@]}"
    again=no
    of_one 'exchange 60' stop "${ring[@]}"
    of_one 'exchange 60' loop "${ring[@]}"
fi

[ "${HALF:-}" != first ] || close

# ---- before all have met ----

# before RANK ACTION PATTERN WORDS...
before() {
    what="rank $1: $2 before the ranks have met"
    new_port
    MEGATRAIN_RANK_FAULT=$1:rendezvous:$2 begin run "${@:4}"
    follow "$1"
    ends 10 "$3"
    noted "rendezvous-$2"
    [ "$2" != kill ] || check "$what: the launcher does not say so" grep -q "^launch: rank $1 .* was ended by SIGKILL" run.err
    rm -rf run
}
# Waited for RANK, maybe for others, too: they may not have come yet.
waited_for() { echo "waited .* for ranks?( [0-9],)* $1(, [0-9])* of 4"; }
for rank in ${all:+0 1 2} 3; do
    of=$(waited_for $rank)
    before $rank kill "$of" parallel.timeout_s=900
    [ -z "$all" ] || before $rank stop "$of" parallel.timeout_s=4
done

# refused CODE PATTERN WORDS...
refused() {
    new_port
    begin run "${@:3}"
    follow 9
    ends "$1" "$2"
    rm -rf run
    wrapped ''
}
what="two processes are rank 1"
wrapped '[ $RANK = 2 ] && export RANK=1'
refused 10 'two processes are rank 1 of 4: host .*, pid [0-9]+, and host .*, pid [0-9]+'
what="another configuration on one rank"
wrapped '[ $RANK = 2 ] && set -- "$@" optim.lr=2e-3'
refused 2 "rank 2 and rank 0 differ: 'optim.lr: .*' there, 'optim.lr: .*' here"
if [ -n "$all" ]; then
    for rank in 0 2; do
        what="rank $rank never comes"
        wrapped "[ \$RANK = $rank ] && exec sleep 60"
        refused 10 "$(waited_for $rank)" parallel.timeout_s=3
    done
    # (the second one comes when the first one listens: it looks for it on ports that are taken)
    what="two processes are rank 0"
    wrapped 'while [ $RANK = 3 ]; do
        ! grep -qE ":$(printf %04X "$MASTER_PORT") 0+:0000 0A" /proc/net/tcp /proc/net/tcp6 || export RANK=0
        sleep 0.02
    done'
    refused 10 'two processes are rank 0 of 4'
    what="another program on one rank"
    { cat "$mt"; echo; } >"$programs/other"
    chmod +x "$programs/other"
    wrapped "[ \$RANK = 3 ] && exec $programs/other \"\$@\""
    refused 2 "rank 3 and rank 0 differ: 'megatrain: .*, binary .*' there"
    what="a disk that is full on one rank"
    wrapped '[ $RANK = 2 ] && export MEGATRAIN_FILE_FAULT=enospc@3'
    refused 5 'rank 2: .*No space left on device' checkpoint.every=0
    what="a wrong key on one rank"
    wrapped '[ $RANK = 1 ] && set -- "$@" optim.no_such=1'
    refused 2 "optim.no_such"
fi

# ---- strangers ----

# others PYTHON: something else on the ports; it says "ready" and the first of them
others() {
    python3 -u -c "import socket, os, random, time, sys; base, port = $base, $port; $1" >others.txt 2>&1 &
    other=$!
    for ((i = 0; i < 9000; i++)); do grep -q ready others.txt && break; pause 0.02; done
    port=$(sed -n 's/^ready //p' others.txt)
    check "$what: something else on the ports: $(tail -1 others.txt)" [ -n "$port" ]
}
undisturbed_by() {
    begin run
    follow 9
    check "$what: exit $code, $(grep -m1 error run.err)" [ $code -eq 0 ]
    check "$what: same bits" same run
    rm -rf run
}
# (It chooses the ports itself: one that looks free may be the local end of somebody's connection.)
hold='
while True:
    try:
        port = base + random.randrange(4400)
        s = [socket.create_server(("127.0.0.1", port + i), backlog=64) for i in range(16)][:COUNT]
        break
    except OSError: pass
print("ready", port)
time.sleep(300)'
what="three ports are taken"
others "${hold/COUNT/3}"
undisturbed_by
kill $other
if [ -n "$all" ]; then
    what="all ports are taken"
    others "${hold/COUNT/16}"
    begin run
    follow 9
    kill $other
    wait $other 2>/dev/null
    ends 10 "rank 0 finds the ports $port to $((port + 15)) of .* all taken"
    what="garbage is sent to the port"
    new_port
    others '
print("ready", port)
end = time.time() + 2
while time.time() < end:
    for p in range(port, port + 3):
        try:
            c = socket.create_connection(("127.0.0.1", p), 0.2)
            c.sendall((b"MGTRAIN1" if os.urandom(1)[0] & 1 else b"") + os.urandom(5000))
            c.close()
        except OSError: pass'
    undisturbed_by
    kill $other 2>/dev/null
    what="another run on the same port"
    new_port
    timeout 600 "$launch" -n 4 -p "$port" -- "$mt" --config "$work/faults.ini" run.dir=second >/dev/null 2>second.err &
    second=$!
    undisturbed_by
    wait $second
    check "$what: the other one, $(grep -m1 error second.err)" same second
fi

# ---- signals ----

steps_saved() { ls run/checkpoints 2>/dev/null | grep -c '^step-[0-9]*$'; }
pass_term() { kill -TERM $launcher; }
# SIGTERM while a rank is lost or being judged: no checkpoint but the one of step 3
no_checkpoint() { # WHAT FAULT CODE PATTERN WORDS...
    what=$1
    new_port
    on_fault=pass_term
    MEGATRAIN_RANK_FAULT=$2 begin run "${@:5}"
    follow "${2%%:*}"
    on_fault=
    ends "$3" "rank ${2%%:*} .*$4"
    check "$what: $(ls run/checkpoints)" [ "$(steps_saved)" -eq 1 ]
    restarts run
}
if [ -n "$all" ]; then
    no_checkpoint 'SIGTERM while a frozen rank is being judged' 2:step:5:stop 7 'gave no sign of life' \
        parallel.freeze_s=$freeze_s
    no_checkpoint 'SIGTERM when a rank is killed' 1:backward:9:kill 7 'was lost'
    no_checkpoint 'SIGTERM while a rank hangs' 3:update:5:loop 8 '' parallel.stall_s=$stall_s
fi
# A run that stands still before step 4, in rank 1: what is sent to it meanwhile comes neither too early nor too late.
comes() { # COMMAND...: waits until it is true
    local i
    for ((i = 0; i < 9000; i++)); do "$@" && return; pause 0.01; done
    bad "$what: not in 90 s: $*"
}
waits_at_4() { comes note_ranks && comes stands_still "${ranks[1]}"; }
go_on_with() { # SIGNAL: when it has come to rank 1
    comes has_pending "${ranks[1]}" "$1"
    kill -CONT "${ranks[1]}"
}
# ranks killed together, rank 0 among them: the lowest that is left says it
together() { # RANK...
    local r pids=()
    what="ranks $* are killed together"
    new_port
    MEGATRAIN_RANK_FAULT=1:step:4:stop begin run
    waits_at_4
    for r in "$@"; do pids+=("${ranks[r]}"); done
    kill -STOP "${pids[@]}" # (lest rank 0 says of the first that it was lost, and dies after it)
    kill -KILL "${pids[@]}"
    follow 9
    ends 7 "rank 0 \(host .*, pid ${ranks[0]}\) was lost"
    check "$what: $(grep '^launch' run.err)" [ "$(grep -c '^launch: rank' run.err)" -eq $# ]
    restarts run
}
together 1 0
if [ -n "$all" ]; then
    together 0 1
    together 0 1 2
fi
what="both of two ranks are killed"
rm -f pid.*
MEGATRAIN_RANK_FAULT=1:step:4:stop "$launch" -n 2 -- "$programs/rank.sh" --config faults.ini run.dir=run parallel.tp=2 \
    >/dev/null 2>run.err &
launcher=$!
both_are_there() { read -r ranks[0] <pid.0 && read -r ranks[1] <pid.1; } 2>/dev/null
comes both_are_there
comes stands_still "${ranks[1]}"
kill -KILL "${ranks[0]}" "${ranks[1]}"
wait $launcher
code=$?
check "$what: exit $code" [ $code -eq 137 ]
check "$what: $(grep -v step run.err)" grep -q '^launch: no rank was left' run.err
rm -rf run
what="SIGTERM"
new_port
MEGATRAIN_RANK_FAULT=1:step:4:stop begin run
waits_at_4
kill -TERM $launcher
go_on_with 15
follow 9
ends 75 'stopped by SIGTERM after step 4, with a checkpoint'
restarts run
# (no rank may be stopped here: the system ends stopped processes that it leaves without a parent)
what="the launcher is killed"
holds() { grep -q 'fault: hold' run.err; }
nobody_left() { [ -z "$(pgrep -f "$work/faults.ini")" ]; }
new_port
MEGATRAIN_RANK_FAULT=1:step:4:hold begin run
comes holds
kill -KILL $launcher
comes nobody_left
wait $launcher 2>/dev/null
code=75 # (nobody is left who could tell)
ends 75 'stopped by SIGTERM after step 4, with a checkpoint'
if [ -n "$all" ]; then restarts run; else rm -rf run; fi
if [ -n "$all" ]; then
    what="Ctrl-C"
    rank_0_has_it() { has_pending "${ranks[1]}" 2 && ! has_pending "${ranks[0]}" 2; }
    for times in 1 2; do
        new_port
        rm -rf run pid.*
        : >run.err
        ranks=()
        # as at a terminal: the signal goes to a process group of shell and launcher (in the background it is ignored)
        MEGATRAIN_RANK_FAULT=1:step:4:stop setsid env --default-signal=INT bash -c "trap : INT
            '$launch' -n 4 -p $port -- '$programs/rank.sh' --config '$work/faults.ini' run.dir=run \
            >/dev/null 2>run.err; echo \$? >code" &
        group=$!
        waits_at_4
        kill -INT -- -$group
        comes rank_0_has_it
        [ $times = 1 ] || kill -INT -- -$group
        go_on_with 2
        wait $group 2>/dev/null
        comes nobody_left
        code=$(cat code)
        if [ $times = 1 ]; then ends 75 'stopped by SIGINT after step 4'
        else check "Ctrl-C twice: exit $code" [ "$code" -eq 130 ]; fi
    done
    restarts run
fi
close
