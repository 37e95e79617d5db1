#!/usr/bin/env bash
# debug.dot: the kind of products in bf16 is chosen when a run begins, named by its log, its plan and its checkpoints, and
# kept; with it every layout and every instruction set of the CPU has the same bits.
. "$(dirname "$0")/lib.sh"
make_tiny
narrow=(train.steps=6 run.precision=bf16 run.reproducible=layout)
run() { "$mt" --config tiny.ini run.dir="$1" "${narrow[@]}" "${@:2}" >/dev/null 2>"$1.err"; }
ranks() { "$root/scripts/launch.sh" -n "$1" -- "$mt" --config tiny.ini run.dir="$2" "${narrow[@]}" "${@:3}" >/dev/null 2>"$2.err"; }

usual=$("$mt" doctor 2>/dev/null | sed -n 's/^bf16 dots *\([a-z0-9]*\).*/\1/p')
"$mt" plan --config tiny.ini "${narrow[@]}" >plan.txt 2>/dev/null
check "plan names the processor's kind: $usual" grep -q "^device .*products by $usual" plan.txt
for dot in fma vdpbf16 amx; do
    run $dot debug.dot=$dot
    check "$dot: the log names it: $(grep -m1 error $dot.err)" grep -q "bf16 by $dot" $dot.err
    run $dot-c debug.dot=$dot debug.isa=c
    check "$dot: plain C has the same losses" same_losses $dot $dot-c
    ranks 2 $dot-tp debug.dot=$dot parallel.tp=2 train.micro_batch=5
    check "$dot: two ranks of tp have the same run: $(grep -m1 error $dot-tp.err)" same_run $dot-tp $dot 6
done
experts=(moe.experts=4 moe.topk=2 moe.ffn=16 model.bias=false parallel.seq_blocks=4)
run experts "${experts[@]}"
ranks 2 experts-parts parallel.tp=2 parallel.etp=2 train.micro_batch=5 "${experts[@]}"
check "parts of experts have their run: $(grep -m1 error experts-parts.err)" same_run experts-parts experts 6
ranks 2 experts-cp parallel.cp=2 parallel.ep=2 "${experts[@]}"
check "ranks of cp, too: $(grep -m1 error experts-cp.err)" same_run experts-cp experts 6
check "the kinds differ" [ "$( (digest fma 6; digest vdpbf16 6; digest amx 6) | sort -u | wc -l)" -eq 3 ]
run amx-experts debug.dot=amx "${experts[@]}"
ranks 2 amx-parts debug.dot=amx parallel.tp=2 parallel.etp=2 train.micro_batch=5 "${experts[@]}"
check "amx: parts of experts have their run: $(grep -m1 error amx-parts.err)" same_run amx-parts amx-experts 6
run auto
check "auto is $usual" same_losses auto $usual

# ---- resumed
other=fma
[ $usual = fma ] && other=vdpbf16
run half train.stop_at=3
expect 4 "debug.dot was '$usual' and is '$other'" "$mt" --config tiny.ini run.dir=half "${narrow[@]}" debug.dot=$other
cp -r half over
run half
check "resumed with its own kind: as if it had not stopped" same_losses half $usual
"$mt" --config tiny.ini run.dir=over "${narrow[@]}" debug.dot=$other --override debug.dot >/dev/null 2>over.err
check "and with another where that is asked for" grep -q "debug.dot was '$usual' and is '$other'" over.err

# ---- what it is for
expect 2 "only the CPU in bf16 has a choice of products" "$mt" --config tiny.ini run.dir=none run.precision=fp32 debug.dot=vdpbf16
finish
