#!/usr/bin/env python3
"""Compares the event files of a run folder with its metrics.jsonl: each value of each line once, and no others.

    check_events.py RUN_DIR     exit 0: they agree; 1: they differ, with what

Twice: with a reader of its own (framing, CRC32C, protobuf from their descriptions), and, where the tensorboard package
is installed, with the reader that TensorBoard itself uses; where it is not, a line says "skipped".
"""
import glob
import json
import math
import os
import struct
import sys


def crc32c(data):
    c = 0xFFFFFFFF
    for byte in data:
        c ^= byte
        for _ in range(8):
            c = c >> 1 ^ 0x82F63B78 if c & 1 else c >> 1
    return ~c & 0xFFFFFFFF


def masked(data):
    c = crc32c(data)
    return ((c >> 15 | c << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(data, at):
    x = shift = 0
    while True:
        byte = data[at]
        at += 1
        x |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return x, at


def fields(data):
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = varint(data, at)
        elif wire == 2:
            n, at = varint(data, at)
            value, at = data[at:at + n], at + n
        else:
            n = {1: 8, 5: 4}[wire]
            value, at = struct.unpack("<d" if n == 8 else "<f", data[at:at + n])[0], at + n
        yield key >> 3, value


def own_reader(run_dir):
    """{tag: [(step, value)]}, [(step, text)]; an error when a file is not whole."""
    found, texts, last_wall = {}, [], 0.0
    for path in sorted(glob.glob(os.path.join(run_dir, "events.out.tfevents.*"))):
        data, at = open(path, "rb").read(), 0
        while at < len(data):
            size, head = struct.unpack_from("<QI", data, at)
            body = data[at + 12:at + 12 + size]
            (tail,) = struct.unpack_from("<I", data, at + 12 + size)
            assert masked(data[at:at + 8]) == head and masked(body) == tail, f"{path}: checksum at {at}"
            event = dict(fields(body))
            assert at or event.get(3) == b"brain.Event:2", f"{path}: no version"
            assert event[1] >= last_wall, f"{path}: time goes back at {at}"
            last_wall = event[1]
            for field, value in fields(event.get(5, b"")):
                assert field == 1
                point = dict(fields(value))
                if 8 in point:  # a text, of the configuration
                    assert point[1] == b"config/text_summary" and dict(fields(dict(fields(point[9]))[1])) == {1: b"text"}
                    tensor = dict(fields(point[8]))
                    assert tensor[1] == 7
                    texts.append((event.get(2, 0), tensor[8].decode()))
                    continue
                found.setdefault(point[1].decode(), []).append((event.get(2, 0), point[2]))
            at += size + 16
    return found, texts


def package_reader(run_dir):
    from tensorboard.backend.event_processing import event_accumulator
    reader = event_accumulator.EventAccumulator(run_dir, size_guidance={event_accumulator.SCALARS: 0,
                                                                        event_accumulator.TENSORS: 0})
    reader.Reload()
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for tag in reader.Tags()["tensors"] for e in reader.Tensors(tag)]
    assert reader.Tags()["tensors"] in ([], ["config/text_summary"])
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}, texts


# groups of TensorBoard, and the members of a step's line in each
GROUPS = {
    "optim": ("grad_norm", "lr", "skipped"),
    "speed": ("step_ms", "tokens_per_s", "mfu", "tflops"),
    "run": ("tokens", "memory_bytes"),
}
TAGS = {name: f"{group}/{name}" for group, names in GROUPS.items() for name in names} | {
    "loss": "loss/train", "aux_loss": "loss/aux", "z_loss": "loss/z", "slowest_rank": "ranks/slowest", "lag_ms": "ranks/lag_ms"}
# a curve for each member of a list; metrics.jsonl does not say which layers are mixtures: here all are
LISTS = {"expert_load": "expert_load/layer {}", "expert_dropped": "expert_dropped/layer {}"}


def wanted(run_dir):
    found = {}
    for line in open(os.path.join(run_dir, "metrics.jsonl")):
        record = json.loads(line)
        if "valid_loss" in record:
            values = {"valid/" + record["valid"] if "valid" in record else "loss/valid": record["valid_loss"]}
        elif "loss" not in record:
            continue  # the line of a key that changed
        else:
            values = {TAGS[k]: v for k, v in record.items() if k in TAGS}
            values |= {tag.format(i): v for k, tag in LISTS.items() for i, v in enumerate(record.get(k, []))}
            values |= {f"loss/mtp {i + 1}": v for i, v in enumerate(record.get("mtp_loss", []))}
        for tag, value in values.items():
            found.setdefault(tag, []).append((record["step"], value))
    return found


def same(a, b):
    if a is None:
        return not math.isfinite(b)
    return struct.pack("<f", float(a)) == struct.pack("<f", b)


def compare(name, want, got):
    bad = []
    for tag in sorted(want.keys() | got.keys()):
        w, g = want.get(tag, []), got.get(tag, [])
        if [s for s, _ in w] != [s for s, _ in g]:
            bad.append(f"{tag}: steps {[s for s, _ in w]}, in the events {[s for s, _ in g]}")
        elif not all(same(a[1], b[1]) for a, b in zip(w, g)):
            bad.append(f"{tag}: other values")
    for line in bad:
        print(f"{name}: {line}")
    if not bad:
        print(f"{name}: {len(want)} tags, {sum(len(v) for v in want.values())} points agree")
    return not bad and bool(want)


def same_texts(name, run_dir, texts):
    """The last start's is the configuration beside it; all are of ascending steps."""
    config = open(os.path.join(run_dir, "config.ini")).read()
    shown = "".join("    " + line for line in config.splitlines(keepends=True))
    good = bool(texts) and texts[-1][1] == shown and [s for s, _ in texts] == sorted(s for s, _ in texts)
    print(f"{name}: configurations of steps {[s for s, _ in texts]}" + ("" if good else ": not the run's"))
    return good


def main():
    want = wanted(sys.argv[1])
    found, texts = own_reader(sys.argv[1])
    good = compare("own reader", want, found) and same_texts("own reader", sys.argv[1], texts)
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        print("skipped: the reader of TensorBoard: no tensorboard package (pip install tensorboard)")
    else:
        found, texts = package_reader(sys.argv[1])
        good &= compare("tensorboard", want, found) and same_texts("tensorboard", sys.argv[1], texts)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
