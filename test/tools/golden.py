#!/usr/bin/python3
"""Golden values for test_golden.c: tiny models computed by PyTorch in float64.

The model below is written from the definitions (plain autograd, no cache, no fused kernels) and shares nothing
with megatrain but the names and shapes of parameters. Initial weights and tokens are a formula (draw, weight,
tokens below; test_golden.c has the same one), exact in float32, so that nothing but results is stored:

  golden.json       per case: the model, the batch, the optimizer; losses, gradient norms and learning rates of
                    20 steps; the names and shapes of the parameters in plain order
                    AUTOCAST: how near PyTorch's own gradients in bfloat16 come to those in float64
  NAME.grad.f32     gradients of the first step's mean loss, before clipping, parameter after parameter
  NAME.final.f32    weights after the last step, likewise

Usage: /usr/bin/python3 test/tools/golden.py [FOLDER]      (default test/golden; needs torch and numpy)
"""
import json
import math
import os
import sys

try:
    import numpy
    import torch
except ImportError as e:
    print(f"skipped: {e} (Debian: apt-get install python3-torch python3-numpy; run by /usr/bin/python3)")
    sys.exit(77)

MASK = (1 << 64) - 1

# What the two recipes leave between them is in `mixed`; sizes are odd on purpose: vector tails, padded vocabulary.
GPT2 = dict(layers=2, hidden=24, heads=4, kv_heads=4, head_dim=6, ffn=96, seq=24, vocab=71, window=[0, 0],
            learned_positions=True, rope=[0, 0], rms=False, bias=True, tied=True, qk_norm=False, swiglu=False,
            norm_eps=1e-5, rope_base=10000.0)
LLAMA = dict(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=8, ffn=56, seq=24, vocab=71, window=[0, 0],
             learned_positions=False, rope=[1, 1], rms=True, bias=False, tied=False, qk_norm=True, swiglu=True,
             norm_eps=1e-6, rope_base=500.0)
MIXED = dict(layers=1, hidden=24, heads=6, kv_heads=2, head_dim=4, ffn=40, seq=24, vocab=71, window=[7],
             learned_positions=False, rope=[1], rms=False, bias=True, tied=False, qk_norm=True, swiglu=True,
             norm_eps=1e-5, rope_base=10000.0)
# Mixtures: the routers of Mixtral, Qwen3-MoE and DeepSeek-V3 (the last with its first layer dense and a shared expert),
# and one of what is left. `layers`: which blocks are mixtures.
MIXTRAL = dict(LLAMA, qk_norm=False, norm_eps=1e-5, moe=dict(
    experts=8, topk=2, ffn=20, shared_ffn=0, shared_gate=False, router="softmax", normalize=True, scale=1.0, groups=1,
    group_topk=1, layers=[1, 1]))
QWEN3MOE = dict(LLAMA, moe=dict(
    experts=32, topk=8, ffn=10, shared_ffn=0, shared_gate=False, router="softmax_pre", normalize=True, scale=1.0,
    groups=1, group_topk=1, layers=[1, 1]))
DEEPSEEK = dict(LLAMA, qk_norm=False, kv_heads=4, moe=dict(
    experts=32, topk=8, ffn=10, shared_ffn=12, shared_gate=False, router="sigmoid", normalize=True, scale=2.5,
    groups=8, group_topk=4, layers=[0, 1]))
MIXEDMOE = dict(GPT2, bias=False, tied=False, moe=dict(
    experts=6, topk=3, ffn=18, shared_ffn=14, shared_gate=True, router="sqrt_softplus", normalize=False, scale=0.5,
    groups=1, group_topk=1, layers=[1, 0]))
# Attention that differs from block to block: windows of some, and blocks without positions.
PATTERNS = dict(LLAMA, layers=3, window=[5, 5, 0], rope=[1, 1, 0])
# Ways to scale rotary angles, by numbers that leave pairs of each kind in a head this narrow; heads that turn in part.
LINEAR = dict(LLAMA, layers=1, window=[0], rope=[1], rope_columns=4, rope_scaling=dict(kind="linear", factor=3.0))
LLAMA31 = dict(LLAMA, qk_norm=False, head_dim=16, rope_scaling=dict(
    kind="llama3", factor=8.0, original=12.0, slow=0.25, fast=1.5))
YARN = dict(LLAMA, layers=1, window=[0], rope=[1], head_dim=16, rope_columns=12, rope_scaling=dict(
    kind="yarn", factor=4.0, original=6.0, slow=0.05, fast=0.8, magnitude=0.1 * math.log(4) + 1, truncate=True))
