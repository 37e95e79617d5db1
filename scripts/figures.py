#!/usr/bin/python3
"""How easy the source is to change, in figures (docs/architecture.md, "Figures").

usage: scripts/figures.py [FOLDER]     of this source, or of another checkout
       scripts/figures.py --check      only what is above a limit below; then an error (make lint)

Files are found by name wherever they stand, so that the same commands measure a source whose rooms have moved.
"""
import collections
import glob
import os
import re
import statistics
import subprocess
import sys

MODEL_KEY = "attention_softcap"  # a number that attention alone needs
OP = "gate_fwd"                  # an operation of the usual kind
STRUCTS = ["Ctx", "Trainer", "TrainSpec", "ModelSpec"]

# Limits of --check. What is named is above the general one and may have so much, but not more: whoever shortens one lowers its
# number here, or takes it out.
LINES = 45  # of a function; a kernel of CUDA is named by its file
LONG = {"tile_kernel": 93, "cuda/attention_dkv.cu": 62, "cuda/attention_dq.cu": 61, "train_spec": 49, "model_spec": 53,
        "cuda/attention_fwd.cu": 58, "op_work": 54, "cuda/norm.cu": 48}
MEMBERS = 30  # of a struct in a header
LARGE = {"HfModel": 89,    # a key of config.json each
         "ModelSpec": 48,  # a key of the model each
         "Group": 33,      # of ranks, over Gloo
         "Executor": 31}
CIRCLES = []


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def source(*suffixes):
    """Files of src/ and cuda/ with one of these suffixes, as {path: text}."""
    paths = [p for s in suffixes for p in glob.glob("src/*/*" + s) + glob.glob("cuda/*" + s)]
    return {p: read(p) for p in sorted(paths)}


def room(path):
    return path.split("/")[1] if path.startswith("src/") else path.split("/")[0]


def without_comments(text):
    """The text with its comments blanked, line by line as it was. (What looks like one in a string is none.)"""
    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/',
                  lambda m: m.group() if m.group()[0] == '"' else re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)


def matches(files, pattern, where=lambda path: True):
    """[path] once for each line of code that the pattern is found in."""
    found = []
    for path, text in files.items():
        if where(path):
            found += [path for line in without_comments(text).split("\n") if re.search(pattern, line)]
    return found


def in_files(found):
    return f"{len(found)} in {len(set(found))} files"


# ---- structs ----


def closing(text, at):
    """The end of the block that opens at text[at]."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    raise ValueError("a block without an end")


def members(body):
    """Names of a struct's members; those of structs and unions without a name count as its own."""
    nested = re.search(r"\b(struct|union)\s*\w*\s*\{", body)
    if nested:
        end = closing(body, nested.end() - 1)
        name = re.match(r"\s*(\w*)[^;]*;", body[end + 1:])
        inner = [name.group(1)] if name.group(1) else members(body[nested.end():end])
        return members(body[:nested.start()]) + inner + members(body[end + 1 + name.end():])
    names = []
    for statement in body.split(";"):
        function = re.search(r"\(\*(\w+)", statement)
        flat = re.sub(r"\[[^\]]*\]|\([^)]*\)", "", statement)
        names += [function.group(1)] if function else re.findall(r"(\w+)\s*(?=,|:|$)", flat.strip())
    return [n for n in names if not n.isdigit()]


def structs(files):
    """{name: (path, members)} of all structs that have a name."""
    found = {}
    for path, text in files.items():
        text = re.sub(r"^#.*$", "", without_comments(text), flags=re.M)
        for m in re.finditer(r"^(typedef )?struct\s*(\w*)\s*\{", text, re.M):
            end = closing(text, m.end() - 1)
            name = re.match(r"[^;]*?(\w+);", text[end + 1:]).group(1) if m.group(1) else m.group(2)
            found[name] = (path, members(text[m.end():end]))
    return found


# ---- functions, and who needs whom ----


def definitions(text):
    """(name, static, lines) of each function that a file defines."""
    text = without_comments(text)
    for m in re.finditer(r"^(?!typedef|else|return)((?:extern \"C\" )?[A-Za-z_][\w *]*?)\b(\w+)\(([\w, ]*\)\()?", text, re.M):
        body = re.match(r"[^;{}]*(\{[^\n]*\}\n|\n\{.*?\n\})", text[m.end():], re.S)
        if body:
            yield m.group(2), "static" in m.group(1), text[m.start():m.end() + body.end()].rstrip().count("\n") + 1


def variables(text):
    return re.findall(r"^(?:extern \"C\" )?(?:const )?\w+ (\w+)(?:\[\w*\])* = ", without_comments(text), re.M)


