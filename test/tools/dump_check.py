#!/usr/bin/env python3
"""
dump_check.py RECIPE FILE: codes and factors of a debug.dump by another implementation, tables of all codes and a search
among them in float64, and its products. Prints 'ok', or the first thing that differs.
"""
import bisect
import json
import math
import struct
import sys


def table(exponent, mantissa, bias, top):
    """The magnitudes that a format has, by code."""
    values = []
    for code in range(1 << (exponent + mantissa)):
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        values.append((m if e == 0 else m + (1 << mantissa)) * 2.0 ** (max(e, 1) - bias - mantissa))
    return [v for v in values if v <= top]


TABLES = {"F8_E4M3": table(4, 3, 7, 448), "F8_E5M2": table(5, 2, 15, 57344), "U8": table(2, 1, 1, 6)}
SIGN = {"F8_E4M3": 128, "F8_E5M2": 128, "U8": 8}


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def nearest(values, x):
    """The code whose magnitude is nearest, the even one of two."""
    i = bisect.bisect_left(values, x)
    if i == len(values):
        return i - 1
    if i == 0 or values[i] == x:
        return i
    below, above = x - values[i - 1], values[i] - x
    return i - 1 if below < above or (below == above and (i - 1) % 2 == 0) else i


def read(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, t in json.loads(data[8:8 + n]).items():
        if name == "__metadata__":
            continue
        begin, end = t["data_offsets"]
        raw, (rows, columns) = data[8 + n + begin:8 + n + end], t["shape"]
        if t["dtype"] == "BF16":
            flat = struct.unpack(f"<{rows * columns}f", b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2)))
        else:
            flat = struct.unpack(f"<{rows * columns}f", raw) if t["dtype"] == "F32" else raw
        found[name] = t["dtype"], [flat[r * columns:(r + 1) * columns] for r in range(rows)]
    return found


def turned(x):
    return list(zip(*x))


def scale_of(recipe, amax, most):
    """Scale and factor of a largest magnitude, in fp32."""
    if recipe == "mxfp8":
        power = math.ceil(math.log2(f32(amax / most))) if amax else -127
        return 2.0 ** -power, 2.0 ** power
    if amax == 0:
        return 1.0, 1.0
    scale = f32(most / amax)
    if recipe == "blockwise":
        scale = 2.0 ** math.floor(math.log2(scale))
    return scale, f32(1 / scale)


def blocks(recipe, weight, x):
    """Rows and columns that have one factor."""
    if recipe == "tensorwise":
        return len(x), len(x[0])
    return {"blockwise": (128 if weight else 1, 128), "mxfp8": (1, 32)}[recipe]


def check_cast(recipe, name, weight, x, dump):
    dtype, codes = dump[name + ".codes"]
    factors, values = dump[name + ".factor"][1], TABLES[dtype]
    high, wide = blocks(recipe, weight, x)
    for r0 in range(0, len(x), high):
        for c0 in range(0, len(x[0]), wide):
            amax = max(abs(v) for row in x[r0:r0 + high] for v in row[c0:c0 + wide])
            scale, back = scale_of(recipe, amax, values[-1])
            got = factors[r0 // high][c0 // wide]
            assert got == back, f"{name}: factor {got}, {back} is right"
            for r in range(r0, min(r0 + high, len(x))):
                for c in range(c0, min(c0 + wide, len(x[0]))):
                    code = nearest(values, abs(f32(x[r][c] * scale))) | (SIGN[dtype] if math.copysign(1, x[r][c]) < 0 else 0)
                    assert codes[r][c] == code, f"{name}: code {codes[r][c]} at {r}, {c}; {code} is right"


def numbers(name, high, wide, dump):
    dtype, codes = dump[name + ".codes"]
    factors, values, sign = dump[name + ".factor"][1], TABLES[dtype], SIGN[dtype]
    return [[(-1 if code & sign else 1) * values[code & (sign - 1)] * factors[r // high][c // wide]
             for c, code in enumerate(row)] for r, row in enumerate(codes)]


def check_product(recipe, name, a, b, bias, dump):
    """The result, to 2^-8 of the sum of magnitudes at most where it is of bf16."""
    x, w = (numbers(f"{name}.{o}", *SHAPES(recipe, o == "w", dump[f"{name}.{o}.codes"][1]), dump) for o in (a, b))
    result = dump[f"{name}.{'y' if name == 'forward' else 'dx'}"]
    error = 2.0 ** -8 if result[0] == "BF16" else 2.0 ** -20
    for r in range(0, len(x), 7):
        for o in range(0, len(w), 5):
            terms = [p * q for p, q in zip(x[r], w[o])] + ([bias[0][o]] if bias else [])
            want, bound = math.fsum(terms), error * math.fsum(map(abs, terms))
            assert abs(result[1][r][o] - want) <= bound, f"{name}: {result[1][r][o]} at {r}, {o}; {want} is right"


def SHAPES(recipe, weight, codes):
    return (16 if weight else 1, 16) if recipe == "nvfp4" else blocks(recipe, weight, codes)


def main():
    recipe, dump = sys.argv[1], read(sys.argv[2])
    if recipe != "nvfp4":  # (whose factors have two levels, and whose dw is mixed: test_fp8)
        check_cast(recipe, "forward.x", False, dump["forward.x"][1], dump)
        check_cast(recipe, "forward.w", True, dump["forward.w"][1], dump)
        check_cast(recipe, "dx.dy", False, dump["dx.dy"][1], dump)
        check_cast(recipe, "dx.w", True, turned(dump["forward.w"][1]), dump)
        check_cast(recipe, "dw.dy", False, turned(dump["dw.dy"][1]), dump)
        check_cast(recipe, "dw.x", False, turned(dump["dw.x"][1]), dump)
    check_product(recipe, "forward", "x", "w", dump.get("forward.bias", (None, None))[1], dump)
    check_product(recipe, "dx", "dy", "w", None, dump)
    print("ok")


try:
    main()
except AssertionError as wrong:
    print(wrong)
