#!/usr/bin/env bash
# A run with run.restarts goes on by itself: a rank that dies, freezes or hangs, at each place of a run, costs no more
# than the steps since the newest checkpoint. Losses, norms and tensors are those of the run that nobody disturbed.
#
#   test/test_restarts.sh                        some of each kind
#   MEGATRAIN_FAULTS=each test/test_restarts.sh  every place, and each rank (make test-faults)
. "$(dirname "$0")/lib.sh"
launch=$root/scripts/launch.sh
all=${MEGATRAIN_FAULTS:-}
export OMP_NUM_THREADS=1
make_tiny
make_ini restarts.ini model.layers=2 model.hidden=32 model.heads=4 model.seq=32 model.dropout=0.1 parallel.tp=2 \
    parallel.zero=1 parallel.seq_blocks=8 parallel.attn_block=4 parallel.freeze_s=900 parallel.stall_s=900 \
    parallel.timeout_s=60 train.global_batch=8 train.steps=8 optim.lr=3e-3 checkpoint.keep=0
sed -i 's/^every=0$/every=3/' restarts.ini
gone() { ! pgrep -f "$work/restarts.ini" >/dev/null; } # (supervisors and workers alike)
start() { # DIR WORDS...
    "$launch" -n 4 -- "$mt" --config "$work/restarts.ini" run.dir="$1" run.restarts=3 "${@:2}" >"$1.out" 2>&1
}
causes() { sed -n 's/.*"restart":\([0-9]*\),"cause":"\([^"]*\)".*/\1 \2/p' "$1/metrics.jsonl" 2>/dev/null; }
# whole CODE DIR: what each of these runs must come to
whole() {
    check "$what: exit $1: $(grep -v step "$2.out" | tail -3)" [ "$1" -eq 0 ]
    check "$what: the run is the undisturbed one" same_run "$2" undisturbed 8
    check "$what: processes are left: $(pgrep -af "$work/restarts.ini")" gone
}

start undisturbed
check "nobody disturbs it: $(tail -1 undisturbed.out)" [ -z "$(causes undisturbed)" ]

# goes_on FAULT CAUSE [WORDS...]: one restart, for that cause
goes_on() {
    what=$1
    rm -rf run
    MEGATRAIN_RANK_FAULT=$1 start run "${@:3}"
    whole $? run
    check "$what: '$2' is not in: $(causes run)" grep -qE "^1 .*($2)" <(causes run)
    check "$what: one restart" [ "$(causes run | wc -l)" -eq 1 ]
}
lost='rank %d .*(was lost|ended by SIGKILL)'
places=(rendezvous met connect load forward:9 step:5 save norm:7 save:2 all-gather:20 end)
ranks=(0 1 3)
if [ -z "$all" ]; then places=(rendezvous met load step:5 save:2 end); fi
turn=0
for place in "${places[@]}"; do
    for rank in "${ranks[@]}"; do
        # (one rank a place, rank 0 every other time; of the places before all have met any rank may be the one named)
        turn=$((turn + 1))
        [ -n "$all" ] || [ $((turn % 6)) -eq 1 ] || [ $((turn % 6)) -eq 5 ] || continue
        case $place in rendezvous) cause='was started anew|ended by SIGKILL' ;; *) cause=${lost/\%d/$rank} ;; esac
        goes_on "$rank:$place:kill" "$cause"
    done
done
goes_on 2:step:5:stop 'rank 2 .*no sign of life' parallel.freeze_s=3
goes_on 1:rendezvous:stop 'started anew' parallel.freeze_s=3
goes_on 1:step:5:loop 'the first to look at is rank 1' parallel.stall_s=4
goes_on 3:step:6:exit 'rank 3 .*was lost'
if [ -n "$all" ]; then
    goes_on 0:step:5:stop 'rank 0 .*no sign of life' parallel.freeze_s=3
    goes_on 0:step:2:loop 'the first to look at is rank 0' parallel.stall_s=4
    goes_on 0:step:3:exit 'rank 0 .*' # (its supervisor, or the others)
fi

what="a worker of each of three starts dies"
rm -rf run
MEGATRAIN_WORKERS_FAULT=3 MEGATRAIN_RANK_FAULT=1:step:2:kill start run
whole $? run
check "$what: $(causes run)" [ "$(tail -1 run/metrics.jsonl | wc -l)" -eq 1 ]
check "$what: restarts: $(causes run | cut -c 1-20)" [ "$(causes run | tail -1 | cut -d ' ' -f 1)" -eq 3 ]

