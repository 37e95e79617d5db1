#!/usr/bin/env python3
"""Checks a trace by the rules of the JSON format that Perfetto opens (Trace Event Format): check_trace.py FILE

A list of events, each with what its phase demands: complete spans X (ts and dur in microseconds, on a named track of a
named process), counters C (ts and finite numbers as args, in order of time on each track), names M. Spans of a track
nest: none ends after the one it began in. Prints, a line each: how many spans of a name, and the least, greatest and
last value of a counter.
"""
import json
import math
import sys
from collections import defaultdict
from decimal import Decimal

bad = []


def number(event, key):
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)) or not math.isfinite(value) or value < 0:
        bad.append(f"{key} of {event}")
        return Decimal(0)
    return Decimal(value)


def check_nesting(tid, spans):
    open_spans = []
    for start, length, name in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        if open_spans and start + length > open_spans[-1][0]:
            bad.append(f"track {tid}: '{name}' ends after '{open_spans[-1][1]}', in which it began")
        open_spans.append((start + length, name))


def main():
    events = json.load(open(sys.argv[1]), parse_float=Decimal)
    if not isinstance(events, list) or not events:
        print("no list of events")
        return 1
    tracks, counters, named, processes = defaultdict(list), defaultdict(list), set(), set()
    for event in events:
        if not isinstance(event.get("name"), str) or not event["name"] or not isinstance(event.get("pid"), int):
            bad.append(f"name or pid of {event}")
        elif event.get("ph") == "X":
            if not isinstance(event.get("tid"), int):
                bad.append(f"tid of {event}")
            tracks[event["tid"]].append((number(event, "ts"), number(event, "dur"), event["name"]))
        elif event.get("ph") == "C":
            args = event.get("args")
            if not isinstance(args, dict) or not args:
                bad.append(f"args of {event}")
                continue
            track = event["name"] + (f" {event['id']}" if "id" in event else "")
            counters[track].append((number(event, "ts"), sum(number(args, key) for key in args)))
        elif event.get("ph") == "M":
            if not isinstance(event.get("args", {}).get("name"), str):
                bad.append(f"args.name of {event}")
            (processes if event["name"] == "process_name" else named).add(event.get("tid"))
        else:
            bad.append(f"phase of {event}")
    for tid, spans in tracks.items():
        check_nesting(tid, spans)
        if tid not in named:
            bad.append(f"track {tid} has no name")
    if not processes:
        bad.append("the process has no name")
    for name, values in counters.items():
        if any(a[0] > b[0] for a, b in zip(values, values[1:])):
            bad.append(f"counter '{name}' goes back in time")
    counts = defaultdict(int)
    for spans in tracks.values():
        for _, _, name in spans:
            counts[name] += 1
    for name in sorted(counts):
        print(f"span {name}: {counts[name]}")
    for name in sorted(counters):
        values = [v for _, v in counters[name]]
        print(f"counter {name}: {min(values)} {max(values)} {values[-1]}")
    for line in bad[:20]:
        print("bad:", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
