#!/usr/bin/env python3
"""Tables and a picture of what bench/optimizers.sh left.

  bench/optimizers.py OUT [--json bench/results/NAME.json] [--picture docs/NAME.svg]

The margin is the difference of the means over seeds of the last validation loss, beside its standard error (of the runs
of both, whose seeds are paired: the same weights and samples) and the standard deviation of each.
"""
import argparse
import json
import math
import statistics
import textwrap

COLORS = {"adamw": "#1b6ca8", "muon": "#c8553d"}


def read(folder):
    runs = []
    with open(f"{folder}/runs.tsv") as f:
        for line in f:
            name, rate, seed, seconds, loss = line.rstrip("\n").split("\t")
            runs.append({"name": name, "optimizer": name.replace("sweep-", "").split("-")[0], "rate": float(rate),
                         "seed": int(seed), "sweep": name.startswith("sweep-"), "seconds": float(seconds),
                         "valid_loss": float(loss), "curve": []})
    by_name = {r["name"]: r for r in runs}
    with open(f"{folder}/runs.jsonl") as f:
        for line in f:
            m = json.loads(line)
            if "valid_loss" in m:
                by_name[m["name"]]["curve"].append([m["tokens"], round(m["valid_loss"], 4)])
    with open(f"{folder}/machine.txt") as f:
        machine = [word for line in f if line.strip() for word in (line.split() if len(line) > 100 else [line.strip()])]
    return machine, runs


def tables(runs):
    rates = sorted({r["rate"] for r in runs if r["sweep"]})
    print("| validation loss after a third of the steps | " + " | ".join(f"{x:g}" for x in rates) + " |")
    print("| --- |" + " --- |" * len(rates))
    for name in COLORS:
        losses = {r["rate"]: r["valid_loss"] for r in runs if r["sweep"] and r["optimizer"] == name}
        print(f"| `{name}` | " + " | ".join(f"{losses[x]:.3f}" if x in losses else "" for x in rates) + " |")
    whole = {name: {r["seed"]: r for r in runs if not r["sweep"] and r["optimizer"] == name} for name in COLORS}
    seeds = sorted(set(whole["adamw"]) & set(whole["muon"]))
    print("\n| seed | " + " | ".join(map(str, seeds)) + " | mean | standard deviation |")
    print("| --- |" + " --- |" * (len(seeds) + 2))
    for name in COLORS:
        losses = [whole[name][s]["valid_loss"] for s in seeds]
        print(f"| `{name}` | " + " | ".join(f"{x:.4f}" for x in losses) +
              f" | {statistics.mean(losses):.4f} | {statistics.stdev(losses):.4f} |")
    margins = [whole["adamw"][s]["valid_loss"] - whole["muon"][s]["valid_loss"] for s in seeds]
    error = statistics.stdev(margins) / math.sqrt(len(margins))
    print(f"\nmuon is below adamw by {statistics.mean(margins):.4f}, standard error {error:.4f}; "
          f"seed by seed {' '.join(f'{m:.4f}' for m in margins)}")
    target = statistics.mean(whole["adamw"][s]["valid_loss"] for s in seeds)
    curve = mean_curve([whole["muon"][s] for s in seeds])
    for (t0, a, _, _), (t1, b, _, _) in zip(curve, curve[1:]):
        if a > target >= b:
            at = t0 + (t1 - t0) * (a - target) / (a - b)
            print(f"muon is at adamw's last loss after {at / curve[-1][0]:.0%} of the tokens")


def mean_curve(runs):
    """[tokens, mean, lowest, highest]"""
    rows = []
    for points in zip(*(r["curve"] for r in runs)):
        losses = [p[1] for p in points]
        rows.append((points[0][0], statistics.mean(losses), min(losses), max(losses)))
    return rows


def lines(text):
    """No longer than 110 columns, cut at blanks."""
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def path(points):
    return lines("M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points))


def picture(runs, file):
    left, top, wide, high = 46, 22, 560, 270
    curves = {n: mean_curve([r for r in runs if not r["sweep"] and r["optimizer"] == n]) for n in COLORS}
    count = len([r for r in runs if not r["sweep"] and r["optimizer"] == "muon"])
    last = max(c[-1][0] for c in curves.values())
    low = math.floor(10 * min(p[2] for c in curves.values() for p in c)) / 10
    top_loss = math.ceil(2 * max(p[3] for c in curves.values() for p in c[1:])) / 2  # (all but the first evaluation)

    def at(tokens, loss):
        return left + wide * tokens / last, top + high * (top_loss - min(loss, top_loss)) / (top_loss - low)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 20} {top + high + 46}" '
             'font-family="sans-serif" font-size="12">',
             "<style>.axis{fill:none;stroke:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.8}\n"
             ".number,.under{text-anchor:end;font-size:10px;fill:#555}.under{text-anchor:middle}</style>",
             '<rect width="100%" height="100%" fill="#fff"/>']
    loss = math.ceil(2 * low) / 2
    while loss <= top_loss:
        y = at(0, loss)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{left + wide}" class="grid"/><text x="{left - 5}" y="{y + 3:.1f}" '
                     f'class="number">{loss:.1f}</text>')
        loss += 0.5
    for million in range(1, int(last / 1e6) + 1):
        x = at(million * 1e6, low)[0]
        parts.append(f'<text x="{x:.1f}" y="{top + high + 15}" class="under">{million} M</text>')
    parts.append(f'<path d="M{left} {top}V{top + high}H{left + wide}" class="axis"/>')
    for name, curve in curves.items():
        band = [at(p[0], p[3]) for p in curve] + [at(p[0], p[2]) for p in reversed(curve)]
        parts.append(f'<path d="{path(band)}Z" fill="{COLORS[name]}" opacity="0.25"/>')
        parts.append(f'<path d="{path([at(p[0], p[1]) for p in curve])}" class="line" stroke="{COLORS[name]}"/>')
    for i, name in enumerate(COLORS):
        final = curves[name][-1]
        parts.append(f'<text x="{left + wide - 210}" y="{top + 30 + 18 * i}" fill="{COLORS[name]}">{name}: '
                     f'{final[1]:.3f} ({final[2]:.3f} to {final[3]:.3f})</text>')
    parts.append(f'<text x="{left}" y="{top - 8}">validation loss, mean and range of {count} seeds, by tokens</text>')
    with open(file, "w") as f:
        f.write("\n".join([*parts, "</svg>\n"]))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("--json", default="")
    ap.add_argument("--picture", default="")
    a = ap.parse_args()
    machine, runs = read(a.out)
    tables(runs)
    if a.json:
        with open(a.json, "w") as f:
            rows = ",\n".join(lines(json.dumps(r)) for r in runs)
            f.write(f'{{"machine": {json.dumps(machine, indent=1)},\n"runs": [\n{rows}\n]}}\n')
    if a.picture:
        picture(runs, a.picture)


if __name__ == "__main__":
    main()
