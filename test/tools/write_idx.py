#!/usr/bin/env python3
"""Writes a Megatron token file pair from JSON on stdin, as an independent second writer.

stdin:  {"dtype": 4 or 8, "documents": [[id, ...], ...]}      argv: PREFIX
Every document is one sequence; one without tokens adds an entry to the document list only.
"""
import json
import struct
import sys


def write(prefix, dtype, documents):
    letter = {4: "i", 8: "H"}[dtype]
    size = struct.calcsize("<" + letter)
    sequences = [d for d in documents if d]
    ends, count = [0], 0
    for d in documents:
        count += bool(d)
        ends.append(count)
    with open(prefix + ".bin", "wb") as f:
        for d in sequences:
            f.write(struct.pack("<%d%s" % (len(d), letter), *d))
    pointers, at = [], 0
    for d in sequences:
        pointers.append(at)
        at += len(d) * size
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, dtype, len(sequences), len(ends)))
        f.write(struct.pack("<%di" % len(sequences), *[len(d) for d in sequences]))
        f.write(struct.pack("<%dq" % len(sequences), *pointers))
        f.write(struct.pack("<%dq" % len(ends), *ends))


if __name__ == "__main__":
    spec = json.load(sys.stdin)
    write(sys.argv[1], spec["dtype"], spec["documents"])
