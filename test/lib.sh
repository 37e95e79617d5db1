# Shared by the shell tests: a scratch folder, tiny token files, counting. Source it; end with `finish`.
# MEGATRAIN names another binary than the one at the root.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mt=$(realpath "${MEGATRAIN:-$root/megatrain}")
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} NO_COLOR=1
unset WORLD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS MEGATRAIN_FILE_FAULT
work=$(mktemp -d "${TMPDIR:-/tmp}/megatrain-test.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
passed=0 failed=0 skipped=0

ok() { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); echo "FAIL: $*"; }
check() { local what=$1; shift; if "$@"; then ok; else bad "$what"; fi; }

# expect CODE TEXT command...: exit status and a piece of stderr; exactly one primary error line when CODE > 0
expect() {
    local code=$1 text=$2 got
    shift 2
    "$@" >out.txt 2>err.txt
    got=$?
    if [ $got -ne "$code" ]; then bad "exit $got, want $code: $*"; head -5 err.txt; return; fi
    if ! grep -qF -- "$text" err.txt out.txt; then bad "no '$text' in the output of: $*"; head -5 err.txt; return; fi
    if [ "$code" -gt 0 ] && [ "$(grep -cE '^megatrain: (error|stopped|interrupted)' err.txt)" -ne 1 ]; then
        bad "not one error line: $*"; head -5 err.txt; return
    fi
    ok
}

# Token files a, b (train, valid) of bytes, and tiny.ini beside them.
make_tiny() {
    local i
    for i in $(seq 1 60); do
        printf 'Line %d of a small text about %d ships, %d tides and %d harbours.\n' "$i" $((i * 7 % 13)) $((i * 5 % 11)) $((i % 4))
    done >text.txt
    for i in $(seq 1 40); do cat text.txt; done >big.txt
    "$mt" preprocess --input big.txt --tokenizer byte --output a --append-eod >/dev/null 2>&1 || bad "preprocess"
    "$mt" preprocess --input text.txt text.txt --tokenizer byte --output b --append-eod >/dev/null 2>&1 || bad "preprocess"
    cat >tiny.ini <<EOI
[model]
layers = 2
hidden = 32
heads = 4
seq = 32
dropout = 0.1
attention_dropout = 0.1
[train]
micro_batch = 3
global_batch = 15
steps = 40
eval_samples = 60
[optim]
lr = 3e-3
min_lr = 3e-4
warmup = 4
[data]
train = a
valid = b
[checkpoint]
every = 7
keep = 0
EOI
}

# make_ini FILE SECTION.KEY=VALUE...: of a run of several ranks on the files of make_tiny, with these keys; evaluated on
# a few samples
make_ini() {
    local file=$1
    shift
    printf '%s\n' parallel.bucket_mb=1 train.micro_batch=2 train.eval_samples=8 optim.warmup=2 optim.clip=0.5 \
        data.train=a data.valid=b checkpoint.every=0 "$@" | sort |
        awk -F. '$1 != section { print "[" $1 "]"; section = $1 } { print substr($0, length($1) + 2) }' >"$file"
}

losses() { sed -n 's/.*"step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/p' "$1/metrics.jsonl"; }
same_losses() { [ "$(losses "$1")" = "$(losses "$2")" ] && [ -n "$(losses "$1")" ]; }
same_tensors() { # of two runs at a step
    local f=checkpoints/step-$(printf %08d "$3")/shard-00000.safetensors
    [ -s "$1/$f" ] && cmp -s "$1/$f" "$2/$f"
}

all_losses() { # steps, losses, gradient norms
    sed -n 's/.*"step":\([0-9]*\),.*"loss":\([^,]*\),"grad_norm":\([^,]*\),.*/\1 \2 \3/p' "$1/metrics.jsonl"
}
digest() { "$mt" inspect "$1/checkpoints/step-$(printf %08d "$2")" 2>/dev/null | sed -n 's/^digest *//p'; } # RUN STEP
same_run() { # RUN RUN STEPS: losses and gradient norms of so many steps, and all tensors of the last
    [ "$(all_losses "$1" | wc -l)" -eq "$3" ] && [ "$(all_losses "$1")" = "$(all_losses "$2")" ] &&
        [ -n "$(digest "$1" "$3")" ] && [ "$(digest "$1" "$3")" = "$(digest "$2" "$3")" ]
}
near() { # RUN RUN STEPS TOLERANCE: losses of so many steps; NaN is far
    [ "$(losses "$1" | wc -l)" -eq "$3" ] && paste <(losses "$1") <(losses "$2") |
        awk -v tol="$4" '{ d = ($2 - $4) / $4; if (!(d < tol && d > -tol)) bad = 1 } END { exit bad }'
}

# What a process is at, for what has to happen then and not so many milliseconds later.
stands_still() { [[ $(cat "/proc/$1/stat" 2>/dev/null) == *') T '* ]]; } # PID
has_pending() { # PID NUMBER: the signal has been sent there, and waits
    local mask
    mask=$(sed -n 's/^ShdPnd:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null)
    (((0x${mask:-0} >> ($2 - 1)) & 1))
}

skip() { skipped=$((skipped + 1)); echo "    skipped: $*"; }

finish() {
    local tail=
    [ $skipped -eq 0 ] || tail=", $skipped skipped"
    echo "$passed passed, $failed failed$tail"
    [ $failed -eq 0 ] && [ $passed -gt 0 ]
    exit $?
}

# both_ways NUMBER STEP LAST RANKS KEYS...: what one rank does up to a step ranks go on with, and the other way round; both
# must be the run in `whole`. By the script's own `run DIR KEYS...` and `ranks COUNT DIR KEYS...`.
both_ways() {
    local n=$1 at=$2 last=$3 count=$4
    shift 4
    run r$n train.stop_at=$at
    ranks $count r$n "$@"
    check "from step $at on $count ranks with $*: $(grep -m1 error r$n.err)" same_run r$n whole $last
    ranks $count s$n "$@" train.stop_at=$at
    run s$n
    check "and the other way round" same_run s$n whole $last
}
