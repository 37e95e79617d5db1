"""What one busy neighbour costs a run of one process: steps of whole runs, alone and beside processes that spin on one
core and on each, with the waits and threads of a plain start ("now"), with libgomp's own ("before": 300,000 spins, a
thread a core) and with waits that sleep at once ("asleep"). The ways take turns. A section of bench/run.py.

    bench/run.py --only neighbour

Wall times say what a user sees, and mean something on a machine that is else idle: `now_over_before` alone is what
bounded spinning costs there, beside neighbours what it saves. Processor seconds (`cpu_s` a step) hardly depend on what
else the machine does, and show what the waits burn. `sleeps` a step, times what a wake-up takes (65 to 80 us here), is
at most what bounded spinning costs on a quiet machine, and does not vary as wall times do.
"""
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

import ranks

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
CORES = len(os.sched_getaffinity(0))
VOCAB = 257
MODELS = [  # name, layers, width, heads, micro-batch, context, steps for one of --steps
    ("2 of 64, B4 T32", 2, 64, 4, 4, 32, 40),
    ("4 of 192, B8 T128", 4, 192, 4, 8, 128, 4),
    ("6 of 384, B8 T256", 6, 384, 6, 8, 256, 1),
]
WAYS = {
    "now": {},
    "before": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": str(CORES)},
    "asleep": {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(CORES)},
}


def one_run(folder, way, words, steps):
    """Milliseconds of its steps, without the first; processor seconds and waits that slept of a step, the start's among
    them."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        p = subprocess.run([f"{ROOT}/megatrain", *words, f"train.steps={steps + 1}", f"run.dir={out}/run"],
                           env=dict(clean, NO_COLOR="1", **WAYS[way]), text=True, capture_output=True)
        if p.returncode:
            sys.exit(f"{way}: exit {p.returncode}: {p.stderr[-600:]}")
        with open(f"{out}/run/metrics.jsonl") as f:
            times = [json.loads(line)["step_ms"] for line in f if '"step_ms"' in line][1:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return times, used / (steps + 1), (after.ru_nvcsw - before.ru_nvcsw) / (steps + 1)


class Neighbours:
    """A process that spins on each of the cores, or none."""

    def __init__(self, count):
        self.count, self.processes = count, []

    def __enter__(self):
        for core in sorted(os.sched_getaffinity(0))[:self.count]:
            self.processes.append(subprocess.Popen(
                [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"]))

    def __exit__(self, *_):
        for p in self.processes:
            p.kill()
            p.wait()


def measure(folder, name, shape, busy, rounds, steps):
    words = ["--config", f"{folder}/neighbour.ini", *ranks.model_keys(*shape), f"train.global_batch={shape[3]}"]
    times, used, slept = ({way: [] for way in WAYS} for _ in range(3))
    with Neighbours(busy):
        for _ in range(rounds):
            for way in WAYS:
                t, seconds, sleeps = one_run(folder, way, words, steps)
                times[way] += t
                used[way].append(seconds)
                slept[way].append(sleeps)
    median = {way: statistics.median(t) for way, t in times.items()}
    row = {"config": name, "neighbours": busy, "best_ms": {way: min(t) for way, t in times.items()},
           "median_ms": median, "cpu_s": {way: statistics.median(s) for way, s in used.items()},
           "sleeps": {way: statistics.median(n) for way, n in slept.items()},
           # neighbouring runs: what else the machine does hits both alike
           "now_over_before": statistics.median(a / b for a, b in zip(times["now"], times["before"])),
           "now_over_asleep": statistics.median(a / b for a, b in zip(times["now"], times["asleep"]))}
    ways = ", ".join(f"{way} {median[way]:.1f} ms ({1e3 * row['cpu_s'][way]:.0f} ms of processors, "
                     f"{row['sleeps'][way]:.0f} sleeps)" for way in WAYS)
    print(f"{name:18} beside {busy}: {ways}; now / before {row['now_over_before']:.3f}, "
          f"now / asleep {row['now_over_asleep']:.3f}", flush=True)
    return row


def section(rounds, steps):
    with tempfile.TemporaryDirectory() as folder:
        ranks.write_tokens(f"{folder}/tokens", 200_000, VOCAB)
        with open(f"{folder}/neighbour.ini", "w") as f:
            f.write(f"[run]\ndevice = cpu\n[model]\nvocab = {VOCAB}\n[data]\ntrain = {folder}/tokens\n"
                    "[optim]\nschedule = constant\n[checkpoint]\nevery = 0\n")
        return [measure(folder, name, shape, busy, rounds, more * steps)
                for name, *shape, more in MODELS for busy in (0, 1, CORES)]
