#!/usr/bin/env python3
"""The peer of bench_step: the same GPT-2-shaped training step in PyTorch on the CPU.

  torch_gpt.py LAYERS HIDDEN HEADS BATCH SEQ STEPS [eager|compile] [fp32|bf16]

Random tokens, learned positions, biases, tied head, GELU (tanh), AdamW, clip at 1.0, no dropout. bf16: under autocast.
Prints one line a step and a closing JSON line. Uses scaled_dot_product_attention and fused AdamW where this PyTorch
has them.
"""
import contextlib
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 50257
PADDED = 50304  # a multiple of 64 is faster for the product


def attention(q, k, v, hidden):
    """[batch, heads, seq, columns]; hidden [seq, seq]: what a row does not see."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return scores.masked_fill(hidden[: q.shape[2], : q.shape[2]], float("-inf")).softmax(dim=-1) @ v


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x, hidden):
        batch, seq, width = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        return self.proj(attention(q, k, v, hidden).transpose(1, 2).reshape(batch, seq, width))

    def forward(self, x, hidden):
        x = x + self.attend(self.norm1(x), hidden)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), **GELU))


try:
    F.gelu(torch.zeros(1), approximate="tanh")
    GELU = {"approximate": "tanh"}
except TypeError:
    GELU = {}


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, seq):
        super().__init__()
        self.token, self.position = nn.Embedding(PADDED, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        self.register_buffer("hidden", torch.ones(seq, seq, dtype=torch.bool).triu(1))

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.hidden)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model):
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    try:
        return torch.optim.AdamW(model.parameters(), fused=True, **settings)
    except (TypeError, RuntimeError, AssertionError):  # an older one, which fuses on a GPU alone
        return torch.optim.AdamW(model.parameters(), **settings)


def train(model, vocab, batch, seq, steps, ways):
    """Random tokens, AdamW, clip at 1.0; `ways` are words of the command line. Prints one line a step and a closing
    JSON line."""
    autocast = contextlib.nullcontext
    if "compile" in ways:
        model = torch.compile(model)
    if "bf16" in ways:
        def autocast():
            return torch.autocast("cpu", dtype=torch.bfloat16)
    optimizer = adamw(model)
    ms = []
    for step in range(steps + 1):
        data = torch.randint(0, vocab, (batch, seq + 1))
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        took = 1e3 * (time.perf_counter() - start)
        print(f"step {step} loss {value:.4f} ms {took:.1f}", flush=True)
        if step:
            ms.append(took)
    print(json.dumps({"peer": "torch-" + torch.__version__, "ms": round(statistics.median(ms), 1),
                      "min_ms": round(min(ms), 1), "tok_s": round(batch * seq / statistics.median(ms) * 1e3, 1)}))


def main():
    layers, width, heads, batch, seq, steps = (int(a) for a in sys.argv[1:7])
    torch.manual_seed(0)
    torch.set_num_threads(2)
    train(Gpt(layers, width, heads, seq), VOCAB, batch, seq, steps, sys.argv[7:])


if __name__ == "__main__":
    main()
