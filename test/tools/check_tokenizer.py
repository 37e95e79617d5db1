#!/usr/bin/env python3
"""Compares megatrain's tokenizers with the `tokenizers` package: every id, the merges of training, loading and saving.

  test/tools/check_tokenizer.py [--megatrain ./megatrain] [--tokenizer FILE.json]... [--random 20000] [--mib 10]
                                [--seed 1] [FILE...]

Texts: the files given, or else the first --mib of what this machine has of prose, code and many scripts (Python's
library, C headers, documentation, manual pages, locales); and random strings of everything that is tricky: blanks of
all kinds, digits, suffixes, letters newer than a library's tables, added tokens inside and across one another.
Tokenizers: those given, or else one trained on the texts, and forms of it: the three split patterns, NFC,
ignore_merges, both forms of merges, added tokens with all flags.

Closes with "N passed, N failed". Skips, saying so, where the package is not installed (pip install tokenizers).
"""
import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

import texts as corpus

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError:
    Tokenizer = None

TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3, QWEN = HEAD + r"\p{N}{1,3}" + TAIL, HEAD + r"\p{N}" + TAIL
passed = failed = 0


def check(what, good, detail=""):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    if not good:
        print(f"FAIL: {what}{': ' if detail else ''}{detail}", flush=True)


def merge_pairs(model):
    return [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]


class Megatrain:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def path(self, name):
        return os.path.join(self.folder, name)

    def run(self, *words):
        p = subprocess.run([self.program, *map(str, words)], text=True, capture_output=True)
        if p.returncode:
            sys.exit(f"{' '.join(map(str, words))}: exit {p.returncode}: {p.stderr}")

    def encode(self, tokenizer, texts):
        """Ids of each text, through `preprocess`. Empty texts have none, and no document."""
        full = [t for t in texts if t]
        with open(self.path("texts.jsonl"), "w") as f:
            for text in full:
                f.write(json.dumps({"text": text}) + "\n")
        self.run("preprocess", "--force", "--input", self.path("texts.jsonl"), "--format", "jsonl", "--tokenizer", tokenizer,
                 "--output", self.path("ids"))
        with open(self.path("ids.idx"), "rb") as f:
            index = f.read()
        with open(self.path("ids.bin"), "rb") as f:
            data = f.read()
        kind, count = struct.unpack_from("<BQ", index, 17)
        size, code = (2, "H") if kind == 8 else (4, "i")
        lengths = struct.unpack_from(f"<{count}i", index, 34)
        ids, at = [], 0
        for n in lengths:
            ids.append(list(struct.unpack_from(f"<{n}{code}", data, at * size)))
            at += n
        whole = iter(ids)
        return [next(whole) if t else [] for t in texts]


def train_package(texts, vocab):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab - 1, min_frequency=2, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_training(mt, texts, vocab):
    """A tokenizer trained on the texts; its merges are those of the package, ties included."""
    inputs = []
    for i, text in enumerate(texts):
        inputs.append(mt.path(f"text{i}"))
        with open(inputs[-1], "w", newline="") as f:
            f.write(text)
    out = mt.path("trained.json")
    mt.run("tokenizer", "train", "--vocab-size", vocab, "--output", out, "--input", *inputs)
    got = merge_pairs(json.load(open(out))["model"])
    want = merge_pairs(json.loads(train_package(texts, vocab).to_str())["model"])
    at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
    check(f"training a vocabulary of {vocab}", got == want,
          f"{len(got)} merges, the package {len(want)}, different from {at} on: {got[at:at + 1]} {want[at:at + 1]}")
    print(f"training: {len(got)} merges of {sum(len(t.encode()) for t in texts)} bytes", flush=True)
    written = open(out).read()
    check("the package loads and saves it unchanged", Tokenizer.from_file(out).to_str(pretty=True) == written)
    return out


