#!/usr/bin/env python3
"""Folders of Hugging Face's, written from the format's description alone: no package is needed.

    hf_folder.py make OUT [--shards N] [--dtype F32|BF16|F16] [--sparse] [KEY=VALUE ...]   a Llama with random weights,
                                          or with num_local_experts a Mixtral
    hf_folder.py damage KIND FROM OUT     a copy of FROM with one fault; `damage list` prints the kinds
    hf_folder.py apart TOKENIZER OUT      vocab.json and merges.txt of a tokenizer.json
    hf_folder.py values FILE...           "NAME DTYPE SHAPE CRC32" of each tensor of safetensors files, sorted

Keys are those of config.json. As a module: read, write, llama_shapes.
"""
import json
import os
import random
import shutil
import struct
import sys
import zlib

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I32": 4, "F8_E4M3": 1}
INDEX = "model.safetensors.index.json"


def read(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    data = open(path, "rb").read()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    return {
        name: (t["dtype"], t["shape"], data[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]])
        for name, t in header.items()
    }


def header_of(sizes):
    """The header of tensors {name: (dtype, shape)}, and how many bytes of data follow it."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in sizes.items():
        size = SIZES[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def write(path, tensors):
    head, _ = header_of({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})
    with open(path, "wb") as f:
        f.write(head)
        for _, _, data in tensors.values():
            f.write(data)


def numbers(rng, dtype, count):
    if dtype == "F32":
        return b"".join(struct.pack("<f", rng.uniform(-0.3, 0.3)) for _ in range(count))
    # 16 bits: any sign and mantissa, an exponent that makes it smaller than 1/2
    top = (0x3E80, 0x3800)[dtype == "F16"]
    return b"".join(struct.pack("<H", rng.randrange(top) | rng.randrange(2) << 15) for _ in range(count))


def llama_shapes(c):
    h, f, q, kv = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_attention_heads"] * c["head_dim"],
        c["num_key_value_heads"] * c["head_dim"],
    )
    out = {"model.embed_tokens.weight": [c["vocab_size"], h]}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = [h]
        for e in range(c.get("num_local_experts", 0)):
            out.update({f"{p}block_sparse_moe.experts.{e}.{w}.weight": [f, h] for w in ("w1", "w3")})
            out[f"{p}block_sparse_moe.experts.{e}.w2.weight"] = [h, f]
        if "num_local_experts" in c:
            out[p + "block_sparse_moe.gate.weight"] = [c["num_local_experts"], h]
        else:
            out[p + "mlp.down_proj.weight"] = [h, f]
            out[p + "mlp.gate_proj.weight"] = [f, h]
            out[p + "mlp.up_proj.weight"] = [f, h]
        out[p + "post_attention_layernorm.weight"] = [h]
        out[p + "self_attn.k_proj.weight"] = [kv, h]
        out[p + "self_attn.o_proj.weight"] = [h, q]
        out[p + "self_attn.q_proj.weight"] = [q, h]
        out[p + "self_attn.v_proj.weight"] = [kv, h]
    out["model.norm.weight"] = [h]
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = [c["vocab_size"], h]
    return out


def make(out, shards, dtype, sparse, keys):
    c = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[dtype],
    }
    if "num_local_experts" in keys:
        c.update(architectures=["MixtralForCausalLM"], model_type="mixtral", num_experts_per_tok=2, sliding_window=None)
        del c["attention_bias"], c["mlp_bias"]
    c.update(keys)
    rng = random.Random(7)
    os.makedirs(out)
    json.dump(c, open(f"{out}/config.json", "w"), indent=1)
    shapes = list(llama_shapes(c).items())
    parts = [shapes[len(shapes) * i // shards : len(shapes) * (i + 1) // shards] for i in range(shards)]
    where = {}
    for i, part in enumerate(parts):
        name = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        where.update({tensor: name for tensor, _ in part})
        head, size = header_of({tensor: (dtype, shape) for tensor, shape in part})
        with open(f"{out}/{name}", "wb") as f:
            f.write(head)
            if sparse:
                f.truncate(len(head) + size)
            for _, shape in [] if sparse else part:
                f.write(numbers(rng, dtype, shape[0] * (shape + [1])[1]))
    if shards > 1:
        json.dump({"metadata": {"total_size": 0}, "weight_map": where}, open(f"{out}/{INDEX}", "w"), indent=1)


# ---- faults. Each changes a folder of three shards in place.


def shard(out, i):
    return f"{out}/model-{i:05d}-of-00003.safetensors"


def change(out, i, how):
    tensors = read(shard(out, i))
    how(tensors)
    write(shard(out, i), tensors)


def index(out, how):
    x = json.load(open(f"{out}/{INDEX}"))
    how(x["weight_map"])
    json.dump(x, open(f"{out}/{INDEX}", "w"))


NORM = "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def tensor(name, value):
    def how(tensors):
        tensors[name] = value(tensors[name])

    return how


def reshape(t):
    return (t[0], [t[1][0] * 2, t[1][1] // 2], t[2])


def missing_tensor(out):
    change(out, 3, lambda t: t.pop(NORM))
    index(out, lambda m: m.pop(NORM))


def extra_tensor(out):
    change(out, 3, lambda t: t.update({"model.layers.2.input_layernorm.weight": t[NORM]}))
    index(out, lambda m: m.update({"model.layers.2.input_layernorm.weight": m[NORM]}))


def move(out, target, link):
    shutil.move(shard(out, 2), target)
    os.symlink(link, shard(out, 2))


def overwrite(path, at, data):
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(data)


def set_index(text):
    return lambda out: open(f"{out}/{INDEX}", "w").write(text)


FAULTS = {
    "missing_shard": lambda out: os.remove(shard(out, 2)),
    "no_weights": lambda out: [os.remove(shard(out, i)) for i in (1, 2, 3)] + [os.remove(f"{out}/{INDEX}")],
    "no_config": lambda out: os.remove(f"{out}/config.json"),
    "truncated": lambda out: os.truncate(shard(out, 2), os.path.getsize(shard(out, 2)) - 1),
    "empty_shard": lambda out: os.truncate(shard(out, 2), 0),
    "cut_header": lambda out: os.truncate(shard(out, 2), 100),
    "longer": lambda out: open(shard(out, 2), "ab").write(b"x"),
    "header_length": lambda out: overwrite(shard(out, 1), 0, b"\xff" * 8),
    "header_text": lambda out: overwrite(shard(out, 1), 8, b"["),
    "wrong_shape": lambda out: change(out, 1, tensor(GATE, reshape)),
    "wrong_dims": lambda out: change(out, 3, tensor(NORM, lambda t: (t[0], [1] + t[1], t[2]))),
    "wrong_dtype": lambda out: change(out, 3, tensor(NORM, lambda t: ("I32", t[1], t[2]))),
    "fp8_unscaled": lambda out: change(out, 1, tensor(GATE, lambda t: ("F8_E4M3", t[1], t[2][: len(t[2]) // 4]))),
    "missing_tensor": missing_tensor,
    "extra_tensor": extra_tensor,
    "twice": lambda out: change(out, 2, lambda t: t.update(read(shard(out, 3)))),
    "unlisted": lambda out: index(out, lambda m: m.pop(NORM)),
    "listed_only": lambda out: index(out, lambda m: m.update({"model.more": m[NORM]})),
    "other_shard": lambda out: index(out, lambda m: m.update({NORM: m[GATE]})),
    "index_up": lambda out: index(out, lambda m: m.update({NORM: "../three/" + m[NORM]})),
    "index_dots": lambda out: index(out, lambda m: m.update({NORM: "..safetensors"})),
    "index_absolute": lambda out: index(out, lambda m: m.update({NORM: os.path.abspath(shard(out, 3))})),
    "index_folder": lambda out: index(out, lambda m: m.update({NORM: "sub/" + m[NORM]})),
    "index_number": lambda out: index(out, lambda m: m.update({NORM: 3})),
    "index_other": set_index('{"weight_map": []}'),
    "index_empty": set_index("{}"),
    "index_cut": set_index('{"weight_map": {"a'),
    "index_repeats": set_index('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'),
    "link_out": lambda out: move(out, f"{out}.elsewhere", f"../{os.path.basename(out)}.elsewhere"),
    "link_absolute": lambda out: move(out, f"{out}.elsewhere", os.path.abspath(f"{out}.elsewhere")),
    "link_to_nothing": lambda out: move(out, f"{out}.elsewhere", "nothing"),
    "shard_is_folder": lambda out: [os.remove(shard(out, 2)), os.mkdir(shard(out, 2))],
    "tied_differs": lambda out: json.dump(
        dict(json.load(open(f"{out}/config.json")), tie_word_embeddings=True), open(f"{out}/config.json", "w")
    ),
}


def main():
    words = sys.argv[1:]
    if words[:1] == ["make"]:
        keys, shards, dtype, sparse, out = {}, 1, "F32", False, words[1]
        rest = iter(words[2:])
        for word in rest:
            if word == "--shards":
                shards = int(next(rest))
            elif word == "--dtype":
                dtype = next(rest)
            elif word == "--sparse":
                sparse = True
            else:
                key, _, value = word.partition("=")
                keys[key] = json.loads(value)
        make(out, shards, dtype, sparse, keys)
    elif words == ["damage", "list"]:
        print("\n".join(FAULTS))
    elif words[:1] == ["damage"]:
        _, kind, source, out = words
        shutil.copytree(source, out)
        FAULTS[kind](out)
    elif words[:1] == ["apart"]:
        model = json.load(open(words[1]))["model"]
        json.dump(model["vocab"], open(f"{words[2]}/vocab.json", "w"))
        with open(f"{words[2]}/merges.txt", "w") as f:
            f.write("#version: 0.2\n" + "".join(" ".join(merge) + "\n" for merge in model["merges"]))
    elif words[:1] == ["values"]:
        lines = []
        for path in words[1:]:
            for name, (dtype, shape, data) in read(path).items():
                lines.append(f"{name} {dtype} {shape} {zlib.crc32(data):08x}")
        print("\n".join(sorted(lines)))
    else:
        sys.exit(__doc__)


main() if __name__ == "__main__" else None
