"""
Every row of src/hf/keys.def by its meaning in transformers: in a small model of each class the key alone is changed,
and the logits that transformers then computes are held to ours. A key that changes them on one side alone is wrong. Run
by a Python that has torch, transformers and safetensors (make deps-hf).

    hf_keys.py ROOT MEGATRAIN IDS OUT [all] [CLASS...]

ROOT is that of the source; all: of each class all models of hf_cases.py, and not the first alone. A line for
each key that differs; the last line counts rows, values and differences.
"""
import copy
import json
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from hf_cases import CASES, np, torch, T  # noqa: E402

TOLERANCE = 2e-3  # of the largest logit: fp32 there and here
# not of the model: how it is stored, named, or begun
APART = {"model_type", "architectures", "quantization_config", "transformers_version", "dtype", "torch_dtype"}
APART.add("vocab_size")


def table(root):
    """Rows (classes, name, kind, values, of_rope), with classes as a set of lower-case names."""
    names = re.findall(r"HF_([A-Z0-9_]+),", open(root + "/src/hf/class.h").read().split("HF_CLASSES")[0])
    keys_c = re.sub(r"\s*\\\n\s*", " ", open(root + "/src/hf/keys.c").read())
    known = {"ALL": set(names)}
    for name, text in re.findall(r"#define ([A-Z]+) (\([^/\n]*\))", keys_c):
        if name not in known and "HF_" not in text:
            known[name] = classes(text, known)
    rows = []
    text = re.sub(r"/\*.*?\*/", "", open(root + "/src/hf/keys.def").read(), flags=re.S)
    model, rope = text.split("\n#else\n")
    for part, of_rope in ((model, False), (rope, True)):
        for m in re.finditer(r"\b(INT|SIZE|REAL|FLAG|WORD|OTHER|FIXED|QUIET|IDLE)\(", part):
            inner, kind = part[m.end() : end_of(part, m.end())], m[1]
            if kind == "OTHER":
                kind, inner = inner.split(",", 1)
            head, _, rest = re.sub(r",\s+\"", ', "', inner).partition(', "')
            name, _, rest = rest.partition('"')
            rows.append((classes(head, known), name, kind, (re.findall(r'"([^"]*)"', rest) + [""])[0], of_rope))
    return rows


def end_of(text, at):
    """Where the parenthesis that was opened before `at` is closed; words in quotes have none of their own."""
    depth = 1
    for i in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i


def classes(text, known):
    text = " ".join(text.split())
    text = re.sub(r"B\((\w+)\)", r"{'\1'}", text)
    text = re.sub(r"~\s*([A-Z]+)\b", r"(ALL - \1)", text)
    text = re.sub(r"~\s*(\{'\w+'\})", r"(ALL - \1)", text)
    return eval(text, {"__builtins__": {}}, known)


