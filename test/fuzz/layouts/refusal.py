"""
What is refused: `config check`, `plan` and the run must say so alike, exit status and text; and a hint that proposes
keys must be one that is accepted when it is followed.
"""
import re

from case import words
from program import Hang
from trial import Finding

KEY = r"(?:(?:run|model|moe|parallel|train|optim|data|checkpoint|debug)\.)?[a-z_]+"
ASSIGNMENT = re.compile(rf"\b({KEY}) ?= ?'?([\w.+-]+)'?")
SECTIONS = {"cp_comm": "parallel", "cp_heads": "parallel", "seq_blocks": "parallel", "attn_block": "parallel",
            "reproducible": "run", "slices": "parallel", "sp": "parallel", "capacity": "moe", "balance": "moe",
            "aux_coeff": "moe", "unit": "moe", "router": "moe", "normalize": "moe", "ep": "parallel", "etp": "parallel",
            "overlap_moe": "parallel", "order": "parallel", "groups": "moe", "cp": "parallel", "tp": "parallel",
            "pp": "parallel", "position": "model", "qk_norm": "model", "kv_heads": "model", "head_dim": "model",
            "shared_ffn": "moe", "group_topk": "moe", "overflow": "moe", "slack": "moe"}


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


def proposals(text):
    """Each a set of keys that go together: {key: value}; 'world' for a number of ranks."""
    found = []
    rule = text.split("': ")[-1]  # behind the keys that are named with their values
    for part in re.split(r"; or |, or | or (?=take|give|set)|; ", rule):
        if not re.match(r"(take|give|set|leave|or|nearest|lower|raise|parallel|to try)?", part):
            continue
        keys = {full(k): v.rstrip(".") for k, v in ASSIGNMENT.findall(part)}
        if keys and None not in keys and "here" not in part:
            found.append(keys)
    nearest = re.search(r"nearest that (?:do|does|fit|fits): ([\d and]+)$", rule.split("; or")[0].strip())
    return found, [int(n) for n in re.findall(r"\d+", nearest[1])] if nearest else []


def subject(text):
    """The key that 'nearest that do' is about."""
    if "the world size is" in text:
        return "world"
    found = re.search(r"(?:2 x )?(\w+)(?: x \w+)* must divide \w+(?: ?[:;]|,|;)? ?nearest", text)
    if "their number must divide" in text or "x slices must divide" in text:
        return "parallel.slices"
    return full(found[1]) if found else None


def follow(trial, keys, world):
    """The hint's keys into the configuration: refused still?"""
    layout = trial.case.layout | keys
    ended = [trial.try_command(*line, "--config", "case.ini", "--world", str(world), *words(layout))
             for line in (("config", "check"), ("plan",))]
    for e in ended:
        if e.status:
            said = " ".join([f"{k}={v}" for k, v in keys.items()] + ([f"--world {world}"] if world != trial.case.ranks else []))
            raise Finding("hint refused", f"followed: {said}\nthen: {e.error()}")


def check_hints(trial, text):
    """Only where one mistake is said: of several each hint is about one. How many were followed."""
    if "mistakes in the configuration" in text:
        return 0
    case = trial.case
    given, nearest = proposals(text)
    about = subject(text)
    choices = [(keys, case.ranks) for keys in given]
    if about == "world":
        choices += [({}, n) for n in nearest]
    elif about:
        choices += [({about: str(n)}, case.ranks) for n in nearest]
    for keys, world in choices:
        for axis in ("parallel.tp", "parallel.pp", "parallel.cp"):
            if axis in keys:
                world = world // case.number(axis) * int(keys[axis])
        try:
            follow(trial, keys, world)
        except Finding as finding:
            raise Finding(finding.kind, f"{text}\n{finding.text}") from None
    return len(choices)
