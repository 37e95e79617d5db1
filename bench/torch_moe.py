#!/usr/bin/env python3
"""The peer of bench/mixtures.py: the same mixture of experts in PyTorch on the CPU: tokens of an expert are picked by
index, multiplied, and added where they came from.

  torch_moe.py LAYERS HIDDEN HEADS BATCH SEQ VOCAB EXPERTS TOPK FFN STEPS [eager|compile] [fp32|bf16]

Random tokens, rotary positions, RMSNorm, SwiGLU experts, a softmax over the chosen logits, tied head, AdamW, clip at
1.0. bf16: under autocast. Prints one line a step and a closing JSON line.
"""
import sys

import torch
import torch.nn.functional as F
from torch import nn

from torch_gpt import attention, train


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Mixture(nn.Module):
    def __init__(self, width, experts, topk, ffn):
        super().__init__()
        self.topk = topk
        self.router = nn.Linear(width, experts, bias=False)
        self.fc1 = nn.Parameter(torch.randn(experts, 2 * ffn, width) * 0.02)
        self.fc2 = nn.Parameter(torch.randn(experts, width, ffn) * 0.02)

    def forward(self, x):
        rows = x.flatten(0, 1)
        weight, index = self.router(rows).topk(self.topk, dim=-1)
        weight = weight.softmax(dim=-1)
        out = torch.zeros_like(rows)
        for e in range(self.fc1.shape[0]):
            token, choice = torch.where(index == e)
            gate, up = F.linear(rows[token], self.fc1[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.fc2[e])
            out = out.index_add(0, token, (y * weight[token, choice, None]).to(out.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, width, heads, experts, topk, ffn):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mixture = Mixture(width, experts, topk, ffn)

    def attend(self, x, cos, sin, hidden):
        batch, seq, width = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        return self.proj(attention(q, k, v, hidden).transpose(1, 2).reshape(batch, seq, width))

    def forward(self, x, cos, sin, hidden):
        x = x + self.attend(self.norm1(x), cos, sin, hidden)
        return x + self.mixture(self.norm2(x))


def turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Model(nn.Module):
    def __init__(self, layers, width, heads, seq, vocab, experts, topk, ffn):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts, topk, ffn) for _ in range(layers))
        self.norm = Norm(width)
        half = width // heads // 2
        angle = torch.arange(seq)[:, None] * 10000.0 ** -(torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("hidden", torch.ones(seq, seq, dtype=torch.bool).triu(1))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.hidden)
        return F.cross_entropy(F.linear(self.norm(x), self.token.weight).flatten(0, 1), targets.flatten())


def main():
    layers, width, heads, batch, seq, vocab, experts, topk, ffn, steps = (int(a) for a in sys.argv[1:11])
    torch.manual_seed(0)
    torch.set_num_threads(2)
    train(Model(layers, width, heads, seq, vocab, experts, topk, ffn), vocab, batch, seq, steps,
          sys.argv[11:])


if __name__ == "__main__":
    main()