def forms(mt, path):
    """(name, path) of variants of a tokenizer.json."""
    made = []

    def make(name, change):
        j = json.load(open(path))
        change(j)
        made.append((name, mt.path(name + ".json")))
        with open(made[-1][1], "w") as f:
            json.dump(j, f)

    def split(j, regex):
        j["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}

    def add(j, contents, **flags):
        model, added = j["model"]["vocab"], j["added_tokens"]
        first = 1 + max([*model.values(), *(t["id"] for t in added)])
        for content in contents:
            entry = {"id": model.get(content, first), "content": content, "single_word": False, "lstrip": False,
                     "rstrip": False, "normalized": False, "special": False, **flags}
            first += entry["id"] == first
            added.append(entry)

    def llama(j):
        split(j, LLAMA3)
        j["model"]["ignore_merges"] = True
        j["model"]["merges"] = [" ".join(m) for m in merge_pairs(j["model"])]
        add(j, ["<|begin|>", "<|begin|><|end|>", "<|end|>"], special=True)

    def qwen(j):
        split(j, QWEN)
        j["normalizer"] = {"type": "NFC"}
        add(j, ["<|im_start|>", "<tool>", "<|", "ộ", "한", "e\u0301\u0323"])
        add(j, ["norm", "\u1ed3", "o\u0323\u0301", " the"], normalized=True)

    make("gpt2", lambda j: None)
    make("llama", llama)
    make("qwen", qwen)
    for name, flags in (("lstrip", {"lstrip": True}), ("rstrip", {"rstrip": True}), ("word", {"single_word": True}),
                        ("all", {"lstrip": True, "rstrip": True, "single_word": True})):
        def flagged(j, flags=flags):
            qwen(j)
            add(j, ["<m>", "mask", "\u2460", " b", "  "], **flags)
            add(j, ["cat", "<m><m>"], normalized=True, **flags)
            add(j, ["dog\n", "m>"])
        make(name, flagged)
    return made


PARTS = [" ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u0085", "\u3000", "\u2028", "\u200b", "\ufeff", "\u180e", "\0",
         "'s", "'S", "'\u017f", "'ll", "'lL", "'re", "'", "don't", "I'M", "the", "The", " the", "cat", "dog", "dog\n",
         "mask", "norm", "1", "12", "123456", "\u0661\u0662", "\u00bd", "\u2167", "\u2460", "x_", "_", "!", "...", "==",
         "é", "e\u0301", "e\u0323\u0301", "o\u0308", "\u212b", "a\u030a", "o\u0323\u0302", "ộ", "o\u0302\u0300", "ọ\u0301",
         "\u1100\u1161\u11a8", "한국어", "中文", "日本",
         "नमस्ते", "ไทย", "العربية", "עברית", "Ελλάδα", "Привет", "\U0001f600", "\U0001f468\u200d\U0001f469",
         "\u200d",
         "\u2581", "\u2581the", "\u2581\u2581", "<s>", "</s>", "<unk>", "<0x41>", "DoN'T", "HTTPServer", "\u01c5x", "/\n",
         "<m>", "<m><m>", "m>", "<", "<|begin|>", "<|end|>", "<|begin|><|end|>", "<|endoftext|>", "<|im_start|>",
         "<tool>", "<|", "|>", "b", " b", "\u01c5", "\ua7cb", "\U00011f02", "\U00031350", "\U00011f50", "\U0001e4d0",
         "\U000e0041",
         "\U0010ffff", "\u0378", "\u093c\u0915", "\u0300", "\u0345"]


def not_new_mark(c):
    """Is it no combining mark newer than the package's tables for NFC, those of Unicode 9? What Python's own tables do
    not know may be one that utf8proc's do; marks lie in planes 0 and 1."""
    if unicodedata.category(c) == "Cn":
        return ord(c) >= 0x20000
    return not unicodedata.combining(c) or unicodedata.ucd_3_2_0.combining(c)


def random_texts(count, seed):
    rng = random.Random(seed)
    texts = [""]
    for i in range(count):
        parts = []
        for _ in range(rng.randrange(1, 30)):
            if rng.random() < 0.85:
                parts.append(rng.choice(PARTS))
                continue
            c = chr(rng.randrange(rng.choice((0x300, 0x3000, 0x11000, 0x110000))))
            parts.append(c if not 0xD800 <= ord(c) < 0xE000 and not_new_mark(c) else "?")
        texts.append("".join(parts))
    return texts


def compare(mt, name, path, texts):
    """Ids of named texts."""
    tokenizer = Tokenizer.from_file(path)
    bodies = [t for _, t in texts]
    got, want = mt.encode(path, bodies), tokenizer.encode_batch_fast(bodies, add_special_tokens=False)
    wrong, shown, total = 0, 0, 0
    for (label, text), a, b in zip(texts, got, want):
        total += len(b.ids)
        if a == b.ids:
            continue
        wrong += 1
        if shown < 5:
            shown += 1
            at = next((i for i, (x, y) in enumerate(zip(a, b.ids)) if x != y), min(len(a), len(b.ids)))
            print(f"    {label} {ascii(text[:120])}\n    id {at}: {a[at:at + 6]}, the package {b.ids[at:at + 6]}")
    check(f"{name}: ids of {len(texts)} texts", wrong == 0 and len(got) == len(texts), f"{wrong} differ")
    print(f"{name}: {len(texts)} texts, {total} ids, {wrong} texts differ", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ap.add_argument("--megatrain", default=os.path.join(root, "megatrain"))
    ap.add_argument("--tokenizer", action="append", default=[])
    ap.add_argument("--random", type=int, default=20000)
    ap.add_argument("--mib", type=float, default=10)
    ap.add_argument("--vocab", type=int, default=16000)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("files", nargs="*")
    a = ap.parse_args()
    if not Tokenizer:
        print("    skipped: the `tokenizers` package is not here (pip install tokenizers)")
        print("0 passed, 0 failed, 1 skipped")
        return 0
    texts = [(f, corpus.read_text(f)) for f in a.files] or corpus.of_this_machine(int(a.mib * (1 << 20)))
    texts = [(f, t) for f, t in texts if t]
    pieces = [(f"{f}+{i}", t[i:i + 20000]) for f, t in texts for i in range(0, len(t), 20000)]
    tricky = [("random", t) for t in random_texts(a.random, a.seed)]
    print(f"{len(texts)} files, {sum(len(t.encode()) for _, t in texts)} bytes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mt = Megatrain(os.path.abspath(a.megatrain), folder)
        chosen = [(t, t) for t in a.tokenizer]
        if not chosen:
            trained = check_training(mt, [t for _, t in texts], a.vocab)
            chosen = forms(mt, trained)
        for name, path in chosen:
            if name in ("word", "all"):  # word characters are those of utf8proc's tables
                tricky = [(f, "".join(c if unicodedata.category(c) != "Cn" else "?" for c in t)) for f, t in tricky]
            compare(mt, name + ", random", path, tricky)
            compare(mt, name + ", files", path, pieces)
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