# What Gemma 2, gpt-oss and Qwen3-Next have: capped scores and windows; sinks, windows, YaRN without whole pairs and
# experts; a gate and heads that turn in part.
GEMMA = dict(LLAMA, qk_norm=False, layers=6, window=[6] * 5 + [0], rope=[1] * 6, softcap=2.0)
# All of Gemma 2 and 3: norms of what layers give, too, scaled embeddings and scores, capped logits, GeGLU; and another base
# of angles in blocks with a window, beside scaled ones in the others, with a module of multi-token prediction.
GEMMA2 = dict(LLAMA, qk_norm=False, tied=True, window=[6, 0], softcap=2.0, post_norms=True, geglu=True, embed_scale=2.5,
              score_scale=0.2, final_softcap=1.5)
GEMMA3 = dict(LLAMA, layers=3, window=[6, 6, 0], rope=[1] * 3, post_norms=True, geglu=True, embed_scale=3.0, score_scale=0.3,
              local_base=50.0, rope_scaling=dict(kind="linear", factor=3.0), mtp=1, mtp_weight=0.3)
# OLMo 2: norms of what layers give alone, and norms of the queries and of the keys of all heads together.
OLMO2 = dict(LLAMA, heads=6, qk_norm="full", post_norms=True, pre_norms=False)
GPTOSS = dict(LLAMA, qk_norm=False, bias=False, window=[8, 0], sinks=True, moe=MIXTRAL["moe"], rope_scaling=dict(
    kind="yarn", factor=4.0, original=6.0, slow=0.05, fast=0.8, magnitude=0.1 * math.log(4) + 1, truncate=False))
QWEN3NEXT = dict(LLAMA, rope_columns=6, gate=True)
# All of gpt-oss: biases of its linears, of the router and of the experts too, and the clamped activation, with a limit
# that numbers of this size reach.
GPTOSSFULL = dict(GPTOSS, bias=True, limit=0.5)
# Latent attention: without a latent for queries, also with sinks; with biases and a gate on what heads give; and what
# DeepSeek-V3 has besides, experts, YaRN with a scale of scores and a module of multi-token prediction.
MLA = dict(LLAMA, qk_norm=False, kv_heads=4, head_dim=10, window=[7, 0], mla=dict(
    q_rank=0, kv_rank=20, nope=6, rope=4, value=9, mscale_all=0.0))
MLASINKS = dict(MLA, layers=1, window=[7], rope=[1], sinks=True)
MLAGATE = dict(MLA, layers=1, window=[0], rope=[1], bias=True, gate=True, mla=dict(
    q_rank=11, kv_rank=14, nope=6, rope=4, value=9, mscale_all=0.0))
DEEPSEEKV3 = dict(DEEPSEEK, head_dim=14, mtp=1, mtp_weight=0.3, moe=dict(
    DEEPSEEK["moe"], experts=16, topk=4, groups=4, group_topk=2), mla=dict(
    q_rank=17, kv_rank=19, nope=6, rope=8, value=10, mscale_all=1.0), rope_scaling=dict(
    kind="yarn", factor=4.0, original=6.0, slow=0.05, fast=0.8, magnitude=1.0, truncate=True))
# Biases of experts and of a shared one, whose output passes its gate with its bias.
SHAREDBIAS = dict(MIXEDMOE, layers=1, window=[0], rope=[0], bias=True, moe=dict(
    MIXEDMOE["moe"], normalize=True, layers=[1]))
# Multi-token prediction: one module of experts, as DeepSeek-V3's; two, of dense blocks, that share the one table.
MTP = dict(DEEPSEEK, mtp=1, mtp_weight=0.3, moe=dict(
    DEEPSEEK["moe"], experts=8, topk=2, groups=4, group_topk=2))
MTP2 = dict(LLAMA, layers=1, window=[0], rope=[1], rms=False, bias=True, tied=True, mtp=2, mtp_weight=0.5)
# The squared ReLU, in experts and in a dense layer.
RELU2 = dict(LLAMA, qk_norm=False, ffn=40, swiglu=False, relu2=True, moe=dict(
    experts=6, topk=2, ffn=18, shared_ffn=14, shared_gate=False, router="sigmoid", normalize=True, scale=1.5, groups=1,
    group_topk=1, layers=[0, 1]))
