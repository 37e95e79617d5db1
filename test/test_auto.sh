#!/usr/bin/env bash
# parallel.auto: rank 0 chooses a layout, every rank has it, the run's folder and its checkpoints keep it; the bits are
# those of that layout given by hand. Devices are made up: nothing depends on how fast the machine is.
. "$(dirname "$0")/lib.sh"
export OMP_NUM_THREADS=1
make_tiny
sed -i 's/dropout = 0.1/dropout = 0/; s/^micro_batch.*/micro_batch = 2/; s/^global_batch.*/global_batch = 8/; s/^steps.*/steps = 4/; s/^warmup.*/warmup = 1/; s/^vocab.*//' tiny.ini
cat >fast.ini <<'EOI'
[device]
memory_mib = 4096
processors = 4
fp32_tflops = 0.1
memory_gb_s = 10
link_gb_s = 100
link_us = 0.001
EOI
sed 's/link_gb_s.*/link_gb_s = 0.0001/' fast.ini >far.ini
sed 's/memory_mib.*/memory_mib = 1/' fast.ini >small.ini

# run NAME RANKS words...: a run in a folder of that name
run() {
    local name=$1 n=$2
    shift 2
    local start=("$root/scripts/launch.sh" -n "$n")
    [ "$n" = 1 ] && start=()
    timeout 600 "${start[@]}" "$mt" --config tiny.ini run.dir="$name" parallel.auto_device=fast.ini "$@" >"$name.out" 2>"$name.err"
}
value() { sed -n "/^\[$2\]/,/^\[/s/^$3 = //p" "$1"; } # of FILE SECTION KEY
layout() { sed -n '/^\[parallel\]/,/^$/p; s/^micro_batch/&/p; s/^recompute/&/p' "$1" | grep -v '^auto'; }
# The words that the run said it chose.
words() { sed -n 's/, else the defaults//; s/.*parallel.auto: the layout on [0-9]* x fast is //p' "$1.err"; }

for n in 1 2 4; do
    check "a run on $n" run "auto$n" "$n" parallel.auto=true
    check "says what it chose on $n" grep -q "parallel.auto: predicted are" "auto$n.err"
    check "and what is slower on $n" grep -q "slower is" "auto$n.err"
    check "its configuration has it on $n" test "$(value "auto$n/config.ini" parallel auto)" = true
    ranks=$(($(value "auto$n/config.ini" parallel tp) * $(value "auto$n/config.ini" parallel pp) * $(value "auto$n/config.ini" parallel cp)))
    check "which divides $n ranks: $ranks" test $((n % ranks)) = 0
    check "by hand on $n" timeout 600 "$root/scripts/launch.sh" -n "$n" "$mt" --config tiny.ini run.dir="hand$n" train.micro_batch=1 $(words "auto$n") >hand.out 2>&1
    check "the layout by hand on $n" diff <(layout "auto$n/config.ini") <(layout "hand$n/config.ini")
    check "four losses on $n" test "$(losses "auto$n" | wc -l)" = 4
    check "the losses on $n" test "$(losses "auto$n")" = "$(losses "hand$n")"
    check "shards on $n" test -s "auto$n/checkpoints/step-00000004/shard-00000.safetensors"
    check "the weights on $n" diff <(cd "auto$n/checkpoints/step-00000004" && cksum shard-*) <(cd "hand$n/checkpoints/step-00000004" && cksum shard-*)
done

