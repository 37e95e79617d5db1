#!/usr/bin/env python3
"""
docs/models.md: what was tried of each class of transformers, and what the others lack.

    models_page.py write ROOT SEEN FOLDERS   rows of the classes in SEEN, which test_hf.sh wrote of models in FOLDERS; the
                                             other rows stay
    models_page.py again ROOT                what other files say: published configurations, classes that are not read
    models_page.py check ROOT                page, source and test/models_refused.txt agree

SEEN has a line for each thing that held: CASE WHAT FIGURE. A class has a row only if all of it held.
"""
import collections
import json
import os
import re
import sys

MODELS = 3  # of a class
LAYOUTS = 2
NOT_YET = "not written yet"
HEAD = "| class | published config.json | keys | weights in and out | logits | step of SGD | tokenizer, text | GGUF | layouts |"
OTHERS = "| lacks | classes |"


def page(root):
    return open(root + "/docs/models.md").read()


def rows(text):
    """Cells of the table of classes, by class."""
    lines = text.split(HEAD + "\n")[1].split("\n\n")[0].split("\n")[1:]
    return {cells[0].strip("`"): cells for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)}


def put_classes(root, have):
    """A class without a row of its own gets one that says so."""
    none = lambda name: [f"`{name}`", files_of(root, name), NOT_YET] + ["-"] * (HEAD.count(" | ") - 2)
    put(root, page(root), HEAD, ["| " + " | ".join(have.get(n) or none(n)) + " |" for n in classes(root)])


def put(root, text, head, lines):
    before, rest = text.split(head + "\n", 1)
    rule = "|" + " --- |" * head.count(" | ") + " --- |"
    table = "\n".join([head, rule, *lines])
    open(root + "/docs/models.md", "w").write(before + table + "\n\n" + rest.split("\n\n", 1)[1])


def classes(root):
    """model_types in the order of class.c."""
    return re.findall(r"\.names = \{ \"([a-z0-9_]+)\"", open(root + "/src/hf/class.c").read())


def published(root, name):
    """The published configurations of a class that tests read, as test/golden/hf has them."""
    folder, found = root + "/test/golden/hf", []
    files = os.listdir(folder) + ["published/" + file for file in os.listdir(folder + "/published")]
    for file in (f for f in files if f.endswith(".json") and not f.endswith(".v5.json")):
        c = json.load(open(f"{folder}/{file}"))
        kinds = {c.get("model_type"), c.get("text_config", {}).get("model_type")}
        if name in kinds or (name == "deepseek_v3" and "kimi_k2" in kinds):
            found.append(file[: -len(".json")].removeprefix("published/"))
    return sorted(found)


def files_of(root, name):
    return ", ".join(published(root, name)) or "none"


def seen_of(path):
    seen = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in open(path):
        case, what, *figure = line.rstrip("\n").split(" ", 2)
        seen[case.rsplit("-", 1)[0]][what].append(" ".join(figure))
    return seen


def row(root, name, s):
    least = dict(weights=MODELS, logits=MODELS, layout=LAYOUTS, keys=1, step=1, text=1)
    if any(len(s[what]) < n for what, n in least.items()):
        return None
    gguf = s["gguf"][0] if s["gguf"] else "refused"
    logits = max(s["logits"], key=float)
    return [f"`{name}`", files_of(root, name), s["keys"][0], f"{len(s['weights'])} models", logits,
            s["step"][0], "yes", gguf, "; ".join(s["layout"])]  # fmt: skip


def write(root, path, folders):
    text = page(root)
    have, missing = rows(text), []
    for case, s in seen_of(path).items():
        config = f"{folders}/{case}-0/config.json"
        if case not in ("mtp",) and os.path.exists(config):
            name = json.load(open(config))["model_type"]
            cells = row(root, name, s)
            if not cells:
                missing.append(name)
            else:
                have[name] = cells
    put_classes(root, have)
    if missing:
        sys.exit("not all of it was seen to hold: " + ", ".join(missing))


def refused(root):
    """{class: what it lacks}, in the order of the list."""
    lines = [x for x in open(root + "/test/models_refused.txt").read().split("\n") if x and not x.startswith("#")]
    found = {}
    for line in lines:
        lacks, names = line.split(":")
        for name in names.split():
            if name in found:
                sys.exit(f"test/models_refused.txt: {name} twice")
            found[name] = lacks
    return found


def other_lines(root):
    groups = collections.defaultdict(list)
    for name, lacks in refused(root).items():
        groups[lacks].append(f"`{name}`")
    return [f"| {lacks} | {', '.join(names)} |" for lacks, names in groups.items()]


def check(root):
    text, wrong = page(root), []
    have, read = rows(text), set(classes(root))
    for name in sorted(read - have.keys()):
        wrong.append(f"{name} has no row: test/tools/models_page.py again . and test/test_hf.sh --page CLASS")
    wrong += [f"{name} is no class of src/hf/class.c" for name in have.keys() - read]
    wrong += [f"{name} is read, and in test/models_refused.txt" for name in refused(root).keys() & read]
    for name in have.keys() & read:
        if have[name][1] != files_of(root, name):
            wrong.append(f"{name}: other files are in test/golden/hf: test/tools/models_page.py again .")
    if "\n".join(other_lines(root)) not in text:
        wrong.append("test/models_refused.txt is another list: test/tools/models_page.py again .")
    for line in wrong:
        print(f"docs/models.md: {line}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    what, root, *rest = sys.argv[1:]
    if what == "write":
        write(root, *rest)
    elif what == "again":
        have = rows(page(root))
        for name in have:
            have[name][1] = files_of(root, name)
        put_classes(root, have)
        put(root, page(root), OTHERS, other_lines(root))
    else:
        check(root)
