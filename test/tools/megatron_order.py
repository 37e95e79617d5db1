#!/usr/bin/env python3
"""Megatron's order of samples once more, in NumPy and one document at a time: test/golden/megatron_order.txt.

  megatron_order.py > test/golden/megatron_order.txt

Independent of src/data/megatron.c: numpy.random.RandomState shuffles, a table says where each sample starts, samples
are put together from parts of documents. Lines of the file:

  sum N VALUE            numpy.sum of 1 / (3 + 7 i % 11), i < N
  order SEQ SEED SAMPLES SPLIT COUNT  (WEIGHT DOCUMENTS A B M) x COUNT  HASH  FIRST ...

Document d of a file has 1 + (A d^2 + B d) % M tokens; token k of file number i is i * 1000000 + k. WEIGHT and SPLIT
may be "-". HASH covers the tokens of all samples; FIRST are the first tokens of the first samples.
"""
import math

import numpy

M64 = (1 << 64) - 1
FIRST = 24


class Corpus:
    def __init__(self, number, documents, a, b, m):
        self.lengths = numpy.array([1 + (a * d * d + b * d) % m for d in range(documents)], dtype=numpy.int32)
        self.starts = numpy.concatenate(([0], numpy.cumsum(self.lengths, dtype=numpy.int64)))
        self.base = number * 1000000

    def part(self, document, offset, length):
        begin = self.starts[document] + offset
        return (self.base + numpy.arange(begin, begin + length)).tolist()


class Index:
    """document_index, sample_index and shuffle_index of one file."""

    def __init__(self, corpus, begin, end, seq, wanted, seed):
        self.corpus = corpus
        documents = numpy.arange(begin, end, dtype=numpy.int32)
        per_epoch = int(corpus.lengths[begin:end].sum())
        epochs, tokens = 1, per_epoch
        while tokens < wanted * seq + 1:
            epochs, tokens = epochs + 1, tokens + per_epoch
        apart, before = False, 0
        if epochs > 1:
            before = ((epochs - 1) * per_epoch - 1) // seq
            apart = wanted - before < int(0.80 * ((per_epoch - 1) // seq))
        random = numpy.random.RandomState(seed)
        groups = [epochs - 1, 1] if apart else [epochs]
        order = [numpy.tile(documents, n) for n in groups]
        for part in order:
            random.shuffle(part)
        self.document = numpy.concatenate(order).tolist()
        self.start = self.walk(seq, (epochs * per_epoch - 1) // seq)
        count = len(self.start) - 1
        cuts = [0, before, count] if apart else [0, count]
        shuffles = [numpy.arange(x, y, dtype=numpy.uint32) for x, y in zip(cuts, cuts[1:])]
        for part in shuffles:
            random.shuffle(part)
        self.shuffle = numpy.concatenate(shuffles).tolist()

    def walk(self, seq, samples):
        """(place in document, offset) where each sample starts, and where the last one ends."""
        place, offset, rows = 0, 0, [(0, 0)]
        for _ in range(samples):
            left = seq + 1
            while left:
                rest = int(self.corpus.lengths[self.document[place]]) - offset
                left -= rest
                if left <= 0:
                    offset += left + rest - 1
                    left = 0
                else:
                    place, offset = place + 1, 0
            rows.append((place, offset))
        return rows

    def sample(self, position):
        j = self.shuffle[position]
        (first, begin), (last, end) = self.start[j], self.start[j + 1]
        out = []
        for i in range(first, last + 1):
            offset = begin if i == first else 0
            stop = end + 1 if i == last else int(self.corpus.lengths[self.document[i]])
            out += self.corpus.part(self.document[i], offset, stop - offset)
        return out


def normalize(weights):
    w = numpy.array(weights, dtype=numpy.float64)
    return (w / numpy.sum(w)).tolist()


def blend(weights, size):
    taken, draws = [0] * len(weights), []
    for i in range(size):
        errors = [w * max(float(i), 1.0) - n for w, n in zip(weights, taken)]
        d = errors.index(max(errors))
        draws.append((d, taken[d]))
        taken[d] += 1
    return draws


def order(seq, seed, samples, split, sources):
    corpora = [Corpus(i, *s[1:]) for i, s in enumerate(sources)]
    bounds = []
    for c in corpora:
        upto = normalize([float(x) for x in split.split(",")])[0] if split != "-" else 1.0
        bounds.append(int(round(upto * float(len(c.lengths)))))
    if len(sources) == 1 and (sources[0][0] == "-" or split == "-"):
        one = Index(corpora[0], 0, bounds[0], seq, samples, seed)
        return [one.sample(i) for i in range(samples)]
    weights = normalize([float(s[0]) for s in sources])
    wanted = [math.ceil(math.ceil(samples * w) * (1 + 0.005)) for w in weights]
    size = sum(math.ceil(samples * w) for w in weights)
    indexes = [Index(c, 0, b, seq, n, seed) for c, b, n in zip(corpora, bounds, wanted)]
    return [indexes[d].sample(i) for d, i in blend(normalize(weights), size)[:samples]]


CASES = [
    (6, 1234, 4, "-", [("-", 5, 3, 1, 9)]),
    (6, 1234, 40, "-", [("-", 20, 3, 1, 9)]),
    (8, 1, 2000, "-", [("-", 300, 5, 3, 61)]),
    (16, 42, 1, "-", [("-", 70, 7, 2, 40)]),
    (16, 42, 95, "-", [("-", 70, 7, 2, 40)]),
    (16, 42, 130, "-", [("-", 70, 7, 2, 40)]),
    (16, 42, 170, "-", [("-", 70, 7, 2, 40)]),
    (16, 42, 700, "98,2", [("-", 70, 7, 2, 40)]),
    (16, 0, 130, "969,30,1", [("-", 70, 7, 2, 40)]),
    (1, 7, 50, "-", [("-", 3, 1, 1, 5)]),
    (300, 4294967295, 64, "-", [("-", 40, 11, 7, 1000)]),
    (32, 5, 900, "90,10", [("2.5", 200, 3, 5, 97)]),
    (32, 5, 900, "-", [("2.5", 200, 3, 5, 97)]),
    (12, 1234, 1500, "-", [("0.5", 100, 3, 1, 50), ("0.3", 80, 5, 2, 70), ("0.2", 300, 7, 3, 11)]),
    (12, 1234, 1500, "95,4,1", [("0.5", 100, 3, 1, 50), ("0.3", 80, 5, 2, 70), ("0.2", 300, 7, 3, 11)]),
    (20, 99, 5000, "-", [("7", 90, 3, 4, 60), ("1", 60, 5, 6, 80)]),
    (20, 3, 777, "8,2", [("%g" % (1 / (3 + 7 * i % 11)), 20 + i, 3, i, 30 + i) for i in range(13)]),
]

print("# by test/tools/megatron_order.py, NumPy %s" % numpy.__version__)
for n in [1, 2, 7, 8, 9, 31, 127, 128, 129, 136, 200, 255, 256]:
    print("sum", n, repr(float(numpy.sum(numpy.array([1 / (3 + 7 * i % 11) for i in range(n)])))))
for seq, seed, samples, split, sources in CASES:
    rows = order(seq, seed, samples, split, sources)
    h = 14695981039346656037
    for row in rows:
        assert len(row) == seq + 1
        for token in row:
            h = ((h ^ int(token)) * 1099511628211) & M64
    words = [seq, seed, samples, split, len(sources)] + [x for s in sources for x in s] + ["%016x" % h]
    print("order", *words, *[row[0] for row in rows[:FIRST]])