what="more deaths without a checkpoint than run.restarts"
rm -rf run
MEGATRAIN_WORKERS_FAULT=9 MEGATRAIN_RANK_FAULT=1:step:2:kill start run run.restarts=1
code=$?
check "$what: exit $code" [ $code -eq 7 ]
check "$what: $(tail -2 run.out)" grep -q 'the run ends: it was started again 1 time without a new checkpoint (run.restarts), the last time' run.out
check "$what: processes are left" gone

what="progress between deaths"
rm -rf run
MEGATRAIN_WORKERS_FAULT=2 MEGATRAIN_RANK_FAULT=1:step:4:kill start run run.restarts=1 checkpoint.every=1
whole $? run
check "$what: $(causes run)" [ "$(causes run | tail -1 | cut -d ' ' -f 1)" -eq 2 ]

what="a mistake in the configuration"
start never model.heads=5
code=$?
check "$what: exit $code, $(cat never.out)" [ $code -eq 2 ]
check "$what: one error: $(cat never.out)" [ "$(grep -c 'error (' never.out)" -eq 1 ]
what="a run without data"
start never data.train=nowhere
check "$what is not started again" [ $? -eq 3 ]
check "$what: one error: $(cat never.out)" [ "$(grep -c 'error (' never.out)" -eq 1 ]

# asked_to_stop WHO SIGNAL...: to a run whose rank 1 is slow
at_step() { grep -q "step $1/" run.out 2>/dev/null; }
comes() { for ((i = 0; i < 3000; i++)); do "$@" && return; kill -0 $launcher 2>/dev/null || return 1; sleep 0.02; done; false; }
begin() {
    rm -rf run run.out
    MEGATRAIN_RANK_FAULT=1:step:2:slow env --default-signal=INT setsid "$launch" -n 4 -- "$mt" \
        --config "$work/restarts.ini" run.dir=run run.restarts=3 train.steps=8 >run.out 2>&1 &
    launcher=$!
    comes at_step 2
}
what="SIGTERM to the launcher"
begin
kill -TERM $launcher
wait $launcher
check "$what: exit $?, $(tail -2 run.out)" grep -q 'stopped by SIGTERM after step' run.out
start run
whole $? run
check "$what: nothing was lost" [ -z "$(causes run)" ]
what="Ctrl-C, which a whole process group gets"
begin
for p in $(pgrep -P $launcher -f "$work/restarts.ini"); do kill -INT -- -"$p"; done
wait $launcher
check "$what: exit $?, $(tail -2 run.out)" grep -q 'stopped by SIGINT after step' run.out
start run
whole $? run
what="kill -9 of a supervisor"
begin
kill -KILL "$(pgrep -P $launcher -f "$work/restarts.ini" | sed -n 2p)"
wait $launcher
check "$what: $(tail -2 run.out)" grep -qE 'stopped by SIGTERM after step|was lost|at the end of the run' run.out
for ((i = 0; i < 500; i++)); do gone && break; sleep 0.02; done
check "$what: processes are left" gone
start run
whole $? run

