#!/usr/bin/env bash
# Tokenizers in GGUF files: what of each kind is written, and what is refused because llama.cpp would give other ids. And
# llama.cpp itself (package xllamacpp, as in test_gguf.sh) on random texts: the ids are megatrain's.
. "$(dirname "$0")/lib.sh"
make_tiny
python=${HF_PYTHON:-$root/${BUILD:-build}/venv-hf/bin/python}
"$python" -c 'import xllamacpp' 2>/dev/null || python=
[ -n "$python" ] || { skipped=1; echo "  skipped: ids by llama.cpp, no xllamacpp: make deps-hf"; }
keys() { /usr/bin/python3 "$root/test/tools/gguf_file.py" keys "$1" 2>tool.err; }

"$mt" tokenizer train --input text.txt --vocab-size 340 --output bytes.json >/dev/null 2>&1 || bad "tokenizer train"
eod=$(/usr/bin/python3 -c 'import json; print(json.load(open("bytes.json"))["added_tokens"][0]["id"])')
"$mt" --config tiny.ini run.dir=base model.arch=llama model.dropout=0 model.attention_dropout=0 model.vocab=700 train.steps=1 \
    optim.warmup=0 train.eval_every=0 >/dev/null 2>err.txt || bad "$(grep -m1 error err.txt)"
"$mt" convert --from base --to base.hf --format hf 2>err.txt || bad "$(grep -m1 error err.txt)"

# A tokenizer of characters as SentencePiece's become one: the most frequent neighbours of the text's characters are the
# next token, words begin with a mark; with all pairs that make a token in the list, those of one token together.
/usr/bin/python3 - <<'EOP'
import collections, json
text, mark = open("text.txt").read() + "straße née 中文 中文 中a", "\u2581"
words = collections.Counter(mark + w for w in text.split())
parts = {w: list(w) for w in words}
pieces, merges = sorted({c for w in words for c in w}), []
known = dict.fromkeys(pieces)
for _ in range(120):
    pairs = collections.Counter()
    for w, n in words.items():
        for p in zip(parts[w], parts[w][1:]):
            pairs[p] += n
    if not pairs:
        break
    (a, b), _ = min(pairs.items(), key=lambda x: (-x[1], x[0]))
    pieces.append(a + b)
    known[a + b] = None
    for w, p in parts.items():
        i = 0
        while i + 1 < len(p):
            if (p[i], p[i + 1]) == (a, b):
                p[i : i + 2] = [a + b]
            i += 1
for p in pieces:
    merges += [[p[:i], p[i:]] for i in range(1, len(p)) if p[:i] in known and p[i:] in known]
names = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + pieces
blank = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
json.dump({
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [dict(id=i, content=names[i], single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
                     for i in range(3)],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": mark},
                   {"type": "Replace", "pattern": {"String": " "}, "content": mark}]},
    "pre_tokenizer": None, "post_processor": None,
    "decoder": {"type": "Sequence", "decoders": [blank, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
              "vocab": {n: i for i, n in enumerate(names)}, "merges": merges},
}, open("characters.json", "w"))
EOP

# make NAME FROM CODE: FROM.json, changed by Python's CODE (t: the tokenizer, m: its model), as the tokenizer of a model
make() {
    local name=$1
    rm -rf "$name" "$name.hf" "$name.gguf"
    cp -r base.hf "$name.hf"
    /usr/bin/python3 - "$2.json" "$name.hf/tokenizer.json" "$3" <<'EOP'
import json, sys
MARK = "\u2581"
HEAD, TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
def split(regex): return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
def sequence(*parts):
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*parts, plain]}
def add(content, **more):
    t["added_tokens"].append(dict(dict(id=m_next(), content=content, single_word=False, lstrip=False, rstrip=False,
                                       normalized=False, special=True), **more))
def m_next(): return max([*m["vocab"].values()] + [a["id"] for a in t["added_tokens"]]) + 1
def piece(text): m["vocab"][text] = m_next()
DEEPSEEK = [split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
            split("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
                  "?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")]
