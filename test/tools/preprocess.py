#!/usr/bin/env python3
"""Token files from text by the byte tokenizer, independently of megatrain: ids 0-255 are bytes, 256 ends a document.

preprocess.py PREFIX FORMAT KEY EOD FILE...    FORMAT: text, paragraphs, jsonl; KEY: a/b is b in a; EOD: 0 or 1
Compressed files are opened by gzip (Python's) and by the program zstd, by their first bytes.
"""
import gzip
import json
import subprocess
import sys

sys.path.insert(0, __file__.rsplit("/", 1)[0])
import write_idx

prefix, form, key, eod = sys.argv[1:5]
documents = []


def read(path):
    with open(path, "rb") as f:
        data = f.read()
    if data[:2] == b"\x1f\x8b":
        return gzip.decompress(data)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        return subprocess.run(["zstd", "-dcq", path], check=True, stdout=subprocess.PIPE).stdout
    return data


def paragraphs(data):
    lines = []
    for line in data.split(b"\n") + [b""]:
        if line.strip(b" \t\r"):
            lines.append(line)
        elif lines:
            yield b"\n".join(lines).removesuffix(b"\r")
            lines = []


def members(data):
    for line in data.split(b"\n"):
        if not line.strip(b" \t\r"):
            continue
        value = json.loads(line)
        for name in key.split("/"):
            value = value[name]
        yield value.encode()


for path in sys.argv[5:]:
    data = read(path)
    documents += [data] if form == "text" else paragraphs(data) if form == "paragraphs" else members(data)
write_idx.write(prefix, 8, [list(d) + [256] * int(eod) if d else [] for d in documents])
