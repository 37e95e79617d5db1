#!/usr/bin/env python3
"""Writes test/golden/tokens.json with the `tokenizers` package.

  test/tools/golden_tokens.py [--shared ../shared/fixtures/tokenizers]

A text made of `parts` and of characters from `ranges` by a generator that test/test_tokens.c has, too; the merges that
the package trains on it; and hashes of the package's ids of that text, and of files of this machine, for forms of the
trained tokenizer and for GPT-2's and Qwen3's. The files are named with a checksum: where another version lies, the test
leaves them out.
"""
import argparse
import json
import os
import tempfile

import check_tokenizer as check
import texts as corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MASK = 2**64 - 1
SEED, SIZE, VOCAB, FILE_BYTES, FILE_LEAST = 17, 400000, 1500, 12 << 20, 20000
RANGES = [(33, 591), (880, 887), (0x400, 0x52F), (0x5D0, 0x5EA), (0x621, 0x64A), (0x905, 0x939), (0x0E01, 0x0E3A),
          (0x3041, 0x3096), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x2000, 0x2064), (0x2460, 0x24FF)]


def rand(state):
    state[0] = x = (state[0] + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def make_text(parts):
    state, out, size = [SEED], [], 0
    while size < SIZE:
        r = rand(state)
        part = parts[(r >> 8) % len(parts)]
        if r % 8 == 0:
            low, high = RANGES[(r >> 8) % len(RANGES)]
            part = chr(low + (r >> 32) % (high - low + 1))
        out.append(part)
        size += len(part.encode())
    return "".join(out)


def hash_of(ids):
    h = 0
    for i in ids:
        h = (h * 6364136223846793005 + i + 1) & MASK
    return f"{h:016x}"


def hash_bytes(data):
    return hash_of(data)


def gpt2(folder):
    tokenizer = Tokenizer(models.BPE.from_file(f"{folder}/gpt2/encoder.json", f"{folder}/gpt2/vocab.bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--shared", default=os.path.join(ROOT, "..", "shared", "fixtures", "tokenizers"))
    a = ap.parse_args()
    parts = [p for p in check.PARTS if p != "\0"]
    parts += [" of", " and", " a", "s", "ing", " return", "    ", "(", ");\n", "1990"]
    text = make_text(parts)
    files = corpus.of_this_machine(FILE_BYTES)
    plain = [(p, t) for p, t in files
             if not p.endswith((".gz", ".bz2", ".xz")) and FILE_LEAST <= os.path.getsize(p) < 1 << 20]
    out = {"about": "made by test/tools/golden_tokens.py", "seed": SEED, "size": SIZE, "vocab": VOCAB, "parts": parts,
           "ranges": RANGES, "text": hash_bytes(text.encode()), "tokenizers": {}, "files": []}
    with tempfile.TemporaryDirectory() as folder:
        mt = check.Megatrain(os.path.join(ROOT, "megatrain"), folder)
        trained = check.check_training(mt, [text], VOCAB)
        if check.failed:
            raise SystemExit("megatrain's training differs from the package's")
        with open(trained, "rb") as f:
            out["trained"] = hash_bytes(f.read())
        tokenizers = {name: Tokenizer.from_file(path) for name, path in check.forms(mt, trained)
                      if name not in ("word", "all")}  # what is a word there is in the hands of utf8proc's version
        for name in tokenizers:
            j = json.load(open(os.path.join(folder, name + ".json")))
            whole = j.pop("model")["ignore_merges"]
            out["tokenizers"][name] = {"ignore_merges": whole, "head": json.dumps(j)[:-1] + ","}
        qwen3 = "qwen3/tokenizer.json"
        tokenizers["shared/gpt2"] = gpt2(a.shared)
        tokenizers["shared/" + qwen3] = Tokenizer.from_file(os.path.join(a.shared, qwen3))
        for name in ("shared/gpt2", "shared/" + qwen3):
            out["tokenizers"][name] = {}
        for path, t in plain:
            out["files"].append({"path": path, "bytes": hash_bytes(t.encode()), "ids": {}})
        for name, tokenizer in tokenizers.items():
            all_ids = tokenizer.encode_batch_fast([text] + [t for _, t in plain], add_special_tokens=False)
            out["tokenizers"][name]["ids"] = hash_of(all_ids[0].ids)
            for entry, e in zip(out["files"], all_ids[1:]):
                if name in ("gpt2", "llama", "qwen") or "/" in name:
                    entry["ids"][name] = hash_of(e.ids)
            print(name, flush=True)
    path = os.path.join(ROOT, "test", "golden", "tokens.json")
    with open(path, "w") as f:
        json.dump({k: v for k, v in out.items() if k != "files"}, f, indent=1)
        f.seek(f.tell() - 2)
        f.write(",\n \"files\": [\n" + ",\n".join("  " + json.dumps(e) for e in out["files"]) + "\n ]\n}\n")
    print(f"{path}: {len(plain)} files, {sum(len(t.encode()) for _, t in plain)} bytes")


if __name__ == "__main__":
    main()
