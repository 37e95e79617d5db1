#!/usr/bin/env python3
"""How even each balance method keeps the load of experts: a small model of 4 blocks with 16 experts each, 2 a token, is
trained on real text (what `make demo` fetches, or any other) for 300 steps with each method and without one.

  bench/balance.py [--text data/demo/text.txt] [--steps 300] [--out bench/results/NAME.json] [--picture docs/NAME.svg]

Of each run the load by block and step, as the run wrote it (`expert_load`: rows of the busiest expert over the mean),
its mean over the last 50 steps, and the loss on text that it did not see. Nothing here is a time: the machine need not
be quiet.
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
MODEL = """[model]
arch=llama
layers=4
hidden=64
heads=4
seq=128
ffn=128
[moe]
experts=16
topk=2
ffn=64
[train]
micro_batch=4
global_batch=8
eval_samples=128
[optim]
lr=1e-2
min_lr=1e-3
warmup=20
[checkpoint]
every=0
"""
METHODS = [  # name, keys, the load that it keeps under
    ("none", ["moe.balance=none"], None),
    ("none(sigmoid)", ["moe.balance=none", "moe.router=sigmoid"], None),
    ("aux", ["moe.balance=aux", "moe.unit=4"], 2.5),
    ("seq_aux", ["moe.balance=seq_aux"], 2.5),
    ("global_aux", ["moe.balance=global_aux"], 2.5),
    ("bias", ["moe.balance=bias", "moe.router=sigmoid", "moe.bias_rate=0.01"], 2.5),
    ("sinkhorn", ["moe.balance=sinkhorn", "moe.unit=4"], 2.5),
]
LAST = 50  # steps that the figures are a mean of
COLORS = ["#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2"]  # of blocks


def program(*words):
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", NO_COLOR="1")
    p = subprocess.run([f"{ROOT}/megatrain", *map(str, words)], env=environment, text=True, capture_output=True)
    if p.returncode:
        sys.exit(f"megatrain {' '.join(map(str, words))}: exit {p.returncode}: {p.stderr[-600:]}")


def write_tokens(folder, text):
    """The last hundredth of the text is for evaluation."""
    with open(text, "rb") as f:
        whole = f.read()
    cut = whole.rindex(b"\n", 0, len(whole) * 99 // 100) + 1
    for name, part in (("train", whole[:cut]), ("valid", whole[cut:])):
        with open(f"{folder}/{name}.txt", "wb") as f:
            f.write(part)
        program("preprocess", "--input", f"{folder}/{name}.txt", "--tokenizer", "byte", "--output", f"{folder}/{name}")


def train(folder, steps, keys):
    """Loads [step][block], the loss on unseen text."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        with open(f"{out}/model.ini", "w") as f:
            f.write(f"{MODEL}[data]\ntrain = {folder}/train\nvalid = {folder}/valid\n")
        program("--config", f"{out}/model.ini", *keys, f"train.steps={steps}", f"train.eval_every={steps}",
                f"run.dir={out}/run")
        with open(f"{out}/run/metrics.jsonl") as f:
            records = [json.loads(line) for line in f]
    losses = [m["valid_loss"] for m in records if "valid_loss" in m]
    return [m["expert_load"] for m in records if "expert_load" in m], losses[-1]


def smoothed(values, width=5):
    """Means of so many steps each."""
    return [round(statistics.mean(values[i:i + width]), 2) for i in range(0, len(values), width)]


def lines(text):
    """No longer than 120 columns, cut at blanks."""
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def panel(row, left, top, wide, high, most):
    """One run: a line for each block, load upwards from 1 to `most`."""
    parts = [f'<text x="{left}" y="{top - 6}">{row["method"]}</text>',
             f'<path d="M{left} {top}V{top + high}H{left + wide}" class="axis"/>']
    for load in range(2, int(most) + 1, 2):
        y = top + high - high * (load - 1) / (most - 1)
        parts.append(f'<path d="M{left} {y:.1f}H{left + wide}" class="grid"/><text x="{left - 4}" y="{y + 3:.1f}" '
                     f'class="number">{load}</text>')
    for line, color in zip(row["loads"], COLORS):
        points = (f"{left + wide * (i + 0.5) / len(line):.1f} {top + high - high * (v - 1) / (most - 1):.1f}"
                  for i, v in enumerate(line))
        parts.append(lines(f'<path d="M{" L".join(points)}" class="line" stroke="{color}"/>'))
    return parts


def picture(rows, path):
    columns, wide, high = 4, 150, 90
    most = max(max(map(max, row["loads"])) for row in rows)
    high_all = (len(rows) + columns - 1) // columns * (high + 40)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * (wide + 30) + 10} '
             f'{high_all + 20}" font-family="sans-serif" font-size="11">',
             "<style>.axis{fill:none;stroke:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.3}\n"
             ".number{text-anchor:end;font-size:9px;fill:#555}</style>",
             '<rect width="100%" height="100%" fill="#fff"/>']
    for i, row in enumerate(rows):
        parts += panel(row, 28 + i % columns * (wide + 30), 24 + i // columns * (high + 40), wide, high, most)
    foot = high_all + 10
    parts.append(f'<text x="28" y="{foot}">rows of the busiest expert over the mean, by step</text>')
    parts += [f'<text x="{420 + 60 * b}" y="{foot}" fill="{color}">block {b}</text>' for b, color in enumerate(COLORS)]
    with open(path, "w") as f:
        f.write("\n".join([*parts, "</svg>\n"]))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--text", default=f"{ROOT}/data/demo/text.txt")
    ap.add_argument("--steps", type=int, default=300)
    ap.add_argument("--out", default="")
    ap.add_argument("--picture", default="")
    a = ap.parse_args()
    if not os.path.exists(a.text):
        sys.exit(f"there is no {a.text}: run `make demo`, or give --text")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(folder, a.text)
        for method, keys, bound in METHODS:
            loads, valid = train(folder, a.steps, keys)
            last = [statistics.mean(step[b] for step in loads[-LAST:]) for b in range(len(COLORS))]
            rows.append({"method": method, "keys": keys, "aim": bound, "last": [round(v, 2) for v in last],
                         "valid_loss": round(valid, 3), "steps": len(loads),
                         "loads": [smoothed([step[b] for step in loads]) for b in range(len(COLORS))]})
            print(f"{method:14} load of the last {LAST} steps, by block: {' '.join(f'{v:5.2f}' for v in last)}"
                  f"  valid loss {valid:.3f}" + (f"  (aim: under {bound})" if bound else ""), flush=True)
    out = a.out or os.path.join(HERE, "results", f"cpu-balance-{datetime.date.today().isoformat()}.json")
    with open(out, "w") as f:
        rows_text = ",\n".join(lines(json.dumps(row)) for row in rows)
        f.write(lines(json.dumps({"text": os.path.basename(a.text), "model": MODEL.split()})[:-1]) +
                f',\n"runs": [\n{rows_text}\n]}}\n')
    if a.picture:
        picture(rows, a.picture)


if __name__ == "__main__":
    main()
