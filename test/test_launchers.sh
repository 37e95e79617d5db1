#!/usr/bin/env bash
# Every launcher comes to the losses of the run of one process.
#
#   test/test_launchers.sh                           scripts/launch.sh, torchrun's variables with its port taken
#   MEGATRAIN_LAUNCHERS=all test/test_launchers.sh   also mpirun, torchrun itself, and a Slurm of our own: srun over two
#                                                    nodes, sbatch with a signal, queueing again, and giving up (make
#                                                    test-launchers)
. "$(dirname "$0")/lib.sh"
all=${MEGATRAIN_LAUNCHERS:-}
export OMP_NUM_THREADS=1
make_tiny
cat >launch.ini <<EOI
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
timeout_s = 20
[train]
micro_batch = 1
global_batch = 8
steps = 8
[optim]
lr = 3e-3
warmup = 2
[data]
train = $work/a
valid = $work/b
[checkpoint]
every = 4
keep = 0
EOI
words=(--config "$work/launch.ini")
port=$((20000 + RANDOM % 10000))

same() { same_run "$1" "$work/alone" 8; } # as the run of one process
error_of() { grep -Em1 '^megatrain: (error|stopped)' "$1.err"; }
# said DIR TEXT: the start line of the run
said() { check "$1: '$2' is not in: $(grep -m1 ranks "$1.err")" grep -qF "$2" "$1.err"; }

timeout 600 "$mt" train "${words[@]}" run.dir=alone parallel.tp=1 parallel.zero=0 >/dev/null 2>alone.err
check "one process: $(error_of alone)" same alone

# step.sh beside a Slurm that only writes down what it is asked: a GPU that failed
mkdir fake
printf '#!/bin/sh\nexit 11\n' >fake/srun
printf '#!/bin/sh\necho "$@" >>asked\n[ "$1" != show ] || echo " TimeLimit=1-00:00:00 ExcNodeList=n3 "\n' >fake/scontrol
chmod +x fake/srun fake/scontrol
mkdir gpu-failed
echo "error (device failed): rank 3: GPU 3 of n7.site, 00000000:1B:00.0, GPU-1, in adamw: an error" >gpu-failed/log.txt
PATH=$PWD/fake:$PATH SLURM_JOB_ID=5 MEGATRAIN=$mt RUN_DIR=gpu-failed "$root/scripts/slurm/step.sh" --config launch.ini 2>said.txt
check "step.sh ends with the status of the ranks, 11, not $?" [ $? -eq 11 ]
check "a device failed: $(tail -1 said.txt)" grep -q 'a GPU of n7 failed' said.txt
check "queued again: $(tail -1 asked)" grep -qx 'requeue 5' asked
check "not on that host: $(tail -1 asked)" grep -qx 'update JobId=5 ExcNodeList=n3,n7' asked

timeout 600 "$root/scripts/launch.sh" -n 4 -p $port -- "$mt" "${words[@]}" run.dir=launch >/dev/null 2>launch.err
check "launch.sh: exit $?, $(error_of launch)" same launch

# Ctrl-Z: the ranks stop with the launcher, and go on with it
"$root/scripts/launch.sh" -n 2 -- bash -c 'echo $$ >rank-$RANK; while [ ! -e go ]; do read -rt 0.05 <> <(:); done; exit 3' &
launcher=$!
until [ -s rank-0 -a -s rank-1 ]; do sleep 0.05; done
stand() { # YES, of launcher and ranks: in at most a minute
    local p
    for p in $launcher $(cat rank-0 rank-1); do
        for ((i = 0; i < 1200; i++)); do
            if stands_still "$p"; then [ "$1" = 1 ]; else [ "$1" = 0 ]; fi && break
            sleep 0.05
        done
        [ $i -lt 1200 ] || return 1
    done
}
kill -TSTP $launcher
check "Ctrl-Z stops launcher and ranks" stand 1
kill -CONT $launcher
check "they go on" stand 0
touch go
wait $launcher
check "the ranks' exit code is the launcher's" [ $? -eq 3 ]
said launch '(environment)'

