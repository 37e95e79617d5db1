"""Makes a failing case small: keys back to their defaults, numbers lower, fewer ranks, while it fails in the same way."""

SMALLER = {"model.layers": ("1", "2", "3"), "model.hidden": ("8", "16"), "model.seq": ("16", "32"),
           "train.steps": ("1", "2"), "model.heads": ("1", "2", "4"), "train.global_batch": ("1", "2", "4", "8"),
           "moe.experts": ("2", "4"), "moe.topk": ("1",), "model.ffn": ("8", "16"), "moe.ffn": ("8", "16"),
           "data.train": ("a",), "data.valid": ("c",)}
KEPT = {"run.device", "data.tokenizer", "data.train", "model.hidden", "model.layers", "model.seq", "train.steps",
        "train.global_batch", "checkpoint.every", "run.reproducible", "model.heads", "model.position"}


def smaller(case):
    """Cases with one thing less."""
    if case.dp > 1:
        yield case.but(dp=1)
        yield case.but(dp=case.dp // 2)
    if case.mode in ("resume", "load") and "checkpoint.upcycle" not in case.model:
        yield case.but(mode="train", model={k: v for k, v in case.model.items() if k != "checkpoint.load"})
    for part in ("layout", "alone", "model"):
        keys = getattr(case, part)
        for section in ("moe.", "data.valid"):
            fewer = {k: v for k, v in keys.items() if not k.startswith(section)}
            if fewer != keys:
                yield case.but(**{part: fewer})
        for key in keys:
            if key not in KEPT:
                yield case.but(**{part: {k: v for k, v in keys.items() if k != key}})
        for key, value in keys.items():
            for less in SMALLER.get(key, ()):
                if less != value and not (less.isdigit() and value.isdigit() and int(less) >= int(value)):
                    yield case.but(**{part: keys | {key: less}})


def shrink(case, kind_of, tries):
    """kind_of(case): how it fails, None if it does not. The smallest found with so many tries."""
    kind, again = kind_of(case), True
    if kind is None:
        return case, None
    while again and tries > 0:
        again = False
        for less in smaller(case):
            tries -= 1
            if kind_of(less) == kind:
                case, again = less, True
                break
            if tries <= 0:
                break
    return case, kind
