"""What tasks come to, from the logits of `eval --logits`: an independent second way, of bytes as tokens and one request a
sequence, without NumPy.

    tasks.py make SEED              writes some.jsonl, contexts.jsonl, words.jsonl and long.jsonl, questions of each form
    tasks.py ids SEQ FILE...        the requests of these files, a line each, filled up to SEQ ids
    tasks.py check SEQ LOGITS JSON FILE...    compares what `eval --tasks FILE,... --json` printed
"""
import json, math, os, random, sys

import npy

EOD = 256


def make(seed):
    r = random.Random(seed)
    words = "Line ships tides harbours small text about of and 1 2 3 4 5 6 é 界 ü".split()
    some = lambda n: " ".join(r.choice(words) for _ in range(n))
    with open("some.jsonl", "w") as f:
        for i in range(60):
            choices = [some(r.randint(1, 3))[:14] for _ in range(r.randint(2, 5))]
            query = ["", "Line 7", "a small text: ", "Line\n\t "][i % 4]
            f.write(json.dumps({"query": query, "choices": choices, "gold": r.randrange(len(choices))}) + "\n")
        f.write("\n")  # a blank line is none
    with open("contexts.jsonl", "w") as f:
        for _ in range(40):
            options = [some(r.randint(1, 2)) for _ in range(r.randint(2, 4))]
            f.write(json.dumps({"context_options": options, "continuation": some(1), "gold": r.randrange(len(options))}) + "\n")
    with open("words.jsonl", "w") as f:
        lines = open("text.txt").read().split("\n")
        for line in lines[:40]:
            at = r.randrange(3, 12)
            f.write(json.dumps({"context": line[:at], "continuation": line[at : at + 1 + at % 2]}) + "\n")
    with open("long.jsonl", "w") as f:  # cut from the left
        for _ in range(10):
            choices = [some(1), " " + some(2)[:10]]
            f.write(json.dumps({"query": some(9), "choices": choices, "gold": r.randrange(2)}) + "\n")


def questions(path):
    """form, and for each question its gold and its requests: tokens, how many of them count, the choice's text."""
    form, out = None, []
    for line in open(path, encoding="utf-8"):
        if not line.strip():
            continue
        q = json.loads(line)
        if "choices" in q:
            form, pairs = "choices", [(q["query"], c) for c in q["choices"]]
        elif "context_options" in q:
            form, pairs = "contexts", [(c, q["continuation"]) for c in q["context_options"]]
        else:
            form, pairs = "greedy", [(q["context"], q["continuation"])]
        out.append((q.get("gold"), [request(c, t) + (t,) for c, t in pairs]))
    return form, out


def request(context, choice):
    blank = "" if context[-1:].isspace() or choice[:1].isspace() else " "
    whole = list((context + blank + choice).encode())
    before = list(context.rstrip().encode())
    scored = len(whole) - len(before)
    return ([] if before else [EOD]) + whole, scored


def fitted(tokens, seq):
    return tokens[-(seq + 1) :]


def ids(seq, paths):
    for path in paths:
        for _, requests in questions(path)[1]:
            for tokens, _, _ in requests:
                row = fitted(tokens, seq)[:-1]
                print(*(row + [0] * (seq - len(row))))


def mean(right):
    n = len(right)
    m = math.fsum(right) / n
    squares = math.fsum((x - m) ** 2 for x in right)
    return m, math.sqrt(squares / (n - 1)) / math.sqrt(n) if n > 1 else None


def same(what, got, want):
    if want is None:
        assert got is None, (what, got)
    else:
        assert got is not None and abs(got - want) <= 1e-12, (what, got, want)


def check(seq, logits, answer, paths):
    (count, positions, vocab), values = npy.load(logits)
    assert positions == seq
    row, report, all_right = 0, json.load(open(answer)), {}
    assert len(report["tasks"]) == len(paths)
    for path, got in zip(paths, report["tasks"]):
        form, asked = questions(path)
        assert got["task"] == os.path.basename(path)[: -len(".jsonl")] and got["form"] == form
        assert got["questions"] == len(asked), got
        right = {"acc": [], "acc_norm": [], "acc_bytes": []}
        cut = 0
        for gold, requests in asked:
            scores = []
            for tokens, scored, text in requests:
                cut += len(tokens) > seq + 1
                tokens = fitted(tokens, seq)
                at = row * seq + len(tokens) - 1 - scored
                steps = [npy.log_prob(values, vocab, at + i, t) for i, t in enumerate(tokens[-scored:])]
                scores.append((math.fsum(s for s, _ in steps), all(g for _, g in steps), len(text), len(text.encode())))
                row += 1
            if form == "greedy":
                right["acc"].append(float(scores[0][1]))
                continue
            for name, by in (("acc", None), ("acc_norm", 2), ("acc_bytes", 3)):
                each = [s[0] / (s[by] if by else 1) for s in scores]
                right[name].append(float(each.index(max(each)) == gold))
        assert got["cut"] == cut, (got, cut)
        for name, list_ in right.items():
            if form == "greedy" and name != "acc":
                assert name not in got
                continue
            m, error = mean(list_)
            same((path, name), got[name], m)
            same((path, name, "error"), got[name + "_error"], error)
            all_right.setdefault(name, []).append(list_)
            print(path, name, m)
    assert row == count, (row, count)
    for name, lists in all_right.items() if len(paths) > 1 else ():
        n = sum(map(len, lists))
        same(("pooled", name), report["pooled"][name], math.fsum(map(math.fsum, lists)) / n)
        parts = [(len(x), mean(x)[1]) for x in lists]
        variance = math.fsum((k - 1) * k * e * e for k, e in parts if k > 1) / (n - len(lists))
        same(("pooled", name, "error"), report["pooled"][name + "_error"], math.sqrt(variance / n))


if __name__ == "__main__":
    what, args = sys.argv[1], sys.argv[2:]
    if what == "make":
        make(int(args[0]))
    elif what == "ids":
        ids(int(args[0]), args[1:])
    else:
        check(int(args[0]), args[1], args[2], args[3:])
