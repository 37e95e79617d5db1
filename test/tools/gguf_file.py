#!/usr/bin/env python3
"""GGUF files, read from the format's description alone: no package is needed.

    gguf_file.py same FILE HF_FOLDER      every tensor of an fp32 file is that of the folder (model.safetensors, fp32): names,
                                          dims and numbers, rows of queries and keys in the other order where the class has it
    gguf_file.py near FILE F32_FILE       a file of fewer bits: each number is the nearest of its kind to the fp32 file's
    gguf_file.py keys FILE                "KEY TYPE VALUE" of each key, sorted; of arrays how many and the first few
    gguf_file.py logits FILE IDS LOGITS   how far log-probabilities of all tokens by llama.cpp (the package xllamacpp) lie
                                          from those of LOGITS (.npy), the largest of all
"""
import array
import json
import math
import os
import re
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import hf_folder
import npy

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
NAMES = {4: "u32", 5: "i32", 6: "f32", 7: "bool", 8: "string", 9: "array"}
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 8: ("Q8_0", 32, 34), 30: ("BF16", 1, 2)}


class Reader:
    def __init__(self, path):
        self.data, self.at = open(path, "rb").read(), 0
        assert self.data[:4] == b"GGUF", "no GGUF file"
        self.at = 4
        assert self.number(4) == 3, "not version 3"
        tensors, keys = self.number(11), self.number(11)
        self.keys = {}
        for _ in range(keys):
            name, kind = self.text(), self.number(4)
            assert name and name not in self.keys, "key twice: " + name
            self.keys[name] = (kind, self.value(kind))
        infos = []
        for _ in range(tensors):
            name, dims = self.text(), self.number(4)
            assert len(name) < 64 and 1 <= dims <= 4, name
            infos.append((name, [self.number(11) for _ in range(dims)], self.number(4), self.number(10)))
        step = self.keys.get("general.alignment", (4, 32))[1]
        start = -(-self.at // step) * step
        assert not any(self.data[self.at : start]), "padding that is not 0"
        self.tensors, end = {}, 0
        for name, dims, kind, offset in infos:
            what, block, size = TYPES[kind]
            assert name not in self.tensors and offset == end and dims[0] % block == 0, name
            data = self.data[start + offset : start + offset + math.prod(dims) // block * size]
            end = -(-(offset + len(data)) // step) * step
            assert len(data) == math.prod(dims) // block * size, name + " ends early"
            self.tensors[name] = (what, dims, data)
        assert len(self.data) == start + end, "bytes behind the last tensor, or too few"

    def number(self, kind):
        (value,) = struct.unpack_from(SCALARS[kind], self.data, self.at)
        self.at += struct.calcsize(SCALARS[kind])
        return value

    def text(self):
        size = self.number(10)
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.number(kind)
        inner, count = self.number(4), self.number(10)
        return [self.value(inner) for _ in range(count)]


# ---- against a folder of safetensors

RENAMED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def pairs(rows, heads):
    """Rows of halves of heads become neighbours."""
    size = len(rows) // heads
    return [rows[h * size + i // 2 + i % 2 * (size // 2)] for h in range(heads) for i in range(size)]


def expected(folder):
    """{name in GGUF: (dims, bytes)}."""
    config = json.load(open(os.path.join(folder, "config.json")))
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    turned = config["model_type"] in ("llama", "mistral", "mixtral")
    tensors, stacks, out = hf_folder.read(os.path.join(folder, "model.safetensors")), {}, {}
    for name, (dtype, shape, data) in tensors.items():
        assert dtype == "F32", name
        row = len(data) // shape[0]
        if turned and re.search(r"\.[qk]_proj\.", name):
            rows = pairs([data[i * row : (i + 1) * row] for i in range(shape[0])], heads if "q_proj" in name else kv)
            data = b"".join(rows)
        m = re.fullmatch(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if m:
            stacks.setdefault(f"blk.{m[1]}.ffn_{EXPERTS[m[3]]}_exps.weight", {})[int(m[2])] = (shape, data)
            continue
        m = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        out[f"blk.{m[1]}.{RENAMED[m[2]]}.{m[3]}" if m else RENAMED[name]] = (shape[::-1], data)
    for name, parts in stacks.items():
        shape = parts[0][0]
        out[name] = ([*shape[::-1], len(parts)], b"".join(parts[e][1] for e in range(len(parts))))
    return out


def same(path, folder):
    got, want = Reader(path).tensors, expected(folder)
    extra = set(got) - set(want) - {"rope_freqs.weight"}
    assert not extra and not set(want) - set(got), (extra, set(want) - set(got))
    for name, (dims, data) in want.items():
        kind, got_dims, got_data = got[name]
        assert kind == "F32" and got_dims == dims, (name, kind, got_dims, dims)
        assert got_data == data, name + " has other numbers"


# ---- fewer bits

def halves(data, what):
    if what == "BF16":
        return struct.unpack(f"<{len(data) // 2}f", b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)))
    return struct.unpack(f"<{len(data) // 2}e", data)


def near(path, reference):
    got, want, kinds = Reader(path).tensors, Reader(reference).tensors, set()
    assert list(got) == list(want)
    for name, (what, dims, data) in got.items():
        exact = array.array("f", want[name][2])
        kinds.add(what)
        if len(dims) == 1 or "ffn_gate_inp." in name:
            assert what == "F32" and data == want[name][2], name
        elif what == "Q8_0":
            for b in range(len(exact) // 32):
                x = exact[32 * b : 32 * b + 32]
                scale, *q = struct.unpack("<e32b", data[34 * b : 34 * b + 34])
                top = max(map(abs, x))
                assert scale == struct.unpack("<e", struct.pack("<e", top / 127))[0], name
                assert top == 0 or max(map(abs, q)) == 127, name
                for y, n in zip(x, q):
                    assert abs(y * 127 - n * top) <= top * 0.50001, (name, y, n, top)
        else:
            unit = 2.0**-8 if what == "BF16" else 2.0**-11
            for x, y in zip(exact, halves(data, what)):
                assert abs(x - y) <= abs(x) * unit + (2.0**-25 if what == "F16" else 0), (name, x, y)
    print(*sorted(kinds))


# ---- llama.cpp

def logits(path, ids, reference):
    import xllamacpp as x

    (count, length, vocab), values = npy.load(reference)
    p = x.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel, p.warmup = path, 256, 1, False
    p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
    p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server, worst, seen = x.Server(p), 0.0, 0
    for i, line in enumerate(open(ids)):
        tokens = list(map(int, line.split()))
        for size in range(3, length + 1, 6):
            ask = {"prompt": tokens[:size], "max_tokens": 1, "temperature": 0, "n_probs": vocab}
            said = server.handle_completions({**ask, "post_sampling_probs": False, "cache_prompt": False})
            said = (json.loads(said) if isinstance(said, str) else said)["choices"][0].get("logprobs")
            if not said:  # the likeliest token has no text
                continue
            row = values[(i * length + size - 1) * vocab : (i * length + size) * vocab]
            top = max(row)
            norm = top + math.log(math.fsum(math.exp(v - top) for v in row))
            for token in said["content"][0]["top_logprobs"]:
                difference = abs(token["logprob"] - (row[token["id"]] - norm))
                worst, seen = max(worst, difference if difference == difference else math.inf), seen + 1
    assert seen >= 4 * vocab, f"only {seen} log-probabilities"
    print(f"{worst:.3e}")


def keys(path):
    for name, (kind, value) in sorted(Reader(path).keys.items()):
        if kind == 9:
            value = f"{len(value)}: {value[:3]}"
        print(name, NAMES[kind], f"{value:.6g}" if kind == 6 else value)


if __name__ == "__main__":
    {"same": same, "near": near, "keys": keys, "logits": logits}[sys.argv[1]](*sys.argv[2:])
