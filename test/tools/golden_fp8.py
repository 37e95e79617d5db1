#!/usr/bin/env python3
"""Writes test/golden/fp8.txt, which test_fp8 compares the CPU's casts to 8 and 4 bits with.

    test/tools/golden_fp8.py > test/golden/fp8.txt

Another way to the same numbers: a format is the sorted list of its values, a cast looks for the nearest of them (of two,
the one with the even code), scales are made of Python's floats, which are doubles, rounded to fp32 after each operation.

    values FORMAT BITS...              the float of each code, 256 of them, or 16
    codes FORMAT BITS:CODE...          what floats are cast to
    scale RULE FORMAT AMAX SCALE BACK  bits of floats
    levels WHOLE AMAX SCALE BACK       the same of a block, by the tensor's largest magnitude
    mix BITS... BITS...                16 floats and what they are mixed to
    cast NUMBER RULE FORMAT BLOCK_ROWS BLOCK_COLUMNS TRANSPOSED ROWS COLUMNS CODES FACTORS
                                       a tensor made by tensor(), its codes and factors as hashes
"""
import bisect
import math
import struct

# bits of exponent and mantissa, bias, largest
FORMATS = {"e4m3": (4, 3, 7, 448.0), "e5m2": (5, 2, 15, 57344.0), "e2m1": (2, 1, 1, 6.0)}
EIGHTS = ("e4m3", "e5m2")
RULES = ("exact", "power", "e8m0")
NAN = 0x7FC00000


def bits(x):
    if math.isnan(x):
        return NAN
    try:
        return struct.unpack("<I", struct.pack("<f", x))[0]
    except OverflowError:
        return 0x7F800000 if x > 0 else 0xFF800000


def real(b):
    return struct.unpack("<f", struct.pack("<I", b))[0]


def single(x):
    return real(bits(x))


def value(name, code):
    exponents, mantissas, bias, _ = FORMATS[name]
    if name == "e2m1":
        code = (code & 8) << 4 | code & 7
    sign, e, m = -1.0 if code & 0x80 else 1.0, (code & 0x7F) >> mantissas, code & ((1 << mantissas) - 1)
    if name == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if name == "e5m2" and e == 31:
        return math.nan if m else sign * math.inf
    if e == 0:
        return sign * m * 2.0 ** (1 - bias - mantissas)
    return sign * (1 + m / 2 ** mantissas) * 2.0 ** (e - bias)


CODES = {"e4m3": 127, "e5m2": 124, "e2m1": 8}  # of finite numbers without a sign
VALUES = {name: [value(name, c) for c in range(count)] for name, count in CODES.items()}


def code(name, x):
    if math.isnan(x):
        return 7 if name == "e2m1" else 0x7F
    of, a, sign = VALUES[name], abs(x), CODES[name] if name == "e2m1" else 0x80
    sign = sign if math.copysign(1, x) < 0 else 0
    if a >= of[-1]:
        return sign | len(of) - 1
    above = bisect.bisect_right(of, a)
    low, high = a - of[above - 1], of[above] - a
    return sign | (above if high < low or (high == low and above % 2 == 0) else above - 1)


def is_finite(b):
    return b < 0x7F800000


def scale(rule, name, amax):
    """Of numbers whose largest magnitude has these bits: the scale and what leads back."""
    most = FORMATS[name][3]
    if rule == "e8m0":
        if amax > 0x7F800000:
            return math.nan, math.nan
        share = 2.0 ** 127 if amax == 0x7F800000 else single(real(amax) / most)
        exponent = -127
        while exponent < 127 and 2.0 ** exponent < share:
            exponent += 1
        return 2.0 ** -exponent, 2.0 ** exponent
    if amax == 0 or not is_finite(amax):
        return 1.0, 1.0
    s = single(most / real(amax))
    if math.isinf(s):
        s = real(0x7F7FFFFF)
    if rule == "power":
        s = 2.0 ** (math.frexp(s)[1] - 1)
    return s, single(1 / s)


def levels(whole, amax):
    """Of a block whose largest magnitude has the bits amax, in a tensor whose has those of whole."""
    g = 1.0 if whole == 0 or not is_finite(whole) else min(single(2688.0 / real(whole)), real(0x7F7FFFFF))
    if amax > 0x7F800000:
        return math.nan, math.nan
    d = VALUES["e4m3"][code("e4m3", single(single(real(amax) * g) / 6))]
    back = single(d / g)
    return min(single(1 / back) if back else math.inf, real(0x7F7FFFFF)), back


SIGNS = "+++-+------+-+--"


def mix(x):
    """Sums of sums: numbers whose index has the same bits below that of the pair, first those with bit 1."""
    def at(i, level):  # number i behind the stage of `level`
        if level == 0:
            return x[i] if SIGNS[i] == "+" else -x[i]
        apart = 1 << (level - 1)
        a, b = known[level - 1][i & ~apart], known[level - 1][i | apart]
        return single(a - b) if i & apart else single(a + b)

    known = []
    for level in range(5):
        known.append([at(i, level) for i in range(16)])
    return [single(v / 4) for v in known[4]]


class Random:
    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2 ** 64
        return self.state >> 33


