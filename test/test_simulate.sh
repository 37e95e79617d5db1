#!/usr/bin/env bash
# `megatrain simulate`: every row of golden/schedules.tsv through --json, unequal costs and latency included; what the
# lists, the chart, the picture and the comparison show.
. "$(dirname "$0")/lib.sh"

cat >golden.py <<'EOP'
"""golden.py MEGATRAIN TABLE: runs every row twice (unit costs; F=I=W=4 and latency 1) and prints what differs."""
import json
import re
import subprocess
import sys


def simulate(name, p, m, *more):
    base, inside, suffix = re.fullmatch(r"([a-z0-9-]+)(?:\((.*)\))?(\+split)?", name).groups()
    words = {"v": "--chunks", "g": "--group", "w": "--waves"}
    options = []
    for part in filter(None, (inside or "").split(",")):
        key, value = part.split("=")
        options += [words[key], str(2 * p) if value == "2p" else value]
    command = [sys.argv[1], "simulate", "--json", "--schedule", base + (suffix or ""), "--stages", str(p),
               "--microbatches", str(m), *options, *more]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


head, *rows = [line.split("\t") for line in open(sys.argv[2]).read().splitlines()]
for row in rows:
    r = dict(zip(head, row))
    p, m = int(r["p"]), int(r["m"])
    got, slow = simulate(r["schedule"], p, m), simulate(r["schedule"], p, m, "--cost", "4,4,4", "--latency", "1")
    wanted = {"stages": p, "microbatches": m, "makespan": float(r["T"]), "ideal": float(r["ideal"]),
              "bubble": float(r["bubble"]), "span_bubble": float(r["span_bubble"]),
              "peak_hold_to_w": [int(x) for x in r["peak_hold_to_W"].split(",")],
              "peak_hold_to_i": [int(x) for x in r["peak_hold_to_I"].split(",")],
              "weight_copies": int(r["weight_copies"])}
    wrong = {k: (got[k], v) for k, v in wanted.items() if got[k] != v}
    if wrong or slow["makespan"] != float(r["T_comm(F=I=W=4,c=1)"]):
        print(r["schedule"], p, m, wrong, slow["makespan"])
print(len(rows), "rows", file=sys.stderr)
EOP
python3 golden.py "$mt" "$root/test/golden/schedules.tsv" >wrong.txt 2>rows.txt
check "golden rows: exit $?, $(head -3 wrong.txt)" [ ! -s wrong.txt ]
check "golden rows: $(cat rows.txt)" grep -qx "237 rows" rows.txt

# ---- lists and the chart
"$mt" simulate --schedule 1f1b --stages 2 --microbatches 2 --list >list.txt
cat >wanted.txt <<'EOT'
r0: F0.s0 [SEND(act0.s1, to 1)] F1.s0 [SEND(act1.s1, to 1)] [RECV(grad0.s0, from 1)] B0.s0 [RECV(grad1.s0, from 1)] B1.s0 TIED REDUCE NORM UPDATE
r1: [RECV(act0.s1, from 0)] F0.s1 [RECV(act1.s1, from 0)] B0.s1 [SEND(grad0.s0, to 0)] F1.s1 B1.s1 [SEND(grad1.s0, to 0)] TIED REDUCE NORM UPDATE
EOT
check "list of 1f1b: $(diff list.txt wanted.txt | head -4)" cmp -s list.txt wanted.txt
"$mt" simulate --schedule interleaved --stages 2 --microbatches 4 --group 2 >chart.txt
check "chart of interleaved" grep -qxF 'r0  |F0a F1a F0b F1b F2a .   B0b B0b F3a B1b B1b F2b B0a B0a F3b B1a B1a .   B2b B2b .   B3b B3b B2a B2a B3a B3a' chart.txt
check "chart: the time" grep -qE '^time +27$' chart.txt
"$mt" simulate --schedule 1f1b --stages 8 --microbatches 200 >chart.txt
check "a long chart fits: $(head -8 chart.txt | awk '{ print length }' | sort -nu | tr '\n' ' ')" \
    [ "$(head -8 chart.txt | awk 'length > 200' | wc -l)" -eq 0 ]
