"""
What the draws are about: each key of src/config/config.def is drawn, and each choice of a key that has some, or it
stands here with the reason why not. `python3 test/fuzz/layouts --keys` says what is neither.
"""
import re
from pathlib import Path

import program as files
from draw import draw

DRAWS = 3000
GPUS = "of device=cuda alone: test/emu"
FIXED = {  # "key", or "key=choice", and why it is not drawn
    "run.dir": "a path", "run.name": "a name", "run.device=cuda": GPUS, "run.graphs": GPUS, "run.autotune": GPUS, "parallel.staged": GPUS,
    "parallel.nccl.tp.min_ctas": GPUS, "parallel.nccl.tp.max_ctas": GPUS, "parallel.nccl.dp.min_ctas": GPUS,
    "parallel.nccl.dp.max_ctas": GPUS,
    "run.precision=fp32": "auto on the CPU, which is drawn", "debug.isa=avx512": "not of every processor; auto takes it",
    "run.reproducible=off": "promises nothing to compare",
    "run.bind": "of the machine's processors: test/test_threads.sh",
    "run.restarts": "of processes that come again: test/test_restarts.sh",
    "parallel.auto": "puts another layout in the place of the one drawn: test/test_auto.sh",
    "parallel.auto_device": "of parallel.auto",
    "parallel.data_port": "a port: test/test_keys.sh",
    "parallel.timeout_s": "a time", "parallel.freeze_s": "a time", "parallel.stall_s": "a time",
    "data.start": "which samples, not how they are computed: test/test_overrides.sh",
    "train.eval_batches": "the older form of train.eval_samples",
    "train.stop_at": "given by mode resume", "train.max_minutes": "a time",
    "checkpoint.fail_after": "of a disk that fails: test/test_resume.sh",
    "checkpoint.resume": "a path; modes resume and repeat go on, or begin, by its default",
    "debug.dump": "a weight's name; what is written is looked at by test/test_dump.sh",
    "log.jsonl": "metrics.jsonl is what is compared", "log.color": "of a terminal", "log.prometheus": "of metrics, which are compared",
}
DECLARATION = r"^(INT|AUTO_INT|REAL|BOOL|PICK|ONE_OF|TEXT|DOTS|WORD) ?\((\w+), *(\w+), *(.*)"
LISTS = files.ROOT / "src" / "base"


def lists():
    """{name of a list of choices in src/base: [(row's name, word), ...]}."""
    found = {}
    for path in sorted(LISTS.glob("*.h")):
        for name, rows in re.findall(r"^#define (\w+)\(ROW\)((?:.*\\\n)*.*)", path.read_text(), re.M):
            found[name] = re.findall(r'ROW\((\w+), "([^"]*)"', rows)
    return found


def choices_of(kind, rest, of_lists):
    """[(constant, word), ...] of a key's declaration from its default on."""
    if kind == "ONE_OF":
        return of_lists[re.match(r"\w+, *\w+, *(\w+),", rest).group(1)]
    if kind not in ("PICK", "WORD"):
        return []
    inner = [choice for name in re.findall(r"\b(\w+)\(\w+_CHOICE\)", rest) for choice in of_lists[name]]
    return re.findall(r'C\((\w+), "([^"]*)"\)', rest) + inner


def declared(text):
    """{key: its choices but for the default, which a draw leaves out} of config.def; none of a key without a list there."""
    found, of_lists = {}, lists()
    for part in re.split(r"^(?=(?:INT|AUTO_INT|REAL|BOOL|PICK|ONE_OF|TEXT|DOTS|WORD|SECTION|#) ?)", text, flags=re.M):
        match = re.match(DECLARATION, part, re.S)
        if not match:
            continue
        kind, section, name, rest = match.groups()
        if kind in ("DOTS", "WORD"):
            name, rest = re.match(r'"([^"]*)", *(.*)', rest, re.S).groups()
        choices = choices_of(kind, rest, of_lists)
        default = rest.split(",")[0]
        found[f"{section}.{name}"] = [word for constant, word in choices if constant != default and not default.endswith("_" + constant)]
    return found


def drawn(count=DRAWS):
    """{key: values} of so many draws. A key with its default may be left out of a draw, so all have their default."""
    found = {}
    for i in range(count):
        case = draw(f"keys.{i}")
        for keys in (case.model, case.layout, case.alone):
            for key, value in keys.items():
                found.setdefault(key, set()).add(value)
    return found


def wrong(path):
    """A line for each key and choice of that config.def that is neither drawn nor left out, is both, or is not there."""
    keys, have = declared(Path(path).read_text()), drawn()
    names = [(key, key in have) for key in keys]
    names += [(f"{key}={choice}", choice in have.get(key, ())) for key in have
              if key in keys and key not in FIXED for choice in keys[key]]
    lines = [f"{name} is {'drawn, and left out' if seen else 'neither drawn nor left out'}"
             for name, seen in names if seen == (name in FIXED)]
    known = dict(names)
    return lines + [f"{name} is left out, and is nothing that could be drawn" for name in FIXED if name not in known] + \
        [f"{name} is drawn, and is no key" for name in have if name not in keys]
