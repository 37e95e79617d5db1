#!/usr/bin/env bash
# doctor --calibrate: a file that plan takes, with a figure for every op and collective; what goes wrong leaves nothing. A
# GPU's results as a device's file. Nothing here depends on how fast the machine is.
. "$(dirname "$0")/lib.sh"
unset OMP_NUM_THREADS
make_tiny
device_is() { "$mt" plan --config tiny.ini --device "$1" >plan.out 2>plan.err && grep -q "^device  $2" plan.out; }

expect 0 "written" "$mt" doctor --calibrate ./here.ini --seconds 0.5
check "plan takes it" device_is ./here.ini here
check "every op of ops.def, every collective" python3 - "$root" <<'EOP'
import re, sys
text = open("here.ini").read()
ops = re.findall(r"^OP\((\w+),", open(sys.argv[1] + "/src/device/ops.def").read(), re.M)
found = set(re.findall(r"^\[op\.(\w+)\]", text, re.M)), len(set(re.findall(r"^\[comm\.", text, re.M)))
figures = [float(line.split()[-1]) for line in text.splitlines() if re.match(r"(?!isa|dot)\w+ = ", line)]
missing = set(ops) - found[0]
print(missing, len(ops), found[1], len(figures))
sys.exit(not (ops and not missing and text.count("\n[comm.") == 11 and all(0 < f < 1e9 for f in figures)))
EOP
check "the disk's rate" test "$(grep -c '^disk_gb_s = [0-9.e+-]*$' here.ini)" = 1
check "which checkpoints take" grep -Eq "checkpoints +[0-9.]+ ms .*every" <("$mt" plan --config tiny.ini --device ./here.ini checkpoint.every=2 checkpoint.async=false)
check "and no file of it is left: $(ls)" test "$(find . -name '*disk*' -o -name '.tmp*' | wc -l)" = 0
check "calls behind work" grep -q '^us = 2 ' <(sed -n '/^\[comm.skew\]/,/^$/p' here.ini)
check "calls of pairs behind work" grep -q '^us = 4 ' <(sed -n '/^\[comm.skew-of-pairs\]/,/^$/p' here.ini)
check "by one rank and by several, in fp32 and bf16" test "$(grep -A99 '^\[op.gelu_fwd' here.ini | sed -n '2,/^$/s/us = \([a-z0-9]* [0-9]*x[0-9]*\) .*/\1/p' |
    sort -u | cut -d' ' -f1 | uniq -c | awk '$1 >= 1 { n++ } END { print n }')" = 2

# by which instructions, which plan goes by: it says so where a configuration has others
isa=$(sed -n 's/^isa = //p' here.ini) dot=$(sed -n 's/^dot = //p' here.ini)
check "isa = $isa, dot = $dot" grep -qE '^(avx512|avx2|c) (amx|vdpbf16|fma)$' <<<"$isa $dot"
other=$([ "$dot" = fma ] && echo amx || echo fma)
says() { "$mt" plan --config tiny.ini --device "$1" "${@:2}" 2>&1 >plan.out | grep 'measured'; }
check "nothing to say" [ -z "$(says ./here.ini run.precision=bf16)" ]
check "nor of fp32" [ -z "$(says ./here.ini run.precision=fp32)" ]
check "another kind of dot was not measured" grep -q "'here' was measured with debug.dot=$dot: how long products take with debug.dot=$other nobody" \
    <(says ./here.ini run.precision=bf16 debug.dot="$other")
sed 's/^isa = .*/isa = avx1024/; s/^dot = .*/dot = amx/' here.ini >wide.ini
check "a set that is not here" grep -q "'wide' was measured by avx1024, which this processor lacks: .* by $isa$" <(says ./wide.ini)
check "of a file its own kind" grep -q "products by amx" <("$mt" plan --config tiny.ini --device ./wide.ini run.precision=bf16 2>/dev/null)
sed '/^isa = /d; /^dot = /d' here.ini >older.ini
check "an older file says nothing" [ -z "$(says ./older.ini run.precision=bf16 debug.dot=fma)" ]

# one processor: no ranks beside each other, and a file all the same
expect 0 "measured     1 processors" taskset -c "$(taskset -cp $$ | sed 's/.*: *//; s/[-,].*//')" "$mt" doctor --calibrate ./one.ini --seconds 0.5
for n in 1 2; do check "plan takes it for $n" grep -q "ms: .* tokens/s" <("$mt" plan --config tiny.ini --world $n --device ./one.ini train.global_batch=30); done