def declared_names(header):
    """Names of the functions and variables that a header declares. (Members and arguments may have the name of either.)"""
    text, n = header.replace('extern "C" {', ""), 1
    while n:
        text, n = re.subn(r"\{[^{}]*\}|(?<=\()[^()]+(?=\))|(?<!\w)\(\)", "", text)
    return set(re.findall(r"\w+(?=[(;\[,])", text))


def needs(files, headers):
    """{module: those whose functions or tables it names, as a header that it includes declares them}; a module is a
    file's path without its suffix."""
    owner, own = {}, collections.defaultdict(set)
    for path, text in files.items():
        module = path.rsplit(".", 1)[0]
        for name, static, _ in definitions(text):
            own[module].add(name)
            if not static:
                owner[name] = module
        owner.update({name: module for name in variables(text)})
    words = {path: declared_names(without_comments(text)) & set(owner) for path, text in headers.items()}
    graph = collections.defaultdict(set)
    for path, text in files.items():
        module = path.rsplit(".", 1)[0]
        code = re.sub(r'"(\\.|[^"\\\n])*"', "", without_comments(text))
        declared = set().union(*(words.get(h, ()) for h in included(path, text, headers)))
        named = set(re.findall(r"(?<![.>])\b[a-z_]\w*", code)) & declared - own[module]
        graph[module] |= {owner[name] for name in named if owner[name] != module}
    return graph


def included(path, text, headers):
    """The headers that a file includes, by whatever way."""
    found, todo = set(), [(path, text)]
    while todo:
        at, text = todo.pop()
        for name in re.findall(r'^#include "([^"]+)"', text, re.M):
            header = next((h for h in ("src/" + name, os.path.join(os.path.dirname(at), name)) if h in headers), None)
            if header and header not in found:
                found.add(header)
                todo.append((header, headers[header]))
    return found


def circles(graph):
    """The strongly connected components of more than one node (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(graph.get(v, ())):
            if w not in index:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == index[v]:
            at = stack.index(v)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for v in sorted(graph):
        if v not in index:
            visit(v)
    return found


def sees(header):
    """(C files of src/ that include a header of this name, by whatever way; all of them)"""
    files = sorted(glob.glob("src/*/*.c"))
    out = subprocess.run(["gcc", "-MM", "-Isrc", "-D_GNU_SOURCE", "-DCPU_ISA=c", "-DCPU_ISA_c"] + files,
                         capture_output=True, text=True, check=True).stdout
    rules = [r for r in re.split(r"\n(?=\S)", out) if r]
    return sum(f"/{header}" in r for r in rules), len(rules)


# ---- the figures ----


def model_key(files, found):
    word = rf"\b{MODEL_KEY}\b"
    of_it = lambda p: room(p) not in ("cpu", "device", "cuda") and not re.search(r"config_(check|meant)", p)
    lines = matches(files, word, of_it) + matches({"test/golden/keys.txt": read("test/golden/keys.txt")}, word)
    relays = [s for s, (path, names) in found.items() if of_it(path)
              and any(re.fullmatch(word, n) for n in names)]
    yield f"edits for a model key ({MODEL_KEY}), kernels and tests apart", f"{in_files(lines)}, {1 + len(relays)} structs"


def specifications(found):
    specs = {s: path for s, (path, _) in found.items() if s.endswith("Spec") and room(path) in ("layer", "model")}
    yield "structs of the model's and its layers' specification", in_files(list(specs.values()))


def layer_kinds(files):
    asks = (r"->(latent|mixture)\b(?!\.| =)|(?<!bool )\bmodel_is_(latent|mixture)\("
            r"|\b(MIXER|FFN)_[A-Z]+\b(?!, )|\bif \(m->latent\.width\.kv_rank\)")
    yield "lines that ask which kind a layer is", in_files(matches(files, asks))


def keys_code(files):
    walk = [p for p in files if room(p) == "layer" and re.match(r"(context|slices|keys|ring|reshard)", os.path.basename(p))]
    yield "attention over shared or sliced sequences", f"{sum(files[p].count(chr(10)) for p in walk)} lines in {len(walk)} files"


def branches(files):
    layer = lambda p: room(p) == "layer" and p.endswith(".c")
    size = matches(files, r"(\.|->)size (==|!=|<=?|>=?) [01]\b", layer)
    sends = matches(files, r"(?<!bool )\bsends\(", layer)
    slices = matches(files, r"\bslices\.count\b", layer)
    yield "branches in layers: on a group's size, sends(c), lines with slices.count", f"{len(size)}, {len(sends)}, {len(slices)}"


def op_edits():
    patterns = ["src/*/*", "cuda/*", "test/*.[ch]", "test/cuda/*", "bench/cuda/*"]
    files = {p: read(p) for g in patterns for p in sorted(glob.glob(g)) if re.search(r"\.(c|h|cu|cuh|def)$", p)}
    forms = (rf"\b(OP|CPU|CASE|BENCH)\({OP}\b|\b(cuda|make)_{OP}\(|\b(RUN|BOTH)\(\w+, {OP}\b" rf"|\{{ \"{OP}\"")
    yield f"edits for an op ({OP})", in_files(matches(files, forms))


def room_circles(files, headers):
    found = circles(needs(files, headers))
    yield "circles of files that call each other", str(len(found))
    for c in found:
        yield "", " ".join(re.sub("^src/", "", m) for m in c)


def lengths(files):
    """(lines, name) of each function; a kernel's name is that of its file."""
    for path, text in files.items():
        for name, _, lines in definitions(text):
            yield lines, path if name.startswith("__") else name