# It is the first of those that a search names.
check "a search" sh -c "'$mt' plan --search --config tiny.ini --world 4 --device ./fast.ini --best 1 --json >search.json 2>err.txt"
check "has the same layout" python3 - <<'EOP'
import json, re
words = json.load(open("search.json"))["best"][0]["layout"].split()
text = open("auto4/config.ini").read()
keys = {f"{s}.{k}": v.strip() for s, body in re.findall(r"^\[(\w+)\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S)
        for k, v in re.findall(r"^([\w.]+) =(.*)$", body, re.M)}
seen = [keys[k] == v for k, v in (w.split("=", 1) for w in words)
        if v != "auto" and (k, v) != ("parallel.overlap_tp", "0")]  # (which are resolved)
assert len(seen) > 8 and all(seen), words
EOP

# What is given stays: on the command line; in the file, where parallel.auto is in the file.
check "a fixed key" run fixed 4 parallel.auto=true parallel.pp=2 parallel.zero=0
check "is the run's" test "$(value fixed/config.ini parallel pp) $(value fixed/config.ini parallel zero)" = "2 0"
check "and is not chosen" sh -c '! grep -q "x fast.* parallel.pp=" fixed.err'
cp tiny.ini plain.ini
printf '[parallel]\nauto = true\npp = 2\n' >>tiny.ini
check "a key of the file beside parallel.auto" run beside 4
check "stays" test "$(value beside/config.ini parallel pp)" = 2
cp plain.ini tiny.ini
printf '[parallel]\ntp = 3\n' >>tiny.ini # (no layout at all)
check "a key of the file below parallel.auto" run below 2 parallel.auto=true
check "is free" test "$(value below/config.ini parallel tp)" != 3
cp plain.ini tiny.ini

# A run that goes on keeps its layout, whatever would be chosen now; unless that is asked for.
check "the first half" run kept 4 parallel.auto=true train.stop_at=2 parallel.pp=1
check "goes on" run kept 4 parallel.auto=true parallel.auto_device=far.ini
check "with what it had" grep -q "the layout of the checkpoint of step 2 stays" kept.err
check "and plans nothing" sh -c '! grep -q predicted kept.err'
check "as its second start says" diff <(layout kept/starts/1.ini) <(layout kept/starts/2.ini)
check "the losses of a run that went on" test "$(losses kept)" = "$(losses auto1)"
check "the first half again" run anew 4 parallel.auto=true train.stop_at=2
check "goes on, planned again" run anew 4 parallel.auto=again parallel.auto_device=far.ini
check "as is said" grep -q "predicted" anew.err
check "and is another layout" sh -c '! cmp -s anew/starts/1.ini anew/starts/2.ini'
check "the losses of a run that changed" test "$(losses anew)" = "$(losses auto1)"
check "a run for a machine with less memory" run less 2 parallel.auto=true train.stop_at=2 parallel.zero=0
bytes=$("$mt" plan --config less/config.ini --world 2 --json 2>/dev/null | sed 's/.*"largest_total":\([0-9]*\).*/\1/')
sed "s/memory_mib.*/memory_mib = $((2 * bytes / 1048576 - 1))/" fast.ini >less.ini
sed "s/memory_mib.*/memory_mib = $((2 * bytes / 1048576 + 2))/" fast.ini >enough.ini
cp -r less enough
check "goes on where a rank has room, $bytes bytes" run enough 2 parallel.auto=true parallel.auto_device=enough.ini
check "with its layout" grep -q "the layout of the checkpoint of step 2 stays" enough.err
run less 2 parallel.auto=true parallel.auto_device=less.ini # (another layout may fit, or none: both are the truth)
check "and says where not: $(grep -m1 checkpoint less.err)" grep -q "the layout of the checkpoint does not do on 2 ranks: it takes .* on a rank, which has" less.err
check "in one line" test "$(grep -c 'does not do' less.err)" = 1
check "without a device of its own a kept layout stays" run kept 4 parallel.auto=true parallel.auto_device= train.steps=5
check "as is said" grep -q "the layout of the checkpoint of step 4 stays" kept.err
check "a device that is wrong is refused" sh -c '! "$0" --config tiny.ini run.dir=auto1 parallel.auto=true parallel.auto_device=./none.ini train.steps=5 2>err.txt && grep -q "no file" err.txt' "$mt"
check "the first half on four" run fewer 4 parallel.auto=true train.stop_at=2 parallel.zero=1
check "goes on on one" run fewer 1 parallel.auto=true
check "and says why it is planned again" grep -Eq "does not do on 1 rank: .*: planning anew|the layout of the checkpoint of step 2 stays" fewer.err
check "a layout by hand" run hand 2 parallel.auto_device= train.stop_at=2 parallel.pp=2
check "is planned when asked" run hand 2 parallel.auto=true
check "and says so" grep -q "predicted" hand.err
check "the run's own configuration is a configuration" sh -c "'$mt' config check --config auto4/config.ini >out.txt 2>&1"

expect 0 "parallel.auto chooses a layout when a run begins" "$mt" plan --config tiny.ini --world 2 parallel.auto=true

# What is wrong: one line, an exit code, and no folder.
expect 2 "doctor --calibrate" "$mt" --config tiny.ini run.dir=e parallel.auto=true
expect 2 "no file" "$mt" --config tiny.ini run.dir=e parallel.auto=true parallel.auto_device=./none.ini
expect 2 "is a GPU" "$mt" --config tiny.ini run.dir=e run.device=cpu parallel.auto=true parallel.auto_device="$root/config/devices/h100.ini"
expect 2 "nothing is planned" "$mt" --config tiny.ini run.dir=e parallel.auto_device=fast.ini
expect 2 "must be one of" "$mt" --config tiny.ini run.dir=e parallel.auto=perhaps
expect 4 "the least that one takes" "$mt" --config tiny.ini run.dir=e parallel.auto=true parallel.auto_device=small.ini
expect 2 "parallel.tp" "$mt" --config tiny.ini run.dir=e parallel.auto=true parallel.auto_device=fast.ini parallel.tp=3
expect 4 "the least that one takes" timeout 600 "$root/scripts/launch.sh" -n 2 "$mt" --config tiny.ini run.dir=e parallel.auto=true parallel.auto_device=small.ini
expect 2 "no layout" timeout 600 "$root/scripts/launch.sh" -n 3 "$mt" --config tiny.ini run.dir=e parallel.auto=true parallel.auto_device=fast.ini
check "no folder of what failed" test ! -e e
expect 0 "bits_per_byte" "$mt" eval --run auto4
finish