# interrupted: the file that was there stays, no process and no file is left
before=$(cksum <here.ini) files=$(ls | wc -l)
timeout -s INT 1 "$mt" doctor --calibrate ./here.ini --seconds 60 >out.txt 2>&1
check "interrupted" test $? = 124
check "the old file stays" test "$(cksum <here.ini)" = "$before"
check "and no other comes: $(ls)" test "$(ls | wc -l)" = "$files"
left() { pgrep -cf "doctor --calibrate ./here.ini --seconds 60"; }
for ((i = 0; i < 500; i++)); do [ "$(left)" != 0 ] || break; sleep 0.1; done # (a slow machine needs a moment)
check "nor a process" test "$(left)" = 0

# nothing half written: a folder that takes nothing, a name that is no file's
mkdir shut old.ini
expect 5 "shut/no/here.ini" "$mt" doctor --calibrate shut/no/here.ini --seconds 0.5
expect 5 "old.ini" "$mt" doctor --calibrate old.ini --seconds 0.5
check "and nothing is left" test -z "$(find shut old.ini -type f)"
for s in 0 -1 nan many; do expect 2 "--seconds" "$mt" doctor --calibrate here2.ini --seconds $s; done
expect 0 "! the file has no disk_gb_s" "$mt" doctor --calibrate nodisk.ini --seconds 0.5 --folder /proc
check "which is not in it" test "$(grep -c disk_gb_s nodisk.ini)" = 0
check "and plan says so" grep -q "checkpoints .*not known" <("$mt" plan --config tiny.ini --device ./nodisk.ini checkpoint.every=2)
expect 5 "is no folder" "$mt" doctor --calibrate here2.ini --folder nowhere
expect 5 "is no folder" "$mt" doctor --calibrate here2.ini --folder here.ini
expect 2 "--folder is about a calibration" "$mt" doctor --folder shut
expect 2 "--seconds is about a calibration" "$mt" doctor --seconds 5
check "no file of a refused one" test ! -e here2.ini
before=$(cksum <here.ini)
(ulimit -f 1 && "$mt" doctor --calibrate ./here.ini --seconds 0.5 >full.out 2>&1)
check "a full disk leaves the file that was there" test "$(cksum <here.ini)" = "$before"
check "and no other: $(ls)" test -z "$(ls | grep tmp)"

# a GPU's rooflines
cat >gpu.json <<'EOJ'
{"rooflines": {"date": "2026-01-02T03:04:05Z", "device": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984,
"multiprocessors": 132, "copy_gb_s": 2900.5, "gemm_tflop_s": 710.25, "ops": [
{"op": "linear_fwd", "case": "qkv", "ms": 0.5, "dtype": "bf16", "times": 1, "shape": [8192, 2304, 768]},
{"op": "linear_fwd", "case": "again", "ms": 9, "dtype": "bf16", "times": 1, "shape": [8192, 2304, 768]},
{"op": "attention_fwd", "case": "causal", "ms": 1.2, "dtype": "bf16", "times": 96, "shape": [1024, 1024, 64]},
{"op": "gelu_fwd", "case": "", "ms": 0.25, "dtype": "bf16", "times": 1, "shape": [805306368]}]},
"rooflines_autotuned": {"ops": [{"op": "linear_fwd", "case": "qkv", "ms": 0.4, "dtype": "bf16", "times": 1, "shape": [8192, 2304, 768]}]}}
EOJ
expect 0 "" "$root/scripts/device-file.py" gpu.json --like "$root/config/devices/h100.ini"
cp out.txt gpu.ini
for line in 'memory_mib = 81559' 'memory_gb_s = 2900' 'bf16_tflops = 989' 'match = H100' 'us = bf16 1x1 8192x2304x768 400' \
    'us = bf16 1x1 1024x1024x64 12.5' 'us = bf16 1x1 805306368 250'; do
    check "a GPU's file: $line" grep -qx "$line" gpu.ini
done
check "plan takes it, too" device_is ./gpu.ini gpu
echo '{"steps": []}' >none.json
check "no rooflines, no file" test "$("$root/scripts/device-file.py" none.json 2>err.txt; echo $?)" = 1 -a "$(wc -l <err.txt)" = 1
finish
