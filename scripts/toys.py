#!/usr/bin/python3
"""Follows the recipes of docs/adding.md, so that the page stays true: makes their edits in a copy of the source, compiles it
without a warning and runs what they end with. The copy has the objects too (BUILD=build).

usage: scripts/toys.py [--places | --into FOLDER] [KIND...]

KIND: headings of the page, such as 'A schedule'; none: all, in one copy.
--places: only whether each edit finds its place. --into: only the edits, in this copy.
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = "docs/adding.md"
BUILD = os.environ.get("BUILD", "build")
EDIT = re.compile(r"^- `([^`]+)`, (?:(below|above|instead of) `([^`]+)`|(at the end|a new file)): [^\n]+\n```[\w+]*\n(.*?)^```$", re.M | re.S)
CHECK = re.compile(r"^Then `([^`]+)` says `([^`]+)`\.$", re.M)
# compiled as the mutants are (test/mutate.sh): quickly
FAST = ["CUDA=0", f"BUILD={BUILD}", "OPT=-O0", "VEC_OPT=-O1", "FRAMES=", "EXTRA_CFLAGS=-Werror", "EMU_FLAGS=-O0 -Werror"]


class Bad(Exception):
    pass


def recipes(wanted):
    """{kind: (edits, checks)}; an edit: file, where, anchor, text; a check: command, what it says."""
    found = {}
    for section in (ROOT / PAGE).read_text().split("\n## ")[1:]:
        kind, body = section.split("\n", 1)
        edits = [(file, where or end, anchor, text) for file, where, anchor, end, text in EDIT.findall(body)]
        checks = CHECK.findall(body)
        if len(edits) != len(re.findall("^- ", body, re.M)) or len(checks) != len(re.findall("^Then ", body, re.M)) or not checks:
            raise Bad(f"{PAGE}, '{kind}': an edit or what comes of them is not in the page's form")
        found[kind] = edits, checks
    unknown = [kind for kind in wanted if kind not in found]
    if unknown:
        raise Bad(f"{PAGE} has no heading '{unknown[0]}'; it has: {', '.join(found)}")
    return {kind: found[kind] for kind in wanted or found}


def edited(text, where, anchor, new):
    """The text with an edit made; None: its place is not there exactly once."""
    if where == "at the end":
        return f"{text}\n{new}"
    if text.count(anchor) != 1:
        return None
    at = text.index(anchor)
    if where == "instead of":
        return text[:at] + new.rstrip("\n") + text[at + len(anchor):]
    if where == "below":
        at = text.index("\n", at) + 1
        return text[:at] + new + text[at:]
    at = text.rindex("\n", 0, at) + 1
    own = "\n" if text[:at].endswith("\n\n") else ""  # a paragraph before a paragraph
    return text[:at] + new + own + text[at:]


def follow(found, tree):
    """Makes the edits of recipes in a copy of the source."""
    for kind, (edits, _) in found.items():
        for file, where, anchor, new in edits:
            path = tree / file
            if where == "a new file":
                text = None if path.exists() else new
            else:
                text = edited(path.read_text(), where, anchor, new) if path.exists() else None
            if text is None:
                raise Bad(f"{PAGE}, '{kind}': '{anchor}' is not there exactly once in {file}")
            path.write_text(text)
        print(f"{kind}: {len(edits)} edits in {len({e[0] for e in edits})} files")


def copy_source(tree):
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).exists():  # else it is about to go
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def copy_objects(tree):
    for folder in ("src", "test"):
        for path in (ROOT / BUILD / folder).rglob("*.[od]"):
            to = tree / BUILD / path.relative_to(ROOT / BUILD)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)


def targets(files):
    """What make is to build of edited files."""
    emulated = shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/include").is_dir() or os.environ.get("CUDA_HOME")
    found = {"megatrain"}
    for file in files:
        if re.match(r"test/test_\w+\.c$", file):
            found.add(f"{BUILD}/{file[:-2]}")
        elif file == "test/axes.def":
            found.add(f"{BUILD}/test/test_array")
        elif re.match(r"(cuda|test/cuda|bench/cuda)/", file):
            found |= {f"{BUILD}/emu/{file}.o".replace(".c.o", ".o")} if emulated else set()
    if not emulated and any("cuda/" in f for f in files):
        print("    skipped: edits for the GPU are not compiled: no CUDA toolkit here")
    return sorted(found)


def run(tree, command):
    paths = f"{tree}:{tree / BUILD / 'test'}:{os.environ['PATH']}"
    done = subprocess.run(command, shell=True, cwd=tree, env={**os.environ, "PATH": paths, "OMP_WAIT_POLICY": "passive"},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.returncode, done.stdout


def make(tree, files):
    status, out = run(tree, shlex.join(["make", "-s", "-k", f"-j{os.cpu_count()}", *FAST, *targets(files)]))
    if status:
        raise Bad("what came of the recipes does not compile:\n" + "\n".join(re.findall(r".*(?:error|undefined).*", out)[:10]))


def try_out(found):
    """Follows the recipes in a copy of the source; returns how many of their checks failed."""
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="megatrain-toys.") as folder:
        tree = pathlib.Path(folder)
        copy_source(tree)
        copy_objects(tree)
        follow(found, tree)
        make(tree, [edit[0] for edits, _ in found.values() for edit in edits])
        for kind, (_, checks) in found.items():
            for command, says in checks:
                status, out = run(tree, command)
                good = status == 0 and says in out
                passed, failed = passed + good, failed + (not good)
                if not good:
                    print(f"FAIL: {kind}: '{command}' ends with {status} and does not say '{says}':\n{out[-1000:]}")
    print(f"{passed} passed, {failed} failed")
    return failed


def main(args):
    if args[:1] == ["--places"]:
        with tempfile.TemporaryDirectory(prefix="megatrain-toys.") as folder:
            copy_source(pathlib.Path(folder))
            return follow(recipes(args[1:]), pathlib.Path(folder))
    if args[:1] == ["--into"]:
        return follow(recipes(args[2:]), pathlib.Path(args[1]))
    return try_out(recipes(args))


try:
    sys.exit(1 if main(sys.argv[1:]) else 0)
except Bad as bad:
    sys.exit(f"toys: {bad}")