# The same over samples of several documents: rows that do not count, but which later rows see; and rows of experts, of
# which a balance loss counts all.
MTPMASK = dict(MTP2, vocab=17, eod=3, mask_eod=True)
MTPRESET = dict(MTP, vocab=17, eod=3, reset_at_eod=True, moe=dict(MTP["moe"], aux=0.5))
# Blocks of one layer each, of attention, experts and a dense layer, and experts that read and write a latent (LatentMoE of
# Nemotron 3), also in a module of multi-token prediction. `mixers`, `ffns`: which blocks have which.
NEMOTRON = dict(RELU2, layers=5, window=[0] * 5, rope=[0] * 5, mixers=[1, 0, 1, 0, 0], ffns=[0, 1, 1, 1, 1], mtp=1,
                mtp_weight=0.3, moe=dict(RELU2["moe"], latent=14, layers=[0, 1, 0, 0, 1]))
GRADIENTS_ONLY = ("mtp", "mtp2", "mtpmask", "mtpreset", "mixed", "mixedmoe", "patterns", "linear", "llama31", "yarn", "gemma", "gptoss",
                  "qwen3next", "mla", "deepseekv3", "gptossfull",
                  "mlasinks", "mlagate", "sharedbias", "gemma2", "gemma3", "olmo2", "relu2", "nemotron")  # no final weights
AUTOCAST = ("gpt2", "llama", "gptoss")  # of these also autocast_errors
AUTOCAST_BATCHES, AUTOCAST_TRIED = 8, 32
BATCH = 4
OPTIM = dict(steps=20, lr=0.01, min_lr=0.001, warmup=3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0)


def mix(x):
    """splitmix64"""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draw(name, i):
    """Element i of tensor `name`: an integer in [-32768, 32767]."""
    h = 0xCBF29CE484222325  # FNV-1a
    for c in name.encode():
        h = ((h ^ c) * 0x100000001B3) & MASK
    return (mix((h + i) & MASK) >> 48) - 32768


def weight(name, shape):
    """Matrices in [-1/4, 1/4), vectors of norms 1 +- 1/4, biases in [-1/8, 1/8)."""
    count = math.prod(shape)
    x = torch.tensor([draw(name, i) for i in range(count)], dtype=torch.float64).reshape(shape)
    if len(shape) == 2:
        return x * 2.0**-17
    return x * 2.0**-18 if name.endswith(".bias") else 1 + x * 2.0**-17


def tokens(sample, m):
    """seq + 1 tokens that are half predictable, so that there is something to learn."""
    t = [mix(sample) % m["vocab"]]
    for i in range(m["seq"]):
        t.append((5 * t[-1] + mix(1000 * (sample + 1) + i) % 4) % m["vocab"])
    return t


def is_mixture(m, layer):
    return "moe" in m and bool(m["moe"]["layers"][layer])


def has(m, layers, i):
    """Has block i a layer of `mixers` or `ffns`?"""
    return layers not in m or bool(m[layers][i])


