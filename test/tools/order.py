#!/usr/bin/env python3
"""The data order of src/data/order.h once more: order.py SEED EPOCH N prints what positions 0 .. N-1 visit."""
import sys

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def philox(key, c):
    k = [key & M32, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & M32, (a >> 32) ^ c[3] ^ k[1], a & M32]
        k = [(k[0] + 0x9E3779B9) & M32, (k[1] + 0xBB67AE85) & M32]
    return c


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def stream_key(seed, name):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & M64
    return mix(mix(seed) ^ h)


seed, epoch, n = map(int, sys.argv[1:])
key = stream_key(seed, "data.order")
half = 1
while 4 ** half < n:
    half += 1
mask = (1 << half) - 1
for i in range(n):
    x = i
    while True:
        left, right = x >> half, x & mask
        for r in range(8):
            left, right = right, left ^ philox(key, [right, r, epoch & M32, epoch >> 32])[0] & mask
        x = left << half | right
        if x < n:
            break
    print(x)
