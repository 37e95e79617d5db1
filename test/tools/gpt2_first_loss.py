#!/usr/bin/python3
"""The first loss of GPT-2 124M against PyTorch in float64, with megatrain's own initial weights.

Runs build/test/tools/first_loss (test/first_loss.sh builds it), which writes the initial weights and prints
megatrain's loss, and computes the same loss with the model of golden.py. Both must agree within 1e-7 of the loss,
and lie within 0.1 of ln V + D std^2 / 2, what random logits of that variance give.

Usage: /usr/bin/python3 test/tools/gpt2_first_loss.py [PATH OF first_loss] [CONFIG.ini] [section.key=value ...]
Exit: 0 equal, 1 not, 77 skipped (no torch, or first_loss is not built).
"""
import json
import math
import os
import struct
import subprocess
import sys
import tempfile

import golden  # says what is missing and exits 77 without torch
import numpy
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
CLOSE = 1e-7  # relative; 3e-9 is seen
SAMPLE = ["train.micro_batch=1", "train.global_batch=1", "model.seq=64"]  # on top of the configuration


def read_safetensors(path):
    dtypes = {"F32": "<f4", "I32": "<i4"}
    with open(path, "rb") as f:
        length, = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
        data = f.read()
    out = {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            x = numpy.frombuffer(data, dtypes[t["dtype"]], (end - begin) // 4, begin)
            out[name] = torch.from_numpy(x.reshape(t["shape"]).copy())
    return out


def first_loss(program, config, overrides):
    """megatrain's result and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "weights.safetensors")
        done = subprocess.run([program, path, config, *overrides], stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout), read_safetensors(path)


def main():
    args = sys.argv[1:]
    program = args[0] if args else os.path.join(HERE, "..", "..", "build", "test", "tools", "first_loss")
    config = args[1] if len(args) > 1 else os.path.join(HERE, "..", "..", "config", "gpt2-124m.ini")
    if not os.path.exists(program):
        print(f"skipped: {program} is not built (make build/test/tools/first_loss)")
        return 77
    m, tensors = first_loss(program, config, SAMPLE + args[2:])
    batch = tensors.pop("tokens").long()
    missing = [name for name, shape in golden.shapes(m) if tuple(tensors[name].shape) != tuple(shape)]
    assert not missing and len(golden.shapes(m)) == len(tensors), f"other parameters: {missing}"
    with torch.no_grad():
        want = golden.Model(m, {name: t.double() for name, t in tensors.items()}).losses(batch)[0][0].item()
    theory = math.log(m["vocab"]) + m["hidden"] * m["init_std"]**2 / 2
    off = abs(m["loss"] - want) / want
    print(f"{m['params']} weights, {batch.numel() - len(batch)} tokens: megatrain {m['loss']:.9f}, torch {want:.9f} "
          f"(relative difference {off:.2g}, allowed {CLOSE:g}); ln V + D std^2/2 = {theory:.4f} "
          f"(off by {abs(want - theory):.4f}, allowed 0.1)")
    return 0 if off <= CLOSE and abs(m["loss"] - theory) <= 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
