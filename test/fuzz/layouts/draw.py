"""
Draws cases. The layout comes first, then a model that it can cut, so that most draws are legal; what is drawn by
mistake is a trial of refusals (refusal.py). The rules are those of src/config (config.def, config_check*.c)
and src/pipeline/table.c, but as a way to make numbers that fit, never as a test of them: what is legal the program says.
"""
import random

import published
import states
from case import Case

RANKS_MAX = 8
BLOCKS = {"parallel.tp_blocks", "parallel.seq_blocks", "parallel.attn_block"}  # facts of the model
FLAG = ("true", "false")
SPLIT = {"gpipe", "1f1b", "eager-1f1b", "seq1f1b", "interleaved", "bfs", "chimera", "chimera-fdouble", "chimera-bhalf",
         "gems", "hanayo", "dualpipe", "dualpipe-serial", "dualpipev", "dualpipev-serial", "pipedream", "2bw"}
TWO_WAY = {"chimera", "chimera-fdouble", "chimera-bhalf", "gems", "dualpipe", "dualpipe-serial"}
PAIRS = {"dualpipe", "dualpipev"}
WAVES = {"zb-v", "v-half", "v-min", "hanayo", "dualpipev", "dualpipev-serial"}
MANY = {"interleaved", "bfs", "zb-h1-int"}
ONE_WAY = ["gpipe", "1f1b", "eager-1f1b", "seq1f1b", "zb-h1", "zb-h2"]
ASYNC = ["pipedream", "pipedream-vertical", "2bw"]
IN_ORDER = {"gpipe", "1f1b", "eager-1f1b", "seq1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "hanayo"}
SCHEDULES = ONE_WAY + sorted(MANY) + sorted(WAVES) + sorted(TWO_WAY) + ASYNC


def power_of_two(n):
    return n & (n - 1) == 0


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


OTHERWISE = {  # values that a key is given at random, to be refused or not
    "parallel.tp": (3, 4, 5, 8), "parallel.pp": (3, 4), "parallel.cp": (3, 4, 5, 8), "parallel.ep": (3, 4, 5),
    "parallel.etp": (2, 3, 8), "parallel.slices": (2, 3, 5, 8, 64), "parallel.cp_heads": (2, 3, 4),
    "parallel.cp_comm": ("ring", "a2a", "hierarchical", "ring,a2a"), "parallel.sp": FLAG, "parallel.vpp": (2, 3),
    "parallel.group": (1, 3), "parallel.seq_blocks": (1, 2, 3, 16), "parallel.tp_blocks": (1, 3, 16),
    "parallel.attn_block": (3, 64), "parallel.overlap_moe": ("true",), "parallel.overlap_tp": (2, 3),
    "parallel.order": ("tp-cp-ep-pp-dp",),
    "parallel.schedule": SCHEDULES, "parallel.layout": ("Et|tL", "E|ttL", "Ettt|L"), "train.micro_batch": (1, 2, 3, 4),
    "train.global_batch": (1, 6, 12), "model.layers": (1, 2, 5), "model.seq": (15, 24, 48), "model.heads": (3, 5),
    "model.kv_heads": (2, 5), "model.ffn": (7, 12), "model.mixer": ("delta", "delta,attention", "attention*9,delta"),
    "model.delta_key_heads": (1, 3, 6), "model.delta_value_heads": (1, 4, 5), "model.mtp_layers": (1,), "model.position": ("learned", "none"),
    "model.qk_norm": ("true", "full"), "model.block_norms": ("both", "post"), "moe.experts": (3, 4), "moe.topk": (1, 3, 9), "moe.groups": (2, 3),
    "moe.group_topk": (2, 3), "moe.unit": (2, 3), "moe.capacity": (0, 1), "moe.drop": ("position",),
    "moe.balance": ("none", "aux", "seq_aux", "global_aux", "bias", "sinkhorn", "forced"), "moe.aux_coeff": (0, 0.1),
    "moe.jitter": (0.1,), "moe.router": ("softmax", "sigmoid"), "moe.normalize": FLAG, "moe.shared_ffn": (3, 8),
    "moe.shared_gate": ("true",), "moe.pad": ("true",), "moe.slack": (0.5,), "moe.overflow": ("redo", "drop"),
    "moe.every": ("3", "0*9"), "run.reproducible": ("layout",), "run.precision": ("bf16", "fp16", "fp8"),
    "run.fp8": ("tensorwise", "blockwise", "mxfp8", "nvfp4"), "run.fp8_keep": (0, 1, 4), "run.fp32_residual": FLAG,
    "run.fp32_vectors": FLAG, "run.fp32_row_sums": FLAG, "run.fp8_weights": ("true",),
    "run.fp8_experts": FLAG, "data.order": ("megatron",), "optim.clip": (1,), "optim.name": ("adamw", "muon", "lion", "sgd"),
    "optim.moments": ("bf16",), "optim.qk_clip": (0.1, 4), "optim.mup_base": (24,),
}


class Draw:
    """One draw: numbers by name, then the keys of model and layout."""

    def __init__(self, name):
        self.rng = random.Random(name)
        self.name = name
        self.model = {"run.device": "cpu", "data.tokenizer": "byte", "checkpoint.every": "0"}
        self.layout = {}
        self.alone = {}

    # ---- dice

    def one(self, *values):
        return self.rng.choice(values)

    def chance(self, p):
        return self.rng.random() < p

    def put(self, keys, key, value, default=None):
        """Defaults are left out, so that a case shows what it is about."""
        if value != default:
            keys[key] = {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)

    # ---- the layout

    def draw_ranks(self):
        world = self.one(2, 2, 3, 4, 4, 4, 6, 8, 8)
        shape = {"tp": 1, "cp": 1, "pp": 1, "dp": 1}
        whole = self.one("tp", "cp", "pp", "dp") if self.chance(0.15) else None
        for prime in ([2, 2, 2] if world == 8 else [2, 2] if world == 4 else [2, 3] if world == 6 else [world]):
            axes = ["pp", "dp"] if prime == 3 and self.exact else ["tp", "cp", "pp", "pp", "dp"]
            shape[whole if whole in axes else self.rng.choice(axes)] *= prime
        self.tp, self.cp, self.pp, self.dp = (shape[a] for a in ("tp", "cp", "pp", "dp"))

    def draw_schedule(self):
        """Schedule, chunks of a rank, micro-batches of a step."""
        pp = self.pp
        names = [n for n in SCHEDULES if n not in ASYNC or (self.mode == "repeat" and self.chance(0.3))]
        if pp % 2:
            names = [n for n in names if n not in TWO_WAY]
        if pp == 1 and self.chance(0.6):
            names = ["1f1b"]
        if self.wants_slices:
            names = ["seq1f1b"]
        if self.overlap_moe:
            names = [n for n in names if n in PAIRS] or ["dualpipev"]
        if self.balance == "global_aux":
            names = [n for n in names if n in IN_ORDER] or ["1f1b"]
        self.schedule = self.rng.choice(names)
        s = self.schedule
        self.chunks = 2 if s in WAVES else self.one(2, 2, 3) if s in MANY else 1
        if s == "hanayo" and self.chance(0.3):
            self.chunks = 4
        self.slices = self.one(2, 2, 4, 8) if s == "seq1f1b" else 1
        while self.cp * self.slices > 16:  # rings around each slice: 8 x 8 took minutes of processor time for 2 steps
            self.slices //= 2
        self.micro_batches = self.draw_micro_batches()
        self.split = s in SPLIT and self.chance(0.3)
        self.unit_div = 2 if s == "chimera-bhalf" else 1

    def draw_micro_batches(self):
        s, pp = self.schedule, self.pp
        if s == "chimera":
            return self.one(pp, 2 * pp) if pp == 2 or self.chance(0.7) else 2
        if s == "chimera-fdouble":
            return 2 * pp
        if s in ("chimera-bhalf", "zb-h1-int") or (s == "hanayo" and self.chunks == 2):
            return self.one(1, 2) * pp
        if s in ("dualpipe", "dualpipe-serial"):
            return 2 * pp + self.one(0, 2)
        if s in ("dualpipev", "dualpipev-serial"):
            return 2 * pp + self.one(0, 0, 1)
        if s == "interleaved":
            return self.one(1, 2) * pp
        if s == "2bw":
            return 2 * pp
        return self.one(1, 2, 3, 4) if pp < 4 else self.one(2, 4, 5)

    def draw_experts(self):
        """How experts are spread, before how they are."""
        self.experts_on = self.chance(0.45)
        self.ep = self.etp = 1
        self.balance = "none"
        self.overlap_moe = False
        self.wants_slices = self.chance(0.12)
        if not self.experts_on:
            return
        stage = self.tp * self.cp * self.dp
        etps = [d for d in divisors(stage) if not self.exact or power_of_two(d)]
        self.etp = self.rng.choice(etps) if self.chance(0.4) else 1
        self.ep = self.rng.choice(divisors(stage // self.etp))
        balances = ["none", "bias"] if self.wants_slices else ["none", "aux", "seq_aux", "bias", "sinkhorn", "forced"]
        if self.dp == 1 and not self.wants_slices:
            balances.append("global_aux")
        self.balance = self.rng.choice(balances)
        can_pair = self.ep * self.etp > 1 and not self.wants_slices and self.balance != "global_aux"
        self.overlap_moe = can_pair and self.chance(0.3)

    def draw_precision(self):
        """And of what numbers widths and rows are multiples, for products of 8 bits."""
        self.precision, self.fp8, self.multiple, self.block = "fp32", None, 1, 0
        if self.schedule in ASYNC:
            self.precision = "bf16"
        elif not self.exact:
            self.precision = self.one("fp32", "bf16", "bf16", "fp16", "fp8", "fp8")
        elif self.cp > 1 or self.slices > 1:
            self.precision = self.one("fp32", "bf16")
        else:
            self.precision = self.one("fp32", "bf16", "fp8")
        if self.precision == "fp8":
            recipes = ["tensorwise", "mxfp8", "nvfp4"]
            if not self.exact or self.tp == 1:  # (with tp all widths would have to be multiples of 128)
                recipes += ["blockwise"] * (2 if self.experts_on else 1)
            self.fp8 = self.rng.choice(recipes)
            self.multiple = 32 if self.fp8 == "mxfp8" else 16
            if self.fp8 == "blockwise" and self.experts_on and self.chance(0.7):
                self.block = 128  # of experts' widths

    def put_precision(self):
        put = lambda key, value, default=None: self.put(self.model, "run." + key, value, default)
        put("precision", self.precision, "fp32")
        wide = True  # (what both come to on the CPU)
        if self.precision != "fp32" and self.chance(0.5):
            residual, vectors = self.chance(0.5), self.chance(0.5)
            put("fp32_residual", residual)
            put("fp32_vectors", vectors)
            wide = residual and vectors
        if self.precision != "fp32" and self.experts_on and self.chance(0.4):
            put("fp32_row_sums", wide and self.chance(0.5))
        if self.precision == "bf16":
            self.put(self.model, "debug.dot", self.one("auto", "fma", "vdpbf16", "amx"), "auto")
        if self.fp8:
            put("fp8", self.fp8, "tensorwise")
            put("fp8_weights", self.chance(0.3), False)
            fits = self.multiple == 32 or self.block
            if self.experts_on:
                put("fp8_experts", bool(fits) and self.chance(0.7))
            put("fp8_keep", 1 if self.layers > 2 and self.chance(0.3) else 0, 1)

    def draw_batch(self):
        div = self.unit_div
        self.unit = 1
        self.micro = div * self.one(1, 1, 2, 3)
        if self.experts_on and self.balance != "seq_aux" and self.chance(0.3):
            self.unit = 2
            self.micro = 2 * div
        self.sp = self.tp > 1 and (self.experts_on or self.chance(0.6))
        self.cuts = self.cp * self.slices
        need = 2 * self.cp * self.slices if self.cp > 1 else self.slices * (2 if self.sp and self.slices > 1 else 1)
        if self.exact and self.sp and (self.experts_on or self.mla or self.state):
            while self.micro // div * need % (self.tp * self.cuts):
                need *= 2
        self.seq_blocks = need * self.one(1, 1, 2)
        if not power_of_two(need):
            self.seq_blocks = self.one(1, 2)
        least = self.seq_blocks if power_of_two(need) else need * self.seq_blocks
        times = [k for k in range(1, 65) if 16 <= k * least <= 64] or [1]
        self.seq = least * self.rng.choice(times)
        if self.sp:
            while self.micro * self.seq // self.slices % (self.tp * self.cp) or self.seq % (self.tp * self.cuts):
                self.seq += least
        sample = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}.get(self.fp8, 1) if self.exact else 1 # (which no block may cross)
        rows = self.multiple * (self.tp if self.fp8 == "nvfp4" and self.sp else 1)
        window = self.state.window * self.slices if self.state and (self.slices > 1 or self.in_order) else 1
        window *= self.cp if self.in_order else 1
        if self.state and self.chance(0.3):  # several windows
            self.seq += self.state.window // least * least
        while self.seq % sample or self.seq % window or self.micro // div * self.seq // self.cuts % rows:
            self.seq += least
        self.global_batch = self.micro * self.dp * self.micro_batches

    def draw_context(self):
        """How queries meet keys; after the heads, which may not let it."""
        self.ways, self.cp_heads = ["allgather"], 1
        if self.cp == 1:
            return
        ways = ["allgather", "ring"]
        if self.heads_divide(self.cp):
            ways += ["a2a", "a2a"]
        neighbours = [n for n in divisors(self.cp) if 1 < n < self.cp and self.heads_divide(n)]
        if neighbours:
            ways += ["hierarchical", "hierarchical"]
        self.ways = [self.rng.choice(ways) for _ in range(min(self.layers, self.one(1, 1, 1, 2)))]
        if self.state:
            self.ways = [self.rng.choice(ways) if mixer == "attention" else "state" if self.in_order else "a2a" for mixer in self.mixers]
        if "hierarchical" in self.ways:
            self.cp_heads = self.rng.choice(neighbours)

    def draw_attn_block(self):
        most = self.seq // self.slices
        ring = self.cp if "ring" in self.ways else self.cp // self.cp_heads if "hierarchical" in self.ways else 1
        if ring > 1:
            most //= 2 * ring
        bound = self.exact and (ring > 1 or self.slices > 1)
        blocks = [b for b in (1, 2, 4, 8, 16, 32, 64) if not bound or (b <= most and most % b == 0)]
        self.put(self.model, "parallel.attn_block", self.rng.choice(blocks[-3:]))

    def draw_stages(self):
        """Even shares, or a layout string."""
        stages = self.pp * self.chunks
        self.stages = None
        self.hollow = stages > 2 and self.chance(0.3)  # stages in the middle have no block
        if stages > 1 and (self.hollow or stages > 8 or self.chance(0.45)):
            self.layers = self.rng.randint(1, min(8, stages + 2))
            self.stages = self.draw_stage_list(stages)
        else:
            self.layers = self.rng.randint(stages, min(8, stages + self.one(0, 1, 3)))

    def draw_stage_list(self, stages):
        apart = self.mtp and self.schedule not in TWO_WAY and stages > 1 and self.chance(0.4)
        first = 1 if stages > 2 and self.chance(0.3) else 0  # E stands alone
        last = stages - (1 if apart or (stages > 1 and self.chance(0.3)) else 0)  # L stands alone
        if first >= last:
            first = 0
        counts = [0] * stages
        full = [i for i in range(first, last) if i in (first, last - 1) or not self.hollow]
        for _ in range(self.layers):
            counts[self.rng.choice(full)] += 1
        texts = [self.times("t", n) for n in counts]
        texts[0] = "E" + texts[0]
        texts[-2 if apart else -1] += self.times("m", self.mtp)
        texts[-1] += "L"
        return "|".join(texts)

    def times(self, unit, n):
        return f"{unit}*{n}" if n > 1 and self.chance(0.5) else unit * n

    def put_layout(self):
        put = lambda key, value, default=None: self.put(self.layout, key, value, default)
        for axis in ("tp", "pp", "cp", "ep", "etp", "slices"):
            put("parallel." + axis, getattr(self, axis), 1)
        put("train.micro_batch", self.micro, 1)
        name = self.schedule + ("+split" if self.split else "")
        if name != "seq1f1b" or self.slices == 1:
            put("parallel.schedule", name, "1f1b")
        if self.chunks > 1 and not (self.stages and self.chance(0.5)):
            put("parallel.vpp", self.chunks)
        if self.schedule == "interleaved" and self.chance(0.3):
            put("parallel.group", self.micro_batches)
        put("parallel.layout", self.stages)
        if self.tp > 1 and (not self.sp or self.chance(0.3)):
            put("parallel.sp", self.sp)
        put("parallel.cp_comm", ",".join(self.ways), "allgather")
        put("parallel.cp_heads", self.cp_heads if self.chance(0.5) else 1, 1)
        if self.cp > 1:
            put("parallel.cp_cut", self.one("zigzag", "contiguous"), "zigzag")
        copies = self.dp * self.cp > 1
        zeros = (0, 1, 2) if self.schedule in ASYNC else (0, 1, 2, 3)
        put("parallel.zero", self.one(*zeros) if copies or self.chance(0.1) else 0, 0)
        if "parallel.zero" in self.layout:
            self.put_cut(put)
        put("parallel.overlap_grad", copies and self.chance(0.4), False)
        put("parallel.overlap_param", copies and "parallel.zero" in self.layout and self.chance(0.5), False)
        put("parallel.overlap_moe", self.overlap_moe, False)
        put("parallel.overlap_tp", self.one(*divisors(self.tp)) if self.chance(0.4) else 1, 1)
        if self.pp == 1 or self.ep * self.etp in (1 if not self.experts_on else 0, self.tp * self.cp):
            put("parallel.order", self.one("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"), "tp-cp-ep-dp-pp")
        put("train.recompute", self.one("none", "none", "selective", "full", self.recomputed_in_part()), "none")
        put("train.offload", self.rng.randint(1, self.layers) if self.slices == 1 and self.chance(0.25) else 0, 0)
        put("optim.states", self.one("device", "device", "device", "host"), "device")
        put("checkpoint.async", self.chance(0.15), False)
        slow = self.ranks > 4 or self.precision == "fp8"  # (in plain C they take minutes)
        put("debug.isa", self.one("auto", "auto", "auto", "avx2", "auto" if slow else "c"), "auto")
        threads = self.one(0, 0, 0, 2, 3)
        put("debug.threads", threads if self.ranks <= 4 else 0, 0)  # (8 ranks of 3 threads take minutes on two cores)
        put("debug.comm_check", self.ranks > 1 and self.chance(0.2), False)
        put("debug.comm_delay_ms", 1 if self.ranks > 1 and self.chance(0.05) else 0, 0)
        put("debug.poison", self.chance(0.2), False)
        self.put_watching(put)
        if self.experts_on:
            self.put_experts_layout(put)

    def put_cut(self, put):
        """Over whom zero cuts, and when weights are given up."""
        if self.layout["parallel.zero"] == "3":
            put("parallel.reshard", self.one("auto", "always", "never"), "auto")
        groups = [self.cp * d for d in divisors(self.dp)]
        spread = self.ep * self.etp
        groups = [g for g in groups if not self.experts_on or g * self.tp % spread == 0 or spread % (g * self.tp) == 0]
        put("parallel.zero_group", self.rng.choice(groups) if groups and self.chance(0.5) else 0, 0)
        put("parallel.bucket_mb", self.one(40, 40, 1), 40)

    def put_watching(self, put):
        put("log.tensorboard", self.chance(0.05), False)
        if self.chance(0.1):
            put(*self.one(("log.trace_every", 1), ("log.trace_steps", 2), ("log.trace_steps", "1-2")))
            put("log.trace_ranks", self.one("", "all", "0"), "")

    def recomputed_in_part(self):
        """Several kinds, the last for the blocks of a stage behind those of the list."""
        kinds = self.rng.sample(("none", "selective", "full"), 2)
        return f"{kinds[0]}*{self.rng.randint(1, self.layers - 1)},{kinds[1]}" if self.layers > 1 else kinds[0]

    def put_experts_layout(self, put):
        dispatcher = self.one("alltoall", "alltoall", "allgather", "node")
        put("moe.dispatcher", dispatcher, "alltoall")
        if dispatcher == "node":
            put("debug.ranks_per_host", self.etp * self.one(*divisors(self.ep)), 0)
        put("moe.pad", "moe.capacity" in self.model and self.chance(0.3), False)
        if not self.chance(0.2) or self.schedule in ASYNC:
            return
        put("moe.slack", self.one(1, 1.5, 2))
        put("moe.overflow", "redo" if self.exact else self.one("redo", "drop"))

    # ---- the model

    def heads_divide(self, ranks):
        """As config/config_check_context.c: whole key heads for each, or whole parts of one."""
        parts = self.tp_blocks // self.kv_heads if self.tp_blocks % self.kv_heads == 0 else 1
        while parts > 1 and (self.heads // self.kv_heads % parts or self.head_dim % parts):
            parts //= 2
        own = max(1, self.kv_heads // self.tp)
        return self.kv_heads * parts % (self.tp * (ranks if own == 1 else 1)) == 0 and \
            (own % ranks == 0 or (ranks % own == 0 and self.kv_heads * parts // self.tp % ranks == 0))

    def draw_blocks(self):
        """Canonical chunks of what tp cuts; and what a width must be a multiple of."""
        need = max(self.tp, self.etp) if self.exact else 1
        self.tp_blocks = self.rng.choice([b for b in (1, 2, 4, 8) if b >= need])
        self.width = self.tp_blocks
        for cut in (self.tp, self.etp):
            if self.width % cut:
                self.width *= cut
        while self.width // max(self.tp, self.etp) % self.multiple:
            self.width *= 2
        self.put(self.model, "parallel.tp_blocks", self.tp_blocks)

    def draw_heads(self):
        for _ in range(200):
            self.heads = self.one(1, 2, 3, 4, 6, 8, 12, 16)
            self.kv_heads = self.rng.choice(divisors(self.heads))
            self.head_dim = self.one(2, 4, 6, 8, 16)
            B = self.tp_blocks
            if self.mla:
                self.kv_heads = self.heads
                fits = self.heads % B == 0 and self.heads % self.tp == 0
            else:
                fits = self.heads * self.head_dim % B == 0 and (self.heads + 2 * self.kv_heads) * self.head_dim % B == 0
            if self.fp8 and self.kv_heads * self.head_dim // self.tp % self.multiple:
                continue
            if fits and self.heads * self.head_dim <= max(128, 2 * self.tp * self.multiple) and self.heads_divide(1):
                return

    def put_attention(self):
        put = lambda key, value, default=None: self.put(self.model, "model." + key, value, default)
        put("heads", self.heads)
        states.put_mixers(self)
        if self.mla:
            put("attention", "mla")
            if self.fp8:
                self.put_latent_in_8_bits(put)
            else:
                put("q_lora_rank", self.one(0, 8, 9, 16), 0)
                put("kv_lora_rank", self.one(8, 12, 16, 20))
                put("qk_nope_head_dim", self.one(3, 4, 5, 8))
                put("qk_rope_head_dim", self.one(2, 4))
                put("v_head_dim", self.one(4, 5, 6, 8))
        else:
            put("kv_heads", self.kv_heads, self.heads)
            put("head_dim", self.head_dim)
            put("qk_norm", self.one("false", "false", "false", "true", "full"), "false")
            put("attention_scale", self.one(0, 0, 0, 0.3), 0)
        self.put_position(put)
        windows = ["0", "9", "1", "5,0", "3*2,0"]
        window = self.rng.choice(windows[:3] if self.layers < 3 else windows)
        if not states.falls_on_attention(self, window):
            window = "0"
        put("window", window if self.chance(0.4) else "0", "0")
        put("attention_softcap", self.one(0, 0, 0, 2, 0.5), 0)
        put("sinks", self.chance(0.2), False)
        put("attention_gate", self.chance(0.2), False)

    def put_latent_in_8_bits(self, put):
        """Each product's widths are multiples, the latents' as they are, those of heads as a rank has them."""
        m = self.multiple
        put("q_lora_rank", self.one(0, m, 2 * m), 0)
        put("qk_rope_head_dim", m)
        put("kv_lora_rank", self.one(m, 2 * m))
        put("qk_nope_head_dim", self.one(m, 2 * m))
        put("v_head_dim", m)

    def put_position(self, put):
        attends = "attention" in self.mixers
        positions = ["rope"] if self.mla else ["rope", "rope"] * attends + ["none"] + ([] if self.mtp else ["learned"])
        position = self.rng.choice(positions)
        put("position", position)
        if position != "rope":
            return
        if self.layers > 1 and self.chance(0.2):
            put("rope_layers", "1,0" if states.falls_on_attention(self, "1,0") else "0,1")
        if not self.mla and self.head_dim > 2 and self.chance(0.2):
            put("rope_dim", 2)
        scaling = self.one("none", "none", "none", "linear", "llama3", "yarn")
        put("rope_scaling", scaling, "none")
        put("rope_base", self.one(10000, 10000, 500), 10000)
        put("rope_base_local", self.one(0, 0, 100) if not self.mla else 0, 0)
        if scaling != "none":
            put("rope_factor", 2)
        if scaling in ("llama3", "yarn"):
            put("rope_original", 8)
            if self.chance(0.4):
                put("rope_slow", self.one(1, 1.5))
                put("rope_fast", self.one(3, 4.5))
        if scaling == "yarn":
            put("rope_mscale_all", self.one(0, 1) if self.mla else 0, 0)
            put("rope_magnitude", self.one(0, 0, 1.5), 0)
            put("rope_truncate", self.chance(0.7), True)

    def put_model(self):
        put = lambda key, value, default=None: self.put(self.model, "model." + key, value, default)
        put("arch", self.one("gpt2", "llama"))
        put("layers", self.layers)
        hidden = self.one(32, 32, 64, 96) if self.fp8 else self.one(8, 16, 24, 31, 32, 64)
        if self.mtp:
            hidden = self.width * self.one(2, 4)
        while self.block and (hidden % self.block or self.mtp and hidden % self.width):
            hidden = (hidden // self.block + 1) * self.block
        put("hidden", hidden)
        put("seq", self.seq)
        put("mtp_layers", self.mtp, 0)
        if self.mtp:
            put("mtp_weight", 0.5)
        self.put_attention()
        self.ffn = self.width * self.one(1, 2, 3, 5, 7)
        put("ffn", self.ffn)
        put("ffn_layers", "1,0" if self.layers > 1 and self.chance(0.12) else "1", "1")
        put("norm", self.one("layernorm", "rmsnorm"))
        activation = self.one("gelu", "gelu_erf", "relu2", "swiglu", "geglu", "clamped_swiglu")
        put("activation", activation)
        put("norm_eps", self.one("1e-5", "1e-5", "1e-3"), "1e-5")
        put("norm_bias", self.model["model.norm"] == "rmsnorm" or self.chance(0.8), True)
        put("latent_norm_eps", self.one("0", "0", "1e-2") if self.mla else "0", "0")
        if self.model["model.position"] != "learned":
            put("embed_scale", self.one(1, 1, 1, 4), 1)
        put("residual_scale", self.one(1, 1, 1, 0.3), 1)
        put("logits_scale", self.one(1, 1, 1, 0.5), 1)
        put("final_softcap", self.one(0, 0, 0, 3), 0)
        put("vocab", self.one(0, 0, 0, 0, 300, 2000), 0)
        if activation == "clamped_swiglu":
            put("activation_limit", 0.05)
        beside = ("parallel", "parallel_two") if "model.ffn_layers" not in self.model else ()  # (of two layers in each block)
        norms = self.one("pre", "pre", "pre", "both", "post", *beside)
        put("block_norms", norms, "pre")
        behind = norms in ("both", "post")
        put("state_norms", "pre" if behind and self.state and self.chance(0.5) else "same", "same")
        put("bias", not behind and self.chance(0.5))
        biases = ["none"] + ["all"] * (not behind) + ["qkv"] * (not self.mla)
        put("attention_bias", self.rng.choice(biases) if self.chance(0.25) else "auto", "auto")
        put("tied", self.chance(0.5) and self.schedule not in ASYNC)
        put("dropout", self.one(0, 0, 0.1, 0.5), 0)
        put("attention_dropout", self.one(0, 0, 0.2), 0)
        put("init_std", self.one(0.02, 0.1, 0.3))
        self.put(self.model, "run.seed", self.rng.randrange(1000))
        self.put(self.model, "parallel.seq_blocks", self.seq_blocks)

    def put_experts(self):
        put = lambda key, value, default=None: self.put(self.model, "moe." + key, value, default)
        if not self.experts_on:
            return
        self.topk = self.one(1, 2, 2, 3, 4)
        each = [k for k in (1, 2, 3, 4) if self.topk <= k * self.ep <= 24]
        experts = self.ep * (self.rng.choice(each) if each else self.topk)
        put("experts", experts)
        put("topk", self.topk)
        width = self.block * self.etp if self.block else self.width
        put("ffn", width * (self.one(1, 1, 2) if self.block else self.one(1, 2, 3)))
        self.router = self.one("sigmoid", "sqrt_softplus") if self.balance == "bias" else \
            self.one("softmax", "softmax_pre", "sigmoid", "sqrt_softplus")
        put("router", self.router, "softmax")
        if self.router != "softmax" and self.topk > 1 and self.chance(0.3):
            put("normalize", self.chance(0.5))
        put("balance", self.balance, "none")
        if self.balance == "bias" and self.slices == 1 and self.chance(0.3):
            put("aux_coeff", 0.05)
        if self.balance == "bias":
            put("bias_rate", self.one(0.001, 0.1), 0.001)
        put("unit", self.unit, 1)
        self.put_groups(put, experts)
        put("scale", self.one(1, 1, 2.5), 1)
        put("latent", self.one(0, 0, 0, 16, 24) if not self.fp8 else 0, 0)
        put("z_coeff", self.one(0, 0, 0.01), 0)
        if self.balance != "forced":
            put("jitter", self.one(0, 0, 0.1), 0)
        if self.chance(0.3):
            put("shared_ffn", self.width * self.one(1, 2))
            put("shared_gate", self.chance(0.4), False)
        if self.slices == 1 and self.chance(0.35):
            put("capacity", self.one(0.5, 1, 1.25))
            put("drop", self.one("probs", "position"), "probs")
        if self.layers > 1 and self.chance(0.3):
            put("every", self.one("2", "0," + ",".join(["1"] * (self.layers - 1))))

    def put_groups(self, put, experts):
        if self.balance == "forced" or not self.chance(0.3):
            return
        fits = [(g, k) for g in divisors(experts) for k in divisors(self.topk)
                if 1 < g and k <= g and self.topk <= k * experts // g]
        if fits:
            groups, most = self.rng.choice(fits)
            put("groups", groups)
            put("group_topk", most, 1)
            put("group_best", self.rng.randint(1, experts // groups) if self.chance(0.4) else 0, 0)

    # ---- data and training

    def put_data(self):
        put = lambda key, value, default=None: self.put(self.model, key, value, default)
        kind = self.one("plain", "plain", "blend", "stages", "split", "sets")
        order = "megatron" if kind != "stages" and self.chance(0.2) else "keyed"
        put("data.train", {"blend": "0.7 a 0.3 b", "stages": "a @2 0.5 a 0.5 b"}.get(kind, "a"))
        if kind == "split":
            put("data.split", "98,2")
        else:
            put("data.valid", "one: c  two: 0.5 c 0.5 c" if kind == "sets" else "c")
        put("data.order", order, "keyed")
        put("data.seed", self.rng.randrange(1000))
        put("data.mask_eod", self.schedule not in ASYNC and self.chance(0.35), False)
        put("data.reset_at_eod", self.chance(0.35), False)

    def put_training(self):
        put = lambda key, value, default=None: self.put(self.model, key, value, default)
        ramp = self.schedule not in ASYNC and self.chance(0.15)
        G = self.global_batch
        put("train.global_batch", f"{G}*1,{2 * G}" if ramp and G <= 16 else G)
        steps = 3 if self.mode == "resume" or self.chance(0.3) else 2
        put("train.steps", steps)
        if not ramp and self.chance(0.15):
            put("train.steps", 0)
            put("train.tokens", steps * G * self.seq)
        put("train.eval_every", 2)
        put("train.eval_samples", self.one(0, 1, 2) * G, 0)
        put("train.eval_tasks", self.one("", "", "", "", "", "asked.jsonl"), "")
        self.put_rate(put, steps)
        self.put_kept(put)
        put("log.every", self.one(1, 1, 1, 2) if self.exact else 1, 1)
        put("log.max_attention_logit", self.chance(0.1), False)
        put("debug.extra_shift", 30 if self.chance(0.08) else 0, 0)
        put("optim.clip", 0 if self.schedule in ASYNC else self.one(0, 1))
        self.put_optimizer()
        most = [d for d in divisors(G) if d % self.unit == 0 and d <= 8]
        self.put(self.alone, "train.micro_batch", self.rng.choice(most), 1)
        self.put_precision()
        put("run.reproducible", "layout" if self.exact else "run")

    def put_rate(self, put, steps):
        """Ends of warm-up and decay that a run of so many steps meets."""
        put("optim.lr", "1e-2")
        course = self.one("constant", "linear", "cosine", "wsd", "inverse_sqrt")
        put("optim.schedule", course)
        put(*self.one(("optim.min_lr", 0), ("optim.min_lr", "1e-3"), ("optim.min_lr_ratio", 0.2)), 0)
        put("optim.warmup", 1 if self.chance(0.4) else 0, 0)
        end = self.one(0, 0, 2, 5)
        put("optim.decay_steps", end, 0)
        if course == "wsd":
            put("optim.wsd_decay", self.one(0, 1, max(1, (end or steps) - 1)), 0)

    def put_kept(self, put):
        """Which checkpoints are saved, and which of them kept."""
        put("checkpoint.keep", self.one(2, 2, 0, 1), 2)
        if not self.chance(0.15):
            return
        put("checkpoint.every", 1)
        put("train.eval_every", self.one(1, 2))
        if "data.valid" in self.model or "data.split" in self.model:
            put("checkpoint.keep_best", 1)
            put("checkpoint.best_set", "two" if "two:" in self.model.get("data.valid", "") else "", "")
        put("checkpoint.keep_every", self.one(0, 1, 2), 0)

    def put_optimizer(self):
        put = lambda key, value, default=None: self.put(self.model, "optim." + key, value, default)
        names = [n for n in ("adamw", "adamw", "muon", "muon", "lion", "sgd") if n != "muon" or self.schedule not in ASYNC]
        name = self.rng.choice(names)
        mup = name != "sgd" and self.chance(0.3)
        put("name", name, "adamw")
        put("mup_base", 24 if mup else 0, 0)
        put("mup_head_dim", self.one(0, 4) if mup else 0, 0)
        # (by what stands there already: seeds keep their other values)
        self.put(self.model, "model.head_bias", not mup and len(repr(self.model)) % 5 == 0, False)
        put("weight_decay", self.one(0.1, 0.1, 0, 0.5), 0.1)
        put("beta1", self.one(0.9, 0.9, 0.5, 0), 0.9)
        if name != "sgd":
            put("beta2", self.one(0.95, 0.95, 0.9, 0), 0.95)
        if self.model.get("optim.beta2") == "0" and name in ("adamw", "muon"):
            self.model["optim.beta1"] = "0"  # (momentum divided by this step's gradient alone has no bound)
        if name in ("adamw", "muon"):
            put("eps", self.one("1e-8", "1e-8", "1e-4"), "1e-8")
        put("moments", "bf16" if name == "adamw" and self.chance(0.2) else "fp32", "fp32")
        if name == "muon":
            scales = ("match_rms_adamw", "spectral", "shape", "unit_rms_norm")
            put("muon_split", self.one("qkv", "head", "none"), "qkv")
            put("muon_scale", "unit_rms_norm" if mup else self.rng.choice(scales), "match_rms_adamw")
            put("muon_coefficients", self.one("simple", "quintic", "polar_express", "deepseekv4"), "simple")
            put("muon_steps", self.one(0, 1, 2, 3), 0)
            put("muon_momentum", self.one(0.95, 0.5), 0.95)
            put("muon_nesterov", self.chance(0.7), True)
            put("muon_router", "adamw" if self.chance(0.3) else "muon", "muon")
        if self.schedule not in ASYNC and "model.qk_norm" not in self.model and self.chance(0.4):
            put("qk_clip", self.one(0.001, 0.01, 0.1))  # (below each softcap; logits of new weights are small)
            put("qk_clip_alpha", self.one(0.5, 0, 1), 0.5)

    def upcycle(self):
        """Whether the case can begin as a dense model: its keys, if so."""
        m = self.model
        if not self.experts_on or "moe.shared_ffn" in m or "moe.latent" in m or "model.ffn_layers" in m or not self.chance(0.5):
            return
        parts = [g for g in divisors(self.topk) if int(m["moe.experts"]) % g == 0]
        sums = self.router in ("softmax", "softmax_pre") or (self.topk > 1 and m.get("moe.normalize") != "false")
        if not sums:
            return
        m["model.ffn"] = str(self.rng.choice(parts) * int(m["moe.ffn"]))
        m["checkpoint.upcycle"] = "true"

    # ---- the whole

    def mistaken(self, case):
        """One key otherwise, as a user's mistake would have it; not so that there are more ranks than can be started."""
        key = self.rng.choice(list(OTHERWISE))
        value = str(self.rng.choice(OTHERWISE[key]))
        if not key.startswith("parallel.") and key != "train.micro_batch" or key in BLOCKS:
            return case.but(model=self.model | {key: value})
        other = case.but(layout=self.layout | {key: value})
        return other if other.ranks <= RANKS_MAX else case

    def case(self):
        self.mode = self.one("train", "train", "train", "resume", "load", "eval", "repeat", "repeat")
        self.exact = self.mode != "repeat"
        self.draw_ranks()
        self.ranks = self.tp * self.cp * self.pp * self.dp
        self.draw_experts()
        self.draw_schedule()
        self.mla = self.chance(0.25)
        self.mtp = self.one(0, 0, 0, 1, 2) if self.schedule not in ASYNC else 0
        self.state = states.draw_state(self)
        self.draw_precision()
        self.draw_batch()
        self.draw_stages()
        self.mixers = states.draw_mixers(self)
        self.mla = self.mla and "attention" in self.mixers
        self.draw_blocks()
        self.draw_heads()
        self.put_model()
        self.draw_context()
        self.draw_attn_block()
        self.put_experts()
        name = published.publish(self) if self.chance(0.3) else "none"
        self.put_data()
        self.put_training()
        if "attention" not in self.mixers:
            self.model = {key: value for key, value in self.model.items() if key not in states.OF_ATTENTION}
        self.put_layout()
        if self.mode == "load":
            self.model["checkpoint.load"] = "source"
            self.upcycle()
        return Case(self.name, self.mode, self.dp, self.model, self.layout, self.alone, name)


def same_rows(case):
    """In 8 bits the rows of a micro-batch have one scale, so one rank has as large ones, whatever key was mistaken."""
    if case.get("run.precision") != "fp8":
        return case
    halves = 2 if case.get("parallel.schedule", "").startswith("chimera-bhalf") else 1
    return case.but(alone=case.alone | {"train.micro_batch": str(case.number("train.micro_batch") // halves)})


def draw(name):
    """The case of that name, always the same one; 'm' at its end: with a mistake in it."""
    d = Draw(name)
    return same_rows(d.mistaken(d.case()) if name.endswith("m") else d.case())
