"""What mixtures of experts cost: tokens a second beside a dense model of the same active FLOP, beside the same mixture
in PyTorch (Debian's and PyPI's newest, the better of eager and compiled; bf16 against its autocast), and of two ranks
that hold the experts together beside two that have them all. A section of bench/run.py.

Whole runs take turns; of each, the step times that it wrote itself, without the first.
"""
import tempfile

from peer import faster, has_torch, newest_ms, newest_torch, print_faster, torch_ms
from ranks import ratio, step_ms, write_tokens

VOCAB, LAYERS, HIDDEN, HEADS, MICRO, SEQ = 2048, 4, 256, 8, 8, 256
MIXTURES = [  # experts, topk, width of an expert
    (8, 2, 512),
    (16, 2, 512),
    (16, 4, 256),
]


def section(rounds, steps):
    debian, newest, rows = has_torch(), newest_torch(), []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(f"{folder}/tokens", 100_000, VOCAB)
        with open(f"{folder}/moe.ini", "w") as f:
            f.write(f"[run]\ndevice = cpu\n[model]\narch = llama\nlayers = {LAYERS}\nhidden = {HIDDEN}\n"
                    f"heads = {HEADS}\nseq = {SEQ}\nvocab = {VOCAB}\n[train]\nmicro_batch = {MICRO}\n"
                    f"[data]\ntrain = {folder}/tokens\n"
                    "[optim]\nschedule = constant\n[checkpoint]\nevery = 0\n[parallel]\ntimeout_s = 600\n")
        for experts, topk, ffn in MIXTURES:
            base = ["--config", f"{folder}/moe.ini"]
            dense = [*base, f"model.ffn={topk * ffn}"]
            mixture = [*base, "model.ffn=512", f"moe.experts={experts}", f"moe.topk={topk}", f"moe.ffn={ffn}"]
            one, two = [f"train.global_batch={MICRO}"], [f"train.global_batch={4 * MICRO}", "parallel.zero=1"]
            narrow = ["run.precision=bf16"]
            peer = (LAYERS, HIDDEN, HEADS, MICRO, SEQ, VOCAB, experts, topk, ffn, steps)
            ms = {"dense": [], "mixture": [], "mixture bf16": [], "ep1": [], "ep2": []}
            for _ in range(rounds):
                ms["dense"] += step_ms(folder, 1, 2, dense + one, steps)
                ms["mixture"] += step_ms(folder, 1, 2, mixture + one, steps)
                ms["mixture bf16"] += step_ms(folder, 1, 2, mixture + one + narrow, steps)
                if debian:
                    ms.setdefault("debian", []).extend(torch_ms("torch_moe.py", *peer))
                newest_ms(ms, newest, "torch_moe.py", *peer)
                ms["ep1"] += step_ms(folder, 2, 1, mixture + two, steps)
                ms["ep2"] += step_ms(folder, 2, 1, [*mixture, *two, "parallel.ep=2"], steps)
            row = {"experts": experts, "topk": topk, "ffn": ffn, "ms": ms,
                   "of_dense": ratio(ms["dense"], ms["mixture"]), "ep2_of_ep1": ratio(ms["ep1"], ms["ep2"]),
                   "over_debian": faster(ms, "mixture", ["debian"]),
                   "over_newest": faster(ms, "mixture", ["eager fp32", "compile fp32"]),
                   "over_newest_bf16": faster(ms, "mixture bf16", ["eager bf16", "compile bf16"])}
            print(f"{topk} of {experts} experts of {ffn:4}: tokens/s of a dense model of the same active FLOP "
                  f"{row['of_dense']['best']:.2f} (best) {row['of_dense']['median']:.2f} (median), aim 0.8; "
                  f"ep 2 of ep 1 "
                  f"{row['ep2_of_ep1']['best']:.2f} {row['ep2_of_ep1']['median']:.2f}, aim 0.8")
            print_faster(row)
            rows.append(row)
    return rows