# What torchrun sets. Its agent keeps MASTER_PORT for its own store; older ones leave it to rank 0.
listen() { # port: one that it takes
    python3 -u -c "import socket, random, time
while True:
    try:
        port = random.randrange(20000, 30000)
        s = socket.create_server(('127.0.0.1', port), backlog=64)
        break
    except OSError: pass
print('ready', port)
time.sleep(300)" >listener.txt 2>&1 &
    listener=$!
    for ((i = 0; i < 6000; i++)); do grep -q ready listener.txt && break; sleep 0.01; done
    port=$(sed -n 's/^ready //p' listener.txt)
    check "no listener: $(tail -1 listener.txt)" [ -n "$port" ]
}
like_torchrun() { # DIR NAME=VALUE...
    local rank pids=()
    for rank in 0 1 2 3; do
        env RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=4 GROUP_RANK=0 ROLE_RANK=$rank ROLE_WORLD_SIZE=4 \
            MASTER_ADDR=localhost MASTER_PORT=$port TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 \
            TORCHELASTIC_MAX_RESTARTS=3 "${@:2}" timeout 600 "$mt" "${words[@]}" run.dir="$1" >/dev/null 2>>"$1.err" &
        pids+=($!)
    done
    code=0
    for rank in "${pids[@]}"; do wait "$rank" || code=$?; done
}
listen
like_torchrun agent TORCHELASTIC_USE_AGENT_STORE=True
check "torchrun's variables, its agent on the port: exit $code, $(error_of agent)" same agent
said agent '(torchrun)'
like_torchrun taken
check "torchrun's variables, the port taken: exit $code, $(error_of taken)" same taken
kill $listener
wait $listener 2>/dev/null

[ -n "$all" ] || finish

# ---- mpirun ----

if command -v mpirun >/dev/null && mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
    export MASTER_PORT=$((port + 40))
    mpi=(mpirun --allow-run-as-root --oversubscribe --bind-to none)
    timeout 600 "${mpi[@]}" -n 4 "$mt" "${words[@]}" run.dir=mpi >/dev/null 2>mpi.err
    check "mpirun: exit $?, $(error_of mpi)" same mpi
    said mpi '(mpirun)'
    MEGATRAIN_RANK_FAULT=1:backward:9:kill timeout 600 "${mpi[@]}" -n 4 "$mt" "${words[@]}" run.dir=mpi-kill >/dev/null 2>mpi-kill.err
    code=$?
    check "mpirun, rank 1 killed: exit $code, $(error_of mpi-kill)" [ $code -ne 0 ]
    check "mpirun, rank 1 killed: ranks left" [ -z "$(pgrep -f "$work/launch.ini")" ]
    timeout 600 "${mpi[@]}" -n 4 "$mt" "${words[@]}" run.dir=mpi-kill >/dev/null 2>mpi-kill.err
    check "mpirun, after that: exit $?, $(error_of mpi-kill)" same mpi-kill
    MEGATRAIN_RANK_FAULT=1:step:6:kill timeout 600 "${mpi[@]}" -n 4 "$mt" "${words[@]}" run.dir=mpi-again run.restarts=2 >/dev/null 2>mpi-again.err
    check "mpirun, rank 1 killed, with run.restarts: exit $?, $(error_of mpi-again)" same mpi-again
    unset MASTER_PORT
else skip "mpirun: no Open MPI (Debian: openmpi-bin)"; fi

# ---- torchrun itself ----

