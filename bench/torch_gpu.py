#!/usr/bin/env python3
"""The peer of bench/cuda/steps.c: the same GPT-2-shaped training step in PyTorch on one GPU, as fast as PyTorch
goes without kernels of its own: torch.compile, scaled_dot_product_attention, fused AdamW, bf16.

  torch_gpu.py MODEL [--steps N] [--mode default|max-autotune-no-cudagraphs|...] [--json FILE] [--cpu]
      MODEL   124m, 350m, 1.3b, tiny, or LAYERS,HIDDEN,HEADS,BATCH,SEQ

Learned positions, biases, tied head, GELU (tanh), clip at 1.0, no dropout, lr 1e-4. Weights and moments are fp32,
activations and what products read bf16 (autocast), as megatrain's masters and copies are. The tokens are the very
ones of steps.c. A step ends when the host has its loss. --cpu: for trying the script, not for figures.
"""
import argparse
import contextlib
import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

MODELS = {"124m": (12, 768, 12, 64, 1024), "350m": (24, 1024, 16, 32, 1024), "1.3b": (24, 2048, 16, 8, 2048),
          "tiny": (2, 64, 2, 2, 64)}
PEAKS = [("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989), ("H200", 989), ("H800", 989), ("GH200", 989),
         ("H20", 148), ("A100", 312), ("A800", 312), ("GB200", 2500), ("B200", 2250), ("RTX 4090", 165.2),
         ("RTX 5090", 209.5), ("RTX PRO 6000", 500)]  # dense bf16 TFLOP/s by the datasheets
WARM_UP = 5
TOKEN_STRIDE = 1000003


def mix(x):
    """splitmix64 of a list of integers, as rng_mix of src/base/rng.h; int64 arithmetic wraps as uint64 does."""
    def signed(v):
        return v - (1 << 64) if v >= 1 << 63 else v

    def right(v, n):  # logical
        return (v >> n) & ((1 << (64 - n)) - 1)

    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ right(x, 31)


def tokens(first, batch, seq, vocab):
    """Tokens [batch, seq + 1] of samples first, first + 1, ...: rng_mix(sample * stride + i) % vocab, unsigned."""
    i = torch.arange(first, first + batch)[:, None] * TOKEN_STRIDE + torch.arange(seq + 1)[None, :]
    x = mix(i)
    high, low = (x >> 32) & 0xFFFFFFFF, x & 0xFFFFFFFF
    return (high % vocab * (2**32 % vocab) + low) % vocab


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, seq, padded):
        super().__init__()
        self.token, self.position = nn.Embedding(padded, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "fc2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, inputs, targets):
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_for(model, device):
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    fused = {"fused": True} if device == "cuda" else {}
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, **fused)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--mode", default="default")
    ap.add_argument("--json", default="")
    ap.add_argument("--cpu", action="store_true")
    a = ap.parse_args()
    try:
        layers, width, heads, batch, seq = MODELS.get(a.model) or (int(v) for v in a.model.split(","))
    except ValueError:
        sys.exit(f"torch_gpu.py: no model '{a.model}'")
    device = "cpu" if a.cpu else "cuda"
    if not a.cpu and not torch.cuda.is_available():
        sys.exit("torch_gpu.py: this PyTorch sees no GPU")
    vocab = 257 if a.model == "tiny" else 50257
    padded = (vocab + 127) // 128 * 128
    torch.manual_seed(1)
    model = Gpt(layers, width, heads, seq, padded).to(device)
    optimizer = optimizer_for(model, device)
    params = sum(p.numel() for p in model.parameters()) - (padded - vocab) * width
    step_loss = model if a.cpu else torch.compile(model, mode=a.mode)
    cast = contextlib.nullcontext() if a.cpu else torch.autocast("cuda", torch.bfloat16)
    if not a.cpu:
        torch.set_float32_matmul_precision("high")
    ms, losses = [], []
    for step in range(WARM_UP + a.steps):
        data = tokens(step * batch, batch, seq, vocab)
        start = time.perf_counter()
        data = data.to(device) if a.cpu else data.pin_memory().to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with cast:
            loss = step_loss(data[:, :-1], data[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step >= WARM_UP:
            ms.append(1e3 * (time.perf_counter() - start))
    name = "cpu" if a.cpu else torch.cuda.get_device_name()
    peak = next((p * 1e12 for part, p in PEAKS if part in name), None)
    median = statistics.median(ms)
    per_s, flop = batch * seq / median * 1e3, 6 * params + 12 * layers * width * seq
    result = {"peer": "torch " + torch.__version__, "device": name, "model": a.model, "mode": a.mode, "params": params,
              "ms": round(median, 3), "least_ms": round(min(ms), 3), "tokens_s": round(per_s, 1),
              "mfu": round(flop * per_s / peak, 4) if peak else None,
              "memory_bytes": None if a.cpu else torch.cuda.max_memory_reserved(),
              "first_loss": losses[0], "last_loss": losses[-1]}
    text = json.dumps(result)
    print(text)
    if a.json:
        with open(a.json, "w") as f:
            f.write(text + "\n")


if __name__ == "__main__":
    main()