t = json.load(open(sys.argv[1]))
m = t["model"]
exec(sys.argv[3])
json.dump(t, open(sys.argv[2], "w"))
EOP
    "$mt" convert --from "$name.hf" --to "$name" --format megatrain 2>err.txt || bad "$name: $(grep -m1 error err.txt)"
    check "$name: the tokenizer is not understood: $(grep -m1 warning err.txt)" [ -s "$name/tokenizer/tokenizer.json" ]
}
written() { # NAME FROM CODE 'KEY TYPE VALUE'...: these keys, and the ids of random texts
    local name=$1 line said
    make "$1" "$2" "$3"
    shift 3
    "$mt" convert --from "$name" --to "$name.gguf" --format gguf 2>err.txt || { bad "$name: $(grep -m1 error err.txt)"; return; }
    keys "$name.gguf" >keys.txt
    for line in "$@"; do check "$name: no '$line'" grep -qxF "tokenizer.ggml.$line" keys.txt; done
    check "$name: ids that are not said" [ "$(grep -cE '^tokenizer.ggml.(bos|eos|unknown|padding)_token_id u32 ' keys.txt)" = 4 ]
    [ -n "$python" ] || return
    said=$("$python" "$root/test/tools/gguf_tokens.py" "$mt" "$name.gguf" "$name.hf/tokenizer.json" 300 2>llama.err)
    check "$name: ids of '$said' texts: $(grep -m1 -a Error llama.err)" [ "${said:-0}" -ge 250 ]
}
refused() { # TEXT FROM CODE
    make odd "$2" "$3"
    expect 2 "$1" "$mt" convert --from odd --to odd.gguf --format gguf
    check "a file that was refused: $1" [ ! -e odd.gguf ]
}

# ---- what cuts texts
written gpt2 bytes '' 'pre string gpt-2' 'model string gpt2' "eos_token_id u32 $eod" 'add_space_prefix bool False'
written llama3 bytes 't["pre_tokenizer"] = sequence(split(HEAD + r"\p{N}{1,3}" + TAIL)); m["ignore_merges"] = True' \
    'pre string llama-bpe'
written qwen bytes 't["pre_tokenizer"] = sequence(split(HEAD + r"\p{N}" + TAIL))' 'pre string qwen2'
written deepseek bytes 't["pre_tokenizer"] = sequence(*DEEPSEEK); add("<a" + MARK + ">", normalized=True, special=False)' 'pre string deepseek-v3'
cuts="how this tokenizer cuts texts into pieces"
refused "$cuts" bytes 't["pre_tokenizer"] = sequence(DEEPSEEK[2])'
refused "$cuts" bytes 't["pre_tokenizer"] = sequence(DEEPSEEK[1], DEEPSEEK[0], DEEPSEEK[2])'
refused "$cuts" bytes 't["pre_tokenizer"] = sequence(DEEPSEEK[0], split(HEAD + r"\p{N}{1,3}" + TAIL))'
refused "$cuts" bytes 't["pre_tokenizer"] = sequence(split(HEAD + r"\p{N}{1,3}" + TAIL), split(HEAD + r"\p{N}" + TAIL))'
refused "$cuts" bytes 't["pre_tokenizer"] = sequence({"type": "Digits", "individual_digits": True},
                                                     split(HEAD + r"\p{N}" + TAIL))'
refused "$cuts" bytes 't["pre_tokenizer"]["add_prefix_space"] = True'

# ---- pieces that are tokens: no merges lead to "zqx"
written whole bytes 'm["ignore_merges"] = True' 'pre string gpt-2'
refused "ignore_merges" bytes 'm["ignore_merges"] = True; piece("zqx")'
written merged bytes 't["pre_tokenizer"] = sequence(split(HEAD + r"\p{N}{1,3}" + TAIL)); piece("zqx")' 'pre string smaug-bpe'
written taken bytes 't["pre_tokenizer"] = sequence(split(HEAD + r"\p{N}{1,3}" + TAIL)); m["ignore_merges"] = True; piece("zqx")' \
    'pre string llama-bpe'

# ---- tokens
refused "no token ends a document" bytes 't["added_tokens"][0]["content"] = "<|stop|>"; m["vocab"]["<|stop|>"] = m["vocab"].pop("<|endoftext|>")'
refused "the model has 700" bytes 'add("<more>", id=700)'
refused "two tokens have the text '[PAD500]'" bytes 'add("[PAD500]")'
refused "single_word, lstrip, rstrip" bytes 'add("<mask>", lstrip=True)'
refused "where they share letters" bytes 'add("<a"); add("a><b")'
written runs bytes '[add("#" * n, special=False) for n in (2, 3, 7)]; add("<pad>")' "padding_token_id u32 $((eod + 4))"

