#!/usr/bin/env python3
"""Writes test/golden/stages.json with the `tokenizers` package: forms of tokenizer.json, texts, ids and texts again.

  test/tools/golden_stages.py

Two small models are trained here, one of bytes and one of characters as SentencePiece makes them. Each form is a
tokenizer.json with #MODEL# for the vocabulary and merges of its model. `edges` have their ids and what decoding gives; of the
random texts a form has one hash of all ids.
"""
import json
import os
import random

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MASK, MARK = 2**64 - 1, "#MODEL#"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER, BEFORE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[^\r\n\p{L}\p{N}]?"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def cases(suffix):
    return f"{BEFORE}{UPPER}*{LOWER}+{suffix}|{BEFORE}{UPPER}+{LOWER}*{suffix}"


O200K, TEKKEN = cases(SUFFIX + "?") + r"|\p{N}{1,3}" + REST, cases("") + r"|\p{N}" + REST
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|""" "[^\r\n" r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
            "\r\n" r"]*|\s*[" "\r\n" r"]+|\s+(?!\S)|\s+"]

EDGES = ["", " ", "  ", "\n", "a", " a", "  a", "\u2581x", "x\u2581y", "Hi<s>there </s> you", "<s> a", "<s>a", "a<s>", " <s> ",
         "\U0001f999", "中\U0001f999文", "the cat sat on the mat", "the  cat\n\nsat ", "2024", "3.14159",
         "漢字abc12345カナ", "don'T HTTPServer's I'LL", "path/to/\nfile", "e\u0301\u00e9", "a,b ,c", ",,a,,b,,",
         "\ta b", "cat the<m> cat  <m>cat", "mask the mask", "x1²½y", "\u01c5x \u0345a", "<0x41><0x0A>", "a\u3000b",
         "'\u017f it's", "\r\n x \r\n"]
PARTS = ["the", " the", "cat", " cat", " ", "  ", "\n", "\r\n", "\t", ",", ".", "'s", "'LL", "12", "1234", "²", "é", "e\u0301", "中",
         "文字", "カ", "。", "\u2581", "\u2581\u2581", "<s>", "</s>", "<m>", "mask", "\U0001f999", "Ab", "HTTP", "x", "ß", "\u01c5", "Привет",
         "/", "\u0345", "\u3000", "\u00a0", "_", "<0x41>", "q", "ж"]


def by_type(kind, **members):
    return {"type": kind, **members}


def sequence(name, *parts):
    return by_type("Sequence", **{name: list(parts)})


def split(pattern, behavior="Isolated", invert=False):
    return by_type("Split", pattern=pattern if isinstance(pattern, dict) else {"Regex": pattern}, behavior=behavior,
                   invert=invert)


def byte_level(regex=False, prefix=False):
    return by_type("ByteLevel", add_prefix_space=prefix, trim_offsets=True, use_regex=regex)


def replace(old, new):
    return by_type("Replace", pattern={"String": old}, content=new)


def metaspace(scheme, splits=False):
    return by_type("Metaspace", replacement="\u2581", prepend_scheme=scheme, split=splits)


def train(pre, alphabet, special, vocab):
    text = ["the cat sat on the mat, the cats that sat; caps HTTP HTTPS Server server's don't 12 123 1234 1999",
            "中文字 漢字 カナ カタカナ Привет при the mask masks x y z e é ß path/to/file the the cat cat . , ' < > 0 1 2 A B",
            "a b c d f g h i j k l m n o p q r s t u v w", "one two   three    four\n\nfive"] * 3
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=vocab, min_frequency=2, show_progress=False,
                                                    initial_alphabet=alphabet,
                                                    special_tokens=[AddedToken(s) for s in special]))
    model = json.loads(t.to_str())["model"]
    return model["vocab"], model["merges"]


def models_of_both():
    out = {}
    out["bytes"] = train(pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel.alphabet(), [], 420)
    spelled = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    vocab, merges = train(pre_tokenizers.Metaspace(prepend_scheme="first", split=True), [], spelled, 460)
    merges = [m for m in merges if "\n" not in m[0] + m[1]]
    out["characters"] = vocab, merges
    out["across"] = {**vocab, "t\u2581": len(vocab)}, [["t", "\u2581"], *merges]  # a blank behind a letter
    out["short"] = {t: i for t, i in vocab.items() if t != "<0x80>"}, merges
    return out


def added(*contents, first, **flags):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}
    return [{"id": first + i, "content": c, **flags} for i, c in enumerate(contents)]


def all_forms(vocabs):
    strip = sequence("decoders", replace("\u2581", " "), by_type("ByteFallback"), by_type("Fuse"),
                     by_type("Strip", content=" ", start=1, stop=0))
    plain = sequence("decoders", *strip["decoders"][:3])
    legacy = sequence("normalizers", by_type("Prepend", prepend="\u2581"), replace(" ", "\u2581"))
    gemma = replace(" ", "\u2581"), split({"String": " "}, "MergedWithPrevious")
    forms = {}

    def make(name, normalizer, pre, decoder, model="characters", tokens=(), **members):
        if model == "bytes":
            marks = added("<s>", "</s>", first=len(vocabs["bytes"][0]))
        else:
            marks = added("<unk>", "<s>", "</s>", first=0)
            members = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, **members}
        j = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [*marks, *tokens],
             "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": None, "decoder": decoder,
             "model": {"type": "BPE", **members, "#": 0}}
        forms[name] = {"model": model, "text": json.dumps(j, ensure_ascii=False).replace('"#": 0', MARK)}

    make("legacy", legacy, None, strip)
    make("first", None, metaspace("first"), strip)
    make("first and split", None, metaspace("first", True), strip)
    make("always and split", None, metaspace("always", True), metaspace("always"))
    make("never", None, metaspace("never"), metaspace("never"))
    make("gemma", *gemma, plain)
    make("a token across a blank", legacy, None, strip, model="across")
    make("unknown", legacy, None, strip, byte_fallback=False)
    make("unknown, each", legacy, None, strip, byte_fallback=False, fuse_unk=False)
    make("some bytes", legacy, None, strip, model="short")
    make("some bytes, each", legacy, None, strip, model="short", fuse_unk=False)
    make("whole", legacy, None, strip, ignore_merges=True)
    make("digits", None, sequence("pretokenizers", by_type("Digits", individual_digits=False), metaspace("first", True)), strip)
    for name, flags in (("plain", {}), ("lstrip", {"lstrip": True}), ("rstrip", {"rstrip": True}),
                        ("word", {"single_word": True})):
        first = len(vocabs["characters"][0])  # as the package numbers them
        tokens = added("<m>", " cat", first=first, **flags)
        tokens += added("mask", "the", first=first + 2, normalized=True, **flags)
        make("added, " + name, legacy, None, strip, tokens=tokens)
        make("added and gemma, " + name, *gemma, plain, tokens=tokens)
        make("added and first, " + name, None, metaspace("first"), strip, tokens=tokens)
    numbers = by_type("Digits", individual_digits=True)
    for name, pre in (("o200k", [split(O200K), byte_level()]), ("tekken", [split(TEKKEN), byte_level()]),
                      ("deepseek", [*map(split, DEEPSEEK), byte_level()]), ("digits and gpt2", [numbers, byte_level(True)]),
                      ("prefix", [byte_level(True, True)]), ("split and prefix", [split(O200K), byte_level(False, True)]),
                      ("no regex", [byte_level()]), ("a text", [split({"String": "the"}, "MergedWithNext"), byte_level()]),
                      *((f"{b}{', inverted' if i else ''}", [split(r"[\s,]|cat", b, i), byte_level()])
                        for b in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
                        for i in (False, True))):
        normalizer = sequence("normalizers") if name == "deepseek" else None
        make("bytes, " + name, normalizer, sequence("pretokenizers", *pre), byte_level(), model="bytes")
    return forms


def hash_of(ids):
    h = 0
    for i in ids:
        h = (h * 6364136223846793005 + i + 1) & MASK
    return f"{h:016x}"


def main():
    rng = random.Random(5)
    texts = ["".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 24))) for _ in range(250)]
    vocabs = models_of_both()
    out = {"about": "made by test/tools/golden_stages.py", "edges": EDGES, "texts": texts,
           "models": {name: f'"vocab": {json.dumps(v, ensure_ascii=False)}, "merges": {json.dumps(m, ensure_ascii=False)}'
                      for name, (v, m) in vocabs.items()},
           "forms": all_forms(vocabs)}
    for name, form in out["forms"].items():
        t = Tokenizer.from_str(form["text"].replace(MARK, out["models"][form["model"]]))
        of_edges = [t.encode(e, add_special_tokens=False).ids for e in EDGES]
        form["edges"] = [" ".join(map(str, ids)) for ids in of_edges]
        form["back"] = [t.decode(ids, skip_special_tokens=False) for ids in of_edges]
        form["ids"] = hash_of(i for x in t.encode_batch(texts, add_special_tokens=False) for i in [*x.ids, -1])
        print(name)
    with open(os.path.join(ROOT, "test", "golden", "stages.json"), "w") as f:
        json.dump(out, f, ensure_ascii=False, indent=0)
        f.write("\n")


if __name__ == "__main__":
    main()
