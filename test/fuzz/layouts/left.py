"""
What a run leaves is taken up by other commands as it lies there: its configuration is read back to the same plan, its
checkpoint evaluates to the loss that the run wrote, generates, is sound, and is written for transformers and read again
where a class says the model.
"""
import json
import math
import re

import program as files
from case import words

EVALUATE_RANKS = 4
NO_CLASS = re.compile("error \\(configuration\\): no class of transformers ")


def last_losses(folder):
    """{set: loss} of the last evaluation in the metrics; the one set of a run without names is 'None'."""
    lines = [m for m in files.metrics(folder) if "valid_loss" in m]
    return {str(m.get("valid")): m["valid_loss"] for m in lines if m["step"] == lines[-1]["step"]}


def evaluated(text):
    """The same of what `eval --json` prints."""
    said = json.loads(text, parse_float=str, parse_constant=str)
    return {str(m.get("valid")): m["loss"] for m in said["valid"]} if "valid" in said else {"None": said["loss"]}


class Left:
    """trial: the case's; run: a run of it; ranks, keys: its layout."""

    def __init__(self, trial, run, ranks, keys):
        self.trial, self.run, self.ranks, self.keys = trial, run, ranks, keys
        self.exported = None

    def go(self):
        self.read_back()
        self.evaluate(self.run, "--run", self.run)
        text = self.generate()
        self.trial.command("inspect", self.run)
        self.export()
        return text

    def generate(self):
        text = self.trial.command("generate", "--run", self.run, "--prompt", "seven lamps", "--tokens", "3",
                                  "--temperature", "0").out
        if not text.startswith("seven lamps"):
            raise self.trial.finding("nothing generated", repr(text))
        return text

    def read_back(self):
        """config.ini holds all that was resolved, so it is accepted and planned as what was given."""
        world, own = ["--world", str(self.ranks)], f"{self.run}/config.ini"
        self.trial.command("config", "check", "--config", own, *world)
        plans = [json.loads(self.trial.command("plan", "--config", config, "--json", *world, *words(keys)).out)
                 for config, keys in (("case.ini", self.keys), (own, {}))]
        given, back = ({k: v for k, v in plan.items() if k not in ("config", "name")} for plan in plans)
        if given != back:
            differ = [k for k in given.keys() | back.keys() if given.get(k) != back.get(k)]
            raise self.trial.finding("config.ini plans otherwise", ", ".join(
                f"{k}: {str(given.get(k))[:200]}, {str(back.get(k))[:200]}" for k in sorted(differ)))

    def evaluate(self, what, *line, near=False):
        """
        What the run's metrics said last: by the run's ranks the same bits; of many, whose start is most of an
        evaluation so small, one rank stands for all, if it drops what they drop.
        """
        dropped = self.keys.get("moe.overflow") == "drop"
        ranks = self.ranks if self.ranks <= EVALUATE_RANKS or dropped else 1
        case = self.trial.case
        near = near or (ranks != self.ranks and not case.exact)
        wanted = last_losses(self.trial.folder / self.run)
        if not wanted:
            return
        got = evaluated(self.trial.command("eval", *line, "--json", ranks=ranks).out)
        same = got.keys() == wanted.keys() and all(
            got[k] == wanted[k] or near and math.isclose(float(got[k]), float(wanted[k]), rel_tol=0.01) for k in got)
        if not same:
            raise self.trial.finding("evaluation differs", f"{what}: {got}, the run's metrics: {wanted}")

    def export(self):
        """Out to a folder of Hugging Face's, its configuration in again, and its weights into the layout."""
        ended = self.trial.try_command("convert", "--from", self.run, "--to", self.run + "-hf", "--format", "hf")
        if ended.status == 2 and NO_CLASS.search(ended.err):
            return
        if ended.status:
            raise self.trial.finding(f"exit {ended.status}", ended.error() or ended.err)
        told = self.trial.command("config", "from-hf", self.run + "-hf").out
        self.exported = re.match(r"; (\w+)", told)[1]
        if "optim.mup_base" not in self.trial.case.model:  # (whose last norm has the width's factor in the folder)
            self.evaluate("the folder", "--config", f"{self.run}/config.ini", f"checkpoint.load={self.run}-hf",
                          "checkpoint.upcycle=false", f"run.dir={self.run}-back", near=True)
