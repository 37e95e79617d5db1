#!/usr/bin/env bash
# The command line from outside: help of every command, wrong options, exit codes, what goes to stdout and what
# to stderr, and each command once on a tiny run.
set -u
cd "$(dirname "$0")/.."
mt=$(realpath "${MEGATRAIN:-./megatrain}")
dir=$(mktemp -d /tmp/test_cli.XXXXXX)
trap 'rm -rf "$dir"' EXIT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=passive
unset WORLD_SIZE OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS NO_COLOR
passed=0 failed=0

pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); printf 'FAIL %s\n' "$*"; }
check() { local name=$1; shift; if "$@"; then pass; else fail "$name"; fi; }

# run CODE WORDS...: runs megatrain in $dir; output in $dir/out and $dir/err
run() {
    local want=$1 got; shift
    (cd "$dir" && "$mt" "$@" >out 2>err </dev/null)
    got=$?
    if [ $got -eq "$want" ]; then pass; else fail "megatrain $*: exit $got, want $want: $(head -3 "$dir/err")"; fi
}
# refused CODE TEXT WORDS...: that exit code, nothing on stdout, one primary line, and TEXT in stderr
refused() {
    local code=$1 text=$2; shift 2
    run "$code" "$@"
    check "megatrain $*: stdout is not empty" test ! -s "$dir/out"
    check "megatrain $*: one primary line" test "$(grep -c '^megatrain: error' "$dir/err")" -eq 1
    if grep -qF -- "$text" "$dir/err"; then pass; else fail "megatrain $*: no '$text' in: $(cat "$dir/err")"; fi
}
says() { if grep -qE -- "$2" "$dir/$1"; then pass; else fail "no '$2' in $1: $(head -c 400 "$dir/$1")"; fi; }