# (Debian's 1.13 does not find the enum's 0 under Python 3.11)
cat >torchrun.py <<'EOI'
import sys
from torch.distributed.elastic.multiprocessing import Std
Std.from_str = classmethod(lambda cls, text: cls(int(text)))
from torch.distributed.run import main
sys.exit(main())
EOI
python=
for p in python3 /usr/bin/python3; do "$p" -c 'import torch.distributed.run' 2>/dev/null && python=$p; done
if [ -n "$python" ]; then
    timeout 600 "$python" torchrun.py --no_python --nproc_per_node 4 --master_port $((port + 80)) "$mt" "${words[@]}" run.dir=torchrun \
        >/dev/null 2>torchrun.err
    check "torchrun: exit $?, $(error_of torchrun)" same torchrun
    said torchrun '(torchrun)'
else skip "torchrun: no PyTorch (Debian: python3-torch)"; fi

# ---- Slurm ----

for tool in slurmctld slurmd srun sbatch munged; do
    command -v $tool >/dev/null || { skip "Slurm: no $tool (Debian: slurm-wlm, munge)"; finish; }
done
[ "$(id -u)" -eq 0 ] || { skip "Slurm: a cluster of our own needs root"; finish; }
slurm=$root/test/slurm.sh
trap '"$slurm" stop "$work/slurm"; rm -rf "$work"' EXIT
if ! "$slurm" start "$work/slurm" 2 8 >slurm.log 2>&1; then
    bad "Slurm did not start: $(tail -5 slurm.log)"
    finish
fi
export SLURM_CONF=$work/slurm/slurm.conf MASTER_ADDR=127.0.0.1 # (the two nodes are this host, their names are not)

timeout 600 srun -N2 -n4 "$mt" "${words[@]}" run.dir=srun >/dev/null 2>srun.err
check "srun, 2 nodes of 2 ranks: exit $?, $(error_of srun)" same srun
said srun '(srun)'
MEGATRAIN_RANK_FAULT=3:step:6:kill timeout 600 srun -N2 -n4 "$mt" "${words[@]}" run.dir=srun-again run.restarts=2 >/dev/null 2>srun-again.err
check "srun, a rank killed, with run.restarts: exit $?, $(error_of srun-again)" same srun-again
check "it went on in the same step: $(grep -m1 restart srun-again.err)" grep -q 'restart 1: rank 3 .*was lost' srun-again.err
timeout 600 srun -N2 -n8 --ntasks-per-node=4 "$mt" "${words[@]}" run.dir=srun-8 >/dev/null 2>srun-8.err
check "srun, 2 nodes of 4 ranks: exit $?, $(error_of srun-8)" same srun-8
for mode in none pmi2; do
    timeout 600 srun --mpi=$mode -N1 -n2 "$mt" "${words[@]}" run.dir=srun-$mode >/dev/null 2>srun-$mode.err
    check "srun --mpi=$mode: exit $?, $(error_of srun-$mode)" same srun-$mode
done
timeout 600 srun -N2 -n4 "$mt" doctor --cluster >doctor.out 2>doctor.err
check "srun, doctor: exit $?, $(error_of doctor)" [ "$(grep -c '^[0-3] .* all  .* shared  hold ' doctor.out)" = 4 ]
if command -v mpirun >/dev/null; then
    timeout 600 salloc -N2 -n4 mpirun --allow-run-as-root --bind-to none -n 4 "$mt" "${words[@]}" run.dir=salloc \
        >/dev/null 2>salloc.err
    check "salloc, mpirun: exit $?, $(error_of salloc)" same salloc
fi

# the batch scripts, as `make install` puts them, from the folder of the configuration
prefix="$work/pre fix" installed="$work/pre fix/share/megatrain"
make -s -C "$root" install PREFIX="$prefix" >install.log 2>&1 && [ -x "$prefix/bin/megatrain" ] ||
    { bad "make install: $(tail -3 install.log)"; finish; }
for file in README.md LICENSE docs/ranks.md docs/architecture.svg; do
    check "make install: no $file" [ -s "$prefix/share/doc/megatrain/$file" ]