def above_limits():
    """A line for each thing that is above its limit, and for each limit that is no longer needed."""
    c, h, rest = source(".c", ".cc", ".cu"), source(".h", ".hpp", ".cuh"), source(".def")
    longest, found = collections.defaultdict(int), structs(h)
    for lines, name in lengths({**c, **h, **rest}):
        longest[name] = max(longest[name], lines)
    for what, limit, named, all in (("lines", LINES, LONG, longest),
                                    ("members", MEMBERS, LARGE, {s: len(m) for s, (_, m) in found.items()})):
        for name, count in sorted(all.items()):
            if count > named.get(name, limit):
                yield f"{name} has {count} {what}, and at most {named.get(name, limit)} are allowed"
        for name in named:
            if all.get(name, 0) <= limit:
                yield f"{name} has at most {limit} {what}: take it out of the list of scripts/figures.py"
    now = [" ".join(re.sub("^src/", "", m) for m in circle) for circle in circles(needs(c, h))]
    for circle in now:
        if circle not in CIRCLES:
            yield f"files call each other in a circle: {circle}"
    for circle in CIRCLES:
        if circle not in now:
            yield f"'{circle}' is no circle: take it out of the list of scripts/figures.py"


def figures():
    c, h, rest = source(".c", ".cc", ".cu"), source(".h", ".hpp", ".cuh"), source(".def")
    found = structs(h)
    yield from model_key({**c, **h, **rest}, found)
    yield from specifications(found)
    yield from layer_kinds(c)
    yield from keys_code({**c, **h})
    yield from branches(c)
    yield "members of " + " / ".join(STRUCTS), " / ".join(str(len(found[s][1])) for s in STRUCTS)
    yield "C files that see rendezvous (boot.h)", "%d of %d" % sees("boot.h")
    yield from op_edits()
    yield from room_circles(c, h)


def functions():
    """Lines of code, and of functions: median, 95th percentile, most; of each room."""
    files = source(".c", ".cc", ".cu", ".h", ".hpp", ".cuh", ".def")
    for r in sorted({room(p) for p in files}):
        here = {p: t for p, t in files.items() if room(p) == r}
        lengths = sorted(n for t in here.values() for _, _, n in definitions(t)) or [0]
        yield (r, len(here), sum(t.count("\n") for t in here.values()), int(statistics.median(lengths)),
               lengths[len(lengths) * 95 // 100], lengths[-1])


def folders():
    for folder in ("src", "cuda", "test", "bench", "scripts", "docs"):
        listed = subprocess.run(["git", "ls-files", folder], capture_output=True, text=True, check=True).stdout.split()
        texts = [p for p in listed if re.search(r"\.(c|cc|h|hpp|cu|cuh|cpp|def|py|sh|md|awk)$", p) and os.path.exists(p)]
        yield folder, len(texts), sum(read(p).count("\n") for p in texts)


def main():
    check = sys.argv[1:] == ["--check"]
    os.chdir(sys.argv[1] if len(sys.argv) > 1 and not check else os.path.join(os.path.dirname(__file__), ".."))
    if check:
        found = list(above_limits())
        sys.exit("\n".join("figures: " + line for line in found) if found else 0)
    for name, value in figures():
        print(f"{name:74}  {value}" if name else f"    {value}")
    print(f"\n{'room':10}{'files':>6}{'lines':>8}   functions: median, 95 %, longest")
    for r, count, lines, median, most, longest in functions():
        print(f"{r:10}{count:6}{lines:8}   {median:4}{most:5}{longest:5}")
    print()
    for folder, count, lines in folders():
        print(f"{folder:10}{count:6}{lines:8}")


main()
