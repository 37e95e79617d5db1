#!/usr/bin/env python3
"""How right `megatrain plan --device FILE` is about steps on this machine: layouts of three small models on 1, 2 and 4
ranks run in turns, and the step that each takes stands beside the one that is predicted.

usage: bench/predict_here.py [--device FILE] [--rounds N] [--steps N] [--only TEXT] [--json FILE] [--with FILE] [--list]

--device: of `megatrain doctor --calibrate FILE`, made first if there is none. A layout's step is the lower quartile of
its steps, of all rounds together; rounds lie apart, so that no layout has the machine's worst minutes to itself.
Printed: mean absolute error, rank correlation in each model, and regret: how much slower the layout predicted to be
the best of a model's is than the best measured. A wanted figure that is missed is a finding, not a failure: the exit
status is 0 when everything ran. Beside each rank correlation stands that of the measurement with itself, of every
other pair of rounds with the rest: no prediction can be expected to be better than that. --with: rounds of an earlier
--json count, too; --rounds 0 only predicts them again.

MEGATRAIN names the program. Figures count when nothing else runs here: the spread of steps is printed, and how much of
the processors others had."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MEGATRAIN = os.path.abspath(os.environ.get("MEGATRAIN", os.path.join(ROOT, "megatrain")))

# (experts take turns, as in published measurements: a plan does not know what a router will choose)
MODELS = {
    "dense": "model.arch=gpt2 model.layers=8 model.hidden=128 model.heads=8 model.seq=128",
    "grouped": "model.arch=llama model.layers=8 model.hidden=192 model.heads=8 model.kv_heads=4 model.ffn=512 "
    "model.seq=256",
    "mixture": "model.arch=llama model.layers=4 model.hidden=128 model.heads=8 model.kv_heads=4 model.ffn=256 "
    "model.seq=128 moe.experts=8 moe.topk=2 moe.ffn=128 moe.balance=forced",
}
COMMON = "train.micro_batch=1 train.global_batch=8 train.eval_every=0 checkpoint.every=0 data.train=text"
LAYOUTS = {  # ranks, keys
    "dense": [
        (1, ""),
        (1, "train.recompute=full"),
        (2, "parallel.tp=2"),
        (2, "parallel.tp=2 parallel.sp=true"),
        (2, ""),
        (2, "parallel.zero=1"),
        (2, "parallel.pp=2"),
        (2, "parallel.pp=2 parallel.schedule=gpipe"),
        (2, "parallel.pp=2 parallel.schedule=zb-h1"),
        (4, "parallel.tp=2 parallel.pp=2"),
        (4, "parallel.pp=4"),
        (4, ""),
    ],
    "grouped": [
        (1, ""),
        (1, "train.micro_batch=2"),
        (2, "parallel.tp=2"),
        (2, "parallel.cp=2"),
        (2, "parallel.zero=1"),
        (2, "parallel.pp=2"),
        (2, "parallel.pp=2 parallel.vpp=2"),
        (4, "parallel.cp=2 parallel.tp=2"),
        (4, "parallel.pp=2"),
        (4, "parallel.pp=4 parallel.schedule=zb-h1"),
    ],
    "mixture": [
        (1, ""),
        (1, "train.micro_batch=2"),
        (2, "parallel.ep=2"),
        (2, "parallel.tp=2 parallel.ep=2 train.micro_batch=2"),
        (2, ""),
        (2, "parallel.pp=2"),
        (4, "parallel.ep=2 parallel.pp=2"),
        (4, "parallel.ep=4"),
    ],
}


def lower_quartile(rounds):
    steps = sorted(s for r in rounds for s in r)
    return steps[len(steps) // 4]


class Layout:
    def __init__(self, model, ranks, keys):
        self.model, self.ranks, self.keys = model, ranks, keys
        self.rounds, self.predicted = [], None  # of each round its steps
        self.disturbed = 0.0  # share of the processors that others had, at most

    def name(self):
        return f"{self.model}, {self.ranks} rank{'s' * (self.ranks > 1)} {self.keys.replace('parallel.', '')}".strip()

    def words(self):
        mine = {k.split("=")[0] for k in self.keys.split()}
        return [w for w in COMMON.split() if w.split("=")[0] not in mine] + self.keys.split()

    def steps(self):
        return sorted(s for r in self.rounds for s in r)

    def measured(self):
        return lower_quartile(self.rounds)

    def halves(self):
        """Rounds go back and forth through the layouts: a half has whole pairs of them, or one of each direction."""
        pair = 2 if len(self.rounds) >= 4 else 1
        return [lower_quartile([r for i, r in enumerate(self.rounds) if i // pair % 2 == k]) for k in (0, 1)]


def run(words, folder, **more):
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, **more)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def make_files(folder):
    text = "".join(f"Line {i} of a small text about {i * 7 % 13} ships and {i * 5 % 11} tides.\n" for i in range(4000))
    with open(os.path.join(folder, "text.txt"), "w") as f:
        f.write(text)
    run([MEGATRAIN, "preprocess", "--input", "text.txt", "--tokenizer", "byte", "--output", "text"], folder)
    for name, keys in MODELS.items():
        sections = {}
        for word in keys.split():
            section, line = word.split(".", 1)
            sections.setdefault(section, []).append(line)
        with open(os.path.join(folder, name + ".ini"), "w") as f:
            for section, lines in sections.items():
                f.write(f"[{section}]\n" + "\n".join(lines) + "\n")


def seconds_of_others(before=(0, 0)):
    """Processor seconds that other programs than those begun here have had (this machine's others, too), since then."""
    with open("/proc/stat") as f:
        user, nice, system, _, _, _, _, steal = map(int, f.readline().split()[1:9])
    others = (user + nice + system + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
    return others - before[0], time.time() - before[1]


def measure(layout, folder, steps):
    """Runs it; again, at most twice, where others had more than a twentieth of the processors meanwhile."""
    tries = []
    while len(tries) < 3:
        before = seconds_of_others()
        times = measure_once(layout, folder, steps)
        busy, took = seconds_of_others(before)
        tries.append((busy / took / os.cpu_count(), times))
        if tries[-1][0] < 0.05:
            break
    share, times = min(tries)
    layout.disturbed = max(layout.disturbed, share)
    layout.rounds.append(times)


def measure_once(layout, folder, steps):
    """Its steps but for the first two, in milliseconds."""
    words = [MEGATRAIN, "--config", layout.model + ".ini", f"train.steps={steps}", "run.dir=run", *layout.words()]
    if layout.ranks > 1:
        words = [os.path.join(ROOT, "scripts/launch.sh"), "-n", str(layout.ranks), "--", *words]
    run(["rm", "-rf", "run"], folder)
    run(words, folder)
    with open(os.path.join(folder, "run/metrics.jsonl")) as f:
        times = [r["step_ms"] for r in map(json.loads, f) if "step_ms" in r]
    return times[2:]


def predict(layout, device, folder):
    words = [MEGATRAIN, "plan", "--config", layout.model + ".ini", "--world", str(layout.ranks), "--device", device]
    plan = json.loads(run([*words, "--json", *layout.words()], folder))
    return plan["predicted"]["step_ms"] if plan.get("predicted") else None


def ranks_of(values):
    """Places in order; equals share the mean of theirs."""
    return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]


def correlation(pairs):
    """Spearman's."""
    if len(pairs) < 3:
        return float("nan")
    a, b = (ranks_of([p[k] for p in pairs]) for k in (0, 1))
    return statistics.correlation(a, b)


def regret(pairs):
    """Of (predicted, measured): the measured step of the best predicted, over the best measured, - 1."""
    return min(pairs)[1] / min(p[1] for p in pairs) - 1


def report(layouts):
    print(f"\n{'layout':58s} {'measured':>9s} {'spread':>6s} {'predicted':>9s}  error")
    for l in layouts:
        steps, took = l.steps(), l.measured()
        spread = steps[len(steps) * 3 // 4] / steps[len(steps) // 10]
        said = f"{l.predicted:9.2f} {100 * (l.predicted / took - 1):+6.1f} %" if l.predicted else "        -"
        print(f"{l.name():58s} {took:9.2f} {spread:6.2f} {said}")
    known = [l for l in layouts if l.predicted]
    if not known:
        print("\nno predictions: this plan does not say a step's time")
        return {}
    disturbed = [l.disturbed for l in layouts if l.disturbed > 0.05]
    if disturbed:
        print(f"\n! others had up to {100 * max(disturbed):.0f} % of the processors beside {len(disturbed)} layouts")
    errors = [l.predicted / l.measured() - 1 for l in known]
    out = {"mae": statistics.mean(map(abs, errors)), "bias": statistics.mean(errors), "worst": max(errors, key=abs)}
    mae, bias, worst = (100 * out[k] for k in ("mae", "bias", "worst"))
    print(f"\nmean absolute error {mae:.1f} % (bias {bias:+.1f}, worst {worst:+.1f})")
    for model in MODELS:
        pairs = [(l.predicted, l.measured()) for l in known if l.model == model]
        if pairs:
            order, lost = correlation(pairs), regret(pairs)
            again = [l.halves() for l in known if l.model == model and len(l.rounds) > 1]
            most = correlation(again)
            out[model] = {"rank_correlation": order, "of_measured_with_measured": most, "regret": lost}
            print(
                f"{model:9s} rank correlation {order:.3f} (measured with measured {most:.3f}), "
                f"regret {100 * lost:.1f} % of {len(pairs)} layouts"
            )
    return out


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("--device", default="here.ini")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=22)
    p.add_argument("--only", default="")
    p.add_argument("--json")
    p.add_argument("--with", dest="earlier")
    p.add_argument("--list", action="store_true")
    a = p.parse_args()
    layouts = [Layout(m, *l) for m in MODELS for l in LAYOUTS[m]]
    layouts = [l for l in layouts if a.only in l.name()]
    device = os.path.abspath(a.device)
    if a.list:
        return print("\n".join(l.name() for l in layouts))
    if not os.path.exists(device):
        run([MEGATRAIN, "doctor", "--calibrate", device], ROOT)
    with tempfile.TemporaryDirectory(prefix="megatrain-predict.") as folder:
        make_files(folder)
        if a.earlier:
            with open(a.earlier) as f:
                known = {row["layout"]: row["rounds_ms"] for row in json.load(f)["layouts"]}
            for l in layouts:
                l.rounds += known.get(l.name(), [])
        for l in layouts:
            l.predicted = predict(l, device, folder)
        for r in range(a.rounds):
            for l in layouts[:: -1 if len(layouts[0].rounds) % 2 else 1]:
                measure(l, folder, a.steps)
                print(f"round {r + 1}: {l.name()}", end="\r", file=sys.stderr, flush=True)
    out = report(layouts)
    if a.json:
        rows = [{"layout": l.name(), "rounds_ms": l.rounds, "predicted_ms": l.predicted} for l in layouts]
        with open(a.json, "w") as f:
            json.dump({"load": os.getloadavg(), "processors": os.cpu_count(), **out, "layouts": rows}, f, indent=1)


main()