done
dynamic=$(readelf -dW "$prefix/bin/megatrain")
check "what is installed binds late" grep -q BIND_NOW <<<"$dynamic"
check "what is installed looks for libraries by RPATH" bash -c '! grep -q "(RPATH)"' <<<"$dynamic"
# NOTE=FILE: the first time rank 1, of an array's last task, notes its pid there, and stands still before step 3.
# TOLD=FILE: what the ranks were told.
cat >megatrain <<EOI
#!/bin/bash
[ -z "\${TOLD:-}" ] || echo "\${#MEGATRAIN_SECRET} digits, \${OMP_NUM_THREADS:-no} thread" >"\$TOLD"
if [ -n "\${NOTE:-}" ] && [ "\$SLURM_PROCID\${SLURM_ARRAY_TASK_ID:-1}" = 11 ] && [ ! -e "\$NOTE" ]; then
    echo \$\$ >"\$NOTE"
    export MEGATRAIN_RANK_FAULT=1:step:3:stop
fi
exec "$mt" "\$@"
EOI
chmod +x megatrain
options=() # of sbatch, besides
# submit SCRIPT NAME WORDS...: job
submit() {
    job=$(timeout 600 sbatch --parsable --gpus-per-node=0 --cpus-per-task=1 --ntasks-per-node=4 --time=25 \
        --output="$work/$2.err" "${options[@]}" "$installed/scripts/slurm/$1" "${words[@]}" "${@:3}") && [ -n "$job" ] ||
        { bad "sbatch $1"; job=0; }
}
state() { scontrol -o show job "$job" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).* Reason=\([^ ]*\).*ExitCode=\([0-9]*\).*Restarts=\([0-9]*\).*/\1/p'; }
field() { scontrol -o show job "$job" 2>/dev/null | grep -o " $1=[^ ]*" | head -1 | cut -d= -f2; }
# until COMMAND...: true within three minutes
until_() { local i; for ((i = 0; i < 1800; i++)); do "$@" && return; sleep 0.1; done; return 1; }
ended() { case $(field JobState) in COMPLETED | FAILED | CANCELLED | TIMEOUT) true ;; *) false ;; esac; }
queued_again() { [ "$(field Restarts)" = "$1" ] && [ "$(field JobState)" = PENDING ]; }
# Slurm lets a job that queues again wait two minutes; within a second it takes it for the one that it has just ended
go_on() { until_ queued_again "$1" && sleep 2 && scontrol update JobId="$job" StartTime=now; }
rank_1_waits() { [ -s "$work/rank_1" ] && stands_still "$(cat "$work/rank_1")"; }

RUN_DIR=$work/sbatch submit nodes.sbatch sbatch # by the program that was installed
until_ ended
check "nodes.sbatch, 2 nodes of 4 ranks: $(field JobState), $(error_of "$work/sbatch")" same "$work/sbatch"
export NOTE=$work/rank_1 MEGATRAIN=$work/megatrain
submit one-node.sbatch term run.dir="$work/term"
unset NOTE
check "one-node.sbatch: no step 3: $(field JobState), $(tail -3 "$work/slurm/slurmctld.log")" until_ rank_1_waits
end_by_term() {
    scancel --signal=TERM "$job"
    check "$job, SIGTERM: not sent to rank 1" until_ has_pending "$(cat "$work/rank_1")" 15
    kill -CONT "$(cat "$work/rank_1")"
}
end_by_term
check "SIGTERM: not queued again: $(field JobState), $(tail -2 "$work/term.err")" go_on 1
check "SIGTERM: no word of the checkpoint" grep -q '^megatrain: stopped by SIGTERM after step 3, with a checkpoint' "$work/term.err"
until_ ended
check "SIGTERM, and queued again: $(field JobState), $(error_of "$work/term")" same "$work/term"
export MEGATRAIN_RANK_FAULT=1:backward:3:kill # before the first checkpoint, every time
submit one-node.sbatch lost run.dir="$work/lost"
unset MEGATRAIN_RANK_FAULT
for times in 1 2 3; do check "a rank is killed: not queued again the time $times" go_on $times; done
until_ ended
check "a rank is killed each time: $(field JobState) after $(field Restarts) restarts" \
    [ "$(field JobState) $(field Restarts)" = 'FAILED 3' ]
