"""config.json of an exported drafter, in any layout, as one set of settings.

z-lab's layout (SpecForge's DFlash too) has everything at the top, and so has SpecForge's EAGLE-3; speculators' has the draft
layers in transformer_layer_config and numbers captured layers by what enters them. No torch. Does not
know what a server makes of the file.
"""

import os

from dtrain_tools.documents import InputError, load_json

SIZES = ("target_layer_ids", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "layer_types")
# DSpark is DFlash with a Markov head; where it does not say in which slot drafts start, readers disagree.
WANTED = {"dflash": ("block_size", "mask_token_id", *SIZES), "eagle3": ("draft_vocab_size", *SIZES),
          "dspark": ("block_size", "mask_token_id", "markov_rank", "sample_from_anchor", *SIZES)}
EAGLE3 = {"LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", "LlamaEagle3DraftModel"}


def layout_of(config):
    if "speculators_model_type" in config:
        return "speculators"
    return "specforge" if kind_of(config) == "eagle3" else "zlab"


def kind_of(config):
    kind = config.get("speculators_model_type")
    if kind is None:
        kind = "eagle3" if EAGLE3 & set(config.get("architectures") or []) else "dflash"
    return kind


def _flat(config, path):
    """Speculators' config in the words of the others, numbers of captured layers included."""
    kind = config["speculators_model_type"]
    if kind not in WANTED:
        raise InputError(f"{path}: speculators_model_type is {kind!r}; only {', '.join(WANTED)} are read here")
    flat = {**config.get("transformer_layer_config", {}),
            **{name: value for name, value in config.items() if name != "transformer_layer_config"}}
    ids = config.get("eagle_aux_hidden_state_layer_ids" if kind == "eagle3" else "aux_hidden_state_layer_ids")
    flat["target_layer_ids"] = None if ids is None else [i - 1 for i in ids]
    if kind == "eagle3":
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        flat["drafts"] = methods[0].get("speculative_tokens")
    return flat


def _flat_eagle3(config):
    """SpecForge's EAGLE-3 config. How many drafts are made is the server's business there."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return {**config, "target_layer_ids": ids}


def read_export_config(folder):
    """-> settings: the names of z-lab's layout at one level, "kind", "layout" and "path" beside them."""
    path = os.path.join(folder, "config.json")
    config = load_json(path)
    kind, layout = kind_of(config), layout_of(config)
    if layout == "speculators":
        settings = _flat(config, path)
    elif kind == "eagle3":
        settings = _flat_eagle3(config)
    else:
        settings = {**config, **(config.get("dflash_config") or {})}
    rope = settings.get("rope_parameters")  # how newer Transformers save it
    if isinstance(rope, dict):
        settings.setdefault("rope_theta", rope.get("rope_theta"))
        settings.setdefault("rope_scaling", rope)
    if kind == "eagle3" and settings.get("layer_types") is None and settings.get("num_hidden_layers"):
        settings["layer_types"] = ["full_attention"] * settings["num_hidden_layers"]
    settings.update(kind=kind, layout=layout, path=path)
    _check(settings, path)
    return settings


def _check(settings, path):
    missing = [name for name in WANTED[settings["kind"]] if settings.get(name) is None]
    if missing:
        raise InputError(f"{path}: no {', '.join(missing)}")
    types, layers = settings["layer_types"], settings["num_hidden_layers"]
    if "sliding_attention" in types and not settings.get("sliding_window"):
        raise InputError(f"{path}: layer_types has sliding_attention but there is no sliding_window")
    if len(types) != layers:
        raise InputError(f"{path}: {len(types)} layer_types for {layers} layers")
