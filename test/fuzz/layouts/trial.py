"""
Runs a case that is legal, and compares: of every layout losses, gradient norms, loads of experts, evaluations and all
that the last checkpoint holds are to be those of one rank, bit for bit; where that is not promised (mode repeat) a
second run is to be the first. What plan says that rank 0 takes is to be what it took.
"""
import json
import math
import pathlib
import re
import shutil

import program as files
from case import ini, words
from left import Left


class Finding(Exception):
    """kind: a few words, the same while a case is made smaller; text: what was seen."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


def first_difference(a, b):
    """Of two equally long byte strings of floats."""
    at = next(i for i in range(0, len(a), 4) if a[i:i + 4] != b[i:i + 4])
    differ = sum(a[i:i + 4] != b[i:i + 4] for i in range(0, len(a), 4))
    return f"{differ} of {len(a) // 4} elements, the first one at {at // 4}: {a[at:at + 4].hex()}, {b[at:at + 4].hex()}"


def line_of(record):
    """Which line of the metrics it is: of a step, or of an evaluation of a set or task."""
    return record["step"], "loss" in record, record.get("valid"), record.get("task")


def is_finite(record):
    number = next((record[key] for key in ("loss", "valid_loss", "acc") if key in record), "nan")
    return number is not None and math.isfinite(float(number))  # (null is what a number that is not finite becomes)


class Trial:
    """Folder: of the case alone; token files lie beside it."""

    def __init__(self, program, case, folder, tokens):
        self.program, self.case, self.folder = program, case, pathlib.Path(folder)
        self.commands, self.exported = [], None
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for f in [f for name in files.GIVEN for f in pathlib.Path(tokens).glob(name)]:
            (self.folder / f.name).symlink_to(f.resolve())
        (self.folder / "case.ini").write_text(ini(case.model))

    # ---- commands

    @staticmethod
    def finding(kind, text):
        return Finding(kind, text)

    def command(self, *line, ranks=1):
        """One command of the case; it must end well."""
        try:
            ended = self.try_command(*line, ranks=ranks)
        except files.Hang as hang:
            raise Finding("hang", str(hang)) from None
        if ended.status:
            raise Finding(f"exit {ended.status}", ended.error() or ended.err.strip()[-600:])
        return ended

    def try_command(self, *line, ranks=1):
        launcher = f"scripts/launch.sh -n {ranks} -- " if ranks > 1 else ""
        self.commands.append(launcher + " ".join(["megatrain", *(f"'{w}'" if "|" in w or " " in w else w for w in line)]))
        return self.program.run(self.folder, *line, ranks=ranks)

    def alone(self, run, **more):
        return self.train(run, 1, self.case.alone, more)

    def many(self, run, **more):
        return self.train(run, self.case.ranks, self.case.layout, more)

    def train(self, run, ranks, keys, more):
        more = {k.replace("__", "."): v for k, v in more.items()}
        self.command("--config", "case.ini", f"run.dir={run}", *words(keys | more), ranks=ranks)
        return run

    # ---- comparisons

    def same(self, a, b):
        self.same_metrics(a, b)
        one, other = files.checkpoint(self.folder / a), files.checkpoint(self.folder / b)
        if one.keys() != other.keys():
            raise Finding("other tensors", ", ".join(sorted(one.keys() ^ other.keys())))
        differ = [k for k in one if one[k] != other[k]]
        if not differ:
            return
        tensors = [k for k in differ if isinstance(one[k], bytes)]
        name = (tensors or differ)[0]
        how = first_difference(one[name], other[name]) if tensors else f"{one[name]}, {other[name]}"
        raise Finding("state differs", f"{a}, {b}: {len(differ)} of {len(one)}; {name}: {how}")

    def same_metrics(self, a, b):
        one, other = files.metrics(self.folder / a), files.metrics(self.folder / b)
        if self.case.mode == "resume":  # (which evaluates where it stops)
            wanted = [line_of(x) for x in one]
            other = [y for y in other if line_of(y) in wanted]
        if len(one) != len(other) or not one:
            raise Finding("metrics differ", f"{a}: {len(one)} lines, {b}: {len(other)}")
        for x, y in zip(one, other):
            if x != y:
                keys = [k for k in x.keys() | y.keys() if x.get(k) != y.get(k)]
                raise Finding("metrics differ", f"{a}, {b}, step {x['step']}: " +
                              "; ".join(f"{k} {x.get(k)}, {y.get(k)}" for k in sorted(keys)))
            if not is_finite(x) and self.case.get("run.precision") != "fp16":  # (which overflows)
                raise Finding("not finite", f"{a}, step {x['step']}: {x}")

    def near(self, a, b):
        """The first loss: rounding apart, no layout has another."""
        one, other = (float(files.metrics(self.folder / run)[0]["loss"]) for run in (a, b))
        if not abs(one - other) <= 0.05 * abs(one):
            raise Finding("far", f"first loss of {a}: {one}, of {b}: {other}")

    def planned(self, run):
        """As rank 0 says of itself in each line."""
        plan = json.loads(self.command("plan", "--config", "case.ini", "--json", "--world", str(self.case.ranks),
                                       *words(self.case.layout)).out)
        took, said = files.memory_bytes(self.folder / run), plan["ranks"][0]["total"]
        if not took or set(took) != {said}:
            raise Finding("plan differs", f"plan says {said} bytes, the run {sorted(set(took))}")

    # ---- modes

    def go(self):
        getattr(self, "go_" + self.case.mode)()
        said = self.command("config", "check", "--config", "case.ini", "--world", str(self.case.ranks),
                            *words(self.case.layout))
        if not re.fullmatch(r"case\.ini: ok( on \d+ ranks?)?", said.out.strip()):
            raise Finding("config check warns", said.out.strip() + " " + said.err.strip())
        self.left()

    def left(self):
        """What the runs left; with the same weights one rank's run generates the same text."""
        run, one = {"eval": ("alone", None), "resume": ("there", "whole"), "repeat": ("many", None)}.get(
            self.case.mode, ("many", "alone"))
        of = Left(self, run, *((1, self.case.alone) if run == "alone" else (self.case.ranks, self.case.layout)))
        text = of.go()
        self.exported = of.exported
        if one and text != Left(self, one, 1, self.case.alone).generate():
            raise Finding("generated otherwise", f"{run}: {text!r}")

    def go_train(self):
        self.same(self.alone("alone"), self.many("many"))
        self.planned("many")

    def go_resume(self):
        """From one rank to the layout, and the other way round."""
        whole = self.alone("whole")
        self.alone("there", train__stop_at="1")
        self.same(whole, self.many("there"))
        self.many("back", train__stop_at="2")
        self.same(whole, self.alone("back"))

    def go_load(self):
        source = {k: v for k, v in self.case.model.items() if k not in ("checkpoint.upcycle", "checkpoint.load")}
        if "checkpoint.upcycle" in self.case.model:
            source = {k: v for k, v in source.items() if not k.startswith("moe.") and k != "run.fp8_experts"}
        source = {k: v for k, v in source.items() if k not in ("train.tokens", "optim.warmup", "optim.decay_steps", "optim.wsd_decay")}
        source |= {"run.seed": "4321", "train.steps": "1", "optim.schedule": "constant"}
        (self.folder / "source.ini").write_text(ini(source))
        self.command("--config", "source.ini", "run.dir=source", *words(self.case.alone))
        alone, many = self.alone("alone"), self.many("many")
        self.same(alone, many)

    def go_eval(self):
        self.alone("alone")
        line = ("eval", "--config", "case.ini", "run.dir=alone")
        one = self.command(*line, *words(self.case.alone)).out
        other = self.command(*line, *words(self.case.layout), ranks=self.case.ranks).out
        if one != other or "loss" not in one:
            raise Finding("evaluation differs", "one rank: " + " ".join(one.split()) + "; " + " ".join(other.split()))

    def go_repeat(self):
        self.same(self.many("many"), self.many("again"))
        self.planned("many")
        synchronous = not {"pipedream", "2bw"} & set(self.case.get("parallel.schedule", "").replace("-", "+").split("+"))
        if synchronous and self.case.get("moe.overflow") != "drop":
            self.near(self.alone("alone"), "many")