# ---- what a file puts round texts
round='item = lambda n: {"SpecialToken": {"id": n, "type_id": 0}}
text = {"Sequence": {"id": "A", "type_id": 0}}
def template(*single, **ids):
    return {"type": "TemplateProcessing", "single": [item(s) if isinstance(s, str) else s for s in single], "pair": [],
            "special_tokens": {n: {"id": n, "ids": [i], "tokens": [n]} for n, i in ids.items()}}
'
written begins characters "$round
t['post_processor'] = template('<s>', text, **{'<s>': 1})" 'add_bos_token bool True' 'bos_token_id u32 1' \
    'add_eos_token bool False' 'eos_token_id u32 2'
written both characters "$round
t['post_processor'] = {'type': 'Sequence', 'processors': [template('<s>', text, '</s>', **{'<s>': 1, '</s>': 2})]}" \
    'add_bos_token bool True' 'add_eos_token bool True' 'bos_token_id u32 1' 'eos_token_id u32 2'
written neither characters '' 'add_bos_token bool False' 'add_eos_token bool False'

# ---- of characters
written characters characters '' 'model string llama' 'add_space_prefix bool True' 'bos_token_id u32 2' 'eos_token_id u32 2' \
    'unknown_token_id u32 0'
check "patterns of characters" [ "$(grep -c 'tokenizer.ggml.pre ' keys.txt)" = 0 ]
gemma='t["normalizer"] = t["normalizer"]["normalizers"][1]; t["decoder"]["decoders"].pop()
t["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}'
written gemma characters "$gemma" 'model string llama' 'add_space_prefix bool False'
written never characters "$gemma
t['normalizer'] = None; t['pre_tokenizer'] = dict(type='Metaspace', replacement=MARK, prepend_scheme='never', split=False)" \
    'add_space_prefix bool False'
for scheme in '"first", split=False' '"always", split=False' '"never", split=True'; do
    refused "$cuts" characters "t['normalizer'] = None
t['pre_tokenizer'] = dict(type='Metaspace', replacement=MARK, prepend_scheme=$scheme)"
done
refused "sought in the normalized text" characters 't["added_tokens"][1]["normalized"] = True'
refused "byte_fallback" characters 'm["byte_fallback"] = False'
refused "byte_fallback" characters 'del m["vocab"]["<0xF7>"]'
refused "merges of bytes" characters 'piece("<0x41><0x42>"); m["merges"].append(["<0x41>", "<0x42>"])'
# (two tokens that stand beside each other make a text that is a third, without a merge; three do not)
refused "no merges lead to token" characters 'piece("é中")'
written apart characters 'piece("é中ß")' 'model string llama'
refused "no merges lead to token" characters 'piece("éß中"); m["ignore_merges"] = True'
refused "no merges lead to token" characters 'piece("\u0439\u0446")'

# what is at stake: the same order, but two merges of one token apart from each other, with other tokens between
check "scores fall: $(tail -1 tool.err 2>/dev/null)" /usr/bin/python3 - "$root" 2>tool.err <<'EOP'
import json, sys
sys.path.insert(0, sys.argv[1] + "/test/tools")
import gguf_file

keys = {name: value for name, (_, value) in gguf_file.Reader("characters.gguf").keys.items()}
model = json.load(open("characters.json"))["model"]
tokens, kinds, scores = (keys["tokenizer.ggml." + name] for name in ("tokens", "token_type", "scores"))
assert {t: i for i, t in enumerate(tokens) if not t.startswith("[PAD")} == model["vocab"]
assert kinds[:3] == [2, 3, 3] and kinds[3:259] == [6] * 256 and kinds[-1] == 5
ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
for (left, right), rank in ranks.items():
    assert scores[model["vocab"][left + right]] <= 0
made = [model["vocab"]["".join(p)] for p in model["merges"]]
order = [t for i, t in enumerate(made) if t not in made[:i]]
assert [scores[t] for t in order] == sorted((scores[t] for t in order), reverse=True), "another order"
EOP
finish
