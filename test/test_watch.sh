#!/usr/bin/env bash
# What a run shows of itself, from outside: event files for TensorBoard through kills and resumes, compared with
# metrics.jsonl by test/tools/check_events.py; loss.svg and the page of `megatrain report`; traces.
. "$(dirname "$0")/lib.sh"
make_tiny
sed -i "s/^every = 7/every = 14/; s/^keep = 0/keep = 2/" tiny.ini
run() { "$mt" --config tiny.ini run.dir="$1" "${@:2}" >/dev/null 2>"$1.err"; }

# events_agree RUN: also counted as skipped where the tensorboard package is missing
python=python3
for p in python3 "${PYTHON:-python3}"; do "$p" -c 'import tensorboard' 2>/dev/null && python=$p; done
events_agree() {
    "$python" "$root/test/tools/check_events.py" "$1" >"$1.events" 2>&1
}

# ---- events: killed by faults while lines and events are written, resumed each time from step 14 or 28
run whole log.tensorboard=true train.eval_every=5 checkpoint.every=0
check "a run with event files" [ $? -eq 0 ]
check "events of a whole run: $(tail -3 whole.events 2>&1)" events_agree whole
grep '^skipped' whole.events && skipped=$((skipped + 1))
kills=0
for at in 50 80 80 20; do
    { MEGATRAIN_FILE_FAULT=kill@$at run killed log.tensorboard=true train.eval_every=5; } 2>/dev/null
    [ $? -eq 137 ] && kills=$((kills + 1))
done
check "killed four times, not $kills" [ $kills -eq 4 ]
cp -r killed aside
run killed log.tensorboard=true train.eval_every=5
check "the killed run ends" [ $? -eq 0 ]
check "its losses are the whole run's" same_losses killed whole
check "its events are its metrics: $(events_agree killed; tail -3 killed.events)" events_agree killed
run aside log.tensorboard=false train.eval_every=5
from=$(sed -n 's/.*resuming from .*step-0*\([0-9]*\)$/\1/p' aside.err)
events_agree aside
check "resumed without event files: the old ones end at step ${from:-none}" \
    grep -q "^own reader: loss/train: .* in the events \[1, .*, ${from:-none}\]$" aside.events

# ---- report: of whole, damaged and strange folders; the page is checked by test/tools/check_page.py
page_holds() { python3 "$root/test/tools/check_page.py" "$1" >"$1.faults" 2>&1; }
for run in whole killed; do check "$run/loss.svg: $(page_holds $run/loss.svg; tail -3 $run/loss.svg.faults)" page_holds $run/loss.svg; done
run other checkpoint.every=0 optim.lr=1e-3 train.eval_every=10 model.dropout=0.2
"$mt" report whole other >page.html 2>report.err
check "a report on stdout" [ $? -eq 0 -a ! -s report.err ]
check "the page: $(page_holds page.html; tail -3 page.html.faults)" page_holds page.html
keys=$(sed -n 's/.*<code>\([a-z0-9_.]*\)<.*/\1/p' page.html | tr '\n' ' ')
check "keys that differ, not '$keys'" [ "$keys" = "model.dropout train.eval_every optim.lr log.tensorboard " ]
last=$(sed -n 's/.*"valid_loss":\([0-9.]*\).*/\1/p' other/metrics.jsonl | tail -1)
check "the last validation loss $last" grep -q "<td>$(printf %.4f "$last") <small>(step 40)" page.html
mkdir strange
printf '{"step":1,"loss":2,"tokens":9}\nrubbish\n{"step":2,' >strange/metrics.jsonl
"$mt" report whole strange --output page2.html >out.txt 2>report.err
check "a damaged folder is no failure" [ $? -eq 0 -a ! -s out.txt ]
check "but is told" grep -q "warning: strange: left out of metrics.jsonl: 1 damaged line$" report.err
check "in the page, too: $(page_holds page2.html; tail -3 page2.html.faults)" eval \
    'page_holds page2.html && grep -q "<li>strange: config.ini is missing" page2.html'
check "keys of a configuration that is missing are no differences" grep -q 'No key differs' page2.html
mkdir notes
expect 4 "is no run folder" "$mt" report notes
echo stray >stray.txt
expect 0 "'stray.txt' is no run folder: it has neither metrics.jsonl nor config.ini: it is left out" "$mt" report whole stray.txt
expect 0 "'notes' is no run folder: it has neither metrics.jsonl nor config.ini: it is left out" "$mt" report notes whole
check "the run beside it is on the page" grep -q 'whole' out.txt
for paths in 'whole nowhere' 'nowhere whole'; do
    expect 0 "warning: 'nowhere' is no run folder: it has neither metrics.jsonl nor config.ini: it is left out" "$mt" report $paths
    check "$paths: the run is on the page" grep -q whole out.txt
done
expect 4 "'nowhere' is no run folder" "$mt" report notes nowhere
check "without a run there is no page" [ ! -s out.txt ]
expect 3 "nowhere" "$mt" --config tiny.ini run.dir=failed data.train=nowhere
check "a start that failed leaves no folder" [ ! -e failed ]
expect 2 "needs the DIR" "$mt" report
expect 5 "cannot create" "$mt" report whole --output nowhere/page.html

# ---- a terminal: lines every log.every steps stay, the live one goes
TERM=xterm python3 -c 'import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))' \
    "$mt" --config tiny.ini run.dir=terminal log.every=10 train.eval_every=0 checkpoint.every=0 >terminal.txt </dev/null
