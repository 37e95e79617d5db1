#!/usr/bin/env python3
"""What a block with a state costs beside one with attention, by the length of the text; and beside transformers' plain
PyTorch form of the same block.

  bench/states.py [--rounds N] [--lengths T,...] [--python PATH] [--json FILE]     PATH has torch and transformers

One thread, forward and backward of one sequence, fp32. Times are of the processor, not of the clock, so that a machine
that others use disturbs little; calls take turns, and the least of each counts. Ours is half of what a run of three
blocks takes more than one of one block, a step of AdamW on the block's weights with it.
"""
import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile

from ranks import ROOT, write_tokens

HIDDEN, HEADS, FFN, STEPS = 512, 8, 1536, 2
KINDS = {
    "attention": [],
    "delta": ["model.mixer=delta", "model.delta_key_heads=8", "model.delta_key_dim=64"],
    "mamba2": ["model.mixer=mamba2", "model.mamba_heads=16", "model.mamba_state=128"],
    "kda": ["model.mixer=kda", "model.kda_heads=8", "model.kda_head_dim=64"],
}

PEER = r"""
import sys, time, torch
kind, T = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
same = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=8,
            num_key_value_heads=8, vocab_size=256, rms_norm_eps=1e-5, tie_word_embeddings=False)
if kind == "attention":
    from transformers import LlamaConfig, LlamaModel as M
    config = LlamaConfig(**same, max_position_embeddings=T)
elif kind == "delta":
    from transformers import Qwen3NextConfig, Qwen3NextModel as M
    config = Qwen3NextConfig(**same, layer_types=["linear_attention"], num_experts=0, head_dim=64,
                             linear_num_key_heads=8, linear_num_value_heads=8, linear_key_head_dim=64,
                             linear_value_head_dim=64, max_position_embeddings=T)
elif kind == "mamba2":
    from transformers import BambaConfig, BambaModel as M
    config = BambaConfig(**same, attn_layer_indices=[], mamba_n_heads=16, mamba_d_head=64, mamba_n_groups=1,
                         mamba_d_state=128, mamba_expand=2, mamba_chunk_size=128, max_position_embeddings=T)
else:
    from transformers import KimiLinearConfig, KimiLinearModel as M
    config = KimiLinearConfig(**same, layer_types=["linear_attention"], mlp_layer_types=["dense"],
                              linear_head_dim=64, linear_num_heads=8, pad_token_id=0, bos_token_id=0, eos_token_id=0,
                              max_position_embeddings=T)
config._attn_implementation = "sdpa"
config.use_cache = False
layer = M(config).float()
x = torch.randn(1, T, 512, requires_grad=True)
def step():
    layer(inputs_embeds=x).last_hidden_state.sum().backward()
best = 1e9
for i in range(int(sys.argv[3])):
    begin = time.process_time()
    step()
    best = min(best, time.process_time() - begin)
print(best)
"""


def spent(words):
    """Processor seconds of a run of the program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([f"{ROOT}/megatrain", *words], env=dict(os.environ, OMP_NUM_THREADS="1", NO_COLOR="1"),
                          text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit {done.returncode}: {done.stderr[-600:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ours(folder, kind, length):
    """Processor seconds of a step of one block."""
    def run(layers, steps):
        with tempfile.TemporaryDirectory(dir=folder) as out:
            return spent(["--config", f"{folder}/states.ini", *KINDS[kind], f"model.seq={length}",
                          f"model.layers={layers}", f"train.steps={steps}", f"run.dir={out}/run"])
    return (run(3, 1 + STEPS) - run(3, 1) - run(1, 1 + STEPS) + run(1, 1)) / (2 * STEPS)


def theirs(python, kind, length):
    done = subprocess.run([python, "-c", PEER, kind, str(length), "2"], text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"transformers, {kind}: {done.stderr[-600:]}")
    return float(done.stdout)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--lengths", default="1024,4096,16384")
    p.add_argument("--python", default=f"{ROOT}/build/venv-hf/bin/python")
    p.add_argument("--json")
    a = p.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(f"{folder}/tokens", 200_000, 256)
        with open(f"{folder}/states.ini", "w") as f:
            f.write(f"[run]\ndevice = cpu\n[model]\narch = llama\nvocab = 512\nhidden = {HIDDEN}\nheads = {HEADS}\n"
                    f"ffn = {FFN}\n[train]\nmicro_batch = 1\nglobal_batch = 1\n[data]\ntrain = {folder}/tokens\n"
                    "[checkpoint]\nevery = 0\n")
        print("     T kind        ours, ms  PyTorch, ms   ours: tokens/s   of attention's   of PyTorch's", flush=True)
        for length in map(int, a.lengths.split(",")):
            best = {(who, kind): 1e9 for who in ("ours", "theirs") for kind in KINDS}
            for _ in range(a.rounds):
                for kind in KINDS:
                    best["ours", kind] = min(best["ours", kind], ours(folder, kind, length))
                    best["theirs", kind] = min(best["theirs", kind], theirs(a.python, kind, length))
            for kind in KINDS:
                mine, peer = best["ours", kind], best["theirs", kind]
                rows.append({"T": length, "kind": kind, "ours_ms": 1e3 * mine, "torch_ms": 1e3 * peer})
                print(f"{length:6} {kind:10} {1e3 * mine:9.1f} {1e3 * peer:12.1f} {length / mine:16.0f} "
                      f"{best['ours', 'attention'] / mine:16.2f} {peer / mine:14.2f}", flush=True)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
