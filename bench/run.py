#!/usr/bin/env python3
"""Benchmarks: GEMM beside OpenBLAS, attention, whole training steps alternating with PyTorch, ranks beside one, ranks
that share a sequence, latent attention beside multi-head, mixtures beside dense models and PyTorch's, tokenizers beside
the package of that name, runs beside busy neighbours.

  bench/run.py [--rounds 3] [--steps 3] [--out bench/results/NAME.json]
               [--only gemm,attention,grouped,steps,ranks,context,latent,mixtures,tokens,neighbour]

Timings on a shared machine mean something as ratios inside one alternating run: the peers take turns, and the
table gives the ratio of the best and of the median steps. Nothing here asserts a speed.
Without PyTorch (peer.py) or OpenBLAS that part is left out, saying so. Whole steps: fp32 with each layout's bits
against Debian's PyTorch and against PyPI's newest (torch_here.py), the better of eager and compiled; bf16 against its
autocast.
"""
import argparse
import datetime
import json
import os
import platform
import statistics

import context
import latent
import mixtures
import neighbour
import ranks
import tokens
from peer import faster, has_torch, newest_ms, newest_torch, print_faster, run, step_times, torch_ms

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"), "bench")
STEPS = [  # layers, width, heads, batch, context; the ratio to reach
    ("124M B4 T64", (12, 768, 12, 4, 64), 1.25),
    ("30M B8 T256", (6, 384, 6, 8, 256), 1.25),
    ("124M B1 T1024", (12, 768, 12, 1, 1024), 1.25),
]


OURS = ("layout", "run", "bf16")


def steps_section(rounds, steps):
    debian, newest, rows = has_torch(), newest_torch(), []
    for name, shape, goal in STEPS:
        times = {mode: [] for mode in OURS}
        for _ in range(rounds):
            text = run([f"{BUILD}/bench_step", *shape, steps, ",".join(OURS)])
            for mode in OURS:
                times[mode] += step_times(text, mode + " step ")
            if debian:
                times.setdefault("debian", []).extend(torch_ms("torch_gpt.py", *shape, steps))
            newest_ms(times, newest, "torch_gpt.py", *shape, steps)
        # neighbouring steps: what else the machine does hits both alike
        over = statistics.median(a / b for a, b in zip(times["layout"], times["run"]))
        row = {"config": name, "shape": shape, "goal": goal, "best_ms": {p: min(t) for p, t in times.items()},
               "median_ms": {p: statistics.median(t) for p, t in times.items()}, "layout_over_run": over,
               "over_debian": faster(times, "layout", ["debian"]),
               "over_newest": faster(times, "layout", ["eager fp32", "compile fp32"]),
               "run_over_newest": faster(times, "run", ["eager fp32", "compile fp32"]),
               "over_newest_bf16": faster(times, "bf16", ["eager bf16", "compile bf16"])}
        print(f"{name} (aim {goal}): ms a step, best / median; layout takes {100 * (over - 1):+.1f} % over run")
        for p, t in times.items():
            print(f"  {p:14} {min(t):8.1f} / {statistics.median(t):8.1f}")
        print_faster(row)
        rows.append(row)
    return rows


def program_section(name):
    path = f"{BUILD}/bench_{name}"
    out = f"{BUILD}/{name}.json"
    print(run([path, "--json", out]), end="", flush=True)
    with open(out) as f:
        return json.load(f)


SECTIONS = {"steps": steps_section, "ranks": ranks.section, "context": context.section, "latent": latent.section,
            "mixtures": mixtures.section, "tokens": lambda rounds, steps: tokens.section(rounds),
            "neighbour": neighbour.section}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--steps", type=int, default=3)
    ap.add_argument("--only", default="gemm,attention,grouped,steps,ranks,context,latent,mixtures,tokens,neighbour")
    ap.add_argument("--out", default="")
    a = ap.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with open("/proc/cpuinfo") as f:
        cpu = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())
    result = {"date": datetime.date.today().isoformat(), "cpu": cpu, "cores": os.cpu_count(),
              "compiler": run(["gcc", "--version"]).splitlines()[0]}
    for part in a.only.split(","):
        print(f"== {part}", flush=True)
        result[part] = SECTIONS[part](a.rounds, a.steps) if part in SECTIONS else program_section(part)
    out = a.out or os.path.join(HERE, "results", f"cpu-{result['date']}.json")
    os.makedirs(os.path.dirname(out), exist_ok=True)
    with open(out, "w") as f:
        json.dump(result, f, indent=1)
        f.write("\n")
    print(f"results in {os.path.relpath(out)}")


if __name__ == "__main__":
    main()