check "a rank is killed each time: $(tail -1 "$work/lost.err")" grep -q 'no checkpoint after none' "$work/lost.err"
check "a rank is killed: the culprit is named: $(error_of "$work/lost")" grep -q 'error.*rank 1 .* was lost' "$work/lost.err"
submit one-node.sbatch wrong optim.no_such=1 run.dir="$work/wrong"
until_ ended
check "a mistake in the configuration ends the job: $(field JobState), exit $(field ExitCode)" [ "$(field JobState) $(field ExitCode)" = 'FAILED 2:0' ]

# another learning rate from here on
submit one-node.sbatch override run.dir="$work/term" train.steps=9 --override optim.lr optim.lr=1e-3
until_ ended
check "--override: $(field JobState), $(error_of "$work/override")" [ "$(field JobState)" = COMPLETED ]
check "--override: nothing in metrics.jsonl" grep -q '"override":' "$work/term/metrics.jsonl"
# a job array: a folder for each task; the last one, whose id is the array's, queues again alone
rm -f "$work/rank_1"
export NOTE=$work/rank_1
options=(--array=0-1 --ntasks-per-node=2)
submit one-node.sbatch array run.dir="$work/array-%a"
unset NOTE
array=$job job=${job}_0
until_ ended
check "an array's first task: $(field JobState), $(error_of "$work/array")" same "$work/array-0"
job=${array}_1
check "an array's last task: no step 3: $(field JobState)" until_ rank_1_waits
end_by_term
check "an array's last task: not queued again: $(field JobState)" go_on 1
job=${array}_0
check "an array's first task: $(field JobState), queued again" [ "$(field JobState) $(field Restarts)" = 'COMPLETED 0' ]
job=${array}_1
until_ ended
check "an array's last task: $(field JobState), $(error_of "$work/array")" same "$work/array-1"
# a site that passes no environment on to jobs: a copy of the script sets it
sed "s|^#module.*|export MEGATRAIN='$work/megatrain' MASTER_ADDR=127.0.0.1 TOLD='$work/told'|" \
    "$installed/scripts/slurm/nodes.sbatch" >"$installed/scripts/slurm/site.sbatch"
options=(--export=NONE --ntasks-per-node=1)
submit site.sbatch none run.dir="$work/none"
until_ ended
check "--export=NONE: $(field JobState), $(error_of "$work/none")" same "$work/none"
check "--export=NONE: ranks got $(cat "$work/told")" [ "$(cat "$work/told")" = '64 digits, 1 thread' ]
# a limit below the ten minutes before it at which ranks are to stop: not for ever
mkdir -p "$work/short" && echo none 3 >"$work/short/requeues"
options=(--time=3)
submit one-node.sbatch short run.dir="$work/short" train.steps=1000000 debug.comm_delay_ms=20
until_ ended
check "--time=3: $(field JobState) after $(field Restarts) restarts, exit $(field ExitCode)" \
    [ "$(field JobState) $(field Restarts) $(field ExitCode)" = 'FAILED 0 75:0' ]
check "--time=3: $(tail -1 "$work/short.err")" grep -q 'of 180 s lay behind --signal in 3 attempts' "$work/short.err"
check "--time=3: not said at the start" grep -q 'time limit of 180 s is not above the 600 s' "$work/short.err"
rm "$installed/scripts/slurm/site.sbatch"
make -s -C "$root" uninstall PREFIX="$prefix" >>install.log 2>&1
check "make uninstall leaves $(find "$prefix" -type f | head -3)" [ -z "$(find "$prefix" -type f)" ]
finish
