#!/usr/bin/env python3
"""
Random models in random layouts against one rank: see test/fuzz/README.md.

    python3 test/fuzz/layouts [--seed S] [--count N] [--jobs J]    N pairs of a model and a layout
    python3 test/fuzz/layouts --case NAME [--shrink]               one of them again, made smaller
"""
import argparse
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import keys
import program as files
import refusal
from axes import Coverage
from case import ini, words
from draw import draw
from shrink import shrink
from trial import Finding, Trial

CANDIDATES = 40  # of which the one with most pairs not yet tried is taken


def options():
    p = argparse.ArgumentParser(prog="python3 test/fuzz/layouts", description="random models in random layouts against one rank")
    p.add_argument("--seed", default="1", help="of the draws (1)")
    p.add_argument("--count", type=int, default=100, help="pairs of a model and a layout (100)")
    p.add_argument("--refused", type=int, default=20, help="trials of refusals, of layouts with a mistake (20)")
    p.add_argument("--only", nargs="*", default=[], help="a mode (train, resume, load, eval, repeat), class=NAME, section.key=value, or section.key that is not left out")
    p.add_argument("--case", help="the name of one case, to run it again")
    p.add_argument("--shrink", action="store_true", help="make findings small")
    p.add_argument("--tries", type=int, default=300, help="runs that making one small may take (300)")
    p.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time (as many as processors)")
    p.add_argument("--limit", type=float, default=300, help="seconds that no command may take (300)")
    p.add_argument("--missing", type=int, default=0, help="print so many pairs that were not tried")
    p.add_argument("--keys", nargs="?", const=files.ROOT / "src" / "config" / "config.def", metavar="CONFIG.DEF", help="which keys of a configuration are neither drawn nor left out")
    p.add_argument("--keep", help="folder for findings: configuration, runs, command lines")
    return p.parse_args()


class Fuzz:
    def __init__(self, o):
        self.o = o
        binary = os.environ.get("MEGATRAIN", files.ROOT / "megatrain")
        self.program = files.Program(str(pathlib.Path(binary).resolve()), o.limit)
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="megatrain-layouts."))
        self.tokens = self.work / "tokens"
        files.make_tokens(self.program, self.tokens)
        self.coverage = Coverage()
        self.passed = self.failed = self.refused = self.hints = 0
        self.exported = {}
        self.lock = threading.Lock()

    # ---- one case

    def legal(self, trial):
        """By plan, which says all that a run's start would; whoever says something else is found out by the trial."""
        return self.plans(trial, trial.case.ranks, trial.case.layout)

    def plans(self, trial, ranks, keys):
        line = ("plan", "--config", "case.ini", "--world", ranks, *words(keys))
        try:
            return self.program.run(trial.folder, *line).status != 2
        except files.Hang:
            return True

    def go(self, trial, refused):
        """A Finding or None; and how many hints were followed."""
        try:
            if refused:
                return None, refusal.check_hints(trial, refusal.refuse(trial))
            trial.go()
        except Finding as finding:
            return finding, 0
        return None, 0

    def open(self, case, folder=None):
        return Trial(self.program, case, folder or self.work / case.name, self.tokens)

    def kind_of(self, case):
        """For shrink: how a case fails."""
        trial = self.open(case.but(name="smaller-" + case.name))
        finding, _ = self.go(trial, not self.legal(trial))
        return finding.kind if finding else None

    # ---- what is found

    def report(self, trial, finding):
        """What was seen and how to see it again; the smallest case too, if wanted."""
        case = trial.case
        lines = [f"FAIL: case {case.name}, {case.ranks} ranks, {case.mode}: {finding}",
                 f"  again: python3 test/fuzz/layouts --case {case.name} --shrink"]
        if self.o.shrink:
            small, _ = shrink(case, self.kind_of, self.o.tries)
            trial = self.open(small, self.work / (case.name + "-small"))
            finding, _ = self.go(trial, not self.legal(trial))
            lines += [f"  smallest: {small.ranks} ranks, {small.mode}: {finding}", *indent(ini(small.model))]
            lines += [f"  $ {c}" for c in trial.commands]
        if self.o.keep:
            self.keep(trial, lines)
        print("\n".join(lines), flush=True)

    def keep(self, trial, lines):
        to = pathlib.Path(self.o.keep) / trial.folder.name
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(trial.folder, to)  # (token files too, which it has links to)
        (to / "finding.txt").write_text("\n".join(lines) + "\n")

    # ---- many

    def wanted(self, case):
        """Of --only: its mode, and keys that it has."""
        keys = case.model | case.layout
        named = {case.mode, f"class={case.published}", *words(keys), *keys}
        return all(w in named for w in self.o.only)

    def next_case(self, number, mistaken):
        """Of some candidates the one with the most new pairs; None if no one is wanted."""
        drawn = [draw(f"{self.o.seed}.{number}.{i}" + ("m" if mistaken else "")) for i in range(CANDIDATES)]
        drawn = [case for case in drawn if self.wanted(case)]
        return self.open(max(drawn, key=self.coverage.gain)) if drawn else None

    def draws(self):
        """Trials, each with whether it is one of a refusal, until there were as many of both as are wanted."""
        left, number = {False: self.o.count, True: self.o.refused}, 0
        while left[False] > 0 or left[True] > 0:
            trial = self.next_case(number, left[True] > 0 and (number % 3 == 0 or left[False] <= 0))
            number += 1
            if trial is None or not self.plans(trial, 1, trial.case.alone):
                continue
            refused = not self.legal(trial)
            if left[refused] <= 0:
                continue
            left[refused] -= 1
            if not refused:
                self.coverage.add(trial.case)
            yield trial, refused

    def many(self):
        with ThreadPoolExecutor(self.o.jobs) as pool:
            running = set()
            for trial, refused in self.draws():
                running.add(pool.submit(self.one, trial, refused))
                if len(running) >= 2 * self.o.jobs:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for d in done:
                        d.result()
            for d in running:
                d.result()

    def one(self, trial, refused):
        finding, hints = self.go(trial, refused)
        with self.lock:
            self.refused += refused
            self.hints += hints
            self.passed += finding is None
            self.failed += finding is not None
            if trial.exported:
                self.exported[trial.exported] = self.exported.get(trial.exported, 0) + 1
        if finding:
            self.report(trial, finding)
        shutil.rmtree(trial.folder, ignore_errors=True)

    def close(self):
        shutil.rmtree(self.work, ignore_errors=True)
        print(f"{self.passed} passed, {self.failed} failed", flush=True)
        return self.failed > 0 or self.passed == 0


def indent(text):
    return ["    " + line for line in text.splitlines()]


def main():
    o = options()
    if o.keys:
        wrong = keys.wrong(o.keys)
        print("\n".join(wrong or ["each key is drawn, or left out with a reason"]))
        return bool(wrong)
    fuzz = Fuzz(o)
    if o.case:
        trial = fuzz.open(draw(o.case))
        fuzz.one(trial, not fuzz.legal(trial))
    else:
        fuzz.many()
        print(f"pairs of axes, of {o.count} pairs of a model and a layout:")
        print(fuzz.coverage.text(o.missing))
        classes = ", ".join(f"{name} {n}" for name, n in sorted(fuzz.exported.items()))
        print(f"{sum(fuzz.exported.values())} went out as a class of transformers', and in again: {classes}")
        print(f"{fuzz.refused} mistakes were to be refused by check, plan and run alike; {fuzz.hints} hints were followed")
    return fuzz.close()


if __name__ == "__main__":
    sys.exit(main())
