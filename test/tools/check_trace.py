#!/usr/bin/env python3
"""Checks a trace by the rules of the JSON format that Perfetto opens (Trace Event Format): check_trace.py FILE

A list of events, each with what its phase demands: complete spans X (ts and dur in microseconds, on a named track of a
named process), counters C (ts and finite numbers as args, in order of time on each track), arrows s to f (of one id, from one
span to another, forward in time), names M. Spans of a track nest: none ends after the one it began in. Prints, a line
each: how many spans of a name, the least, greatest and last value of a counter, and how many arrows if there are any.
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


def check_arrows(ends, tracks):
    """An arrow has both its ends, each in a span of its track. (A recording may begin between them: no start.)"""
    whole = 0
    for arrow, (starts, finishes) in ends.items():
        for track, at in starts + finishes:
            if not any(start <= at <= start + length for start, length, _ in tracks.get(track, [])):
                bad.append(f"arrow {arrow} ends in no span of track {track}")
        if len(starts) != 1 or len(finishes) != 1:
            bad.append(f"arrow {arrow} has {len(starts)} starts and {len(finishes)} ends")
        elif finishes[0][1] < starts[0][1]:
            bad.append(f"arrow {arrow} goes back in time")
        else:
            whole += 1
    return whole


def main():
    events = json.load(open(sys.argv[1]), parse_float=Decimal)
    if not isinstance(events, list) or not events:
        print("no list of events")
        return 1
    tracks, counters, named, processes = defaultdict(list), defaultdict(list), set(), set()
    arrows = defaultdict(lambda: ([], []))
    for event in events:
        if not isinstance(event.get("name"), str) or not event["name"] or not isinstance(event.get("pid"), int):
            bad.append(f"name or pid of {event}")
        elif event.get("ph") == "X":
            if not isinstance(event.get("tid"), int):
                bad.append(f"tid of {event}")
            tracks[event["pid"], event["tid"]].append((number(event, "ts"), number(event, "dur"), event["name"]))
        elif event.get("ph") == "C":
            args = event.get("args")
            if not isinstance(args, dict) or not args:
                bad.append(f"args of {event}")
                continue
            track = event["name"] + (f" {event['id']}" if "id" in event else "")
            if event["pid"]:
                track += f" of process {event['pid']}"
            counters[track].append((number(event, "ts"), sum(number(args, key) for key in args)))
        elif event.get("ph") in ("s", "f"):
            if not isinstance(event.get("id"), int) or not isinstance(event.get("cat"), str):
                bad.append(f"id or cat of {event}")
                continue
            end = (event["pid"], event.get("tid")), number(event, "ts")
            arrows[event["cat"], event["name"], event["id"]][event["ph"] == "f"].append(end)
        elif event.get("ph") == "M" and event["name"] == "process_sort_index":
            if not isinstance(event.get("args", {}).get("sort_index"), int):
                bad.append(f"args.sort_index of {event}")
        elif event.get("ph") == "M":
            if not isinstance(event.get("args", {}).get("name"), str):
                bad.append(f"args.name of {event}")
            if event["name"] == "process_name":
                processes.add(event["pid"])
            else:
                named.add((event["pid"], event.get("tid")))
        else:
            bad.append(f"phase of {event}")
    for track, spans in tracks.items():
        check_nesting(track, spans)
        if track not in named:
            bad.append(f"track {track} has no name")
        if track[0] not in processes:
            bad.append(f"process {track[0]} has no name")
    if not processes:
        bad.append("no process has a name")
    whole = check_arrows(arrows, tracks)
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
    if arrows:
        print(f"arrows: {whole}")
    for line in bad[:20]:
        print("bad:", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
