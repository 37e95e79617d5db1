"""
What a case has tried: along each axis one value, and of each two axes a pair of values. A new case is the one, of a
few drawn, that brings the most pairs not yet tried.
"""
from itertools import combinations

import published
from states import STATES

YES = ("no", "yes")
KINDS = {  # the values of each axis
    "mode": ("train", "resume", "load", "upcycle", "eval", "repeat"),
    "class": ("none", *published.CLASSES, *published.MIXTURES, *published.LATENT, *published.HYBRIDS),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "residual": ("as chosen", "fp32", "16 bits"), "fp8": ("tensorwise", "blockwise", "mxfp8", "nvfp4"), "fp8_keep": ("0", "1"), "fp8_weights": YES,
    "fp8_experts": YES,
    "vectors": ("as chosen", "fp32", "16 bits"), "row_sums": ("as chosen", "fp32", "16 bits"),
    "dot": ("auto", "fma", "vdpbf16", "amx"),
    "arch": ("gpt2", "llama"),
    "attention": ("mha", "grouped", "one key head", "mla"),
    "mixer": ("attention", *(state.word + with_ for state in STATES for with_ in (" alone", " and attention"))),
    "delta_group": ("1", "2", "3"), "delta_widths": ("equal", "apart"), "delta_conv": ("2", "3", "4", "8"), "delta_negative": YES, "delta_norm_eps": YES,
    "mamba_group": ("1", "2", "3"), "mamba_conv": ("2", "3", "4", "8"), "mamba_conv_bias": YES, "mamba_dt_min": YES,
    "kda_conv": ("2", "3", "4", "8"), "kda_bound": YES,
    "position": ("learned", "rope", "rope in part", "none"),
    "rope_scaling": ("none", "linear", "llama3", "yarn"),
    "window": ("none", "all blocks", "some blocks"),
    "softcap": YES, "sinks": YES, "gate": YES, "qk_norm": ("false", "true", "full"),
    "block_norms": ("pre", "both", "post", "parallel", "parallel_two"), "state_norms": ("same", "pre"),
    "norm": ("layernorm", "rmsnorm"), "embed_scale": YES, "final_softcap": YES, "logits_scale": YES, "residual_scale": YES, "attention_scale": YES, "vocab": YES,
    "attention_bias": ("auto", "none", "qkv", "all"), "rope_base_local": YES,
    "activation": ("gelu", "gelu_erf", "relu2", "swiglu", "geglu", "clamped_swiglu"),
    "ffn": ("all blocks", "some blocks"),
    "bias": YES, "head_bias": YES, "tied": YES, "dropout": YES, "attention_dropout": YES,
    "mtp": ("0", "1", "2"),
    "experts": YES,
    "router": ("softmax", "softmax_pre", "sigmoid", "sqrt_softplus"),
    "balance": ("none", "aux", "seq_aux", "global_aux", "bias", "bias+aux", "sinkhorn", "forced"),
    "unit": ("1", "2"), "groups": ("no", "yes", "best given"), "z": YES, "jitter": YES,
    "shared": ("no", "yes", "gated"),
    "every": ("all blocks", "some blocks"), "latent": YES,
    "capacity": ("none", "probs", "position"),
    "dispatcher": ("alltoall", "allgather", "node"),
    "overflow": ("stop", "redo", "drop"),
    "tp": ("1", "2", "3", "4", "6", "8"), "sp": YES,
    "cp": ("1", "2", "3", "4", "6", "8"),
    "cp_comm": ("allgather", "ring", "a2a", "hierarchical", "several", "state"),
    "cp_cut": ("zigzag", "contiguous"),
    "ep": ("1", "2", "3", "4", "6", "8"), "etp": ("1", "2", "3", "4", "6", "8"),
    "dp": ("1", "2", "3", "4", "6", "8"), "zero": ("0", "1", "2", "3"),
    "zero_group": YES, "reshard": ("auto", "always", "never"), "offload": YES, "states": ("device", "host"),
    "pp": ("1", "2", "3", "4", "6", "8"), "chunks": ("1", "2", "3", "4"),
    "schedule": ("gpipe", "1f1b", "eager-1f1b", "seq1f1b", "zb-h1", "zb-h2", "interleaved", "bfs", "zb-h1-int", "zb-v",
                 "v-half", "v-min", "hanayo", "dualpipev", "dualpipev-serial", "chimera", "chimera-fdouble",
                 "chimera-bhalf", "gems", "dualpipe", "dualpipe-serial", "pipedream", "pipedream-vertical", "2bw"),
    "split": YES, "slices": ("1", "2", "4", "8"),
    "stages": ("even", "given", "E or L alone", "m apart", "empty"),
    "recompute": ("none", "selective", "full", "several"),
    "overlap_grad": YES, "overlap_param": YES, "overlap_moe": YES, "overlap_tp": ("1", "2", "more"),
    "order": ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
    "batch": ("one size", "ramp"), "micro_batch": ("1", "2", "3", "more"),
    "data": ("plain", "blend", "stages", "split", "sets"), "data.order": ("keyed", "megatron"),
    "mask_eod": YES, "reset_at_eod": YES,
    "async": YES, "isa": ("auto", "avx2", "c"), "threads": ("1", "2", "3"), "clip": YES,
    "optimizer": ("adamw", "adamw in bf16", "muon", "lion", "sgd"), "mup": YES, "qk_clip": YES,
    "muon_split": ("qkv", "head", "none"), "muon_scale": ("match_rms_adamw", "spectral", "shape", "unit_rms_norm"),
    "muon_router": ("muon", "adamw"),
    "lr": ("constant", "linear", "cosine", "wsd", "inverse_sqrt"), "warmup": YES, "length": ("steps", "tokens"),
    "keep": ("newest", "best"), "tasks": YES, "max_logit": YES, "trace": YES, "extra_shift": YES,
}

