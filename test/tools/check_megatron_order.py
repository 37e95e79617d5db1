#!/usr/bin/env python3
"""test/golden/megatron_order.txt against Megatron Core itself: its builder, its data sets, its index files.

  pip download --no-deps megatron-core && unzip -d FOLDER megatron_core-*.whl
  check_megatron_order.py FOLDER

Needs NumPy and the Python version of the wheel; no PyTorch: what the data sets want of it is stood in for.
"""
import os
import struct
import sys
import tempfile
import types
from unittest import mock

import numpy


def stand_in(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module


def import_megatron(folder):
    torch = mock.MagicMock()
    torch.utils.data.Dataset = object
    torch.distributed.is_initialized.return_value = False
    torch.distributed.get_rank.return_value = 0
    sys.modules["torch"] = torch
    for name in ["megatron", "megatron.core"]:  # packages, without what their __init__.py would import
        stand_in(name, __path__=[os.path.join(folder, *name.split("."))])
    stand_in("megatron.core.utils", log_single_rank=lambda *_, **__: None)
    stand_in("megatron.core.tokenizers", MegatronTokenizerBase=object)
    stand_in("megatron.core.msc_utils", MultiStorageClientFeature=mock.MagicMock(is_enabled=lambda: False))
    stand_in("megatron.core.parallel_state")
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

    return blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder, gpt_dataset


def write_pair(prefix, lengths, base):
    tokens = base + numpy.arange(sum(lengths), dtype=numpy.int32)
    tokens.tofile(prefix + ".bin")
    starts = numpy.concatenate(([0], numpy.cumsum(lengths)[:-1])) * 4
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1))
        f.write(numpy.array(lengths, numpy.int32).tobytes() + starts.astype(numpy.int64).tobytes())
        f.write(numpy.arange(len(lengths) + 1, dtype=numpy.int64).tobytes())


class Tokenizer:
    unique_identifiers, eod, pad, vocab_size = {}, -2, -1, 1 << 24


def samples_of(megatron, seq, seed, samples, split, sources, folder):
    builder, gpt = megatron
    words = []
    for i, (weight, documents, a, b, m) in enumerate(sources):
        prefix = os.path.join(folder, "source%d" % i)
        write_pair(prefix, [1 + (a * d * d + b * d) % m for d in range(documents)], i * 1000000)
        words.append((prefix, weight))
    prefixes = [p for p, _ in words]
    weights = None if words[0][1] == "-" else [float(w) for _, w in words]
    common = dict(random_seed=seed, sequence_length=seq, tokenizer=Tokenizer, reset_position_ids=False,
                  reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
                  mid_level_dataset_surplus=0.005, path_to_cache=os.path.join(folder, "cache"))
    if split == "-":
        config = gpt.GPTDatasetConfig(blend_per_split=[(prefixes, weights), None, None], **common)
    else:
        config = gpt.GPTDatasetConfig(blend=(prefixes, weights), split=split, **common)
        config.split_matrix[1:] = [None, None]  # a part without documents would loop for ever
    data = builder(gpt.GPTDataset, [samples, 1, 1], lambda: True, config).build()[0]
    for i in range(samples):
        if hasattr(data, "dataset_index"):
            one = data.datasets[data.dataset_index[i]]
            yield one._query_document_sample_shuffle_indices(data.dataset_sample_index[i])[0]
        else:
            yield data._query_document_sample_shuffle_indices(i)[0]


def check(megatron, words):
    seq, seed, samples, split, count = int(words[0]), int(words[1]), int(words[2]), words[3], int(words[4])
    at, sources = 5, []
    for _ in range(count):
        sources.append((words[at], *[int(w) for w in words[at + 1 : at + 5]]))
        at += 5
    h = 14695981039346656037
    with tempfile.TemporaryDirectory() as folder:
        for row in samples_of(megatron, seq, seed, samples, split, sources, folder):
            assert len(row) == seq + 1
            for token in row.tolist():
                h = ((h ^ token) * 1099511628211) & ((1 << 64) - 1)
    return "%016x" % h == words[at]


megatron = import_megatron(sys.argv[1])
golden = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "megatron_order.txt")
lines = [line.split() for line in open(golden) if line.startswith("order ")]
good = 0
for line in lines:
    same = check(megatron, line[1:])
    good += same
    if not same:
        print("different:", *line[1:12], "...")
print("%d of %d data sets as Megatron Core gives them" % (good, len(lines)))
sys.exit(good != len(lines))
