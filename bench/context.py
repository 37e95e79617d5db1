"""What sharing a sequence costs: tokens a second of two ranks that have half of each sequence of 8192 tokens, with a
thread each, beside one rank of two threads, for each way to exchange keys; and the work that attention is on each rank,
in pairs of a query and a key that it sees, cut zigzag and in order. A section of bench/run.py.

Whole runs take turns; of each, the step times that it wrote itself, without the first.
"""
import tempfile

from ranks import ratio, step_ms, write_tokens

VOCAB, LAYERS, HIDDEN, HEADS, SEQ = 2048, 2, 256, 8, 8192
WAYS = ["allgather", "ring", "a2a"]


def pairs(first, count):
    """What `count` queries from position `first` on see under the causal mask."""
    return sum(range(first + 1, first + count + 1))


def balance(cp):
    """Largest share of a rank, relative to the mean: cut zigzag, cut in order."""
    part = SEQ // (2 * cp)
    of = [pairs(i * part, part) for i in range(2 * cp)]
    zigzag = [of[r] + of[2 * cp - 1 - r] for r in range(cp)]
    in_order = [of[2 * r] + of[2 * r + 1] for r in range(cp)]
    return [max(w) * cp / sum(w) for w in (zigzag, in_order)]


def section(rounds, steps):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(f"{folder}/tokens", 200_000, VOCAB)
        with open(f"{folder}/context.ini", "w") as f:
            f.write(f"[run]\ndevice = cpu\n[model]\nlayers = {LAYERS}\nhidden = {HIDDEN}\nheads = {HEADS}\n"
                    f"seq = {SEQ}\nvocab = {VOCAB}\nposition = rope\n[train]\nmicro_batch = 1\nglobal_batch = 1\n"
                    f"[data]\ntrain = {folder}/tokens\n[optim]\nschedule = constant\n[checkpoint]\nevery = 0\n"
                    "[parallel]\ntimeout_s = 600\n")
        base = ["--config", f"{folder}/context.ini"]
        ms = {way: [] for way in ["one", *WAYS]}
        for _ in range(rounds):
            ms["one"] += step_ms(folder, 1, 2, base, steps)
            for way in WAYS:
                ms[way] += step_ms(folder, 2, 1, [*base, "parallel.cp=2", f"parallel.cp_comm={way}"], steps)
    for way in WAYS:
        row = {"way": way, **ratio(ms["one"], ms[way])}
        rows.append(row)
        print(f"cp 2, T {SEQ}, {way:10} {min(ms[way]):8.1f} ms, one rank {min(ms['one']):8.1f}  "
              f"tokens/s {row['best']:.2f} (best) {row['median']:.2f} (median), aim 0.85", flush=True)
    work = {cp: balance(cp) for cp in (2, 4, 8)}
    for cp, (zigzag, in_order) in work.items():
        print(f"cp {cp}: pairs of the busiest rank {zigzag:.3f} of the mean, cut in order {in_order:.3f}", flush=True)
    return {"seq": SEQ, "layers": LAYERS, "hidden": HIDDEN, "ms": ms, "rows": rows, "busiest_of_mean": work}