def others(kind, name, values, old, config):
    """Values that the key may have instead of `old`."""
    if kind == "FLAG":
        return [not old]
    if kind == "REAL":
        return [1.5 * old, 0.5 * old] if old else [5.0, 0.25]
    if kind in ("INT", "SIZE"):
        return [old + 1, max(1, old // 2)] if old else [1, 2, 3]
    if kind == "WORD":
        return [w for w in values.split() if w != old]
    if kind in ("FIXED", "QUIET", "STORE"):
        words = values.split()
        if words and words[0] in ("true", "false"):
            return [True, False]
        if words and re.fullmatch(r"[\d.]+", words[0]):
            return [2, 0.5]
        return [w for w in words if w != old] + (["gelu"] if "act" in name else [])
    if kind == "TYPES":
        n = config.get("num_hidden_layers", 2)
        return [["sliding_attention", "full_attention"] * n, ["full_attention"] * n, ["sliding_attention"] * n]
    if kind == "PATTERN":
        return [2, 3]
    if kind == "MLPS":
        n = config.get("num_hidden_layers", 2)
        return [(["sparse", "dense"] * n)[:n], ["dense"] * n]
    if kind == "TURNS":
        n = config.get("num_hidden_layers", 2)
        return [([1, 0] * n)[:n], [1] * n, [0] * n]
    if kind == "BASES":
        n = config.get("num_hidden_layers", 2)
        return [[0, 1e4] * n, [5e5] * n, [0] * n]
    if kind == "LAYERS":
        return [[0], []]
    if kind == "IDLE":
        if isinstance(old, bool):
            return [not old]
        return [old + 1, 5.0] if isinstance(old, (int, float)) else [5.0, 3, True]
    return []


def write(folder, base, config):
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    os.link(base + "/model.safetensors", folder + "/model.safetensors")
    json.dump(config, open(folder + "/config.json", "w"))


def theirs(folder, ids):
    try:
        experts = "experts" in open(folder + "/config.json").read()
        kinds = dict(attn_implementation="eager", **({"experts_implementation": "eager"} if experts else {}))
        model, info = T.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, output_loading_info=True, **kinds
        )  # fmt: skip
        if any(info.get(k) for k in ("missing_keys", "mismatched_keys", "unexpected_keys")):
            return None
        with torch.no_grad():
            return model.eval()(input_ids=ids, use_cache=False).logits.numpy()
    except Exception:
        return None


def ours(megatrain, folder, ids_file):
    run = folder + ".run"
    shutil.rmtree(run, ignore_errors=True)
    env = dict(os.environ, OMP_NUM_THREADS="1")
    for words in (["convert", "--from", folder, "--to", run, "--format", "megatrain"],
                  ["eval", "--run", run, "--ids", ids_file, "--logits", run + ".npy", "run.device=cpu"]):  # fmt: skip
        if subprocess.run([megatrain, *words], env=env, capture_output=True).returncode:
            return None
    return np.load(run + ".npy")


def far(a, b):
    return a is None or b is None or a.shape != b.shape or not np.abs(a - b).max() <= TOLERANCE * np.abs(b).max()


def variants(rows, name, config):
    """(row, value, config) of each key that is changed alone."""
    for row in rows:
        of, key, kind, values, of_rope = row
        if name.upper() not in of or key in APART or (kind == "IDLE" and len(of) > 8):
            continue
        place = config.get("rope_parameters") if of_rope else config
        if not isinstance(place, dict) or kind == "ROPE":
            continue
        nested = place.get("full_attention") if of_rope else None
        old = (nested or place).get(key)
        for value in others(kind, key, values, old, config):
            if kind == "TYPES":
                value = value[: config.get("num_hidden_layers", 2)]
            changed = copy.deepcopy(config)
            where = changed["rope_parameters"] if of_rope else changed
            (where["full_attention"] if nested else where)[key] = value
            if value != old:
                yield row, value, changed


def main():
    root, megatrain, ids_file, out, *names = sys.argv[1:]
    every = names[:1] == ["all"]
    names = names[every:]
    ids = torch.tensor([[int(x) for x in line.split()] for line in open(ids_file)])
    rows, tried, both, wrong, held = table(root), 0, 0, 0, set()
    for name, (kind, *configs) in CASES.items():
        if names and name not in names:
            continue
        for number, config in enumerate(configs if every else configs[:1]):
            torch.manual_seed(1)
            base = f"{out}/{name}-{number}"
            model = T.AutoModelForCausalLM.from_config(kind(**config))
            with torch.no_grad():  # (ones and zeros hide what a norm or a bias does)
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * 0.1 if p.ndim == 1 else 0)
            model.save_pretrained(base)
            before, well = len(held), wrong
            said = json.load(open(base + "/config.json"))
            if far(ours(megatrain, base, ids_file), theirs(base, ids)):
                print(f"{name}-{number}: differs before a key is changed")
                wrong += 1
                continue
            for row, value, changed in variants(rows, name, said):
                write(base + ".new", base, changed)
                tried += 1
                held.add((name, row[1], row[4]))
                mine = ours(megatrain, base + ".new", ids_file)
                want = theirs(base + ".new", ids) if mine is not None else None
                both += mine is not None and want is not None
                if mine is not None and want is not None and far(mine, want):
                    wrong += 1
                    gap = np.abs(mine - want).max() if mine.shape == want.shape else np.inf
                    print(f"{name}-{number}: {'rope ' if row[4] else ''}'{row[1]}' = {value}: {gap:.3g} of "
                          f"{np.abs(want).max():.3g} apart")  # fmt: skip
            if wrong == well:
                print(f"{name}-{number}: {len(held) - before} keys")
    print(f"{len(held)} rows, {tried} values, {both} of them computed on both sides, {wrong} differences")


if __name__ == "__main__":
    main()
