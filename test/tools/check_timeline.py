#!/usr/bin/env python3
"""Checks the trace of a pipeline run against its schedule: check_timeline.py RUN LIST [STEP]

LIST is what `megatrain simulate --list` prints of the schedule. In RUN/timeline.json every step of every process has the
actions of its pipeline rank's list, each once, and those that are no messages in order; an arrow ends for each message received. RUN/timeline.svg has
a row for each pipeline rank in each of two panels, with a bar for each compute, and states the bubbles that
RUN/metrics.jsonl has for STEP. Prints what was looked at.

Halves of a pair that ran in turn have a span for each turn. One that goes on after the other's turn waits for its rows then,
not before: what travelled did so beside the other's ops. Prints how often.
"""
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict

SVG = "{http://www.w3.org/2000/svg}"
COMPUTES = {"forward", "backward", "dgrad", "wgrad"}
ACTIONS = COMPUTES | {"send", "receive", "tied embedding", "reduce", "norm", "update"}
bad = []


def expected(path):
    """Of each pipeline rank, the actions as words."""
    lists = []
    for line in open(path):
        words = re.findall(r"(?:SEND|RECV)\([^)]*\)|[^\s\[\],|]+", line.split(":", 1)[1])
        lists.append([re.sub(r"x\d+", "", word).replace("'", "") for word in words])
    return lists


def word_of(span, two_replicas):
    args = span["args"]
    if span["name"] in ("send", "receive"):
        short, way = ("SEND", "to") if span["name"] == "send" else ("RECV", "from")
        payload = "act" if args["kind"] == "activation" else "grad"
        return f"{short}({payload}{args['microbatch']}.s{args['stage']}, {way} {args['peer']})"
    if "microbatch" not in args:
        return args["kind"] + (f".s{args['stage']}" if two_replicas and span["name"] != "norm" else "")
    version = f"@-{args['version']}" if args["version"] else ""
    return f"{args['kind']}{args['microbatch']}.s{args['stage']}{version}"


def inside(span, outer):
    return outer["ts"] <= span["ts"] and span["ts"] + span["dur"] <= outer["ts"] + outer["dur"] + 0.0015


def whole_actions(actions, spans, two):
    """Of computes that were cut into turns the first, and how often rows travelled beside the other half's ops."""
    whole, seen, beside, before = [], set(), 0, None
    for action in actions:
        word = word_of(action, two)
        if word in seen and before is not None and word_of(before, two) != word:
            own, other = ([s for s in spans if s["tid"] == turn["tid"] and s is not turn and inside(s, turn)]
                          for turn in (action, before))
            waits = own and min(own, key=lambda s: s["ts"])["name"] == "wait for rows"
            beside += bool(waits and any(s["name"] != "wait for rows" for s in other))
        if word not in seen:
            whole.append(action)
        if action["name"] in COMPUTES:
            seen.add(word)
        before = action
    return whole, beside


def check_json(path, lists):
    spans, names, arrows = defaultdict(list), {}, 0
    for event in json.load(open(path)):
        if event["ph"] == "X":
            spans[event["pid"]].append(event)
        elif event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        arrows += event["ph"] == "f"
    two = any("UPDATE.s" in word for words in lists for word in words)
    received = beside = ran = 0
    for pid, name in names.items():
        match = re.fullmatch(r"rank \d+ on \S+: pp (\d+), tp \d+, dp \d+", name)
        if not match:
            bad.append(f"process {pid} is named '{name}'")
            continue
        listed = lists[int(match[1])]
        steps = [s for s in spans[pid] if s["name"] == "step"]
        if not steps:
            bad.append(f"{name} has no step")
        for step in steps:
            actions = [s for s in spans[pid] if s["name"] in ACTIONS and "args" in s and inside(s, step)]
            actions, turns = whole_actions(sorted(actions, key=lambda s: s["ts"]), spans[pid], two)
            got = [word_of(s, two) for s in actions]
            beside += turns
            ran += 1
            want = listed
            received += sum(word.startswith("RECV") for word in got)
            if sorted(got) != sorted(want):
                bad.append(f"{name}: other actions than in the list: {sorted(set(got) ^ set(want))[:4]}")
            # (a run's messages are ordered by the cost of its stages, the list's as if all were alike)
            got, want = ([word for word in words if word[:4] not in ("SEND", "RECV")] for words in (got, want))
            if got != want:
                at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
                bad.append(f"{name}: {len(got)} actions, {len(want)} in the list; from {at}: {got[at:at + 3]}, "
                           f"list: {want[at:at + 3]}")
    if arrows != received:
        bad.append(f"{arrows} arrows for {received} messages")
    print(f"processes: {len(names)}, messages: {received}, "
          f"rows beside the other half: {beside * len(names) // max(ran, 1)} a step")


def check_svg(run, lists, step):
    root = ET.parse(f"{run}/timeline.svg").getroot()
    texts = ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
    computes = sum(bool(re.match(r"[FBIW]\d", word)) for words in lists for word in words)
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    drawn = {"".join(b.find(f"{SVG}title").itertext()) for b in bars} # (one at the border of two parts is in both)
    if len(drawn) != 2 * computes and not any("shown are the first and the last" in text for text in texts):
        bad.append(f"{len(drawn)} bars for 2 x {computes} computes")
    if len({float(b.get('y')) for b in bars}) < 2 * len(lists):
        bad.append("not a row for each rank and panel")
    width = float(root.get("viewBox").split()[2])
    if any(not 0 <= float(b.get("x")) <= float(b.get("x")) + float(b.get("width")) <= width for b in bars):
        bad.append("a bar outside the picture")
    for rank in range(len(lists)):
        if texts.count(f"pp {rank}") not in (2, 4): # (a picture in two parts has each twice)
            bad.append(f"rows of pp {rank}")
    records = [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
    traced = [r for r in records if "bubble" in r]
    if [r["step"] for r in traced] != [step]:
        bad.append(f"bubbles of steps {[r['step'] for r in traced]}")
        return
    for what, key in (("measured", "bubble"), ("simulated", "bubble_simulated")):
        share = traced[0][key]
        if not 0 <= share < 1 or not any(t.startswith(what) and f"bubble {100 * share:.1f} %" in t for t in texts):
            bad.append(f"{what} bubble of {share} is not stated")
    print(f"bubble: {traced[0]['bubble']:.3f}, simulated {traced[0]['bubble_simulated']:.3f}")


def main():
    lists = expected(sys.argv[2])
    check_json(f"{sys.argv[1]}/timeline.json", lists)
    if len(sys.argv) > 3:
        check_svg(sys.argv[1], lists, int(sys.argv[3]))
    for line in bad[:20]:
        print("bad:", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
