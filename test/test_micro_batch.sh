#!/usr/bin/env bash
# train.micro_batch=auto: the largest number that divides the batch, leaves a pipeline enough micro-batches and whose
# plan fits; a run with it is the run with that number written down, on every layout, and keeps it when it goes on.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
make_tiny
sed -i 's/^micro_batch.*/micro_batch = auto/; s/^global_batch.*/global_batch = 24/; s/^steps.*/steps = 4/; s/^warmup.*/warmup = 1/' tiny.ini

# ---- the number that a plan says ----

# Each number is compared with the plans of the numbers themselves: it fits, and the next larger divisor does not.
cat >numbers.py <<'EOP'
import json, subprocess, sys
mt, root = sys.argv[1:]
CONFIGS = {"gpt2-124m": 1, "llama-1b": 8, "llama3-8b": 8, "mixtral-8x7b": 64, "qwen3-30b-a3b": 16, "gpt-oss-20b": 8}
DEVICES = "h100", "a100-40", "b200", "4090", "h200"

def plan(config, world, device, number):
    words = [mt, "plan", "--config", f"{root}/config/{config}.ini", "--world", str(world), "--device", device, "--json",
             f"train.micro_batch={number}"]
    run = subprocess.run(words, capture_output=True, text=True)
    return json.loads(run.stdout) if run.returncode == 0 else None

seen = set()
for config, world in CONFIGS.items():
    for device in DEVICES:
        got = plan(config, world, device, "auto")
        chosen, share = got["micro_batch"], got["micro_batch"] * got["microbatches"]
        written = plan(config, world, device, chosen)
        same = got == written
        busy = lambda n: got["pp"] == 1 or share // n >= 4 * got["pp"]
        larger = [n for n in range(chosen + 1, share + 1) if share % n == 0 and busy(n)]
        plans = [p for p in (plan(config, world, device, n) for n in larger[:2]) if p]
        fits = got["fits"] or chosen == 1
        largest = not any(p["fits"] for p in plans) and (plans or not larger)
        print(f"{config} on {world} {device}: {chosen}" + ("" if got["fits"] else ", which does not fit"))
        if not (same and fits and largest):
            sys.exit(f"{config} {device}: {chosen}: same {same}, fits {fits}, largest {largest}")
        seen.add((got["fits"], chosen == 1, bool(larger)))
assert len(seen) >= 3, seen
EOP
check "30 numbers: each fits, and the next larger does not" python3 numbers.py "$mt" "$root"
number() { sed 's/.*"micro_batch":\([0-9]*\).*/\1/' <<<"$("$mt" plan --json "$@" 2>err.txt)"; }
gpt2=(--config "$root/config/gpt2-124m.ini" train.micro_batch=auto)
check "less memory, a smaller number" [ "$(number "${gpt2[@]}" --device h100 --memory 24GB)" -lt "$(number "${gpt2[@]}" --device h100)" ]
check "as much as the device has, the same" [ "$(number "${gpt2[@]}" --device h100 --memory 81559MiB)" = "$(number "${gpt2[@]}" --device h100)" ]
check "on the CPU, too" [ "$(number --config tiny.ini run.device=cpu --memory 68MiB)" -lt "$(number --config tiny.ini run.device=cpu --memory 1GB)" ]
check "which takes the whole batch where it fits" [ "$(number --config tiny.ini run.device=cpu --memory 1GB)" = 24 ]
check "divided by dp" [ "$(number --config tiny.ini run.device=cpu --memory 1GB --world 4)" = 6 ]
check "of every part of a ramp" [ "$(number --config tiny.ini run.device=cpu --memory 1GB train.global_batch=8*2,12)" = 4 ]
check "that the rules take: whole units" [ "$(number --config tiny.ini run.device=cpu --memory 1MB --world 4 parallel.tp=2 parallel.pp=2 parallel.schedule=chimera-bhalf model.layers=4)" = 2 ]
said() { # WORDS... -- TEXT: a plan with them says that of its number
    local words=()
    while [ "$1" != -- ]; do words+=("$1"); shift; done
    expect 0 "train.micro_batch=auto: $2" "$mt" plan "${words[@]}"
}
of_gpu="of its 79.6 GiB of GPU memory, 768 MiB for CUDA's libraries among them"
said "${gpt2[@]}" --device h100 -- "160 samples: a rank needs 65.3 GiB $of_gpu; 240 samples need 96.4 GiB"
check "as the manual says" grep -qF "$(grep -o 'auto: 160 samples.*' out.txt | cut -c 1-60)" "$root/docs/configuration.md"
said "${gpt2[@]}" --device h100 optim.states=host train.global_batch=1 -- "1 sample: a rank needs "
expect 0 "; no larger number divides the batch" "$mt" plan --config tiny.ini run.device=cpu --memory 1GB
expect 0 " of its 954 MiB of host memory; " "$mt" plan --config tiny.ini run.device=cpu --memory 1GB

