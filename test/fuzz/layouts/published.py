"""
Models of published classes: what a drawn model must say, and must not, so that `convert --format hf` has a class for
it. Widths and heads stay as they were drawn. Which models have a class the program says, not this table.
"""

PLAIN = {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.bias": "false"}
NEVER = ("model.activation_limit", "model.ffn_layers", "moe.latent", "model.latent_norm_eps", "model.norm_bias", "model.attention_bias", "model.attention_gate", "model.attention_scale",
         "model.attention_softcap", "model.block_norms", "model.state_norms", "model.embed_scale", "model.final_softcap",
         "model.logits_scale", "model.qk_norm", "model.residual_scale", "model.rope_base_local", "model.rope_dim", "model.rope_layers", "model.sinks", "model.window", "moe.scale",
         "moe.groups", "moe.group_topk", "moe.group_best", "moe.shared_ffn", "moe.shared_gate", "moe.every")
GEMMA = {"model.activation": "geglu", "model.block_norms": "both", "model.window": "9,0",
         "model.attention_scale": "0.25"}
CLASSES = {  # beside PLAIN; None: the key is not given
    "llama": {}, "mistral": {"model.window": "9"}, "qwen2": {"model.attention_bias": "qkv"},
    "qwen3": {"model.qk_norm": "true"},
    "olmo2": {"model.qk_norm": "full", "model.block_norms": "post"},
    "phi3": {"model.rope_dim": "2", "model.rope_scaling": None, "model.rope_factor": None, "model.rope_original": None},
    "gemma2": GEMMA | {"model.attention_softcap": "2", "model.final_softcap": "3"},
    "gemma3_text": GEMMA | {"model.qk_norm": "true", "model.rope_base_local": "500"},
    "granite": {"model.embed_scale": "4", "model.residual_scale": "0.3", "model.attention_scale": "0.2",
                "model.logits_scale": "0.25"},
    "arcee": {"model.activation": "relu2"},
    "jais2": {"model.activation": "relu2", "model.norm": "layernorm"},
    "nemotron": {"model.activation": "relu2", "model.norm": "layernorm", "model.rope_dim": "2"},
    "gpt2": {"model.norm": "layernorm", "model.activation": "gelu", "model.position": "learned", "model.bias": "true",
             "model.rope_scaling": None, "model.rope_factor": None, "model.rope_original": None},
}
MIXTURES = {
    "mixtral": {"moe.router": "softmax", "moe.normalize": None},
    "qwen3_moe": {"model.qk_norm": "true", "moe.router": "softmax", "moe.normalize": None},
    "gpt_oss": {"model.activation": "clamped_swiglu", "model.bias": "true", "model.sinks": "true",
                "model.window": "9,0", "model.activation_limit": "7", "moe.router": "softmax", "moe.normalize": None},
}
HYBRIDS = {"qwen3_next": {"model.qk_norm": "true", "model.attention_gate": "true", "moe.router": "softmax_pre",
                          "moe.normalize": "true", "moe.shared_gate": "true", "model.delta_negative": None, "model.delta_norm_eps": None}}
LATENT = {"deepseek_v2": {"moe.router": "softmax_pre", "moe.normalize": "false", "model.norm_eps": "1e-6"},
          "deepseek_v3": {"moe.router": "sigmoid", "model.norm_eps": "1e-6"}}


def choices(d):
    """The classes that a draw's attention, experts and modules can be of."""
    if d.state:
        return [] if d.mtp or d.mla or not d.experts_on or d.balance == "bias" or d.state.word != "delta" or "attention" not in d.mixers else list(HYBRIDS)
    if d.mla:
        if d.mtp or not d.experts_on or d.balance == "bias":
            return ["deepseek_v3"] if d.balance in ("none", "aux", "seq_aux", "bias") else []
        return list(LATENT)
    if d.mtp:
        return []
    if d.experts_on:
        return [] if d.balance == "bias" else list(MIXTURES)
    return [name for name in CLASSES if name != "gpt2" or d.kv_heads == d.heads]


def publish(d):
    """The keys of a class into a draw's model, behind all else of the model; its name, "none" if there is none for it."""
    names = choices(d)
    if not names:
        return "none"
    name = d.rng.choice(names)
    wanted = PLAIN | (CLASSES | MIXTURES | LATENT | HYBRIDS)[name]
    if not d.experts_on:
        wanted = {key: value for key, value in wanted.items() if not key.startswith("moe.")}
    for key in NEVER:
        d.model.pop(key, None)
    if "moe.shared_gate" in wanted:
        d.put(d.model, "moe.shared_ffn", d.width)
    for key, value in wanted.items():
        if value is None:
            d.model.pop(key, None)
        else:
            d.model[key] = value
    if "," in wanted.get("model.window", "") and d.layers == 1:
        d.model["model.window"] = "9"
    if name.startswith("gemma"):
        d.model["model.embed_scale"] = repr(int(d.model["model.hidden"]) ** 0.5)
    if name == "gpt2":
        d.model["model.hidden"] = str(d.heads * d.head_dim)
    return name
