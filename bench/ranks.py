"""What ranks cost: tokens a second of two ranks with a thread each beside one rank of two threads, on two cores; of a
pipeline of two beside two data-parallel ranks; and the time that eight ranks take to meet and open their groups. A
section of bench/run.py.

Whole runs of `megatrain` take turns; of each, the step times that it wrote itself, without the first.
"""
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
VOCAB = 50257
MODELS = [  # name, layers, width, heads, micro-batch, context, stages of about the same FLOP
    ("124M B4 T64", 12, 768, 12, 4, 64, "Et*9|t*3L"),
    ("30M B8 T256", 6, 384, 6, 8, 256, "Et*6|L"),
]
DP = ["parallel.zero=1", "parallel.overlap_grad=true", "parallel.overlap_param=true"]
LAYOUTS = [  # name, micro-batches a step of all ranks, keys, aim
    ("dp 2, 16 micro-batches", 16, DP, 0.90),
    ("dp 2, 2 micro-batches", 2, DP, None),
    ("tp 2", 4, ["parallel.tp=2"], 0.75),
]


def write_tokens(path, count, vocab=VOCAB):
    """One document of random ids, in Megatron's format."""
    ids, x = bytearray(), 1
    for _ in range(count):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
        ids += struct.pack("<H", (x >> 33) % vocab)
    with open(path + ".bin", "wb") as f:
        f.write(ids)
    with open(path + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<i", count))
        f.write(struct.pack("<q", 0) + struct.pack("<qq", 0, 1))


def launch(ranks, threads, words):
    """The launched run's stderr; its folder is run.dir of `words`."""
    command = [f"{ROOT}/scripts/launch.sh", "-n", ranks, "--", f"{ROOT}/megatrain", *words]
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive", NO_COLOR="1")
    p = subprocess.run([str(c) for c in command], env=environment, text=True, capture_output=True)
    if p.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit {p.returncode}: {p.stderr[-600:]}")
    return p.stderr


def metrics(folder, ranks, threads, words, steps):
    """What the run wrote of its steps, without the first."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        launch(ranks, threads, [*words, f"train.steps={steps + 1}", f"run.dir={out}/run"])
        with open(f"{out}/run/metrics.jsonl") as f:
            return [json.loads(line) for line in f if '"step_ms"' in line][1:]


def step_ms(*a):
    return [line["step_ms"] for line in metrics(*a)]


def ratio(of, to):
    """How much faster `to` is: best, median."""
    return {"best": min(of) / min(to), "median": statistics.median(of) / statistics.median(to)}


def model_keys(layers, hidden, heads, micro, seq):
    return [f"model.layers={layers}", f"model.hidden={hidden}", f"model.heads={heads}", f"model.seq={seq}",
            f"train.micro_batch={micro}"]


def layouts(folder, rounds, steps):
    rows = []
    for name, *shape, _ in MODELS:
        model, micro = model_keys(*shape), shape[3]
        for layout, micro_batches, keys, aim in LAYOUTS:
            base = ["--config", f"{folder}/ranks.ini", *model, f"train.global_batch={micro * micro_batches}"]
            one, two = [], []
            for _ in range(rounds):
                one += step_ms(folder, 1, 2, base, steps)
                two += step_ms(folder, 2, 1, base + keys, steps)
            ratio = {"best": min(one) / min(two), "median": statistics.median(one) / statistics.median(two)}
            rows.append({"config": name, "layout": layout, "aim": aim, "one_rank_ms": one, "two_ranks_ms": two,
                         **ratio})
            print(f"{name:12} {layout:24} one rank {min(one):8.1f} ms, two {min(two):8.1f}  "
                  f"tokens/s {ratio['best']:.2f} (best) {ratio['median']:.2f} (median)"
                  + (f"  aim {aim}" if aim else ""), flush=True)
    return rows


def pipelines(folder, rounds, steps):
    """1F1B against data parallelism: what is left of its speed when the idle time of the schedule is taken away. The
    bubble is the simulator's, with the costs that the stages had in a step of this run."""
    rows = []
    steps = max(steps, 2)  # the traced step writes its line one step later
    for name, *shape, layout in MODELS:
        base = ["--config", f"{folder}/ranks.ini", *model_keys(*shape), f"train.global_batch={shape[3] * 16}"]
        pp = [f"log.trace_steps={steps}", "parallel.pp=2", "parallel.schedule=1f1b", f"parallel.layout={layout}"]
        dp_ms, pp_ms, bubbles = [], [], []
        for _ in range(rounds):
            dp_ms += step_ms(folder, 2, 1, base + DP, steps)
            lines = metrics(folder, 2, 1, base + pp, steps)
            pp_ms += [line["step_ms"] for line in lines]
            bubbles += [line["bubble_simulated"] for line in lines if "bubble_simulated" in line]
        bubble = statistics.median(bubbles)
        ratio = {"best": min(dp_ms) / min(pp_ms), "median": statistics.median(dp_ms) / statistics.median(pp_ms)}
        rows.append({"config": name, "layout": layout, "aim": 0.9, "dp_ms": dp_ms, "pp_ms": pp_ms,
                     "bubble_simulated": bubble, **ratio})
        print(f"{name:12} pp 2, 1f1b, 16 micro-batches dp 2 {min(dp_ms):8.1f} ms, pp 2 {min(pp_ms):8.1f}  "
              f"tokens/s {ratio['best']:.2f} (best) {ratio['median']:.2f} (median) of dp 2, bubble {bubble:.3f}: "
              f"{ratio['best'] / (1 - bubble):.2f} {ratio['median'] / (1 - bubble):.2f} of what it leaves  aim 0.9",
              flush=True)
    return rows


def start(folder, rounds):
    seconds = []
    words = ["--config", f"{folder}/ranks.ini", "model.layers=2", "model.hidden=64", "model.heads=8", "model.seq=32",
             "train.micro_batch=2", "train.global_batch=8", "train.steps=1", "parallel.tp=4", "parallel.zero=1"]
    for _ in range(3 * rounds):
        with tempfile.TemporaryDirectory(dir=folder) as out:
            seconds.append(float(re.search(r"ready after ([\d.]+) s", launch(8, 1, [*words, f"run.dir={out}/run"]))[1]))
    print(f"8 ranks, tp 4 x dp 2: met, with all groups open, after {min(seconds):.2f} s (best), "
          f"{statistics.median(seconds):.2f} s (median); aim 1 s", flush=True)
    return seconds


def section(rounds, steps):
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(f"{folder}/tokens", 200_000)
        with open(f"{folder}/ranks.ini", "w") as f:
            f.write(f"[run]\ndevice = cpu\n[model]\nvocab = {VOCAB}\n[data]\ntrain = {folder}/tokens\n"
                    "[optim]\nschedule = constant\n[checkpoint]\nevery = 0\n[parallel]\ntimeout_s = 600\n")
        return {"start_s": start(folder, rounds), "layouts": layouts(folder, rounds, steps),
                "pipelines": pipelines(folder, rounds, steps)}