def shapes(m):
    """Names and plain shapes in megatrain's order of registration."""
    D, V, q, kv = m["hidden"], m["vocab"], m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]
    out = []

    def linear(name, rows, cols, biased=True):
        out.append((name + ".weight", (rows, cols)))
        if m["bias"] and biased:
            out.append((name + ".bias", (rows,)))

    def norm(name, width, rms):
        out.append((name + ".weight", (width,)))
        if not rms:
            out.append((name + ".bias", (width,)))

    def latent_shapes(a, p):
        if a["q_rank"]:
            linear(p + "q_a", a["q_rank"], D)
            norm(p + "q_a_norm", a["q_rank"], True)
        linear(p + ("q_b" if a["q_rank"] else "q"), m["heads"] * (a["nope"] + a["rope"]), a["q_rank"] or D, False)
        linear(p + "kv_a", a["kv_rank"] + a["rope"], D)
        norm(p + "kv_a_norm", a["kv_rank"], True)
        linear(p + "kv_b", m["heads"] * (a["nope"] + a["value"]), a["kv_rank"], False)
        if m.get("sinks"):
            out.append((p + "sinks", (m["heads"],)))
        if m.get("gate"):
            linear(p + "gate", m["heads"] * a["value"], D)
        linear(p + "proj", D, m["heads"] * a["value"])

    def mixer(p):
        if m.get("pre_norms", True):
            norm(p + "norm1", D, m["rms"])
        if "mla" in m:
            latent_shapes(m["mla"], p + "attn.")
        else:
            linear(p + "attn.qkv", q + 2 * kv + (q if m.get("gate") else 0), D)
            if m["qk_norm"]:
                norm(p + "attn.q_norm", q if m["qk_norm"] == "full" else m["head_dim"], True)
                norm(p + "attn.k_norm", kv if m["qk_norm"] == "full" else m["head_dim"], True)
            if m.get("sinks"):
                out.append((p + "attn.sinks", (m["heads"],)))
            linear(p + "attn.proj", D, q)
        if m.get("post_norms"):
            norm(p + "post_norm1", D, m["rms"])

    def feed_forward(p, i):
        if m.get("pre_norms", True):
            norm(p + "norm2", D, m["rms"])
        fc1 = 2 if m["swiglu"] else 1
        if is_mixture(m, i):
            e = m["moe"]
            width = e.get("latent", D)
            out.append((p + "mlp.router.weight", (e["experts"], D)))
            if m["bias"]:
                out.append((p + "mlp.router.logits.bias", (e["experts"],)))
            linear(p + "mlp.experts.fc1", e["experts"] * fc1 * e["ffn"], width)
            linear(p + "mlp.experts.fc2", e["experts"] * width, e["ffn"])
            if "latent" in e:
                linear(p + "mlp.latent_in", width, D, False)
                linear(p + "mlp.latent_out", D, width, False)
            if e["shared_ffn"]:
                linear(p + "mlp.shared.fc1", fc1 * e["shared_ffn"], D)
                linear(p + "mlp.shared.fc2", D, e["shared_ffn"])
            if e["shared_gate"]:
                out.append((p + "mlp.shared_gate.weight", (1, D)))
        else:
            linear(p + "mlp.fc1", fc1 * m["ffn"], D)
            linear(p + "mlp.fc2", D, m["ffn"])
        if m.get("post_norms"):
            norm(p + "post_norm2", D, m["rms"])

    def block(p, i):
        if has(m, "mixers", i):
            mixer(p)
        if has(m, "ffns", i):
            feed_forward(p, i)

    out.append(("embedding.token.weight", (V, D)))
    if m["learned_positions"]:
        out.append(("embedding.position.weight", (m["seq"], D)))
    for i in range(m["layers"]):
        block(f"layers.{i}.", i)
    norm("final_norm", D, m["rms"])
    if not m["tied"]:
        out.append(("head.weight", (V, D)))
    for k in range(m.get("mtp", 0)):
        p = f"mtp.{k}."
        norm(p + "embedding_norm", D, m["rms"])
        norm(p + "hidden_norm", D, m["rms"])
        out.append((p + "proj.weight", (D, 2 * D)))
        block(p, m["layers"] - 1)
        norm(p + "final_norm", D, m["rms"])
    return out


