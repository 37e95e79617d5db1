#!/usr/bin/env python3
"""Writes test/golden/muon.json with torch.optim.Muon (PyTorch 2.9 or newer).

  python3 -m venv v && v/bin/pip install torch numpy && v/bin/python test/tools/golden_muon.py [FILE]

Of each case the weights after STEPS steps, row by row, twice: `bf16` as the package computes them, whose Newton-Schulz
is in bfloat16, from fp32 weights; and `float64`, by the package's own text in which that word is replaced, from float64
weights. Weights and gradients are a formula (test_muon.c has it, too), exact in float32, so only results are stored.
"""
import inspect
import json
import os
import sys

import torch
from torch.optim import _muon

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MASK = 2**64 - 1
STEPS = 4
SCALES = {"shape": "original", "match_rms_adamw": "match_rms_adamw", "unit_rms_norm": "spectral_unclamped"}
CASES = [  # rows, columns, scale, rate, decay, momentum, Nesterov, steps of Newton-Schulz
    (8, 8, "match_rms_adamw", 0.02, 0.1, 0.95, True, 5),
    (12, 30, "shape", 0.05, 0.0, 0.95, True, 5),
    (30, 12, "shape", 0.05, 0.1, 0.9, False, 5),
    (17, 5, "unit_rms_norm", 0.1, 0.1, 0.95, True, 3),
    (24, 40, "match_rms_adamw", 0.01, 0.3, 0.8, True, 7),
]


def uniform(state, low, high):
    state[0] = x = (state[0] + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return low + (high - low) * ((x ^ (x >> 31)) >> 11) * 2.0**-53


def draw(state, rows, columns, size):
    values = [uniform(state, -size, size) for _ in range(rows * columns)]
    return torch.tensor(values, dtype=torch.float64).float().reshape(rows, columns)


def final(case, number, dtype):
    rows, columns, scale, rate, decay, momentum, nesterov, steps = case
    state = [number + 1]
    w = torch.nn.Parameter(draw(state, rows, columns, 0.25).to(dtype))
    optimizer = torch.optim.Muon([w], lr=rate, weight_decay=decay, momentum=momentum, nesterov=nesterov,
                                 ns_steps=steps, adjust_lr_fn=SCALES[scale])
    for _ in range(STEPS):
        w.grad = draw(state, rows, columns, 1).to(dtype)
        optimizer.step()
    return w.detach().flatten().tolist()


def main():
    torch.set_num_threads(1)
    narrow = [final(c, i, torch.float32) for i, c in enumerate(CASES)]
    text = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert text.count("torch.bfloat16") == 1
    exec(text.replace("torch.bfloat16", "torch.float64"), vars(_muon))  # pylint: disable=exec-used
    exact = [final(c, i, torch.float64) for i, c in enumerate(CASES)]
    names = ["rows", "columns", "scale", "rate", "decay", "momentum", "nesterov", "newton_schulz"]
    cases = [dict(zip(names, c), bf16=[round(v, 8) for v in n], float64=[round(v, 11) for v in e])
             for c, n, e in zip(CASES, narrow, exact)]
    path = sys.argv[1] if len(sys.argv) > 1 else f"{ROOT}/test/golden/muon.json"
    with open(path, "w", encoding="utf-8") as f:
        f.write(f'{{"torch": "{torch.__version__}", "steps": {STEPS}, "cases": [\n' +
                ",\n".join(json.dumps(c) for c in cases) + "\n]}\n")


if __name__ == "__main__":
    main()
