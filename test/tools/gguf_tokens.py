#!/usr/bin/env python3
"""Texts that llama.cpp (the package xllamacpp) encodes by a GGUF file, and megatrain by the tokenizer that it was made
from: the same ids.

    gguf_tokens.py MEGATRAIN FILE TOKENIZER COUNT [TEXTS]

COUNT random texts of what is tricky: the vocabulary's own texts and cut ones, added tokens inside and across one another,
blanks of all kinds, digits, suffixes, characters that no vocabulary has. TEXTS: a file of more, which lines
"__ggml_vocab_test__" part, as llama.cpp's own have them. Prints how many were the same; else the first that is not.
"""
import http.client
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

import xllamacpp

MARK = "\u2581"
PARTS = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "'s", "'LL", "n't", "0", "7", "2024", "3.14", ",", ".", "...", "!?", "(", "/",
         "<", ">", "</", "|>", "<0x41>", "[PAD3]", "\u00e9", "\u00df", "\u4e2d\u6587", "\u3042", "\ud55c\uad6d", "\u0928\u092e",
         "\U0001f999", "\U0001f468\u200d\U0001f469", "\u1680", "\u3000", "\u00a0", "\ue000", "\U000e0041"]


OWN = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
BYTES = {chr(b): b for b in OWN} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in OWN)}


def letters(token):
    """The text of a byte-level token."""
    return bytes(BYTES.get(c, 63) for c in token).decode("utf-8", "ignore")


def texts(path, count):
    if path == "byte":
        vocab, added = ["a", "b"], []
    else:
        t = json.load(open(path))
        vocab, added = sorted(t["model"]["vocab"]), [a["content"] for a in t["added_tokens"]]
        byte_level = "ByteLevel" in json.dumps(t["pre_tokenizer"])
        vocab = [letters(v) if byte_level else v.replace(MARK, " ") for v in vocab]
        added = [a for a in added if MARK not in a]
    rng = random.Random(5)
    words = [v for v in vocab if 2 <= len(v) < 20] or vocab
    for _ in range(count):
        out = []
        for _ in range(rng.choice([1, 2, 5, 12])):
            kind, word = rng.random(), rng.choice(words)
            if kind < 0.45:
                out.append(word)
            elif kind < 0.65:
                at = rng.randrange(len(word))
                out.append(rng.choice([word[:at], word[at:], word[::-1], word * 2, word.upper()]))
            elif kind < 0.72 and added:
                a = rng.choice(added)
                out.append(rng.choice([a, a, a[:-1], a[1:], a + a]))
            else:
                out.append(rng.choice(PARTS) * rng.choice([1, 1, 1, 2, 5]))
        yield "".join(out)


def ours(program, tokenizer, lines):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a")
        with open(path + ".jsonl", "w") as f:
            for line in lines:
                f.write(json.dumps({"text": line}) + "\n")
        subprocess.run([program, "preprocess", "--input", path + ".jsonl", "--tokenizer", tokenizer, "--output", path],
                       check=True, capture_output=True)
        index, data = open(path + ".idx", "rb").read(), open(path + ".bin", "rb").read()
    kind, count = index[17], struct.unpack_from("<q", index, 18)[0]
    ids, at = struct.unpack(f"<{len(data) // (2 if kind == 8 else 4)}{'H' if kind == 8 else 'i'}", data), 0
    for size in struct.unpack_from(f"<{count}i", index, 34):
        yield list(ids[at : at + size])
        at += size


def main():
    program, path, tokenizer, count = sys.argv[1:5]
    lines = list(texts(tokenizer, int(count)))
    if len(sys.argv) > 5:
        lines += open(sys.argv[5], newline="").read().split("\n__ggml_vocab_test__\n")
    lines = [line for line in lines if line]
    p = xllamacpp.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel, p.warmup = path, 64, 1, False
    server = xllamacpp.Server(p)
    link = http.client.HTTPConnection(server.listening_address.split("//")[1])
    seen = 0
    for line, want in zip(lines, ours(program, tokenizer, lines), strict=True):
        link.request("POST", "/tokenize", json.dumps({"content": line, "add_special": False, "parse_special": True}),
                     {"Content-Type": "application/json"})
        got = json.loads(link.getresponse().read())["tokens"]
        assert got == want, f"{line!r}: llama.cpp {got}, megatrain {want}"
        seen += 1
    print(seen)


if __name__ == "__main__":
    main()