# ---- ranks started one by one, without a launcher's secret
by_hand() { # RANK WORDS...: of three; its pid is in pids
    RANK=$1 WORLD_SIZE=3 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port MEGATRAIN_JOB=hand.$$ \
        "$mt" --config restarts.ini run.dir=hand parallel.tp=1 parallel.zero=0 train.micro_batch=1 train.global_batch=6 \
        "${@:2}" >"hand.$1" 2>&1 &
    pids[$1]=$!
}
meets() { pgrep -P "${pids[$1]}" >/dev/null && grep -q "$(printf ':%04X' "$port")" /proc/net/tcp /proc/net/tcp6; }
waits() { for ((i = 0; i < 500; i++)); do "$@" && return; sleep 0.02; done; false; }
wait_all() { codes=(); for p in "${pids[@]}"; do wait "$p"; codes+=($?); done; }
what="rank 0's worker dies while the others meet"
port=$((20000 + RANDOM % 9000)) pids=()
rm -rf hand
by_hand 0 run.restarts=3
waits meets 0
by_hand 1 run.restarts=3
sleep 0.5 # (nothing fails if rank 1 has not greeted by then)
kill -KILL "$(pgrep -P "${pids[0]}")"
sleep 0.3
by_hand 2 run.restarts=3
wait_all
check "$what: exits ${codes[*]}: $(grep -h error hand.[012] | head -3)" [ "${codes[*]}" = '0 0 0' ]
check "$what: rank 0 says what became of it" grep -q 'rank 0 (pid [0-9]*) was ended by SIGKILL' hand.0
check "$what: files are left: $(ls -A hand | grep '^\.')" [ -z "$(ls -A hand | grep '^\.')" ]
what="a rank that does not restart meets one that does"
port=$((20000 + RANDOM % 9000)) pids=()
rm -rf hand
by_hand 1 run.restarts=3
waits pgrep -P "${pids[1]}" >/dev/null
kill -KILL "$(pgrep -P "${pids[1]}")"
by_hand 0 parallel.timeout_s=5
by_hand 2 parallel.timeout_s=5
wait "${pids[0]}"
check "$what: exit $?, $(tail -2 hand.0)" grep -q 'hint: run.restarts must be above 0 on all ranks' hand.0
kill "${pids[1]}" "${pids[2]}" 2>/dev/null
wait_all

# ---- what it goes on from
what="a checkpoint of another run, and older ones in its folder"
one=(--config restarts.ini parallel.tp=1 parallel.zero=0)
rm -rf other mine
"$mt" "${one[@]}" run.dir=other train.stop_at=6 >/dev/null 2>&1
"$mt" "${one[@]}" run.dir=mine train.stop_at=3 optim.lr=1e-3 >/dev/null 2>&1
from=(checkpoint.resume=other/checkpoints/step-00000006 optim.lr=2e-3 --override optim.lr)
cp -r mine calm
"$mt" "${one[@]}" run.dir=calm "${from[@]}" >calm.out 2>&1
MEGATRAIN_RANK_FAULT=0:step:2:kill "$mt" "${one[@]}" run.dir=mine "${from[@]}" run.restarts=1 >run.out 2>&1
check "$what: exit $?, $(tail -2 run.out)" [ "$(digest mine 8)" = "$(digest calm 8)" -a -n "$(digest calm 8)" ]
what="the configuration's file changes meanwhile"
rm -rf run
sed 's/^steps=.*/steps=8/' restarts.ini >changing.ini
(waits grep -q 'step 4/8' run.out && sed -i 's/^steps=.*/steps=5/' changing.ini) &
MEGATRAIN_RANK_FAULT=1:step:6:kill "$launch" -n 4 -- "$mt" --config changing.ini run.dir=run run.restarts=2 \
    train.micro_batch=auto >run.out 2>&1
code=$?
wait
check "$what: exit $code, $(tail -2 run.out)" [ $code -eq 0 -a "$(tail -1 run/metrics.jsonl | grep -c '"step":8')" -eq 1 ]

what="asked to stop between two starts"
rm -rf run
MEGATRAIN_WORKERS_FAULT=9 MEGATRAIN_RANK_FAULT=0:step:1:kill "$mt" "${one[@]}" run.dir=run run.restarts=9 >run.out 2>&1 &
waits grep -q 'the next start begins in 2 s' run.out
kill -TERM $!
wait $!
check "$what: exit $?, $(tail -2 run.out)" grep -q 'stopped by SIGTERM between two starts' run.out

what="the time that a run may take"
rm -rf run
MEGATRAIN_WORKERS_FAULT=9 MEGATRAIN_RANK_FAULT=1:step:2:kill start run run.restarts=9 train.max_minutes=0.02 checkpoint.every=1
check "$what: exit $?, $(tail -3 run.out)" grep -q 'train.max_minutes' run.out

what="one process"
rm -rf run
MEGATRAIN_RANK_FAULT=0:step:5:kill "$mt" --config restarts.ini parallel.tp=1 parallel.zero=0 run.dir=run run.restarts=1 >run.out 2>&1
whole $? run
check "$what: $(causes run)" grep -q '^1 rank 0 (pid [0-9]*) was ended by SIGKILL' <(causes run)
MEGATRAIN_RANK_FAULT=0:step:5:kill "$mt" --config restarts.ini parallel.tp=1 parallel.zero=0 run.dir=alone >/dev/null 2>&1
check "and without run.restarts it ends" [ $? -eq 137 ]
finish
