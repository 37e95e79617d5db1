#!/usr/bin/env python3
"""Writes a Megatron token file pair from JSON on stdin, as an independent second writer.

stdin:  {"dtype": 4 or 8, "documents": [[id, ...], ...]}      argv: PREFIX
Every document is one sequence; one without tokens adds an entry to the document list only.
"""
import json
import struct
import sys

spec = json.load(sys.stdin)
letter = {4: "i", 8: "H"}[spec["dtype"]]
size = struct.calcsize("<" + letter)
sequences = [d for d in spec["documents"] if d]
ends, count = [0], 0
for d in spec["documents"]:
    count += bool(d)
    ends.append(count)
with open(sys.argv[1] + ".bin", "wb") as f:
    for d in sequences:
        f.write(struct.pack("<%d%s" % (len(d), letter), *d))
pointers, at = [], 0
for d in sequences:
    pointers.append(at)
    at += len(d) * size
with open(sys.argv[1] + ".idx", "wb") as f:
    f.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, spec["dtype"], len(sequences), len(ends)))
    f.write(struct.pack("<%di" % len(sequences), *[len(d) for d in sequences]))
    f.write(struct.pack("<%dq" % len(sequences), *pointers))
    f.write(struct.pack("<%dq" % len(ends), *ends))
