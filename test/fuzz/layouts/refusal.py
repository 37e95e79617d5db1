"""
What is refused: `config check`, `plan` and the run must say so alike, exit status and text; and a hint that proposes
keys must be one that is accepted when it is followed.
"""
import re

from case import words
from program import Hang
from trial import Finding

KEY = r"(?:(?:run|model|moe|parallel|train|optim|data|checkpoint|debug)\.)?[a-z_]+"
ASSIGNMENT = re.compile(rf"\b({KEY}) ?= ?'?([\w.+*-]+(?:,[\w.+*-]+)*)'?")  # (a list over blocks has commas)
SECTIONS = {"cp_comm": "parallel", "cp_heads": "parallel", "seq_blocks": "parallel", "attn_block": "parallel",
            "reproducible": "run", "slices": "parallel", "sp": "parallel", "capacity": "moe", "balance": "moe",
            "aux_coeff": "moe", "unit": "moe", "router": "moe", "normalize": "moe", "ep": "parallel", "etp": "parallel",
            "overlap_moe": "parallel", "overlap_tp": "parallel", "order": "parallel", "groups": "moe", "cp": "parallel",
            "tp": "parallel", "pp": "parallel", "position": "model", "qk_norm": "model", "kv_heads": "model", "head_dim": "model",
            "shared_ffn": "moe", "group_topk": "moe", "overflow": "moe", "slack": "moe", "precision": "run",
            "fp8": "run", "fp8_keep": "run", "mixer": "model", "delta_key_heads": "model", "delta_value_heads": "model"}


def full(key):
    return key if "." in key else f"{SECTIONS[key]}.{key}" if key in SECTIONS else None


def error_text(text):
    """Without what differs by right: who speaks."""
    text = re.sub(r"^megatrain: error \(configuration\): ", "", text)
    return re.sub(r"^rank \d+: ", "", text)


def refuse(trial):
    """What check, plan and run say of a case that one of them refuses; the text."""
    case, world = trial.case, ["--world", str(trial.case.ranks)]
    keys = words(case.layout)
    try:
        check = trial.try_command("config", "check", "--config", "case.ini", *world, *keys)
        plan = trial.try_command("plan", "--config", "case.ini", *world, *keys)
        run = trial.try_command("--config", "case.ini", "run.dir=many", *keys, ranks=case.ranks)
    except Hang as hang:
        raise Finding("hang", str(hang)) from None
    said = {"check": check, "plan": plan, "the run": run}
    odd = {who: e.status for who, e in said.items() if e.status != 2}
    if odd:
        texts = "; ".join(f"{who}: exit {e.status} {e.error()[:400]}" for who, e in said.items())
        raise Finding("refused by some" if set(odd.values()) == {0} else "exit " + str(max(odd.values(), key=abs)), texts)
    texts = {who: error_text(e.error()) for who, e in said.items()}
    if len(set(texts.values())) != 1:
        raise Finding("refused otherwise", "\n".join(f"{who}: {text}" for who, text in texts.items()))
    return texts["check"]


def advice(text):
    """What a refusal proposes: the line of its hint, or what stands behind a verb in a rule of the configuration."""
    if "\nhint: " in text:
        return [part for part in re.split("; |, or | or ", text.split("\nhint: ")[1]) if not re.search("= ?\\S+ has", part)]
    rule = text.split("': ")[-1] if re.match(r"\S+: \S+ = '|command line: ", text) else ""
    asked = re.search(r"\b(take|give|set|leave) .*", rule)
    return re.split(r"; (?:or )?|, or | or ", asked[0]) if asked else []


def proposals(text):
    """Sets of keys that go together: {key: value}; and numbers that are said to be the nearest that fit."""
    found = []
    for part in advice(text):
        keys = {full(k): v.rstrip(".") for k, v in ASSIGNMENT.findall(part) + re.findall(r"leave (\w+) at (\d+)", part)}
        if keys and None not in keys:
            found.append(keys)
        others = re.search(r"=\d+ and (\d+)", part)
        if others:
            found.append({next(iter(keys)): others[1]})
    nearest = re.search(r"nearest that (?:do|does|fit|fits): (\d+(?: and \d+)?)", text)
    return found, [int(n) for n in re.findall(r"\d+", nearest[1])] if nearest else []


def subject(text):
    """The key that 'nearest that do' is about."""
    if "the world size is" in text:
        return "world"
    found = re.search(r"(?:2 x )?(\w+)(?: x \w+)* must divide \w+(?: ?[:;]|,|;)? ?nearest", text)
    if "their number must divide" in text or "x slices must divide" in text:
        return "parallel.slices"
    return full(found[1]) if found else None


def rule(text):
    """A refusal without numbers and values."""
    return re.sub(r"'[^']*'|\d+", "", text)


def about(keys, text):
    """Whether a refusal names one of the keys, or the word that is its value."""
    return any(re.search(rf"\b{k.split('.')[1]} ?= ?'?{re.escape(v)}\b", text) or (v.isalnum() and not v.isdigit() and f"'{v}'" in text)
               for k, v in keys.items())


def follow(trial, text, keys, world):
    """
    The hint's keys into the configuration: not refused by the same rule again, nor for what the hint gave. (There may
    be another mistake behind the one that was said.)
    """
    line = ["--config", "case.ini", "--world", str(world), *words(trial.case.layout | keys)]
    for command in (("config", "check"), ("plan",)):
        said = trial.try_command(*command, *line).error()
        if said and (rule(error_text(said)) == rule(text) or about(keys, said)):
            raise Finding("hint refused", f"{text}\nfollowed: {' '.join(words(keys))} --world {world}\nthen: {said}")


def check_hints(trial, text):
    """Only where one mistake is said: of several each hint is about one. How many were followed."""
    if "mistakes in the configuration" in text:
        return 0
    case = trial.case
    given, nearest = proposals(text)
    key = subject(text)
    choices = [(keys, case.ranks) for keys in given]
    if key == "world":
        choices += [({}, n) for n in nearest]
    elif key:
        choices += [({key: str(n)}, case.ranks) for n in nearest]
    for keys, world in choices:
        for axis in ("parallel.tp", "parallel.pp", "parallel.cp"):
            if axis in keys:
                world = world // case.number(axis) * int(keys[axis])
        follow(trial, text, keys, world)
    return len(choices)