def tensor(number, rows, columns):
    """Numbers of bf16 as bits: of sizes far apart or close, some zeros; in every seventh tensor a NaN and an infinity."""
    r = Random(number)
    spread, center = 1 + r.next() % 40, 60 + r.next() % 130
    out = []
    for i in range(rows * columns):
        u, v = r.next(), r.next()
        b = (u & 1) << 15 | (center + (u >> 1) % spread) << 7 | v & 0x7F
        out.append(0 if v >> 7 & 15 == 0 else b)
    if number % 7 == 3:
        out[r.next() % len(out)] = 0x7F80
        out[r.next() % len(out)] = 0x7FC0
    return out


def fnv(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = (h ^ b) * 0x100000001B3 % 2 ** 64
    return h


def cast(rule, name, high, wide, transposed, rows, columns, x):
    """Codes and factors of x [rows, columns], or of its transpose, in blocks of high x wide; 0: of all."""
    if transposed:
        x, rows, columns = [x[n * columns + i] for i in range(columns) for n in range(rows)], columns, rows
    x = [real(b << 16) for b in x]
    if rule == "mixed":
        x = [v for i in range(0, len(x), 16) for v in mix(x[i:i + 16])]
    sizes = [bits(v) & 0x7FFFFFFF for v in x]
    high, wide, whole = high or rows, wide or columns, max(sizes)
    codes, factors = bytearray(rows * columns), []
    for r in range(0, rows, high):
        for c in range(0, columns, wide):
            places = [i * columns + k for i in range(r, min(r + high, rows)) for k in range(c, min(c + wide, columns))]
            amax = max(sizes[p] for p in places)
            s, back = levels(whole, amax) if rule in ("levels", "mixed") else scale(rule, name, amax)
            factors.append(bits(back))
            for p in places:
                codes[p] = code(name, single(x[p] * s))
    return fnv(codes), fnv(struct.pack("<%dI" % len(factors), *factors))


def edges(name):
    """At, below and above each middle between neighbours, the values, and what has no neighbour."""
    out = [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, NAN, 0x7F800001]
    of = VALUES[name] + [VALUES[name][-1] * 1.125, VALUES[name][-1] * 2]
    for a, b in zip(of, of[1:]):
        middle = bits((a + b) / 2)
        out += [bits(b), middle, middle - 1, middle + 1, middle | 0x80000000]
    return out


def main():
    for name in FORMATS:
        print("values", name, *("%08x" % bits(value(name, c)) for c in range(16 if name == "e2m1" else 256)))
        print("codes", name, *("%08x:%02x" % (b, code(name, real(b))) for b in edges(name)))
    amaxes = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x40400000, 0x43E00000, 0x43E00001, 0x47600000, 0x7F000000, 0x7F7FFFFF,
              0x7F800000, NAN, 0x00E00000, 0x03E00000, 0x7EFFFFFF]
    for rule in RULES:
        for name in EIGHTS:
            for a in amaxes:
                s, back = scale(rule, name, a)
                print("scale", rule, name, "%08x %08x %08x" % (a, bits(s), bits(back)))
    for whole in amaxes:
        for share in (1, 0.4, 1 / 3, 1e-3, 2e-6, 3e-7, 0):
            a = bits(real(whole) * share) if is_finite(whole) else whole if share == 1 else bits(share)
            s, back = levels(whole, a)
            print("levels %08x %08x %08x %08x" % (whole, a, bits(s), bits(back)))
    ways = [("exact", "e4m3", 0, 0), ("exact", "e5m2", 0, 0), ("power", "e4m3", 1, 128), ("power", "e4m3", 128, 128),
            ("e8m0", "e4m3", 1, 32)]
    for number in range(100):
        rule, name, high, wide = ways[number % 5]
        r = Random(1000 + number)
        rows, columns, transposed = 1 + r.next() % 150, 1 + r.next() % 300, number // 5 % 2
        if number < 60:
            rows, columns = rows % 20 + 1, columns % 80 + 1
        found = cast(rule, name, high, wide, transposed, rows, columns, tensor(number, rows, columns))
        print("cast", number, rule, name, high, wide, transposed, rows, columns, "%016x %016x" % found)
    for number in range(100, 200):
        r = Random(1000 + number)
        rows, columns, high = 1 + r.next() % 150, 1 + r.next() % 300, 16 if number % 3 == 2 else 1
        if number < 160:
            rows, columns = rows % 40 + 1, columns % 80 + 1
        found = cast("levels", "e2m1", high, 16, number // 3 % 2, rows, columns, tensor(number, rows, columns))
        print("cast", number, "levels e2m1", high, 16, number // 3 % 2, rows, columns, "%016x %016x" % found)
    for number in range(200, 240):
        r = Random(1000 + number)
        rows, columns = 16 * (1 + r.next() % 12), 1 + r.next() % (300 if number < 220 else 40)
        x = tensor(number, rows, columns)
        found = cast("mixed", "e2m1", 1, 16, 1, rows, columns, x)
        print("cast", number, "mixed e2m1 1 16 1", rows, columns, "%016x %016x" % found)
        sixteen = [real(b << 16) for b in x[:16]]
        print("mix", *("%08x" % bits(v) for v in sixteen + mix(sixteen)))
    for infinite in ({5: 1}, {12: -1}, {0: 1, 1: 1}, {2: 1, 9: -1}, {3: -1, 8: -1}):
        sixteen = [infinite[i] * math.inf if i in infinite else i - 6.5 for i in range(16)]
        print("mix", *("%08x" % bits(v) for v in sixteen + mix(sixteen)))


main()
