#!/usr/bin/env bash
# What the batch scripts here have in common: one step of all ranks, and the job queues again where that helps.
#
#   scripts/slurm/step.sh --config FILE section.key=value ...      (in a job of Slurm's)
#
# The program is the one that this script came with, or else the one on the PATH; MEGATRAIN names another, such as one inside
# a container. RUN_DIR sets run.dir, which a program that does not run outside a container needs. SRUN_ARGS adds words to
# srun.
#
# Queued again (`scontrol requeue`; it goes on from the newest checkpoint) is what ended with
#
#   75           stopped by a signal, after a checkpoint: the time is up, or the node is wanted
#   7, 8         a rank was lost, or hung
#   11           a device failed: the job keeps away from that host, if Slurm lets it (the error line names the host)
#   128 + signal a rank was killed: srun prefers that to the 7 of all others
#
# but after 3 ends without a new checkpoint in between the job fails with that status; so does any other status at once.
# An end by the time limit also counts where the script's --signal stops the ranks before half of that limit has passed.
# requeues in the run's folder keeps the count. In a job array the task alone queues again, and %a in a word is its number.
set -u
[ $# -gt 0 ] && [ -n "${SLURM_JOB_ID:-}" ] || { sed -n '2,4p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
program=${MEGATRAIN:-}
for p in "$here/../../megatrain" "$here/../../../../bin/megatrain" "$(command -v megatrain)"; do
    [ -n "$program" ] || [ ! -x "$p" ] || program=$p
done
[ -n "$program" ] || { echo "step.sh: no megatrain beside $here, nor on the PATH: MEGATRAIN=FILE names it" >&2; exit 2; }

# an array's own id means all of its tasks
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    set -- "${@//%a/$SLURM_ARRAY_TASK_ID}"
fi
field() { scontrol show job "$job" 2>/dev/null | grep -om1 "\<$1=[^ ]*" | cut -d= -f2; }
# seconds of a limit as Slurm writes it, 1-02:03:04; 0: none
seconds_of() {
    [[ $1 =~ ^(([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+)$ ]] || { echo 0; return; }
    echo $((((10#0${BASH_REMATCH[2]} * 24 + 10#${BASH_REMATCH[3]}) * 60 + 10#${BASH_REMATCH[4]}) * 60 + 10#${BASH_REMATCH[5]}))
}
# Slurm does not tell how long before the limit its signal comes: the script says it, unless sbatch was given another.
limit=$(seconds_of "$(field TimeLimit)")
window=$(scontrol write batch_script "$SLURM_JOB_ID" - 2>/dev/null | sed -n 's/^#SBATCH .*--signal=[^ ]*@\([0-9]*\).*/\1/p' | head -1)
short=''
if [ "$limit" -gt 0 ] && [ "$limit" -le "${window:-0}" ]; then
    short=yes
    echo "step.sh: the time limit of $limit s is not above the $window s before it at which the script's --signal stops the" \
        "ranks: sbatch --time=$((window / 60 + 10)) or more, or a later --signal" >&2
fi

# these would make one rank of all tasks, or a world of another size
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
# by which the ranks know each other (docs/security.md); in the environment, which other users do not see
MEGATRAIN_SECRET=$(od -An -N32 -v -tx1 /dev/urandom | tr -d ' \n')
export MEGATRAIN_SECRET
# sbatch --export=NONE would have srun keep all of that, MASTER_ADDR and NCCL_* from the ranks
unset SLURM_EXPORT_ENV
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
run_dir=${RUN_DIR:-}
if [ -n "$run_dir" ]; then set -- "$@" run.dir="$run_dir"
else
    dump=$("$program" config dump "$@" --world "${SLURM_NTASKS:-1}") || exit
    run_dir=$(sed -n '/^\[run\]/,/^\[model/s/^dir = \(.*[^ ]\) *; [^;]*$/\1/p' <<<"$dump")
fi
# Each task has cores of its own, and takes the next GPU of its node by itself: where Slurm shows it one only, GPUs may
# not reach each other's memory.
bind=(--cpu-bind=cores)
[ "${SLURM_GPUS_ON_NODE:-0}" = 0 ] || bind+=(--gpu-bind=none)

# The first rank that leaves does not end the others: they have a verdict to print. Who has not left a minute after the
# first one is frozen, and ended.
srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${bind[@]}" ${SRUN_ARGS:-} "$program" "$@"
code=$?

case $code in
7 | 8 | 11 | 75) ;;
*) [ $code -gt 128 ] || exit $code ;;
esac
newest=$(ls "$run_dir/checkpoints" 2>/dev/null | grep -x 'step-[0-9]*' | sort | tail -1)
newest=${newest:-none}
read -r before count 2>/dev/null <"$run_dir/requeues" || before='' count=0
why="no checkpoint after $newest"
if [ $code -eq 75 ] && [ -n "$short" ] && [ $SECONDS -lt $((limit / 2)) ] && [[ $(field PreemptTime) =~ ^(None)?$ ]]; then
    before=$newest why="most of the time limit of $limit s lay behind --signal"
fi
if [ "$before" = "$newest" ]; then count=$((count + 1)); else count=1; fi
if [ $count -gt 3 ]; then
    echo "step.sh: exit status $code, and $why in 3 attempts: the job ends" >&2
    rm -f "$run_dir/requeues"
    exit $code
fi
mkdir -p "$run_dir" && echo "$newest $count" >"$run_dir/requeues" || exit $code
echo "step.sh: exit status $code, newest checkpoint $newest: job $job queues again" >&2
scontrol requeue "$job" || echo "step.sh: that failed; is the job submitted with --requeue?" >&2
host=''
if [ $code -eq 11 ]; then host=$(sed -n 's/.*error (device failed).*GPU [0-9]* of \([^ ,.]*\).*/\1/p' "$run_dir/log.txt" 2>/dev/null | tail -1); fi
if [ -n "$host" ]; then
    without=$(field ExcNodeList) without=${without/#(null)/}
    echo "step.sh: a GPU of $host failed: the job keeps away from it" >&2
    scontrol update JobId="$job" ExcNodeList="${without:+$without,}$host" ||
        echo "step.sh: that failed; ask for $host to be drained, or submit with sbatch --exclude=$host" >&2
fi
exit $code