check "a run at a terminal: $?" [ "$(losses terminal | wc -l)" -eq 40 ]
check "a word while the first step runs" grep -q 'the first step is running' terminal.txt
# (what is on a line when it ends is behind the last return to its beginning)
stay() { tr -d '\033' <terminal.txt | sed 's/\r$//; s/.*\r//; s/^\[K//' | sed -n 's/^step \([0-9]*\)\/40 .*/\1/p' | xargs; }
check "the lines that stay: $(stay)" [ "$(stay)" = "10 20 30 40" ]

# ---- trace: test/tools/check_trace.py; the arenas' fill is the plan's, to the byte
trace_holds() { python3 "$root/test/tools/check_trace.py" "$1/timeline.json" >"$1.trace" 2>&1; }
planned() { sed -n "s/^  $1 *\([0-9,]*\) .*/\1/p" plan.txt | tr -d ,; }
"$mt" plan --config tiny.ini >plan.txt 2>&1
run traced log.trace_steps=7-8 train.eval_every=7 train.eval_samples=150 checkpoint.every=7 train.stop_at=9
check "a traced run: $(trace_holds traced; grep -m3 '^bad' traced.trace)" trace_holds traced
# (an evaluation's ten batches are forwards, too)
for want in 'step: 3' 'evaluation: 1' 'checkpoint: 1' 'forward: 65' 'backward: 15' 'next batch: 15'; do
    check "span $want: $(grep "span ${want%%:*}" traced.trace)" grep -qx "span $want" traced.trace
done
state=$(($(planned 'weights (fp32)') + $(planned gradients) + $(planned moments) + $(planned 'tables, batches, statistics')))
check "the state is full all the time" grep -qx "counter state: $state $state $state" traced.trace
counter() { sed -n "s/^counter $1: 0 \([0-9]*\) 0$/\1/p" traced.trace; } # its peak, if it begins and ends empty
check "scratch is filled up to the plan's $(planned 'scratch of a layer call') and emptied: $(grep scratch traced.trace)" \
    [ "$(counter scratch)" = "$(planned 'scratch of a layer call')" ]
halves=$(($(counter 'save (dgrad)') + $(counter 'save (wgrad)')))
check "the saves are filled up to the plan's and emptied: $halves" \
    [ $halves = "$(planned 'saves between forward and backward')" ]
run cut checkpoint.every=0 log.trace_steps=30-90 train.stop_at=32
check "a run that ends before the last step to trace: $(trace_holds cut; tail -1 cut.trace)" trace_holds cut
check "its steps 29 to 32" grep -qx 'span step: 4' cut.trace
run wild log.trace_steps=5-80 train.steps=80 optim.schedule=constant optim.lr=10 optim.weight_decay=10 optim.warmup=0
check "a run that fails while it is traced: exit $?, $(tail -1 wild.err)" grep -q 'error (numerics)' wild.err
check "its trace: $(trace_holds wild; tail -1 wild.trace)" trace_holds wild
"$root/scripts/launch.sh" -n 2 -- "$mt" --config tiny.ini run.dir=two log.trace_every=5 train.steps=5 checkpoint.every=0 train.micro_batch=1 \
    train.global_batch=4 parallel.zero=1 >/dev/null 2>&1
check "two ranks: $(trace_holds two; grep -m3 '^bad' two.trace)" trace_holds two
check "with spans of their communication" grep -q '^span reduce-scatter' two.trace

# ---- gauges for Prometheus: the last step's, in a file that is replaced as a whole
run gauges train.steps=6 train.eval_every=3 log.prometheus=now.prom
value() { sed -n "s/^megatrain_$1{run=\"gauges\"} //p" gauges/now.prom; }
check "the step: $(head -c 200 gauges/now.prom)" [ "$(value step)" = 6 ]
check "the loss: $(value loss)" awk -v a="$(value loss)" -v b="$(losses gauges | tail -1 | cut -d' ' -f2)" 'BEGIN { d = a - b; exit !(d < 1e-9 && d > -1e-9 && a > 1) }'
check "the validation loss: $(value valid_loss)" [ "$(value valid_loss | cut -c1-8)" = "$(sed -n 's/.*"valid_loss":\([^,}]*\).*/\1/p' gauges/metrics.jsonl | tail -1 | cut -c1-8)" ]
check "every gauge has a type" [ "$(grep -c '^# TYPE' gauges/now.prom)" -eq "$(grep -c '^megatrain_' gauges/now.prom)" ]
echo "a list" >notes.txt
own="the run writes this file itself"
for f in metrics.jsonl loss.svg loss.svg.tmp-7 .secret-1 events.out.tfevents.1 new/./log.txt "$PWD/new/starts/2.ini"; do
    expect 2 "log.prometheus = '$f' with run.dir = 'new': $own" "$mt" config check --config tiny.ini run.dir=new log.prometheus="$f"
done
for f in metrics.json old/metrics.jsonl; do
    expect 0 "" "$mt" config check --config tiny.ini run.dir=new log.prometheus="$f"
done
ln -s gauges linked
run gauges log.tensorboard=true log.trace_steps=8 train.steps=9
check "a run with a trace: $(ls gauges)" [ -s gauges/timeline.json ]
for f in $(cd gauges && ls -A | grep -v now.prom); do
    expect 2 "$own" "$mt" config check --config tiny.ini run.dir=linked log.prometheus="gauges/$f"
done

# a folder in which no run began: what a run would replace there is somebody else's
for f in config.ini metrics.jsonl loss.svg tokenizer; do
    mkdir "own-$f"
    echo mine >"own-$f/$f"
    expect 2 "has a '$f', which no run wrote" "$mt" --config tiny.ini run.dir="own-$f"
    check "'$f' is as it was" [ "$(cat "own-$f/$f")" = mine ]
done
expect 2 "is no file that this command writes" "$mt" --config tiny.ini run.dir=refused train.steps=6 log.prometheus=./notes.txt
finish
