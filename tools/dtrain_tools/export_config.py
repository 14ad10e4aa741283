"""config.json of an exported DFlash drafter, in either layout, as one set of settings.

z-lab's layout (SpecForge's too) has everything at the top; speculators' has the draft layers in
transformer_layer_config and numbers captured layers by what enters them. No torch. Does not
know what a server makes of the file.
"""

import os

from dtrain_tools.documents import InputError, load_json

WANTED = ("block_size", "mask_token_id", "target_layer_ids", "num_hidden_layers", "hidden_size", "intermediate_size",
          "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "layer_types")


def layout_of(config):
    return "speculators" if "speculators_model_type" in config else "zlab"


def _flat(config, path):
    """Speculators' config in the words of z-lab's, numbers of captured layers included."""
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise InputError(f"{path}: speculators_model_type is {kind!r}; only dflash is read here")
    flat = {**config.get("transformer_layer_config", {}),
            **{name: value for name, value in config.items() if name != "transformer_layer_config"}}
    ids = config.get("aux_hidden_state_layer_ids")
    flat["target_layer_ids"] = None if ids is None else [i - 1 for i in ids]
    return flat


def read_export_config(folder):
    """-> settings: the names of z-lab's layout at one level, "layout" and "path" beside them."""
    path = os.path.join(folder, "config.json")
    config = load_json(path)
    layout = layout_of(config)
    if layout == "speculators":
        settings = _flat(config, path)
    else:
        settings = {**config, **(config.get("dflash_config") or {})}
    rope = settings.get("rope_parameters")  # how newer Transformers save it
    if isinstance(rope, dict):
        settings.setdefault("rope_theta", rope.get("rope_theta"))
        settings.setdefault("rope_scaling", rope)
    settings.update(layout=layout, path=path)
    _check(settings, path)
    return settings


def _check(settings, path):
    missing = [name for name in WANTED if settings.get(name) is None]
    if missing:
        raise InputError(f"{path}: no {', '.join(missing)}")
    types, layers = settings["layer_types"], settings["num_hidden_layers"]
    if "sliding_attention" in types and not settings.get("sliding_window"):
        raise InputError(f"{path}: layer_types has sliding_attention but there is no sliding_window")
    if len(types) != layers:
        raise InputError(f"{path}: {len(types)} layer_types for {layers} layers")