OF_ATTENTION = ("attention", "rope_scaling", "rope_base_local", "window", "softcap", "sinks", "gate", "qk_norm", "attention_scale",
                "attention_bias", "attention_dropout", "qk_clip")


def yes(case, key):
    return YES[case.get(key, "false") not in ("false", "0", "0.0")]


def mixer_axes(c):
    words = c.get("model.mixer", "attention").split(",")
    state = next((word for word in words if word != "attention"), None)
    axes = {"mixer": "attention" if not state else state + (" and attention" if "attention" in words else " alone")}
    of_state = {"delta": delta_axes, "mamba2": mamba_axes, "kda": kda_axes}.get(state)
    return axes | of_state(c) if of_state else axes


def delta_axes(c):
    keys = c.number("model.delta_key_heads", c.get("model.heads"))
    width = c.get("model.delta_key_dim", c.get("model.head_dim"))
    return {
        "delta_group": str(c.number("model.delta_value_heads", keys) // keys), "delta_conv": c.get("model.delta_conv", "4"),
        "delta_widths": "equal" if c.get("model.delta_value_dim", width) == width else "apart",
        "delta_negative": yes(c, "model.delta_negative"), "delta_norm_eps": yes(c, "model.delta_norm_eps"),
    }


def kda_axes(c):
    return {"kda_conv": c.get("model.kda_conv", "4"), "kda_bound": yes(c, "model.kda_bound")}


def mamba_axes(c):
    groups = c.number("model.mamba_groups")
    return {
        "mamba_group": str(c.number("model.mamba_heads", c.get("model.heads")) // groups), "mamba_conv": c.get("model.mamba_conv", "4"),
        "mamba_conv_bias": YES[c.get("model.mamba_conv_bias", "true") == "true"], "mamba_dt_min": yes(c, "model.mamba_dt_min"),
    }


def model_axes(c):
    heads, kv = c.number("model.heads"), c.number("model.kv_heads", c.get("model.heads"))
    mha = "mha" if kv == heads else "one key head" if kv == 1 else "grouped"
    in_part = "model.rope_layers" in c.model or "model.rope_dim" in c.model
    position = c.get("model.position")
    window = c.get("model.window", "0")
    return {
        "arch": c.get("model.arch"), "attention": "mla" if c.get("model.attention") == "mla" else mha,
        "position": position + " in part" if position == "rope" and in_part else position,
        "rope_scaling": c.get("model.rope_scaling", "none"),
        "window": "none" if window == "0" else "some blocks" if "," in window else "all blocks",
        "embed_scale": yes(c, "model.embed_scale"), "final_softcap": yes(c, "model.final_softcap"),
        "logits_scale": yes(c, "model.logits_scale"), "residual_scale": yes(c, "model.residual_scale"),
        "attention_scale": yes(c, "model.attention_scale"), "vocab": yes(c, "model.vocab"),
        "attention_bias": c.get("model.attention_bias", "auto"), "rope_base_local": yes(c, "model.rope_base_local"),
        "softcap": yes(c, "model.attention_softcap"), "sinks": yes(c, "model.sinks"),
        "gate": yes(c, "model.attention_gate"), "qk_norm": c.get("model.qk_norm", "false"),
        "block_norms": c.get("model.block_norms", "pre"), "state_norms": c.get("model.state_norms", "same"), "norm": c.get("model.norm"),
        "activation": c.get("model.activation"), "ffn": "some blocks" if "model.ffn_layers" in c.model else "all blocks", "bias": yes(c, "model.bias"), "head_bias": yes(c, "model.head_bias"), "tied": yes(c, "model.tied"),
        "dropout": yes(c, "model.dropout"), "attention_dropout": yes(c, "model.attention_dropout"),
        "mtp": c.get("model.mtp_layers", "0"), "experts": yes(c, "moe.experts"),
    }


def expert_axes(c):
    if "moe.experts" not in c.model:
        return {}
    shared = "gated" if "moe.shared_gate" in c.model else yes(c, "moe.shared_ffn")
    balance = c.get("moe.balance", "none") + ("+aux" if "moe.aux_coeff" in c.model else "")
    return {
        "router": c.get("moe.router", "softmax"), "balance": balance, "unit": c.get("moe.unit", "1"),
        "groups": "best given" if "moe.group_best" in c.model else yes(c, "moe.groups"), "z": yes(c, "moe.z_coeff"), "jitter": yes(c, "moe.jitter"), "shared": shared,
        "latent": yes(c, "moe.latent"),
        "every": "some blocks" if "moe.every" in c.model else "all blocks",
        "capacity": c.get("moe.drop", "probs") if "moe.capacity" in c.model else "none",
        "dispatcher": c.get("moe.dispatcher", "alltoall"), "overflow": c.get("moe.overflow", "stop"),
        "ep": c.get("parallel.ep", "1"), "etp": c.get("parallel.etp", "1"),
        "overlap_moe": yes(c, "parallel.overlap_moe"),
    }


def stages_value(text):
    if not text:
        return "even"
    shares = text.split("|")
    if "m" in shares[-2:][0] and "m" not in shares[-1]:
        return "m apart"
    if "" in shares:
        return "empty"
    return "E or L alone" if shares[0] == "E" or shares[-1] == "L" else "given"


def layout_axes(c):
    ways = c.get("parallel.cp_comm", "allgather").split(",")
    schedule, _, split = c.get("parallel.schedule", "seq1f1b" if "parallel.slices" in c.layout else "1f1b").partition("+")
    stages = c.get("parallel.layout", "").count("|") + 1
    axes = {axis: c.get("parallel." + axis, "1") for axis in ("tp", "cp", "pp", "slices")}
    if c.number("parallel.tp") > 1:
        axes["sp"] = c.get("parallel.sp", "true").replace("true", "yes").replace("false", "no")
        bands = c.number("parallel.overlap_tp")
        axes["overlap_tp"] = str(bands) if bands < 3 else "more"
    if c.number("parallel.cp") > 1:
        axes["cp_comm"] = "state" if "state" in ways else ways[0] if len(set(ways)) == 1 else "several"
        axes["cp_cut"] = c.get("parallel.cp_cut", "zigzag")
    again = c.get("train.recompute", "none")
    return axes | {
        "dp": str(c.dp), "zero": c.get("parallel.zero", "0"), "zero_group": yes(c, "parallel.zero_group"),
        "reshard": c.get("parallel.reshard", "auto"), "offload": yes(c, "train.offload"),
        "states": c.get("optim.states", "device"),
        "chunks": c.get("parallel.vpp", str(max(1, stages // c.number("parallel.pp")))),
        "schedule": schedule, "split": YES[bool(split)], "stages": stages_value(c.get("parallel.layout")),
        "recompute": "several" if "," in again else again, "overlap_grad": yes(c, "parallel.overlap_grad"),
        "overlap_param": yes(c, "parallel.overlap_param"), "order": c.get("parallel.order", "tp-cp-ep-dp-pp"),
        "async": yes(c, "checkpoint.async"), "isa": c.get("debug.isa", "auto"), "threads": c.get("debug.threads", "1"),
    }


def precision_axes(c):
    precision = c.get("run.precision", "fp32")
    axes = {"precision": precision}
    if precision != "fp32":
        for axis in ("residual", "vectors") + ("row_sums",) * ("moe.experts" in c.model):
            axes[axis] = {"true": "fp32", "false": "16 bits"}.get(c.get("run.fp32_" + axis), "as chosen")
    if precision == "bf16":
        axes["dot"] = c.get("debug.dot", "auto")
    if precision == "fp8":
        axes |= {"fp8": c.get("run.fp8", "tensorwise"), "fp8_keep": c.get("run.fp8_keep", "1"),
                 "fp8_weights": yes(c, "run.fp8_weights")}
        if "moe.experts" in c.model:
            axes["fp8_experts"] = yes(c, "run.fp8_experts")
    return axes


def training_axes(c):
    train, micro = c.get("data.train"), c.get("train.micro_batch", "1")
    data = "stages" if "@" in train else "blend" if " " in train else "plain"
    data = "split" if "data.split" in c.model else "sets" if ":" in c.get("data.valid", "") else data
    return {
        "class": c.published, "mode": "upcycle" if "checkpoint.upcycle" in c.model else c.mode,
        "batch": "ramp" if "*" in c.get("train.global_batch") else "one size",
        "micro_batch": micro if int(micro) <= 3 else "more", "data": data, "data.order": c.get("data.order", "keyed"),
        "lr": c.get("optim.schedule"), "warmup": yes(c, "optim.warmup"),
        "length": "tokens" if "train.tokens" in c.model else "steps",
        "keep": "best" if "checkpoint.keep_best" in c.model else "newest", "tasks": yes(c, "train.eval_tasks"),
        "max_logit": yes(c, "log.max_attention_logit"), "extra_shift": yes(c, "debug.extra_shift"),
        "trace": YES["log.trace_every" in c.layout or "log.trace_steps" in c.layout],
        "mask_eod": yes(c, "data.mask_eod"), "reset_at_eod": yes(c, "data.reset_at_eod"), "clip": yes(c, "optim.clip"),
    }


def optimizer_axes(c):
    name = c.get("optim.name", "adamw")
    axes = {"optimizer": name + (" in bf16" if c.get("optim.moments") == "bf16" else ""),
            "mup": yes(c, "optim.mup_base"), "qk_clip": yes(c, "optim.qk_clip")}
    if name == "muon":
        axes |= {"muon_split": c.get("optim.muon_split", "qkv"), "muon_scale": c.get("optim.muon_scale", "match_rms_adamw")}
        if "moe.experts" in c.model:
            axes["muon_router"] = c.get("optim.muon_router", "muon")
    return axes


def pairs(case):
    """
    {((axis, value), (axis, value))}; an axis that a case lacks, as router without experts, is in none, nor is a value
    that only a mistake can have.
    """
    at = training_axes(case) | optimizer_axes(case) | precision_axes(case) | model_axes(case) | expert_axes(case) | layout_axes(case)
    at |= mixer_axes(case)
    if at["mixer"].endswith(" alone"):
        at = {axis: value for axis, value in at.items() if axis not in OF_ATTENTION}
    return set(combinations([(axis, at[axis]) for axis in KINDS if at.get(axis) in KINDS[axis]], 2))


class Coverage:
    def __init__(self):
        self.seen = set()

    def gain(self, case):
        return len(pairs(case) - self.seen)

    def add(self, case):
        self.seen |= pairs(case)

    def text(self, missing):
        """Of each two axes the share of their pairs that were tried; with `missing` so many that were not."""
        names, lines = list(KINDS), []
        tried = {}
        for (a, _), (b, _) in self.seen:
            tried[a, b] = tried.get((a, b), 0) + 1
        width = max(map(len, names))
        for i, row in enumerate(names):
            marks = "".join(self.mark(tried.get((col, row), 0), len(KINDS[col]) * len(KINDS[row])) for col in names[:i])
            lines.append(f"  {row:{width}} {len(KINDS[row]):2} {marks}")
        whole = sum(len(KINDS[a]) * len(KINDS[b]) for a, b in combinations(names, 2))
        lines.append(f"  pairs of values tried: {len(self.seen)} of {whole} (of which some exclude each other);")
        lines.append("  the columns are the rows in order: # all of two axes' pairs, 0 to 9 tenths of them, . none")
        untried = [((a, x), (b, y)) for a, b in combinations(names, 2) for x in KINDS[a] for y in KINDS[b]
                   if ((a, x), (b, y)) not in self.seen]
        lines += [f"  not tried: {a} {x}, {b} {y}" for (a, x), (b, y) in untried[:missing]]
        return "\n".join(lines)

    @staticmethod
    def mark(count, whole):
        return "#" if count == whole else "." if count == 0 else str(10 * count // whole)