class Model:
    def __init__(self, m, weights=None):
        """weights: name -> float64 tensor in plain order; without, the formula."""
        self.m = m
        self.margin = math.inf  # by how little an expert was chosen before another; 0 would be a coin
        self.w = weights or {name: weight(name, shape).requires_grad_() for name, shape in shapes(m)}

    def linear(self, name, x):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, name, x, rms):
        if not rms:
            x = x - x.mean(-1, keepdim=True)
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.m["norm_eps"]) * self.w[name + ".weight"]
        return y if rms else y + self.w[name + ".bias"]

    def frequencies(self, d, local):
        """Angles of d / 2 pairs at position 1, and what cosines and sines are multiplied by."""
        s, base = self.m.get("rope_scaling"), self.m["rope_base"]
        if local:
            s, base = None, self.m["local_base"]
        plain = base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        if not s:
            return plain, 1
        slowed = plain / s["factor"]
        if s["kind"] == "linear":
            return slowed, 1
        if s["kind"] == "llama3":  # by the length of a turn, as the published code has it
            length = 2 * math.pi / plain
            longest, shortest = s["original"] / s["slow"], s["original"] / s["fast"]
            smooth = (s["original"] / length - s["slow"]) / (s["fast"] - s["slow"])
            between = (1 - smooth) * slowed + smooth * plain
            return torch.where(length > longest, slowed, torch.where(length < shortest, plain, between)), 1
        ends = [d * math.log(s["original"] / (turns * 2 * math.pi)) / (2 * math.log(base))
                for turns in (s["fast"], s["slow"])]
        if s["truncate"]:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], d - 1)
        ramp = ((torch.arange(d // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return slowed * ramp + plain * (1 - ramp), s["magnitude"]

    def rotate(self, x, local=False):
        """x [B, heads, T, C]: of the first d columns (x[i], x[i + d/2]) turned by position * frequency i."""
        C, T = x.shape[-1], x.shape[-2]
        d = self.m.get("rope_columns") or C
        frequency, magnitude = self.frequencies(d, local)
        angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
        wide = next(iter(self.w.values())).dtype
        cos, sin = (angle.cos() * magnitude).to(wide), (angle.sin() * magnitude).to(wide)
        a, b = x[..., :d // 2], x[..., d // 2:d]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., d:]], -1)

    def latent_heads(self, name, x):
        """Latent attention's q, k, v [B, H, T, ...], as in DeepSeek's paper."""
        a, (B, T, _), H = self.m["mla"], x.shape, self.m["heads"]
        c = self.norm(name + ".q_a_norm", self.linear(name + ".q_a", x), True) if a["q_rank"] else x
        q = self.linear(name + (".q_b" if a["q_rank"] else ".q"), c).reshape(B, T, H, -1).transpose(1, 2)
        latent, shared = self.linear(name + ".kv_a", x).split([a["kv_rank"], a["rope"]], -1)
        kv = self.linear(name + ".kv_b", self.norm(name + ".kv_a_norm", latent, True)).reshape(B, T, H, -1)
        k, v = kv.transpose(1, 2).split([a["nope"], a["value"]], -1)
        shared = self.rotate(shared[:, None]).expand(B, H, T, a["rope"])
        return torch.cat([q[..., :a["nope"]], self.rotate(q[..., a["nope"]:])], -1), torch.cat([k, shared], -1), v

    def score_scale(self):
        a, s = self.m.get("mla"), self.m.get("rope_scaling")
        return (0.1 * a["mscale_all"] * math.log(s["factor"]) + 1) ** 2 if a and s else 1

    def heads(self, name, layer, x):
        """q, k, v [B, H, T, ...], rotated, and a gate [B, T, ...] or nothing."""
        m = self.m
        B, T, _ = x.shape
        H, K, C = m["heads"], m["kv_heads"], m["head_dim"]
        if "mla" in m:
            return *self.latent_heads(name, x), self.linear(name + ".gate", x) if m.get("gate") else None
        q, k, v, *gate = self.linear(name + ".qkv", x).split([H * C, K * C, K * C] + [H * C] * m.get("gate", False), -1)
        if m["qk_norm"] == "full":
            q, k = self.norm(name + ".q_norm", q, True), self.norm(name + ".k_norm", k, True)
        q, k, v = (t.reshape(B, T, -1, C) for t in (q, k, v))
        if m["qk_norm"] is True:
            q, k = self.norm(name + ".q_norm", q, True), self.norm(name + ".k_norm", k, True)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if m["rope"][layer]:
            local = "local_base" in m and m["window"][layer] > 0
            q, k = self.rotate(q, local), self.rotate(k, local)
        k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
        return q, k, v, gate[0] if gate else None

    def documents(self, token):
        """[B, T]: the number of a row's document in its sample; with reset_at_eod rows see no other one's."""
        ended = (token == self.m["eod"]).long() if self.m.get("reset_at_eod") else torch.zeros_like(token)
        return ended.cumsum(1) - ended

    def attention(self, name, layer, x):
        m, window = self.m, self.m["window"][layer]
        B, T, _ = x.shape
        H = m["heads"]
        q, k, v, gate = self.heads(name, layer, x)
        score = q @ k.transpose(-1, -2) * m.get("score_scale", self.score_scale() / math.sqrt(q.shape[-1]))
        if m.get("softcap"):
            score = m["softcap"] * torch.tanh(score / m["softcap"])
        behind = torch.arange(T)[:, None] - torch.arange(T)[None, :]
        hidden = behind < 0 if not window else (behind < 0) | (behind >= window)
        hidden = hidden | (self.document[:, None, :, None] != self.document[:, None, None, :])
        score = score.masked_fill(hidden, -math.inf)
        if m.get("sinks"):  # one more column, whose weight goes nowhere
            sink = self.w[name + ".sinks"].reshape(1, H, 1, 1).expand(B, H, T, 1)
            score = torch.cat([score, sink], -1)
        o = (torch.softmax(score, -1)[..., :T] @ v).transpose(1, 2).reshape(B, T, -1)
        return self.linear(name + ".proj", o if gate is None else o * torch.sigmoid(gate))

    def activation(self, h):
        if self.m["swiglu"]:
            gate, up = h.chunk(2, -1)
            if self.m.get("limit"):
                gate, up = gate.clamp(max=self.m["limit"]), up.clamp(-self.m["limit"], self.m["limit"])
                return gate * torch.sigmoid(1.702 * gate) * (up + 1)
            return (self.gelu(gate) if self.m.get("geglu") else gate * torch.sigmoid(gate)) * up
        return torch.relu(h) ** 2 if self.m.get("relu2") else self.gelu(h)

    def gelu(self, h):
        return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))

    def mlp(self, name, x):
        return self.linear(name + ".fc2", self.activation(self.linear(name + ".fc1", x)))

    def score(self, logits):
        return {"softmax": lambda: logits, "softmax_pre": lambda: torch.softmax(logits, -1),
                "sigmoid": lambda: torch.sigmoid(logits),
                "sqrt_softplus": lambda: torch.sqrt(torch.nn.functional.softplus(logits, threshold=1e9))
                }[self.m["moe"]["router"]]()

    def balance(self, logits):
        """Sum over samples of their T rows times their balance loss: aux E / (K T^2) sum of c[e] sum of q[t, e]."""
        e, (_, T, E) = self.m["moe"], logits.shape
        score = self.score(logits)
        load = torch.zeros(score.shape, dtype=score.dtype).scatter(-1, score.topk(e["topk"], -1).indices, 1).sum(1)
        share = (score / score.sum(-1, keepdim=True)).sum(1)
        return e["aux"] * E / (e["topk"] * T) * (load * share).sum()

    def route(self, logits):
        """[B, T, E] -> which experts (bool) and with what weights, both [B, T, E]."""
        e = self.m["moe"]
        score = self.score(logits)
        allowed = score.detach()
        if e["groups"] > 1:
            grouped = allowed.unflatten(-1, (e["groups"], -1))
            best = grouped.topk(e["topk"] // e["group_topk"], -1).values.sum(-1).topk(e["group_topk"], -1).indices
            open_groups = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
            allowed = grouped.masked_fill(~open_groups[..., None], -math.inf).flatten(-2)
        ranked = allowed.sort(-1, descending=True).values
        self.margin = min(self.margin, (ranked[..., e["topk"] - 1] - ranked[..., e["topk"]]).min().item())
        chosen = torch.zeros(score.shape, dtype=torch.bool).scatter(-1, allowed.topk(e["topk"], -1).indices, True)
        self.choices.append(chosen)
        if e["router"] == "softmax":
            weights = torch.softmax(logits.masked_fill(~chosen, -math.inf), -1)
        else:
            weights = score * chosen
            if e["normalize"]:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * e["scale"]

    def mixture(self, name, x):
        """Every expert on every token, and then the weights, most of them 0."""
        e = self.m["moe"]
        width = e.get("latent", x.shape[-1])
        seen = self.linear(name + ".latent_in", x) if "latent" in e else x
        fc1 = self.w[name + ".experts.fc1.weight"].reshape(e["experts"], -1, width)
        fc2 = self.w[name + ".experts.fc2.weight"].reshape(e["experts"], width, -1)
        bias1, bias2 = (self.w[f"{name}.experts.{fc}.bias"].reshape(e["experts"], -1) if self.m["bias"]
                        else torch.zeros(e["experts"], 1) for fc in ("fc1", "fc2"))
        logits = x @ self.w[name + ".router.weight"].T
        if "aux" in e:
            self.balances.append(self.balance(logits))
        _, weights = self.route(logits + self.w[name + ".router.logits.bias"] if self.m["bias"] else logits)
        y = 0
        for i in range(e["experts"]):
            y = y + weights[..., i:i + 1] * (self.activation(seen @ fc1[i].T + bias1[i]) @ fc2[i].T + bias2[i])
        if "latent" in e:
            y = self.linear(name + ".latent_out", y)
        if e["shared_ffn"]:
            shared = self.mlp(name + ".shared", x)
            if e["shared_gate"]:
                shared = torch.sigmoid(x @ self.w[name + ".shared_gate.weight"].T) * shared
            y = y + shared
        return y

    def block(self, p, layer, x):
        """Named p, and like the model's block `layer`."""
        if has(self.m, "mixers", layer):
            x = x + self.behind(p + "post_norm1", self.attention(p + "attn", layer, self.before(p + "norm1", x)))
        if not has(self.m, "ffns", layer):
            return x
        ffn = self.mixture if is_mixture(self.m, layer) else self.mlp
        return x + self.behind(p + "post_norm2", ffn(p + "mlp", self.before(p + "norm2", x)))

    def before(self, name, x):
        return self.norm(name, x, self.m["rms"]) if self.m.get("pre_norms", True) else x

    def behind(self, name, y):
        return self.norm(name, y, self.m["rms"]) if self.m.get("post_norms") else y

    def predicted(self, h, head):
        y, cap = h @ head.T, self.m.get("final_softcap")
        return cap * torch.tanh(y / cap) if cap else y

    def logits(self, token):
        """Of what the head predicts, the next token, and then of each module's, which see tokens further on."""
        m, rms, T = self.m, self.m["rms"], token.shape[1]
        self.document, self.balances, self.choices = self.documents(token), [], []
        table = self.w["embedding.token.weight"]
        head = table if m["tied"] else self.w["head.weight"]
        scale = m.get("embed_scale", 1)
        x = table[token] * scale
        if m["learned_positions"]:
            x = x + self.w["embedding.position.weight"][:T]
        for i in range(m["layers"]):
            x = self.block(f"layers.{i}.", i, x)
        h = self.norm("final_norm", x, rms)
        out = [self.predicted(h, head)]
        for k in range(1, m.get("mtp", 0) + 1):
            p = f"mtp.{k - 1}."
            e = torch.cat([table[token[:, k:]] * scale, torch.zeros_like(h[:, :k])], 1)  # row t: token t + k, at the end none
            joined = torch.cat([self.norm(p + "embedding_norm", e, rms), self.norm(p + "hidden_norm", h, rms)], -1)
            x = self.block(p, m["layers"] - 1, joined @ self.w[p + "proj.weight"].T)
            h = self.norm(p + "final_norm", x, rms)
            out.append(self.predicted(h, head))
        return out

    def counts(self, token, k):
        """[B, T - k]: whether row t, which at depth k predicts the token behind token t + k, is to."""
        T, document = token.shape[1], self.documents(token)
        same = document[:, :T - k] == document[:, k:]
        return same & (token[:, k:] != self.m["eod"]) if self.m.get("mask_eod") else same

    def losses(self, batch):
        """batch [B, seq + 1]; of the head and of each module the mean over its targets, nats, and how many these are."""
        token, losses, counted = batch[:, :-1], [], []
        for k, y in enumerate(self.logits(token)):
            counts = self.counts(token, k)
            losses.append(torch.nn.functional.cross_entropy(y[:, :token.shape[1] - k][counts], batch[:, 1 + k:][counts]))
            counted.append(counts.sum().item())
        return losses, counted

    def trained(self, losses, counted):
        """What gradients are of: losses are summed, and divided by the head's targets."""
        modules = sum(loss * n / counted[0] for loss, n in zip(losses[1:], counted[1:]))
        modules = self.m["mtp_weight"] / self.m["mtp"] * modules if "mtp" in self.m else 0
        return losses[0] + modules + sum(self.balances) / counted[0]


def rate(o, step):
    """Linear warm-up, then half a cosine from lr to min_lr at the last step."""
    if step <= o["warmup"]:
        return o["lr"] * step / o["warmup"]
    r = (step - o["warmup"]) / (o["steps"] - o["warmup"])
    return o["min_lr"] + 0.5 * (1 + math.cos(math.pi * r)) * (o["lr"] - o["min_lr"])


def flat(tensors):
    return numpy.concatenate([t.detach().numpy().ravel() for t in tensors]).astype("<f4")


def train(model, o):
    """torch's own AdamW and clipping. Gives per-step rows and the first step's gradients."""
    params = list(model.w.values())
    groups = [dict(params=[p for p in params if p.ndim == 2], weight_decay=o["weight_decay"]),
              dict(params=[p for p in params if p.ndim == 1], weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(o["beta1"], o["beta2"]), eps=o["eps"])
    rows, first = [], None
    for step in range(1, o["steps"] + 1):
        batch = torch.tensor([tokens((step - 1) * BATCH + b, model.m) for b in range(BATCH)])
        adam.zero_grad()
        losses, counted = model.losses(batch)
        model.trained(losses, counted).backward()
        if first is None:
            first = flat([p.grad for p in params])
        norm = torch.nn.utils.clip_grad_norm_(params, o["clip"])
        for g in adam.param_groups:
            g["lr"] = rate(o, step)
        adam.step()
        rows.append(dict(loss=losses[0].item(), grad_norm=norm.item(), lr=rate(o, step)))
        if len(losses) > 1:
            rows[-1]["mtp_loss"] = [loss.item() for loss in losses[1:]]
        if "eod" in model.m:
            rows[-1]["counted"] = counted[0]
    return rows, first


def first_gradients(m, kind, batch, held=None):
    """Of a batch and the first weights by parameter, and which experts were chosen: computed in float64, or in float32
    under autocast to bfloat16; with all weights as `held` has them."""
    w = {n: weight(n, s).detach().to(held or kind).to(kind).requires_grad_() for n, s in shapes(m)}
    model = Model(m, w)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind != torch.float64):
        losses, counted = model.losses(torch.tensor([tokens(batch * BATCH + b, m) for b in range(BATCH)]))
        loss = model.trained(losses, counted)
    loss.backward()
    return [p.grad.double() for p in w.values()], model.choices


def autocast_errors(m):
    """How far the gradients of a step under autocast are from those in float64: of each parameter the norm of the
    difference by the norm, or by a thousandth of that of all; the median of parameters, and the largest. Autocast reads
    vectors and tables in float32; `rounded`: where they, too, are of 16 bits. Of several batches, since one alone has
    errors that are a fifth smaller or larger; not of those in which autocast chooses another expert, which is no error
    of rounding any more."""
    rows = []
    for batch in range(AUTOCAST_TRIED):
        if len(rows) == AUTOCAST_BATCHES:
            break
        true, choices = first_gradients(m, torch.float64, batch)
        total = math.sqrt(sum((g * g).sum().item() for g in true))

        def errors(held):
            cast, chosen = first_gradients(m, torch.float32, batch, held)
            off = [(c - g).norm().item() / max(g.norm().item(), 1e-3 * total) for c, g in zip(cast, true)]
            same = all(torch.equal(a, b) for a, b in zip(choices, chosen))
            return dict(median=float(numpy.median(off)), largest=max(off)), same
        row, same = errors(None)
        if same:
            rounded, same = errors(torch.bfloat16)
            rows.append(dict(row, batch=batch, **(dict(rounded=rounded) if same else {})))
    return dict(torch=torch.__version__, batches=rows)


def case(folder, name, m):
    model = Model(m)
    rows, first = train(model, OPTIM)
    first.tofile(os.path.join(folder, name + ".grad.f32"))
    if name not in GRADIENTS_ONLY:
        flat(model.w.values()).tofile(os.path.join(folder, name + ".final.f32"))
    print(f"{name}: {first.size} weights, loss {rows[0]['loss']:.6f} -> {rows[-1]['loss']:.6f}, "
          f"norms {min(r['grad_norm'] for r in rows):.3f} to {max(r['grad_norm'] for r in rows):.3f}"
          + (f", experts chosen by {model.margin:.1g} at the least" if "moe" in m else ""))
    out = dict(name=name, model=m, optim=OPTIM, global_batch=BATCH, steps=rows,
               params=[dict(name=n, shape=list(s)) for n, s in shapes(m)])
    return dict(out, autocast=autocast_errors(m)) if name in AUTOCAST else out


def text(c):
    """A case as JSON: one line a member, a step, a parameter."""
    def value(v):
        if isinstance(v, list):
            return "[\n  " + ",\n  ".join(map(json.dumps, v)) + "]"
        return json.dumps(v)
    return "{" + ",\n ".join(f"{json.dumps(k)}: {value(v)}" for k, v in c.items()) + "}"


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..", "golden")
    torch.set_num_threads(1)
    cases = [case(folder, *c) for c in (
        ("gpt2", GPT2), ("llama", LLAMA), ("mixed", MIXED), ("mixtral", MIXTRAL), ("qwen3moe", QWEN3MOE),
        ("deepseek", DEEPSEEK), ("mixedmoe", MIXEDMOE), ("patterns", PATTERNS),
        ("linear", LINEAR), ("llama31", LLAMA31), ("yarn", YARN),
        ("gemma", GEMMA), ("gptoss", GPTOSS), ("qwen3next", QWEN3NEXT),
        ("mtp", MTP), ("mtp2", MTP2), ("mla", MLA), ("deepseekv3", DEEPSEEKV3), ("gptossfull", GPTOSSFULL),
        ("mlasinks", MLASINKS), ("mlagate", MLAGATE), ("sharedbias", SHAREDBIAS),
        ("mtpmask", MTPMASK), ("mtpreset", MTPRESET), ("gemma2", GEMMA2), ("gemma3", GEMMA3),
        ("olmo2", OLMO2), ("relu2", RELU2), ("nemotron", NEMOTRON))]
    with open(os.path.join(folder, "golden.json"), "w") as f:
        f.write("[" + ",\n".join(text(c) for c in cases) + "]\n")


if __name__ == "__main__":
    main()
