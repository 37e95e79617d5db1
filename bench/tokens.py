#!/usr/bin/env python3
"""Tokenizing and training a tokenizer beside the `tokenizers` package, in turns: a section of bench/run.py, and

  bench/tokens.py [--rounds 5] [--mib 4] [--tokenizer FILE.json]... [--out FILE.json]

Encoding is by one thread of each, documents of about 8 kB, into ids; what is timed is the call alone, ours with an
empty cache each time. Training is by as many threads as there are, from text in memory (ours from files), a vocabulary
of 16,000. Without --tokenizer the one that was trained is used, with GPT-2's pattern and with Qwen's and NFC. Text:
what this machine has of prose, code and many scripts (test/tools/texts.py). Ratios above 1: megatrain is faster.
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
PROGRAM = os.path.join(ROOT, os.environ.get("BUILD", "build"), "bench", "bench_tokenizer")
sys.path.insert(0, os.path.join(ROOT, "test", "tools"))
VOCAB = 16000


def documents(text, size=8192):
    docs, lines, have = [], [], 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        have += len(line)
        if have >= size:
            docs.append("".join(lines))
            lines, have = [], 0
    return docs + ["".join(lines)] if lines else docs


def run(*words):
    p = subprocess.run([str(w) for w in words], text=True, capture_output=True)
    if p.returncode:
        sys.exit(f"{words[0]} failed ({p.returncode}): {p.stderr[-400:]}")
    return p.stdout


def ratios(ours, theirs):
    return {"megatrain_s": statistics.median(ours), "package_s": statistics.median(theirs),
            "ratio_median": statistics.median(b / a for a, b in zip(ours, theirs)),
            "ratio_best": min(theirs) / min(ours)}


def encode_rows(path, name, kinds, rounds, folder):
    from tokenizers import Tokenizer
    tokenizer, rows = Tokenizer.from_file(path), []
    for kind, docs in kinds.items():
        size = sum(len(d.encode()) for d in docs)
        file = os.path.join(folder, "docs")
        with open(file, "wb") as f:
            f.write(b"".join(d.encode() + b"\0" for d in docs))
        ours, theirs = [], []
        for _ in range(rounds):
            seconds, count, _ = run(PROGRAM, path, file).split()
            ours.append(float(seconds))
            start = time.perf_counter()
            encoded = tokenizer.encode_batch_fast(docs, add_special_tokens=False)
            theirs.append(time.perf_counter() - start)
            if sum(len(e.ids) for e in encoded) != int(count):
                sys.exit(f"{path}, {kind}: the numbers of ids differ")
        row = {"tokenizer": name, "text": kind, "bytes": size, **ratios(ours, theirs)}
        row["megatrain_mb_s"], row["package_mb_s"] = size / 1e6 / min(ours), size / 1e6 / min(theirs)
        print(f"encode {name:8} {kind:8} {size / 1e6:5.1f} MB  {row['megatrain_mb_s']:6.1f} MB/s, package "
              f"{row['package_mb_s']:6.2f} MB/s (best)  speed {row['ratio_median']:.1f} (median) / "
              f"{row['ratio_best']:.1f} (best)", flush=True)
        rows.append(row)
    return rows


def train_row(texts, rounds, folder, threads):
    import check_tokenizer
    inputs, ours, theirs = [], [], []
    for i, text in enumerate(texts):
        inputs.append(os.path.join(folder, f"text{i}"))
        with open(inputs[-1], "w", newline="") as f:
            f.write(text)
    out = os.path.join(folder, "trained.json")
    words = ["tokenizer", "train", "--vocab-size", VOCAB, "--threads", threads, "--output", out, "--input"]
    for _ in range(rounds):
        start = time.perf_counter()
        run(os.path.join(ROOT, "megatrain"), *words, *inputs)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        check_tokenizer.train_package(texts, VOCAB)
        theirs.append(time.perf_counter() - start)
    row = {"bytes": sum(len(t.encode()) for t in texts), "vocab": VOCAB, "threads": threads, **ratios(ours, theirs)}
    print(f"train {VOCAB} of {row['bytes'] / 1e6:.1f} MB, {threads} threads: {row['megatrain_s']:.2f} s, package "
          f"{row['package_s']:.2f} s (medians)  speed {row['ratio_median']:.1f} (median) / "
          f"{row['ratio_best']:.1f} (best)", flush=True)
    return row, out


def section(rounds, mib=4, chosen=()):
    try:
        import tokenizers
    except ImportError:
        print("the `tokenizers` package is not here (pip install tokenizers): left out")
        return {}
    import check_tokenizer
    import texts
    found = {kind: [t for _, t in texts.of_this_machine(mib * (1 << 20), (kind,))]
             for kind in ("prose", "code", "scripts")}
    kinds = {kind: documents("".join(t)) for kind, t in found.items() if t}
    result = {"package": f"tokenizers {tokenizers.__version__}", "encode": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        result["train"], trained = train_row([t for ts in found.values() for t in ts], rounds, folder, os.cpu_count())
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        mt = check_tokenizer.Megatrain(os.path.join(ROOT, "megatrain"), folder)
        made = [f for f in check_tokenizer.forms(mt, trained) if f[0] in ("gpt2", "qwen")]
        for name, path in [(os.path.basename(os.path.dirname(os.path.abspath(p))), p) for p in chosen] or made:
            result["encode"] += encode_rows(path, name, kinds, rounds, folder)
    return result


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--mib", type=float, default=4)
    ap.add_argument("--tokenizer", action="append", default=[])
    ap.add_argument("--out", default="")
    a = ap.parse_args()
    with open("/proc/cpuinfo") as f:
        cpu = next((line.split(":")[1].strip() for line in f if line.startswith("model name")), "?")
    result = {"date": datetime.date.today().isoformat(), "cpu": cpu, "cores": os.cpu_count(),
              "libraries": run(os.path.join(ROOT, "megatrain"), "--version").splitlines(),
              "tokens": section(a.rounds, a.mib, a.tokenizer)}
    if a.out:
        with open(a.out, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
