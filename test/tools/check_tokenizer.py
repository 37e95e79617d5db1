#!/usr/bin/env python3
"""Compares `megatrain tokenize` with the `tokenizers` package: check_tokenizer.py MEGATRAIN TOKENIZER.json FILE..."""
import subprocess
import sys

from tokenizers import Tokenizer

program, path, files = sys.argv[1], sys.argv[2], sys.argv[3:]
tokenizer = Tokenizer.from_file(path)
wrong = 0
for name in files:
    data = open(name, "rb").read()
    want = tokenizer.encode(data.decode("utf-8"), add_special_tokens=False).ids
    run = subprocess.run([program, "tokenize", "--tokenizer", path], input=data, stdout=subprocess.PIPE, check=True)
    got = [int(x) for x in run.stdout.split()]
    same = got == want
    wrong += not same
    at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
    print("%s: %d ids, %s" % (name, len(want), "same" if same else "different from id %d on" % at))
sys.exit(wrong > 0)