# ---- help and versions
commands=(train eval generate preprocess "tokenizer train" tokenize plan simulate inspect report convert doctor config)
run 0 --help
for c in "${commands[@]}"; do says out "^  $c "; done
cp "$dir/out" "$dir/help"
check "every command of the help is tested" test "$(sed -n '/^commands/,/^$/p' "$dir/help" | grep -c '^  ')" -eq ${#commands[@]}
for c in "${commands[@]}"; do
    run 0 $c --help
    says out "^usage: megatrain $c"
    check "$c --help: stderr is empty" test ! -s "$dir/err"
    cp "$dir/out" "$dir/long"
    run 0 help $c
    check "help $c = $c --help" cmp -s "$dir/long" "$dir/out"
done
for w in "tokenizer --help" "help tokenizer"; do # half of a name
    run 0 $w
    says out "^usage: megatrain tokenizer train"
done
run 0 --version
for w in '^megatrain [0-9]' '^commit +([0-9a-f]{12}( with changes)?|unknown)$' '^binary +[0-9a-f]{8}$' '^compiler' '^backends .*cpu' '^libraries .*Jansson [0-9].*PCRE2 [0-9].*utf8proc [0-9]'; do says out "$w"; done
run 2
check "no words: the help goes to stderr" test ! -s "$dir/out" -a -s "$dir/err"

# ---- wrong words
refused 2 "did you mean 'megatrain train'?" trian
refused 2 "unknown command 'zzzzzz'" zzzzzz
refused 2 "did you mean 'megatrain tokenizer train'?" tokenizer
refused 2 "unknown command 'tokenizer tarin'" tokenizer tarin
refused 2 "did you mean '--config'?" --confg x
refused 2 "needs --config FILE" train
refused 2 "--config wants a value" train --config
refused 2 "--config wants a value" train --config --config
refused 2 "given twice" train --config a --config b
refused 2 "without '--'" train --config a --model.layers=3
refused 2 "cannot open 'missing.ini'" --config missing.ini
refused 2 "no option '-x'" plan -x
refused 2 "did you mean '--temperature'?" generate --run x --tempratur 3
refused 2 "needs --run DIR" generate
refused 2 "--tokens wants an integer, not '1x'" generate --run x --tokens 1x
refused 2 "--tokens must be 0 to" generate --run x --tokens -1
refused 2 "--temperature wants a number, not 'nan'" generate --run x --temperature nan
refused 2 "--top-p must be 0 to 1" generate --run x --top-p 1.5
refused 2 "--seed wants an integer" generate --run x --seed=99999999999999999999
refused 2 "takes no value" tokenize --tokenizer byte --decode=1
refused 2 "what to do with 'word'" doctor word
refused 2 "--world must be 1 to" plan --config x --world 0
refused 2 "at least one value" preprocess --input --tokenizer byte --output p
refused 2 "--format must be auto, text, jsonl or bytes" preprocess --input f --tokenizer byte --output p --format csv
for p in "" of/; do refused 2 "--output '$p' names no files" preprocess --input f --tokenizer byte --output "$p"; done
refused 2 "--key belongs to --format jsonl" preprocess --input f --tokenizer byte --output p --key k --format text
refused 2 "stdin can be read once" preprocess --input - f - --tokenizer byte --output p
refused 2 "did you mean 'check'?" config chek
refused 2 "did you mean 'model.layers'?" config explain modl.layers
refused 2 "needs --stages P" simulate --list
refused 2 "needs --schedule NAME, or --compare" simulate --stages 4 --microbatches 8
refused 2 "unknown schedule '1f2b'" simulate --schedule 1f2b --stages 4 --microbatches 8
refused 2 "nearest legal shape: 4 ranks, 8 micro-batches" simulate --schedule dualpipe --stages 4 --microbatches 7
refused 2 "--cost wants three numbers" simulate --schedule 1f1b --stages 4 --microbatches 8 --cost 1,2
refused 2 "--cost wants three numbers" simulate --schedule 1f1b --stages 4 --microbatches 8 --cost 1,0,1
refused 2 "--compare shows all schedules" simulate --compare --schedule 1f1b --stages 4 --microbatches 8
refused 2 "either --json or --list" simulate --json --list --schedule 1f1b --stages 4 --microbatches 8
refused 5 "'$dir' is a folder" simulate --schedule 1f1b --stages 4 --microbatches 8 --svg "$dir"
refused 4 "there is no folder 'a'" convert --from a --to b --format hf
refused 2 "needs --to" convert --from a --format hf
refused 2 "needs a PATH" inspect
refused 2 "--tokenizer belongs to --document" inspect x --tokenizer byte
refused 3 "no token files 'nowhere'" inspect nowhere --document 0
refused 4 "there is no 'nowhere'" inspect nowhere
refused 4 "no checkpoint in 'nowhere'" generate --run nowhere
mkdir "$dir"/{hfm,lone,patterned} && touch "$dir"/hfm/{config.json,model.safetensors} "$dir/lone/manifest.json"
refused 4 "'$dir/hfm' is a model of Hugging Face's, not a run" generate --run "$dir/hfm"
refused 4 "convert --from $dir/hfm --to RUN --format megatrain" eval --run "$dir/hfm"
refused 4 "'$dir/lone' is a checkpoint's folder without its run" generate --run "$dir/lone"
refused 2 "it takes several: --input PATH..." tokenizer train --input a --input b --vocab-size 300 --output t.json
refused 2 "--vocab-size 4000, or --vocab-size 4096" tokenizer train --input a --vocab-size 4k --output t.json
refused 3 "no file matches '$dir/patterned/*.txt'" tokenizer train --input "$dir/patterned/*.txt" --vocab-size 300 --output t.json
printf 'BZh91AY&SYxxxx' >"$dir/patterned/a.bz2"
refused 3 "bzip2 -dc '$dir/patterned/a.bz2' | megatrain" preprocess --input "$dir/patterned/a.bz2" --tokenizer byte --output p
refused 3 "missing.txt" preprocess --input missing.txt --tokenizer byte --output p
refused 3 "missing.json" tokenize --tokenizer missing.json
refused 3 "missing.txt" tokenizer train --input missing.txt --vocab-size 300 --output t.json
refused 5 "'$dir' is a folder" tokenizer train --input missing.txt --vocab-size 300 --output "$dir"
refused 5 "'new/' is a folder" tokenizer train --input missing.txt --vocab-size 300 --output new/
mkfifo "$dir/fifo"
refused 5 "'fifo' is not a regular file" tokenizer train --input missing.txt --vocab-size 300 --output fifo
refused 2 "--vocab-size must be 257" tokenizer train --input f --vocab-size 256 --output t.json
"$mt" --version >/dev/full 2>"$dir/err"
check "a full stdout is exit 5" test $? -eq 5
says err "cannot write the results"
# closed streams: no file takes the number of one, and no message stands in a file
(cd "$dir" && for i in {1..9000}; do echo "line $i of a text of more than one chunk"; done >long.txt &&
    "$mt" preprocess --tokenizer byte --output whole --input long.txt >/dev/null 2>&1
    MEGATRAIN_FILE_FAULT=kill@13 "$mt" preprocess --tokenizer byte --output closed --input long.txt --threads 1 \
        --save-every 0.000001 >/dev/null 2>&1; test -s closed.part/job.json) 2>/dev/null
check "a job killed between two saves" test $? -eq 0
(cd "$dir" && "$mt" preprocess --tokenizer byte --output closed --input long.txt >/dev/null <&- 2>&-)
check "without stderr: exit 0" test $? -eq 0
check "without stderr: the tokens are the text's" cmp "$dir/whole.bin" "$dir/closed.bin"
"$mt" --version >&- 2>"$dir/err"
check "a closed stdout is exit 5" test $? -eq 5
says err 'Bad file descriptor'

# ---- ten people's first hour: each slip is answered with what to write instead, or does what was meant
cat >"$dir/first.ini" <<'EOF'
[train]
steps = 100
[optim]
warmup = 10
EOF
printf '[optim]\nlr = 6e-4 # as in the paper\n' >"$dir/note.ini"
slips=0
while IFS='|' read -r code words text; do
    slips=$((slips + 1))
    if [ $code -eq 0 ]; then
        run 0 $words
        says out "$text"
    else refused $code "$text" $words; fi
done <<'EOF'
2|config check --config first.ini train.steps=2|to try the first steps of a longer run: train.stop_at=2
0|config check --config first.ini train.stop_at=2|^first.ini: ok
0|config dump --config first.ini optim.lr=1e-3 optim.lr=2e-3|^lr = 0.002 +; command line
0|config dump --config first.ini --override optim.lr optim.lr=1e-3|^lr = 0.001 +; command line
2|config dump --config first.ini --override optim.lrr optim.lr=1e-3|did you mean 'optim.lr'?
2|--config first.ini model.n_layer=4|did you mean 'model.layers'?
2|--config first.ini train.batch_size=4|did you mean 'train.micro_batch' or 'train.global_batch'?
2|--config first.ini optim.learning_rate=1e-3|did you mean 'optim.lr'?
2|--config first.ini train.max_iters=10|did you mean 'train.steps'?
2|--config first.ini log.wandb=true|did you mean 'log.tensorboard'?
2|--config first.ini layers=3|did you mean 'model.layers=3'?
2|--config first.ini --lr 1e-3|did you mean 'optim.lr=VALUE'?
2|first.ini|did you mean 'megatrain --config first.ini'?
2|train first.ini|did you mean '--config first.ini'?
2|--config note.ini|a comment behind a value begins with ';'
2|config explain n_head|did you mean 'model.heads'?
EOF
check "slips: $slips" test $slips -eq 16

# ---- a tiny run, from text to text
text=$dir/text.txt
for i in $(seq 400); do echo "Line $i: the quick brown fox jumps over the lazy dog, and äöü € 😀 too."; done >"$text"
run 0 preprocess --input "$text" --tokenizer byte --output data/tiny --append-eod
says out "^data/tiny.bin data/tiny.idx: 1 document,"
run 0 tokenizer train --input "$text" --vocab-size=300 --output bpe.json
says out "^bpe.json: vocabulary 300"
cat >"$dir/tiny.ini" <<'EOF'
[model]
layers = 2
hidden = 32
heads = 4
seq = 32
[train]
micro_batch = 2
global_batch = 4
steps = 6
eval_every = 3
eval_samples = 4
[data]
train = data/tiny
valid = data/tiny
[checkpoint]
every = 3
EOF
run 0 config check --config tiny.ini
says out "^tiny.ini: ok on 1 rank .more ranks were not checked: --world N.$"
check "nothing to warn of" test ! -s "$dir/err"
CUDA_VISIBLE_DEVICES= run 0 config check --config tiny.ini data.train=nowhere "data.valid=a: data/tiny b: gone" \
    data.tokenizer=none.json checkpoint.load=old/run run.device=cuda
says out "^tiny.ini: ok on 1 rank .*, but a run would not start here"
for w in "data.train: .*'nowhere.idx'" "data.valid: .*'gone.idx'" "data.tokenizer: no tokenizer 'none.json'" \
    "checkpoint.load: there is no 'old/run'" "run.device: there is no GPU to use: "; do says err "^warning: $w"; done
check "a warning each: $(cat "$dir/err")" test "$(wc -l <"$dir/err")" -eq 5
run 0 config check --config tiny.ini data.train=data/tiny.bin data.valid=data/tiny.idx
check "PREFIX.bin and PREFIX.idx are taken for PREFIX: $(cat "$dir/err")" test ! -s "$dir/err"
run 0 config check --config tiny.ini data.train=
says err "^warning: data.train: it is empty"
refused 2 "model.vocab is 100, the tokenizer has 257 ids" config check --config tiny.ini model.vocab=100
run 0 config --config tiny.ini train.steps=7
says out "^hidden = 32 +; tiny.ini:3"
says out "^steps = 7 +; command line"
run 0 config explain optim.lr
says out "peak learning rate"
refused 2 "tiny.ini" config check --config tiny.ini model.heads=5
run 0 plan --config tiny.ini
plan_bytes=$(awk '$1 == "total" { gsub(",", ""); print $2 }' "$dir/out")
sum=$(awk '/^bytes of one rank/ { on = 1; next } $1 == "total" { exit }
           on { gsub(",", ""); for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+$/) { s += $i; break } } END { print s }' "$dir/out")
check "the plan's rows add up ($sum, $plan_bytes)" test "$sum" = "$plan_bytes"
run 0 plan --config tiny.ini --world 4 parallel.tp=2
says out "4 ranks = tp 2 x dp 2"
refused 4 "no checkpoint in 'runs/tiny'" eval --config tiny.ini
run 0 --config tiny.ini
check "training leaves stdout empty" test ! -s "$dir/out"
if [ ! -e /proc/driver/nvidia/version ]; then
    check "that there is no GPU is said once" test "$(grep -ci 'gpu\|cuda' "$dir/err")" -eq 1
    says err "^no GPU: computing on the CPU$"
fi
says err "^step 6/6  loss [0-9.]+  lr "
says err "^step 3: validation loss"
check "no escapes outside a terminal" test "$(grep -c $'\e' "$dir/err")" -eq 0
check "a line a step, and two evaluations" test "$(grep -c 'loss"' "$dir/runs/tiny/metrics.jsonl")" -eq 8
check "the run took what was planned" grep -q "\"memory_bytes\":$plan_bytes," "$dir/runs/tiny/metrics.jsonl"
for f in config.ini loss.svg checkpoints/step-00000006/manifest.json; do check "$f" test -s "$dir/runs/tiny/$f"; done
# what the folder keeps of its starts
log=$dir/runs/tiny/log.txt
check "log.txt has what was said, with times" grep -qE "^20[0-9-]{8}T[0-9:]{8}Z step 6/6  loss [0-9.]+  lr " "$log"
says err "^[0-9]+ samples of 32 tokens an epoch; step 0 of 6, which are [0-9.e-]+ epochs$"
says err "^step 6/6 .* epoch 0\.0[0-9]( |$)"
check "the last line says where all is" grep -q "^done: step 6 after .*; everything is in 'runs/tiny', the curve in 'runs/tiny/loss.svg'$" \
    <(tail -1 "$dir/err")
check "all of it: $(diff <(cut -d' ' -f2- "$log") "$dir/err" | head -3)" cmp -s <(cut -d' ' -f2- "$log") "$dir/err"
check "the configuration of the start" cmp -s <(tail -n +2 "$dir/runs/tiny/starts/1.ini") "$dir/runs/tiny/config.ini"
check "and its place" grep -qE "^; start 1, 20[0-9-]{8}T[0-9:]{8}Z, from step 0, megatrain " "$dir/runs/tiny/starts/1.ini"
run 0 --config tiny.ini train.steps=7
binary=$("$mt" --version | sed -n 's/^binary *//p')
says runs/tiny/starts/1.ini "^; start 1, .*, megatrain [0-9.]*, commit .*, binary $binary, host '.*', .*, one process$"
cp "$mt" "$dir/other" && echo >>"$dir/other" # another build, which runs as well
(cd "$dir" && ./other --config tiny.ini train.steps=7 2>err)
says err "^the checkpoint is by another build, megatrain .*, binary $binary; this is megatrain .*, binary [0-9a-f]{8}$"
rm "$dir/other"
run 0 inspect runs/tiny
says out "^format  *[0-9]+, written by [0-9.]+, commit .*, binary $binary$"
check "a second start has its own" grep -q "^; start 2, .*, from step 6, " "$dir/runs/tiny/starts/2.ini"
check "the first one's is still there" grep -q "^steps = 6" "$dir/runs/tiny/starts/1.ini"
check "the log goes on" grep -qE "Z step 7/7 " "$log"
cp "$log" "$dir/log"
refused 4 "optim.lr" --config tiny.ini optim.lr=0.5
check "a start that was refused leaves no trace" cmp -s "$log" "$dir/log"
rm -r "$dir/runs/tiny"
run 0 --config tiny.ini
check "an undecorated train command, too" bash -c "cd '$dir' && '$mt' train --config tiny.ini 2>/dev/null"
run 0 eval --config tiny.ini run.device=cpu
check "nothing is said of a device that was asked for" test "$(grep -c 'CPU' "$dir/err")" -eq 0
run 0 eval --config tiny.ini
for w in loss perplexity bits_per_byte; do says out "^$w [0-9.]+$"; done
cp "$dir/out" "$dir/eval6"
run 0 eval --run runs/tiny
check "eval --run: the run's own configuration" cmp -s "$dir/out" "$dir/eval6"
run 0 eval --run runs/tiny --step 3
cp "$dir/out" "$dir/eval3"
check "eval --step: another loss than the newest's" bash -c "! cmp -s '$dir/eval3' '$dir/eval6'"
check "eval --step: the loss of training's own evaluation" grep -q "^loss $(sed -n 's/.*"step":3,.*"valid_loss":\([0-9.]*\).*/\1/p' \
    "$dir/runs/tiny/metrics.jsonl" | awk '{ printf "%.6f", $1 }')$" "$dir/eval3"
for k in load resume; do
    run 0 eval --config tiny.ini checkpoint.$k=runs/tiny/checkpoints/step-00000003
    check "eval: checkpoint.$k names the checkpoint" cmp -s "$dir/out" "$dir/eval3"
    refused 4 "nowhere" eval --config tiny.ini checkpoint.$k=nowhere
done
run 0 eval --config tiny.ini --step 3
check "eval --config --step" cmp -s "$dir/out" "$dir/eval3"
refused 4 "no checkpoint of step 4 in 'runs/tiny/checkpoints'" eval --run runs/tiny --step 4
says err "the nearest are of steps 3 and 6"
for key in checkpoint.load=nowhere checkpoint.resume=runs/other; do
    refused 2 "--run 'runs/tiny' and '$key' each name where the weights are" eval --run runs/tiny $key
done
refused 2 "needs one of --config FILE and --run DIR" eval
refused 2 "needs one of --config FILE and --run DIR" eval --config tiny.ini --run runs/tiny
refused 2 "optim.lrr" eval --run runs/tiny optim.lrr=1
launch=$PWD/scripts/launch.sh
(cd "$dir" && "$launch" -n 2 -- "$mt" eval --run runs/tiny --step 3 parallel.tp=2 train.micro_batch=1 >two 2>err)
check "eval --run on two ranks" cmp -s "$dir/two" "$dir/eval3"
(cd "$dir" && mkdir -p elsewhere && mt=$mt "$launch" -n 2 -- bash -c '[ $RANK = 0 ] || cd elsewhere; exec "$mt" --config tiny.ini run.dir=left' >out 2>err)
check "rank 1 does not find its configuration: exit $?" test $? -eq 2
says err '^megatrain: error .configuration.: rank 1: .*tiny.ini'
check "and that is the only error" test "$(grep -c '^megatrain: error' "$dir/err")" -eq 1
# doctor's table of ranks: of those that share a folder, and of one that is elsewhere
(cd "$dir" && "$launch" -n 2 -- "$mt" doctor --cluster --folder runs >out 2>err)
check "doctor --cluster: exit $?, $(tail -2 "$dir/out")" test $? -eq 0
says out '^0 .* all  .* shared  hold  '
says out '^1 .* all  .* shared  hold  '
(cd "$dir" && mt=$mt "$launch" -n 2 -- bash -c '[ $RANK = 0 ] || cd elsewhere; exec "$mt" doctor --cluster --folder runs' >out 2>err)
check "doctor --cluster without a shared folder: exit $?" test $? -eq 5
says out "^! rank 1: does not see the file that rank 0 has made in 'runs': "
check "doctor leaves nothing behind" test -z "$(find "$dir" -name '.doctor*')"
refused 2 "this is one process" doctor --cluster
refused 2 "--data-port is about the ranks of a cluster" doctor --data-port 20000
refused 2 "--seconds is about a calibration" doctor --cluster --seconds 5
refused 2 "give one of them" doctor --cluster --calibrate device.ini
"$launch" --help >"$dir/out" 2>"$dir/err"
check "launch.sh --help: exit $?" test $? -eq 0 -a ! -s "$dir/err"
says out '^  *scripts/launch.sh -n N'
SLURM_JOB_ID=7 SLURM_NTASKS=2 run 0 eval --run runs/tiny --step 3
says err 'warning.*the Slurm job has 2 tasks: srun'
for p in runs/tiny runs/tiny/checkpoints/step-00000003; do run 0 inspect $p; says out "checksums +every byte"; done
for p in data/tiny data/tiny.idx data/tiny.bin; do run 0 inspect $p; says out "^documents 1$"; done
run 0 preprocess --input "$text" --tokenizer byte --output data/odd.bin # writes data/odd.bin.bin
for p in data/odd.bin data/odd.bin.idx data/odd.bin.bin; do run 0 inspect $p; says out "^data/odd.bin: token files$"; done
run 0 inspect data/tiny --document 0 --tokenizer byte
check "a document is the text that it was made from" cmp -s "$dir/out" "$text"
run 0 inspect data/tiny.idx --document 0
check "and its ids" test "$(head -c 10 "$dir/out")...$(tail -c 10 "$dir/out")" = "76 105 110...46 10 256"
refused 3 "there is no document 1 in 'data/tiny'" inspect data/tiny --document 1
run 0 preprocess --input "$text" --tokenizer bpe.json --output data/bpe --append-eod --split-blank-lines
run 0 inspect data/bpe --document 0 --tokenizer bpe.json
check "a document of another tokenizer" cmp -s "$dir/out" <(head -c -1 "$text")
refused 3 "another tokenizer than 'byte'" inspect data/bpe --document 0 --tokenizer byte
rm "$dir/data/bpe.crc"
refused 3 "document 0, position" inspect data/bpe --document 0 --tokenizer byte
for p in bpe.json byte; do run 0 inspect $p; says out "^vocabulary [0-9]+"; done
refused 4 "is no checkpoint, run folder, token file or tokenizer" inspect text.txt
run 0 doctor
# on a poor machine: each thing is named with its remedy, behind a colon
(cd "$dir" && ulimit -n 256 && PATH=/nowhere OMP_NUM_THREADS=999 "$mt" doctor >poor 2>err)
check "doctor on a poor machine: exit $?" test "$(grep -c '^! ' "$dir/poor")" -ge 8
for w in '^! more threads than processors: unset OMP_NUM_THREADS or set it to [0-9]' '^! few open files .*: ulimit -n' \
    '^! no gcc \(for make\): apt-get install gcc, or make deps' '^! no xz .*: apt-get install xz-utils' '^[0-9]+ things to look at'; do
    says poor "$w"
done
check "no complaint without a remedy" test -z "$(grep '^! ' "$dir/poor" | grep -vE '^! [^:]+: .{8}')"
(ulimit -v 8000000 && "$mt" doctor >"$dir/space" 2>/dev/null)
says space '^! address space is limited to 8192000000 bytes: ulimit'
if unshare -m true 2>/dev/null; then
    unshare -m sh -c 'mount -t tmpfs none /proc && exec "$0" doctor' "$mt" >"$dir/blind" 2>/dev/null
    says blind '^memory +unknown'
    check "no complaint about memory that cannot be seen" test -z "$(grep '^! .*memory is available' "$dir/blind")"
fi
for w in '^processor ' '^kernels ' '^memory ' '^open files' '^devices +cpu' '^disk '; do says out "$w"; done

run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed 5
cp "$dir/out" "$dir/said5"
says out "^The dög"
check "the text is UTF-8" iconv -f utf-8 -t utf-8 "$dir/said5" -o /dev/null
run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed 5
check "the same seed, the same text" cmp -s "$dir/said5" "$dir/out"
run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed 6
check "another seed, another text" bash -c "! cmp -s '$dir/said5' '$dir/out'"
for s in 1 2; do
    run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed $s --temperature 0
    cp "$dir/out" "$dir/cold$s"
    run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed $s --top-k 1
    check "top-k 1 is temperature 0" cmp -s "$dir/cold$s" "$dir/out"
    run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed $s --top-p 0
    check "top-p 0 is temperature 0" cmp -s "$dir/cold$s" "$dir/out"
    run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed $s --top-k 3 --temperature 5
    cp "$dir/out" "$dir/three$s"
    run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed $s --top-k 3 --temperature 5 --top-p 1
    check "top-p 1 leaves out nothing" cmp -s "$dir/three$s" "$dir/out"
    run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed $s --temperature 100 --top-p 0.01
    cp "$dir/out" "$dir/nucleus$s" # of 257 that are nearly alike 3 have 0.01
    run 0 generate --run runs/tiny --prompt "The dög" --tokens 12 --seed $s --temperature 100 --top-k 3
    check "top-p 0.01 draws as top-k 3 does, where all are alike" cmp -s "$dir/nucleus$s" "$dir/out"
done
check "temperature 0 knows no seed" cmp -s "$dir/cold1" "$dir/cold2"
run 0 generate --run runs/tiny --step 3 --prompt "The dög" --tokens 12 --seed 5
check "generate --step: another model, another text" bash -c "! cmp -s '$dir/said5' '$dir/out'"
refused 4 "no checkpoint of step 4" generate --run runs/tiny --step 4
run 0 generate --run runs/tiny --prompt "" --tokens 3
run 0 generate --run runs/tiny --prompt "$(head -n 5 "$text")" --tokens 3 # longer than model.seq
says err "the prompt has [0-9]+ tokens: the model sees the last [0-9]+ of them"
# (where all of 257 are alike, 2000 draws without an end are 4 in 10000 of all; the seed is fixed)
run 0 generate --run runs/tiny --prompt a --tokens 2000 --temperature 100
says err "the document ends after [0-9]+ of 2000 tokens \(--ignore-eod goes on\)"
ended=$(wc -c <"$dir/out")
run 0 generate --run runs/tiny --prompt a --tokens 2000 --temperature 100 --ignore-eod
check "--ignore-eod goes on" [ "$(wc -c <"$dir/out")" -gt "$ended" -a "$(grep -c 'document ends' "$dir/err")" -eq 0 ]
run 0 generate --run runs/tiny --prompt only --tokens 0
says out "^only$"
refused 3 "UTF-8" generate --run runs/tiny --prompt $'\xff' --tokens 1

# ---- tokenize, both ways
for t in byte "$dir/bpe.json"; do
    "$mt" tokenize --tokenizer "$t" <"$text" >"$dir/ids"
    check "$t: ids on one line" test "$(wc -l <"$dir/ids")" -eq 1
    "$mt" tokenize --tokenizer "$t" --decode <"$dir/ids" >"$dir/back"
    check "$t: and back" cmp -s "$text" "$dir/back"
done
check "byte ids" test "$(printf 'h\xc3\xa9' | "$mt" tokenize --tokenizer byte)" = "104 195 169"
# stdin_is BYTES CODE TEXT WORDS...
stdin_is() {
    printf -- "$1" | "$mt" "${@:4}" >/dev/null 2>"$dir/err"
    check "stdin '$1': exit $2" test $? -eq "$2"
    says err "$3"
}
stdin_is 'ab\xffc' 3 "offset '?2" tokenize --tokenizer byte
stdin_is '1 x 2' 3 "'x' on stdin" tokenize --tokenizer byte --decode
stdin_is '-1' 3 "no token id" tokenize --tokenizer byte --decode
stdin_is '5000' 3 "5000" tokenize --tokenizer byte --decode
stdin_is '99999999999' 3 "no token id" tokenize --tokenizer byte --decode

# ---- the live line of a terminal; script(1) makes one
if command -v script >/dev/null; then
    terminal() { (cd "$dir" && rm -rf runs/tty && env "$@" script -qec "'$mt' --config tiny.ini run.dir=runs/tty" /dev/null </dev/null); }
    terminal TERM=xterm >"$dir/tty"
    check "a terminal gets one line that changes" grep -q $'\r\e\\[K.*step 1/6' "$dir/tty"
    check "in colour" grep -q $'\e\\[1;36m' "$dir/tty"
    terminal TERM=xterm NO_COLOR=1 >"$dir/tty"
    check "NO_COLOR" bash -c "grep -q $'\r\e' '$dir/tty' && ! grep -q $'\e\\[1;36m' '$dir/tty'"
    terminal TERM=dumb >"$dir/tty"
    check "TERM=dumb: plain lines" bash -c "! grep -q $'\e' '$dir/tty' && grep -q '^step 2/6' '$dir/tty'"
else
    echo "    skipped: the live line: no script(1)"
fi
run 0 --config tiny.ini run.dir=runs/color log.color=always
says err $'\e\\[1;36mloss'
check "no colours in log.txt" test "$(grep -c $'\e' "$dir/runs/color/log.txt")" -eq 0
says runs/color/log.txt "step 6/6  loss"
# a run of a tokenizer's file has a copy of it, and needs nothing around it
run 0 --config tiny.ini run.dir=runs/own data.train=data/bpe data.valid=data/bpe data.tokenizer=bpe.json
check "the copy" cmp -s "$dir/bpe.json" "$dir/runs/own/tokenizer/tokenizer.json"
mkdir "$dir/away" && mv "$dir/runs/own" "$dir/away/own"
(cd "$dir/away" && "$mt" generate --run own --prompt Line --tokens 3 >../out 2>../err)
check "generate elsewhere: exit $?, $(cat "$dir/err")" grep -q "^Line" "$dir/out"

# ---- a run is named by its folder
step=$(basename "$(ls -d "$dir"/runs/color/checkpoints/step-* | tail -1)")
refused 2 "is a checkpoint's folder, not a run's" generate --run "runs/color/checkpoints/$step"
says err "^hint: give the run's, and which checkpoint: --run runs/color --step $((10#${step#step-}))$"
(cd "$dir/runs/color" && "$mt" generate --run "checkpoints/$step" >../../out 2>../../err)
says err "^hint: give the run's, and which checkpoint: --run \. --step $((10#${step#step-}))$"
mkdir -p "$dir/nest/checkpoints/step-one" && cp -R "$dir/runs/color" "$dir/nest/checkpoints/step-one/run"
run 0 generate --run nest/checkpoints/step-one/run --prompt Line --tokens 3 # (a run may lie anywhere)
refused 2 "did you mean '--run runs/color'" generate runs/color
refused 2 "did you mean 'megatrain generate'" sample
refused 2 "did you mean 'megatrain train'" resume
# (any two letters are one edit apart)
mkdir -p "$dir/t"
run 0 preprocess --input text.txt --tokenizer byte --output d/x

# ---- launchers: half of what one says, and commands that are one process's
for v in WORLD_SIZE:RANK OMPI_COMM_WORLD_SIZE:OMPI_COMM_WORLD_RANK PMI_SIZE:PMI_RANK; do
    (cd "$dir" && env "${v%:*}"=2 "$mt" --config tiny.ini >/dev/null 2>err)
    check "${v%:*}=2: exit 2" test $? -eq 2
    says err "${v%:*} is set but ${v#*:} is not"
done
(cd "$dir" && RANK=1 WORLD_SIZE=2 "$mt" generate --run runs/tiny >/dev/null 2>err)
check "generate as one of two: exit 2" test $? -eq 2
says err "WORLD_SIZE is '2', and this command is a single process's"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
