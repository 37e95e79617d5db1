#!/usr/bin/env python3
"""Coordinate check of muP (docs/mup.md): models of several widths take the same steps at the same learning rate, once
with optim.mup_base = the least width and once without. Printed is how far the logits of a fixed text have moved from
where they began, as a root mean square: with muP it does not depend on the width.

  bench/mup_check.py [--text FILE] [--widths 64,128,256,512] [--steps 10] [--rates 1e-3,...] [--out FILE.json]

With --rates a second table follows: the loss after --sweep-steps steps at each of these rates (a mean of the last ten),
whose least is at one rate for all widths where muP does what it is for. Nothing here is a time: the machine need not be
quiet.
"""
import argparse
import array
import glob
import json
import math
import os
import subprocess
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
HEAD_DIM, SEQ = 16, 64
INI = """[model]
arch=llama
layers=2
init_std=0.08
seq={seq}
[train]
micro_batch=8
global_batch=16
[optim]
schedule=constant
warmup=0
weight_decay=0
[data]
train={data}
[checkpoint]
every=0
[log]
every=1
"""


def program(*words):
    environment = dict(os.environ, OMP_WAIT_POLICY="passive", NO_COLOR="1")
    p = subprocess.run([f"{ROOT}/megatrain", *map(str, words)], env=environment, text=True, capture_output=True)
    if p.returncode:
        raise SystemExit(f"megatrain {' '.join(map(str, words))}: exit {p.returncode}\n{p.stderr[-2000:]}")


def logits(run, step, ids):
    program("eval", "--run", run, "--step", step, "--ids", ids, "--logits", f"{run}.npy")
    with open(f"{run}.npy", "rb") as f:
        data = f.read()
    return array.array("f", data[10 + int.from_bytes(data[8:10], "little"):])


def root_mean_square(values):
    return math.sqrt(sum(x * x for x in values) / len(values))


def model_keys(width, base):
    return [f"model.hidden={width}", f"model.heads={width // HEAD_DIM}", f"optim.mup_base={base}"]


def coordinates(folder, width, base, rate, steps):
    """By step: how far the logits have moved since the start."""
    keys = ["--config", f"{folder}/base.ini", *model_keys(width, base), "checkpoint.keep=0"]
    run = f"{folder}/w{width}-{base}"
    program(*keys, f"run.dir={run}.start", f"train.steps={steps}", "optim.lr=0", "train.stop_at=1")
    program(*keys, f"run.dir={run}", f"train.steps={steps}", f"optim.lr={rate}", "checkpoint.every=1")
    began = logits(f"{run}.start", 1, f"{folder}/ids.txt")
    out = {0: root_mean_square(began)}
    for step in range(1, steps + 1):
        now = logits(run, step, f"{folder}/ids.txt")
        out[step] = root_mean_square([a - b for a, b in zip(now, began)])
    return out


def loss_after(folder, width, base, rate, steps):
    run = f"{folder}/s{width}-{base}-{rate}"
    program("--config", f"{folder}/base.ini", *model_keys(width, base), f"run.dir={run}", f"train.steps={steps}",
            f"optim.lr={rate}")
    with open(f"{run}/metrics.jsonl") as f:
        losses = [json.loads(line)["loss"] for line in f if '"loss"' in line]
    return sum(losses[-10:]) / len(losses[-10:])


def prepare(folder, text):
    with open(f"{folder}/text.txt", "w") as f:
        for name in [text] if text else sorted(glob.glob(f"{ROOT}/docs/*.md")):
            with open(name, encoding="utf-8") as part:
                f.write(part.read())
    program("preprocess", "--input", f"{folder}/text.txt", "--tokenizer", "byte", "--output", f"{folder}/tokens")
    with open(f"{folder}/base.ini", "w") as f:
        f.write(INI.format(seq=SEQ, data=f"{folder}/tokens"))
    with open(f"{folder}/text.txt", "rb") as f, open(f"{folder}/ids.txt", "w") as ids:
        for _ in range(4):
            print(*f.read(SEQ), file=ids)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--text", help="a text to train on; none: the files of docs/")
    p.add_argument("--widths", default="64,128,256,512")
    p.add_argument("--rate", type=float, default=4e-3)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--rates", help="learning rates of the second table")
    p.add_argument("--sweep-steps", type=int, default=60)
    p.add_argument("--out")
    a = p.parse_args()
    widths = [int(w) for w in a.widths.split(",")]
    result = {"rate": a.rate, "coordinates": [], "losses": []}
    shown = [s for s in (0, 1, 2, 5, 10) if s <= a.steps]
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder, a.text)
        print(f"rate {a.rate:g}: logits at the start, and how far they move until step " +
              ", ".join(map(str, shown[1:])), flush=True)
        for base in (min(widths), 0):
            for width in widths:
                moved = coordinates(folder, width, base, a.rate, a.steps)
                result["coordinates"].append({"width": width, "base": base, "moved": moved})
                print(f"{'muP' if base else 'usual':6} hidden {width:5}" + "".join(f" {moved[s]:9.4f}" for s in shown),
                      flush=True)
        rates = [float(r) for r in a.rates.split(",")] if a.rates else []
        if rates:
            print(f"loss after {a.sweep_steps} steps at rates " + ", ".join(f"{r:g}" for r in rates), flush=True)
        for base in (min(widths), 0) if rates else ():
            for width in widths:
                losses = [loss_after(folder, width, base, r, a.sweep_steps) for r in rates]
                result["losses"].append({"width": width, "base": base, "losses": dict(zip(rates, losses))})
                print(f"{'muP' if base else 'usual':6} hidden {width:5}" + "".join(f" {x:9.4f}" for x in losses),
                      flush=True)
    if a.out:
        with open(a.out, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
