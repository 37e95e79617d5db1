#!/usr/bin/env python3
"""Makes a device's file (src/config/config_device.h) of what scripts/gpu-check.sh measured on a GPU, for
`megatrain plan --device FILE`: each op of its rooflines becomes a point, products as the library's timed choice has them.

usage: scripts/device-file.py RESULTS.json [--like DEVICE.ini] >FILE

--like: the lines of its [device] (links, hosts, the datasheet's rates) come first; what was measured replaces them."""
import json
import math
import sys


def stop(why):
    sys.exit(f"device-file: {why}")


def read_results(path):
    """The rooflines, and those of timed products."""
    try:
        with open(path) as f:
            all = json.load(f)
        found, timed = all.get("rooflines"), all.get("rooflines_autotuned")
    except (OSError, ValueError, AttributeError) as why:
        stop(f"{path}: {why}")
    if not found or not found.get("ops"):
        stop(f"{path} has no rooflines: scripts/gpu-check.sh --only rooflines measures them")
    return found, timed or {"ops": []}


def read_device(path):
    lines, inside = {}, False
    try:
        with open(path) as f:
            for line in f:
                line = line.split(";")[0].strip()
                if line.startswith("["):
                    inside = line == "[device]"
                elif inside and "=" in line:
                    key, value = line.split("=", 1)
                    lines[key.strip()] = value.strip()
    except OSError as why:
        stop(f"{path}: {why}")
    return lines


def points(ops):
    """{op: {(dtype, shape): us}}; of cases of one shape the first, which is the plain one."""
    out = {}
    for o in ops:
        us = 1e3 * o["ms"] / o["times"]
        if not (math.isfinite(us) and us > 0):
            stop(f"{o['op']} {o['case']}: {o['ms']} ms")
        shape = "x".join(f"{n:.0f}" for n in o["shape"])
        out.setdefault(o["op"], {}).setdefault((o["dtype"], shape), us)
    return out


def main(args):
    if len(args) not in (1, 3) or (len(args) == 3 and args[1] != "--like"):
        sys.exit(__doc__)
    found, timed = read_results(args[0])
    device = read_device(args[2]) if len(args) == 3 else {}
    device.update(memory_mib=found["memory_bytes"] >> 20, memory_gb_s=f"{found['copy_gb_s']:.4g}")
    device.setdefault("bf16_tflops", f"{found['gemm_tflop_s']:.4g}")
    device.setdefault("multiprocessors", found["multiprocessors"])
    ops = points(found["ops"])
    for op, better in points(timed["ops"]).items():
        ops.setdefault(op, {}).update(better)
    print(f"; {found['device']}, measured {found['date']} by scripts/gpu-check.sh, made by scripts/device-file.py")
    print("[device]")
    for key, value in device.items():
        print(f"{key} = {value}")
    for op in sorted(ops):
        print(f"\n[op.{op}]")
        for (dtype, shape), us in ops[op].items():
            print(f"us = {dtype} 1x1 {shape} {us:.4g}")


main(sys.argv[1:])
