"""What latent attention costs: the time of a step beside that of a model of the same width with multi-head attention,
and beside what its FLOP (those of all ops, of `megatrain plan`) make of that. A section of bench/run.py.

Whole runs of one rank take turns; of each, the step times that it wrote itself, without the first.
"""
import json
import tempfile

from peer import run
from ranks import ROOT, model_keys, ratio, step_ms, write_tokens

VOCAB, SHAPE = 2048, (4, 512, 8, 2, 512)
LATENT = ["model.attention=mla", "model.kv_lora_rank=128", "model.qk_nope_head_dim=32", "model.qk_rope_head_dim=32",
          "model.v_head_dim=64"]
WAYS = {"mha": [], "mla": [*LATENT, "model.q_lora_rank=0"], "mla, latent queries": [*LATENT, "model.q_lora_rank=256"]}


def section(rounds, steps):
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(f"{folder}/tokens", 100_000, VOCAB)
        with open(f"{folder}/latent.ini", "w") as f:
            f.write(f"[run]\ndevice = cpu\n[model]\narch = llama\nvocab = {VOCAB}\n[train]\nglobal_batch = 2\n"
                    f"[data]\ntrain = {folder}/tokens\n[optim]\nschedule = constant\n[checkpoint]\nevery = 0\n")
        base = ["--config", f"{folder}/latent.ini", *model_keys(*SHAPE)]
        plans = {way: json.loads(run([f"{ROOT}/megatrain", "plan", "--json", *base, *keys]))
                 for way, keys in WAYS.items()}
        flop = {way: sum(rank["flop"] for rank in plan["ranks"]) for way, plan in plans.items()}
        ms = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, keys in WAYS.items():
                ms[way] += step_ms(folder, 1, 2, [*base, *keys], steps)
    rows = []
    for way in list(WAYS)[1:]:
        row = {"way": way, "of_mha": ratio(ms["mha"], ms[way]), "flop_of_mha": flop[way] / flop["mha"]}
        row["rate_of_mha"] = {k: x * row["flop_of_mha"] for k, x in row["of_mha"].items()}
        rows.append(row)
        print(f"{way:20} {min(ms[way]):8.1f} ms, mha {min(ms['mha']):8.1f}  FLOP {row['flop_of_mha']:.3f} of mha's, "
              f"FLOP/s of mha's {row['rate_of_mha']['best']:.2f} (best) {row['rate_of_mha']['median']:.2f} (median), "
              "aim 1", flush=True)
    return {"shape": SHAPE, "ms": ms, "flop": flop, "rows": rows}
