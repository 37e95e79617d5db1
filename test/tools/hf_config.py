"""transformers' side of test_hf_config.sh.

  sizes FOLDER...       parameters of the models of these config.json, a line each (weights are never made)
  defaults OUT TYPE...  OUT/TYPE/config.json as transformers writes it for a class of which nothing is said
  again IN OUT          each folder of IN as transformers writes it after having read it
  same IN OUT           each folder of IN has the same values in OUT as transformers reads them; names what differs
  decoders OUT          OUT/TYPE/config.json, with every key, of each class that transformers opens for text
  every OUT TYPE...     the same with every key that the class has
"""
import os
import sys

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
try:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

# What says nothing of the model, or is said of it in other words.
APART = {"architectures", "dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
         "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "quantization_config", "auto_map",
         "max_window_layers", "id2label", "label2id", "_name_or_path"}


def values(folder):
    d = AutoConfig.from_pretrained(folder).to_dict()
    return {k: v for k, v in d.items() if k not in APART and not k.startswith("summary_")}


def said_by_both(a, b):
    """What both objects say, and so their objects; numbers as floats."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return tuple(float(x) if isinstance(x, (int, float)) else x for x in (a, b))
    pairs = {k: said_by_both(a[k], b[k]) for k in a.keys() & b.keys() if k != "type"}
    return {k: x for k, (x, _) in pairs.items()}, {k: y for k, (_, y) in pairs.items()}


def same(ours, theirs):
    """Keys of both that differ; what only one file has is an unused word of its writer."""
    for k in sorted(ours.keys() & theirs.keys()):
        a, b = ours[k], theirs[k]
        if k == "rope_parameters":  # (the kinds of scaling have defaults of their own)
            a, b = said_by_both(a, b)
        if k == "sliding_window_pattern":  # (or in letters)
            a, b = (len(x) if isinstance(x, str) else x for x in (a, b))
        if k == "sliding_window" and "sliding_attention" not in (ours.get("layer_types") or ["sliding_attention"]):
            continue
        if k in ("n_inner", "head_dim") and None in (a, b):  # (of the width)
            continue
        if k == "head_dim" and "kv_lora_rank" in ours:  # (which latent attention does not read)
            continue
        if a != b:
            yield f"{k}: {a}, {b}"


def size(folder):
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(getattr(config, "text_config", config))
    return sum(p.numel() for p in model.parameters())


def main(what, *args):
    if what == "sizes":
        for folder in args:
            print(os.path.basename(folder), size(folder))
    elif what == "defaults":
        for name in args[1:]:
            AutoConfig.for_model(name).save_pretrained(os.path.join(args[0], name))
    elif what == "again":
        for name in sorted(os.listdir(args[0])):
            AutoConfig.from_pretrained(os.path.join(args[0], name)).save_pretrained(os.path.join(args[1], name))
    elif what == "same":
        bad = 0
        for name in sorted(os.listdir(args[0])):
            for line in same(values(os.path.join(args[0], name)), values(os.path.join(args[1], name))):
                print(f"{name}: {line}")
                bad = 1
        sys.exit(bad)
    elif what == "every":
        for name in args[1:]:
            os.makedirs(os.path.join(args[0], name), exist_ok=True)
            AutoConfig.for_model(name).to_json_file(os.path.join(args[0], name, "config.json"), use_diff=False)
    elif what == "decoders":
        for name in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            try:
                config = AutoConfig.for_model(name)
            except Exception:  # (one has no configuration without values)
                continue
            os.makedirs(os.path.join(args[0], name))
            config.to_json_file(os.path.join(args[0], name, "config.json"), use_diff=False)
    else:
        sys.exit(f"unknown: {what}")


main(*sys.argv[1:])