# What is beyond all that a dry run counts does not fit either.
said "${gpt2[@]}" --device h100 train.global_batch=480000 -- "192 samples: a rank needs 77.7 GiB $of_gpu; 200 samples need 80.8 GiB"
said "${gpt2[@]}" --device h100 train.global_batch=200003 -- "1 sample: a rank needs 3.29 GiB $of_gpu; 200003 samples need more than can be planned"

# A pipeline keeps 4 micro-batches a rank, slices among them, or as many as can be.
pipeline=("${gpt2[@]}" --world 8 --device h100 parallel.pp=8)
said "${pipeline[@]}" -- "15 samples: "
check "and why no more" grep -q "; 16 samples would leave the pipeline 30 micro-batches a step, fewer than 4 for each of 8 ranks$" out.txt
said "${pipeline[@]}" parallel.slices=2 -- "30 samples: "
check "and why no more slices" grep -q "; 32 samples would leave the pipeline 30 slices a step, fewer than 4 for each of 8 ranks$" out.txt
said "${pipeline[@]}" train.global_batch=16 -- "1 sample: "
check "and why no more of so few" grep -q "; 2 samples would leave the pipeline 8 micro-batches a step, fewer than 4" out.txt
check "less memory, a smaller number there" [ "$(number "${pipeline[@]}" --memory 5GB)" -lt 15 ]

# A host keeps a tenth for itself, for a run that begins (below) as for a plan.
printf '[device]\nmemory_mib = 1000\nprocessors = 4\nfp32_tflops = 0.1\nmemory_gb_s = 10\nlink_gb_s = 100\nlink_us = 0.001\n' >host.ini
expect 0 " of its 900 MiB of host memory" "$mt" plan --config tiny.ini --device host.ini
expect 0 " of its 450 MiB of host memory" "$mt" plan --config tiny.ini --device host.ini --world 2
available() { awk '/^MemAvailable/ { print $2 / 2^20 }' /proc/meminfo; }
leaves_reserve() { # FILE: of what is available now it promises 95 % at most (what others take changes)
    sed -n 's/.* of its \([0-9.]*\) GiB of host memory.*/\1/p' "$1" | head -1 | awk -v all="$(available)" '{ exit !($1 > 0 && $1 < 0.95 * all) }'
}
host_is_large() { awk -v all="$(available)" 'BEGIN { exit !(all > 2 && all < 900) }'; } # (else other units are printed)
expect 0 " of host memory" "$mt" plan --config tiny.ini run.device=cpu
! host_is_large || check "a host's reserve: $(grep -o 'a rank needs.*memory' out.txt), of $(available) GiB" leaves_reserve out.txt

# The room for an evaluation's questions is in what is chosen, as in a run (below).
printf '{"context":"Line 1 of","continuation":" a small text"}\n' >asked.jsonl
mebibytes() { # of a plan with those words, to the byte less $1
    local less=$1
    shift
    "$mt" plan --json --config tiny.ini run.device=cpu "$@" 2>err.txt | python3 -c "import json, sys; print((json.load(sys.stdin)['largest_total'] - $less) / 2**20, 'MiB', sep='')"
}
with_questions="train.eval_tasks=asked.jsonl"
check "an evaluation's questions take room" [ "$(mebibytes 0 train.micro_batch=6 $with_questions)" != "$(mebibytes 0 train.micro_batch=6)" ]
check "which fits to the byte" [ "$(number --config tiny.ini run.device=cpu $with_questions --memory "$(mebibytes 0 train.micro_batch=6 $with_questions)")" = 6 ]
check "and no further" [ "$(number --config tiny.ini run.device=cpu $with_questions --memory "$(mebibytes 1 train.micro_batch=6 $with_questions)")" = 4 ]
expect 0 "fits 24 GB: no" "$mt" plan --config "$root/config/llama3-8b.ini" --world 8 --device 4090 train.micro_batch=auto
expect 2 "add --search, or train.micro_batch=auto" "$mt" plan --config tiny.ini --memory 1GB train.micro_batch=2
[ -e /proc/driver/nvidia/version ] || expect 2 "--device h100, --memory 80GB, or a number" "$mt" plan --config tiny.ini run.device=cuda
expect 0 "a step" "$mt" plan "${gpt2[@]}" --device h100 --advise

