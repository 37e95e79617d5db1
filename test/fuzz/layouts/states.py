"""
Mixers with a state in the place of attention: the windows that a slice has whole, and the keys that each draws. A
further kind is a row of STATES, with a function that puts its keys, and its axes in axes.py.
"""
from dataclasses import dataclass
from math import lcm
from typing import Callable

OF_ATTENTION = (  # keys that are refused where no block has attention
    "model.rope_layers", "model.rope_dim", "model.rope_base", "model.rope_base_local", "model.rope_scaling", "model.rope_factor",
    "model.rope_original", "model.rope_slow", "model.rope_fast", "model.rope_magnitude", "model.rope_mscale_all",
    "model.rope_truncate", "model.attention_dropout", "model.qk_norm", "model.attention_scale", "model.attention_softcap",
    "model.sinks", "model.attention_gate", "model.window", "optim.mup_head_dim", "optim.qk_clip", "optim.qk_clip_alpha",
    "log.max_attention_logit")


@dataclass
class State:
    word: str  # of model.mixer
    window: int  # positions
    put: Callable  # its keys into a draw's model


def units(d):
    """The least number of units that ranks can share: of cp those that exchange heads."""
    return lcm(d.tp_blocks, d.tp * (1 if d.in_order else d.cp))


def put_delta(d):
    put = lambda key, value, default=None: d.put(d.model, "model.delta_" + key, value, default)
    keys = units(d) * d.one(1, 1, 2)
    group = d.one(1, 1, 2, 3)
    width, wider = (d.multiple, 2 * d.multiple) if d.fp8 else (d.one(2, 3, 4, 8, 16), d.one(2, 4, 5, 8))
    put("key_heads", keys, d.heads)
    put("value_heads", keys * group, keys)
    put("key_dim", width, d.head_dim)
    put("value_dim", d.one(width, wider), width)
    put("conv", d.one(4, 4, 2, 3, 8), 4)
    put("norm_eps", d.one("0", "0", "1e-2"), "0")
    put("negative", d.chance(0.3), False)


def put_mamba(d):
    put = lambda key, value, default=None: d.put(d.model, "model.mamba_" + key, value, default)
    groups = units(d) * d.one(1, 1, 2)
    put("heads", groups * d.one(1, 1, 2, 3), d.heads)
    put("head_dim", d.multiple if d.fp8 else d.one(2, 3, 4, 8, 16))
    put("groups", groups, 1)
    put("state", d.one(1, 2) * d.multiple if d.fp8 else d.one(2, 4, 5, 8, 16))
    put("conv", d.one(4, 4, 2, 3, 8), 4)
    put("conv_bias", d.chance(0.6), True)
    put("dt_min", d.one(0, 0, 0.001, 0.1), 0)


def put_kda(d):
    put = lambda key, value, default=None: d.put(d.model, "model.kda_" + key, value, default)
    put("heads", units(d) * d.one(1, 1, 2), d.heads)
    put("head_dim", d.multiple if d.fp8 else d.one(2, 4, 8, 17), d.head_dim)
    put("conv", d.one(4, 4, 2, 3, 8), 4)
    put("bound", d.one(0, 0, -5), 0)


STATES = (State("delta", 64, put_delta), State("mamba2", 128, put_mamba), State("kda", 64, put_kda))


def draw_state(d):
    """
    The state of a share of the draws, None of the others, and whether ranks of cp hand it on; slices of whole windows, on
    each of these ranks, make no longer samples than 512.
    """
    d.in_order = False
    fit = [s for s in STATES if d.slices == 1 or lcm(s.window * d.slices, 2 * d.cp * d.slices) <= 512]
    state = d.rng.choice(fit) if fit and d.chance(0.25) else None
    if state and d.cp > 1 and state.window * d.slices * d.cp <= 512:
        d.in_order = d.chance(0.5)
    return state


def draw_mixers(d):
    """The words of model.mixer, of each block until the list begins again."""
    if not d.state:
        return ["attention"]
    if d.layers == 1 or d.chance(0.25):
        return [d.state.word]
    both = [d.state.word, "attention"]
    more = [d.rng.choice(both) for _ in range(d.rng.randint(0, min(d.layers, 4) - 2))]
    return d.rng.sample(both + more, 2 + len(more))


def put_mixers(d):
    d.put(d.model, "model.mixer", ",".join(d.mixers), "attention")
    if d.state:
        d.state.put(d)


def falls_on_attention(d, text):
    """Is a number of the list over blocks above 0 in some block with attention?"""
    numbers = [number for item in text.split(",") for number, _, times in [item.partition("*")] for _ in range(int(times or 1))]
    return any(d.mixers[i % len(d.mixers)] == "attention" and numbers[i % len(numbers)] != "0" for i in range(d.layers))
