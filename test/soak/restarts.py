#!/usr/bin/env python3
"""A run that goes on by itself (run.restarts) under faults: workers of one rank, of two or of half of them are killed,
crash or are stopped, in the middle of steps, saves and of restarts themselves, until there were so many faults. Each run
must end by itself with status 0, with the losses, norms and tensors of the run that nobody disturbed.

  test/soak/restarts.py [--faults N] [--seed S]       by hand; 200 faults take some ten minutes

Faults come at random times, so a seed repeats what is drawn, not where it hits.
"""
import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.environ.get("MEGATRAIN", f"{ROOT}/megatrain")
STEPS, MANY, HANGS_S = 30, 1000, 120
LAYOUTS = [(1, ""), (2, "tp=2"), (2, "pp=2"), (2, "zero=1"), (3, "pp=3 layout=Et|tt|tL"), (4, "tp=2 zero=1"),
           (4, "cp=4 cp_comm=ring"), (4, "pp=4"), (8, "tp=2 pp=2 zero=1"), (8, "tp=2 cp=2 zero=1")]
INI = """[model]
layers = 4
hidden = 32
heads = 4
seq = 32
dropout = 0.1
[parallel]
seq_blocks = 8
attn_block = 4
freeze_s = 2
stall_s = 30
bucket_mb = 1
timeout_s = 60
[train]
micro_batch = 2
global_batch = 16
steps = %d
[optim]
lr = 3e-3
warmup = 2
[data]
train = a
[checkpoint]
every = 2
keep = 3
"""


def lines(run):
    """What the run has written so far, as {step: (loss, norm)}, and its restarts."""
    steps, restarts = {}, 0
    try:
        with open(f"{run}/metrics.jsonl") as f:
            for line in f:
                if not line.endswith("\n"):
                    break
                j = json.loads(line)
                restarts += "restart" in j
                if "loss" in j:
                    steps[j["step"]] = (j["loss"], j["grad_norm"])
    except FileNotFoundError:
        pass
    return steps, restarts


def digest(run):
    done = subprocess.run([PROGRAM, "inspect", f"{run}/checkpoints/step-{STEPS:08d}"], capture_output=True, text=True)
    return re.search(r"^digest +(\S+)", done.stdout, re.M).group(1)


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(p) for p in found]


class Campaign:
    def __init__(self, folder, number, draw):
        self.draw, self.run, self.faults, self.back_s = draw, f"{folder}/run{number}", 0, []
        self.ranks, layout = draw.choice(LAYOUTS)
        words = [f"parallel.{w}" for w in layout.split()] + [f"checkpoint.async={draw.choice(['true', 'false'])}"]
        self.what = f"{self.ranks} ranks {layout}"
        # (each run is a session of its own: nothing of it may be left)
        self.launcher = subprocess.Popen(
            [f"{ROOT}/scripts/launch.sh", "-n", str(self.ranks), "--", PROGRAM, "--config", "run.ini",
             f"run.dir={self.run}", f"run.restarts={MANY}", *words], cwd=folder, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=open(f"{self.run}.err", "w"), env=dict(os.environ, OMP_NUM_THREADS="1"))

    def workers(self):
        supervisors = [p for p in children(self.launcher.pid) if children(p)]
        return [w for p in supervisors for w in children(p)]

    def over(self):
        return self.launcher.poll() is not None

    def wait(self, true):
        begun = time.monotonic()
        while not self.over() and not true():
            if time.monotonic() - begun > HANGS_S:
                self.launcher.send_signal(signal.SIGKILL)
                raise SystemExit(f"FAIL: {self.what} hangs; {self.run}.err")
            time.sleep(0.01)
        return not self.over()

    def fault(self):
        """One fault, and another while the run starts again, perhaps."""
        workers = self.workers()
        if not workers:
            return
        hit = self.draw.sample(workers, min(len(workers), self.draw.choice([1, 1, 2, (self.ranks + 1) // 2])))
        number = self.draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV] +
                                  ([signal.SIGSTOP] if self.ranks > 1 else []))
        for pid in hit:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return
        self.faults += 1

    def disturb(self, most):
        """Up to so many faults, each some time after a step that the run had not done before."""
        known = 0
        while self.faults < most:
            if not self.wait(lambda: len(lines(self.run)[0]) > known):
                return
            time.sleep(self.draw.random() * 0.3)
            steps, before = lines(self.run)
            if max(steps, default=0) >= STEPS - 2:
                return
            begun = time.monotonic()
            self.fault()
            if self.draw.random() < 0.3:
                time.sleep(self.draw.random())
                self.fault()
            known = max(steps, default=0)
            if not self.wait(lambda: lines(self.run)[1] > before):
                return
            first = max(lines(self.run)[0], default=0)
            if self.wait(lambda: max(lines(self.run)[0], default=0) > min(first, known)):
                self.back_s.append(time.monotonic() - begun)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--faults", type=int, default=40)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    draw, faults, back_s, passed, failed = random.Random(a.seed), 0, [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/run.ini", "w") as f:
            f.write(INI % STEPS)
        subprocess.run([PROGRAM, "preprocess", "--input", f"{ROOT}/README.md", "--tokenizer", "byte", "--output", f"{folder}/a"],
                       check=True, capture_output=True)
        calm = f"{folder}/calm"
        subprocess.run([PROGRAM, "--config", "run.ini", f"run.dir={calm}"], cwd=folder, check=True, capture_output=True)
        wanted = lines(calm)[0], digest(calm)
        number = 0
        while faults < a.faults:
            number += 1
            c = Campaign(folder, number, draw)
            c.disturb(min(8, a.faults - faults))
            c.wait(lambda: False)
            steps, restarts = lines(c.run)
            same = c.launcher.returncode == 0 and (steps, digest(c.run)) == wanted
            left = subprocess.run(["pgrep", "-f", c.run], capture_output=True, text=True).stdout.split()
            ok = same and not left
            faults, passed, failed, back_s = faults + c.faults, passed + ok, failed + (not ok), back_s + c.back_s
            print(f"{'ok  ' if ok else 'FAIL'} {c.what}: {c.faults} faults, {restarts} restarts seen, exit "
                  f"{c.launcher.returncode}{'' if not left else ', processes are left'}", flush=True)
            if not ok:
                with open(f"{c.run}.err") as f:
                    print(f.read()[-3000:])
    if back_s:
        print(f"{faults} faults; from a fault to the next step: {statistics.median(back_s):.2f} s in the median, at most "
              f"{max(back_s):.2f} s")
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