# A search looks at its own numbers: the key says nothing there, in the file or on the command line.
search() { "$mt" plan --search --config tiny.ini --world 4 --device "$root/config/devices/h100.ini" --json "$@" 2>err.txt; }
check "a search with auto" [ "$(search)" = "$(search train.micro_batch=auto)" ]
check "is that of a number in the file" [ "$(search)" = "$(sed -i 's/= auto/= 2/' tiny.ini; search)" ]
sed -i 's/^micro_batch.*/micro_batch = auto/' tiny.ini
check "and not that of a given one" [ "$(search)" != "$(search train.micro_batch=2)" ]

# ---- the key ----

expect 0 "tiny.ini: ok" "$mt" config check --config tiny.ini
expect 0 "tiny.ini: ok" "$mt" config check --config tiny.ini --world 4 parallel.tp=2 parallel.pp=2 parallel.schedule=chimera-bhalf model.layers=4
expect 0 "micro_batch = auto" "$mt" config dump --config tiny.ini
expect 0 "integer, 1 to 1048576, or auto" "$mt" config explain train.micro_batch
expect 2 "not an integer, nor auto" "$mt" config check --config tiny.ini train.micro_batch=most
expect 2 "with train.micro_batch = 'auto'" "$mt" config check --config tiny.ini --world 5

# ---- runs ----

run() { # NAME RANKS words...: a run in a folder of that name
    local name=$1 n=$2 start=()
    shift 2
    [ "$n" = 1 ] || start=("$root/scripts/launch.sh" -n "$n")
    timeout 300 "${start[@]}" "$mt" --config tiny.ini run.dir="$name" "$@" >"$name.out" 2>"$name.err"
}
kept() { sed -n 's/^micro_batch = //p' "$1"; }
shards() { (cd "$1/checkpoints/step-00000004" && cksum shard-*); }
same_run() { # of the whole runs $1, $2
    same_losses "$1" "$2" && diff <(shards "$1") <(shards "$2") && diff <(grep -v '^dir = ' "$1/config.ini") <(grep -v '^dir = ' "$2/config.ini")
}
while read -r name ranks words; do
    check "a run, $name" run "auto-$name" "$ranks" $words
    number=$(kept "auto-$name/config.ini")
    check "says its number once, $name" [ "$(grep -c "train.micro_batch=auto: $number samples\?: a rank needs .* of its .* of host memory; " "auto-$name.err")" = 1 ]
    check "with the number written down, $name" run "hand-$name" "$ranks" $words train.micro_batch="$number"
    check "is the same run, $name: $number" same_run "auto-$name" "hand-$name"
    check "as each start says, $name" [ "$(kept "auto-$name/starts/1.ini")" = "$number" ]
done <<'EOL'
alone 1
dp 2
pp 2 parallel.pp=2
cp 2 parallel.cp=2
tp 2 parallel.tp=2
pp-dp 4 parallel.pp=2 parallel.zero=1
slices 2 parallel.pp=2 parallel.slices=2
EOL
check "the whole batch" [ "$(kept auto-alone/config.ini)" = 24 ]
check "a half of it" [ "$(kept auto-dp/config.ini)" = 12 ]
check "of a pipeline what leaves 4 micro-batches a rank" [ "$(kept auto-pp/config.ini) $(kept auto-slices/config.ini)" = "3 6" ]
! host_is_large || check "a run leaves the host's reserve: $(grep -m1 'a rank needs' auto-alone.err)" leaves_reserve auto-alone.err
check "a run that asks questions" run asked 1 train.micro_batch=6 $with_questions train.steps=2
took=$(sed -n 's/.*"memory_bytes":\([0-9]*\).*/\1/p' asked/metrics.jsonl | head -1)
check "takes what a plan says: $took" [ "$(mebibytes 0 train.micro_batch=6 $with_questions train.steps=2)" = "$(mebibytes "$(($(mebibytes 0 train.micro_batch=6 $with_questions train.steps=2 | awk '{ printf "%.0f", $1 * 2^20 }') - took))" train.micro_batch=6 $with_questions train.steps=2)" ]