"$mt" simulate --schedule seq1f1b --stages 2 --microbatches 2 --slices 2 >chart.txt
cat >wanted.txt <<'EOT'
r0  |F0:0 F0:1 F1:0 .    .    B0:1 B0:1 F1:1 B0:0 B0:0 .    B1:1 B1:1 B1:0 B1:0
r1  |.    F0:0 F0:1 B0:1 B0:1 F1:0 B0:0 B0:0 F1:1 B1:1 B1:1 B1:0 B1:0
EOT
check "chart of slices: $(diff <(sed 's/[ .]*$//' chart.txt | head -2) wanted.txt | head -4)" \
    cmp -s <(sed 's/[ .]*$//' chart.txt | head -2) wanted.txt
check "slices: a unit is one" grep -qE '^activations held until W, by rank +3 2$' chart.txt
"$mt" simulate --schedule seq1f1b --stages 2 --microbatches 2 --slices 2 --list --svg slices.svg >list.txt
check "list of slices" grep -q '^r1: \[RECV(act0:0.s1, from 0)\] F0:0.s1 .* B1:0.s1 \[SEND(grad1:0.s0, to 0)\]' list.txt
check "picture of slices" grep -q '>1:0</text>' slices.svg
"$mt" simulate --schedule 2bw --stages 4 --microbatches 4 --list >list.txt
check "2bw reads older weights" grep -q 'B5.s0@-1' list.txt

# ---- pictures
for s in 1f1b zb-v dualpipe chimera-fdouble pipedream hanayo; do
    "$mt" simulate --schedule $s --stages 4 --microbatches 8 --svg $s.svg >/dev/null
    python3 - $s.svg <<'EOP' >out.txt 2>&1
import re, sys, xml.etree.ElementTree as tree
svg = tree.parse(sys.argv[1]).getroot()
ns = "{http://www.w3.org/2000/svg}"
width = float(svg.get("viewBox").split()[2])
bars = [r for r in svg.iter(ns + "rect") if r.get("class") and re.fullmatch("[fbiw][0-3]", r.get("class")) and len(r)]
assert len(bars) >= 48, len(bars) # 12 computes a rank at the least
assert all(0 <= float(r.get("x")) and float(r.get("x")) + float(r.get("width")) <= width for r in bars)
assert sum(t.text.startswith("rank ") for t in svg.iter(ns + "text") if t.text) in (4, 8) # (in one part or in two)
assert "idle" in svg.find(ns + "desc").text and "prefers-color-scheme:dark" in svg.find(ns + "style").text
EOP
    check "picture of $s: exit $?, $(tail -1 out.txt)" [ ! -s out.txt -a -s $s.svg ]
done
"$mt" simulate --schedule 1f1b --stages 64 --microbatches 512 --svg big.svg >/dev/null
check "a large picture: $(wc -c <big.svg) bytes" [ "$(wc -c <big.svg)" -lt 8000000 ]

# ---- all schedules
"$mt" simulate --compare --stages 4 --microbatches 8 >all.txt
check "compare has 1f1b" grep -qE '^1f1b +sync +1 +33\.00 +37\.5 +27\.3 +4\.00 +4\.00 +1 ' all.txt
check "compare has zb-v at half a unit a chunk" grep -qE '^zb-v +sync +2 +25\.50 +6\.2 +5\.9 +4\.00 +4\.00 +1 ' all.txt
check "compare marks what is asynchronous: $(awk '$2 == "async" { print $1 }' all.txt | xargs)" \
    [ "$(awk '$2 == "async" { sub("[+]split", "", $1); print $1 }' all.txt | sort -u | xargs)" = "2bw pipedream pipedream-vertical" ]
check "compare: all are legal here" [ "$(grep -c 'not legal' all.txt)" -eq 0 ]
"$mt" simulate --compare --stages 3 --microbatches 5 >all.txt
check "compare says why not" grep -q "schedule 'dualpipe' needs an even number of ranks" all.txt
"$mt" simulate --compare --stages 4 --microbatches 8 --json >all.json
check "compare as JSON" python3 -c "
import json
rows = {r['schedule']: r for r in json.load(open('all.json'))}
assert len(rows) > 35 and rows['1f1b']['makespan'] == 33 and rows['zb-v']['makespan'] == 25.5, len(rows)"
"$mt" simulate --compare --stages 4 --microbatches 8 --slices 4 >all.txt
check "compare: only seq1f1b has the slices" grep -qE '^seq1f1b +sync +1 +26\.25 +9\.4 +8\.6 +1\.75 ' all.txt
check "compare: the others have none" grep -qE '^1f1b +sync +1 +33\.00 +37\.5 +27\.3 +4\.00 ' all.txt
finish
