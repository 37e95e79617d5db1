"""How bench/run.py and its sections run programs and PyTorch, the peer: with two threads, and malloc told to keep its
memory, which is the faster way to run PyTorch: Debian's (python3-torch under /usr/bin/python3), and for whole steps and
mixtures PyPI's, too (torch_here.py)."""
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON = "/usr/bin/python3"
NEWEST = [(way, precision) for precision in ("fp32", "bf16") for way in ("eager", "compile")]  # of PyPI's
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}


def run(command, **env):
    environment = dict(os.environ, OMP_NUM_THREADS="2", **env)
    p = subprocess.run([str(c) for c in command], env=environment, text=True, capture_output=True)
    if p.returncode:
        sys.exit(f"{command[0]} failed ({p.returncode}): {p.stderr[-400:]}")
    return p.stdout


def step_times(text, start="step "):
    """Milliseconds of the steps after the first, in lines that begin so."""
    return [float(line.split(" ms ")[1]) for line in text.splitlines() if line.startswith(start)][1:]


def has_torch():
    if subprocess.run([PYTHON, "-c", "import torch"], capture_output=True).returncode == 0:
        return True
    print("PyTorch is not here (apt-get install python3-torch): its columns are left out")
    return False


def newest_torch():
    """The python of PyPI's PyTorch; None, saying so, where it cannot be had."""
    made = subprocess.run([sys.executable, os.path.join(HERE, "torch_here.py")], capture_output=True, text=True)
    if made.returncode == 0:
        return made.stdout.split()[-1]
    print(f"PyPI's PyTorch is not to be had, its columns are left out: {made.stderr.strip()[-300:]}")
    return None


def torch_ms(script, *words, python=PYTHON):
    """Milliseconds of its steps after the first."""
    return step_times(run([python, os.path.join(HERE, script), *words], **KEEP))


def newest_ms(times, python, script, *words):
    """Adds to `times` what PyPI's PyTorch takes for it: each way, in fp32 and under autocast."""
    for way, precision in NEWEST if python else []:
        times.setdefault(f"{way} {precision}", []).extend(torch_ms(script, *words, way, precision, python=python))


def faster(times, ours, theirs):
    """By which factor `ours` is faster than the best of `theirs`: of best steps, and of medians."""
    peers = [p for p in theirs if p in times]
    if not peers:
        return None
    return {"best": min(min(times[p]) for p in peers) / min(times[ours]),
            "median": min(statistics.median(times[p]) for p in peers) / statistics.median(times[ours])}


def print_faster(row):
    """What `faster` gave for the row's names with "over_" in them and a peer."""
    for name, factor in row.items():
        if "over_" in name and isinstance(factor, dict):
            print(f"  speed {name:18} {factor['best']:.2f} / {factor['median']:.2f}", flush=True)