# A run that goes on keeps its number, whatever would be chosen now; a number that is written is taken.
check "the first half" run on 1 train.micro_batch=3 train.stop_at=2
check "goes on" run on 1
check "and says with what" grep -q "train.micro_batch=auto: 3, as in the checkpoint of step 2$" on.err
check "its number" [ "$(kept on/config.ini) $(kept on/starts/1.ini) $(kept on/starts/2.ini)" = "3 3 3" ]
check "goes on with another that is written" run on 1 train.micro_batch=4 train.steps=5
check "that number" [ "$(kept on/config.ini)" = 4 ]
check "goes on from a checkpoint that is named" run on 1 train.steps=6 checkpoint.resume=on/checkpoints/step-00000005
check "with its number" [ "$(kept on/config.ini)" = 4 ]
check "goes on with more ranks" run on 3 train.steps=7
check "with its number, which divides there" grep -q "train.micro_batch=auto: 4, as in the checkpoint of step 6$" on.err
check "the first half on two" run more 2 train.micro_batch=12 train.stop_at=2
check "goes on on four" run more 4
check "and chooses anew: 12 does not divide" grep -q "auto: the checkpoint of step 2 has 12, which this run cannot take (.*): it takes another number$" more.err
check "a smaller one" [ "$(kept more/config.ini)" = 6 ]
check "the losses of all" [ "$(losses more)" = "$(losses auto-alone)" ]
expect 0 "bits_per_byte" "$mt" eval --run more
expect 0 "bits_per_byte" "$mt" eval --config tiny.ini run.dir=more
cp out.txt evaluated.txt
expect 0 "bits_per_byte" "$mt" eval --config tiny.ini run.dir=more train.micro_batch=12
check "an evaluation has the figures of any number" cmp evaluated.txt out.txt
two_evaluate() { timeout 300 "$root/scripts/launch.sh" -n 2 -- "$mt" eval --config tiny.ini "$@"; }
expect 0 "bits_per_byte" two_evaluate run.dir=more
check "on two ranks, too" cmp evaluated.txt out.txt
# It looks at no other checkpoint than the one that it evaluates.
check "a run whose newest checkpoint is damaged" cp -r on damaged
for part in damaged/checkpoints/step-00000007/*; do echo damaged >"$part"; done
expect 0 "bits_per_byte" "$mt" eval --config tiny.ini run.dir=damaged checkpoint.load=more
check "the one that is named, and is silent on others" sh -c 'cmp evaluated.txt out.txt && ! grep damaged err.txt'
expect 0 "bits_per_byte" "$mt" eval --config tiny.ini run.dir=damaged --step 5
check "the one of a step, and is silent on others" sh -c '! grep step-00000007 err.txt'
expect 4 "gone" two_evaluate run.dir=more checkpoint.resume=gone
check "which is missed once: $(cat err.txt)" [ "$(grep -c gone err.txt)" = 1 ]
check "parallel.auto has a micro-batch of its own" sh -c "printf '[device]\nmemory_mib = 4096\nprocessors = 4\nfp32_tflops = 0.1\nmemory_gb_s = 10\nlink_gb_s = 100\nlink_us = 0.001\n' >fast.ini"
check "with auto on the command line" run planned 2 parallel.auto=true parallel.auto_device=fast.ini train.micro_batch=auto
check "and in the file beside it" sh -c "sed 's/^\[train\]/[parallel]\nauto = true\n[train]/' tiny.ini >beside.ini && '$mt' --config beside.ini run.dir=beside parallel.auto_device=fast.ini 2>beside.err"
for name in planned beside; do check "is a number, $name" grep -q '^micro_batch = [0-9]' $name/config.ini; done

# ---- what is wrong ----

huge="model.hidden=8192 model.layers=200 model.ffn=32768"
expect 9 "this run needs" "$mt" --config tiny.ini run.dir=none train.micro_batch=1 $huge
cp err.txt one.txt
expect 9 "this run needs" "$mt" --config tiny.ini run.dir=none $huge
check "in the words of a run with 1" diff <(sed 's/has .* to give/has/' one.txt) <(sed 's/has .* to give/has/' err.txt)
expect 9 "this run needs" timeout 300 "$root/scripts/launch.sh" -n 2 "$mt" --config tiny.ini run.dir=none $huge
expect 3 "none.json" "$mt" --config tiny.ini run.dir=none data.tokenizer=none.json
check "no folder of what failed" test ! -e none

# One rank with auto and one with a number do not run the same job, and say so at once.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
for rank in 0 1; do
    words=train.micro_batch=$([ $rank = 0 ] && echo auto || echo 6)
    RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port MEGATRAIN_SECRET=0123456789abcdef0123456789abcdef \
        timeout 60 "$mt" --config tiny.ini run.dir=two "$words" >/dev/null 2>rank$rank.err &
    pids[rank]=$!
done
wait "${pids[0]}"; codes=$?
wait "${pids[1]}"; codes="$codes $?"
check "ranks with different words: $codes" [ "$codes" = "2 2" ]
check "of which rank 0 says it" grep -q "train.micro_batch.*auto" rank0.err
finish
