"""What was trained, as facts that a server's can be compared with: from a checkpoint, or from an export alone.

A checkpoint's config.yaml, the target's config.json and the shards say it without the trainer's own
export; settings that are not given are the target's, as docs/config.md says. Does not look at servers.
"""

import contextlib
import os

from dtrain_tools.documents import InputError, load_json
from dtrain_tools.export_config import read_export_config


def target_settings(folder):
    """The target's config.json, its text part."""
    config = load_json(os.path.join(folder, "config.json"))
    return config.get("text_config", config)


def _number(value):
    """YAML 1.1 takes 1e-06 for a text."""
    return float(value) if isinstance(value, str) else value


def _target_theta(target):
    rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
    return target.get("rope_theta", rope.get("rope_theta"))


def _layer_ids(config, checkpoint):
    """-> ids and where they are from."""
    ids = config["target"].get("layer_ids")
    if ids:
        return ids, "config.yaml"
    for path in config["data"].get("train") or []:
        with contextlib.suppress(ImportError, OSError, KeyError):
            import h5py
            with h5py.File(path, "r") as file:
                return file.attrs["target_layer_ids"].tolist(), path
    own = load_json(os.path.join(checkpoint, "config.json"))
    ids = (own["dflash_config"]["target_layer_ids"] if config["drafter"]["kind"] == "dflash"
           else own["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    return ids, "the checkpoint's config.json (no shard is there)"


def from_checkpoint(checkpoint, target_folder):
    """-> settings of the run, named as in an export, with window_origin and the like always stated."""
    import yaml
    path = os.path.join(checkpoint, "config.yaml")
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    drafter, target = config["drafter"], target_settings(target_folder)
    heads = target["num_attention_heads"]
    own = {"num_attention_heads": heads, "num_key_value_heads": target.get("num_key_value_heads", heads),
           "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
           "intermediate_size": target.get("intermediate_size"), "rms_norm_eps": target.get("rms_norm_eps"),
           "rope_theta": _target_theta(target), "max_position_embeddings": target.get("max_position_embeddings")}
    settings = {name: _number(drafter[name]) if drafter.get(name) is not None else value
                for name, value in own.items()}
    ids, source = _layer_ids(config, checkpoint)
    settings.update(_of_dflash(drafter) if drafter["kind"] == "dflash" else _of_eagle3(drafter, target, checkpoint))
    markov = drafter["kind"] == "dflash" and settings["markov_rank"] > 0
    settings.update(
        kind="dspark" if markov else drafter["kind"], target_layer_ids=ids, num_hidden_layers=drafter["layers"], hidden_size=target["hidden_size"], vocab_size=target["vocab_size"],
        layer_types=drafter.get("layer_types") or ["full_attention"] * drafter["layers"],
        sliding_window=drafter.get("sliding_window"), rope_scaling=_scaling(drafter, target), source=f"{path}; layer ids: {source}",
        target_positions=target["max_position_embeddings"])
    return settings


def _of_dflash(drafter):
    return {"block_size": drafter["block_size"], "mask_token_id": drafter["mask_token_id"],
            "sliding_window_non_causal": drafter["sliding_window_non_causal"], "window_origin": drafter["window_origin"],
            "sample_from_anchor": drafter["predict_from_anchor"], "markov_rank": drafter.get("markov_rank") or 0}


SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _of_eagle3(drafter, target, checkpoint):
    kept, path = None, drafter.get("draft_vocab")
    if path:
        kept = kept_ids(os.path.join(checkpoint, path), "d2t")
        if len(kept) == target["vocab_size"]:  # every token: exports have no tables of it
            kept = None
    return {"drafts": drafter["ttt_steps"], "head_norms": drafter["style"] == "qwen3", "kept": kept,
            "draft_vocab_size": target["vocab_size"] if kept is None else len(kept),
            **{name: bool(drafter.get(name)) for name in SWITCHES}}


def kept_ids(path, name):
    """Target ids of a draft vocabulary from its table of offsets."""
    try:
        from safetensors import safe_open
        with safe_open(path, framework="numpy") as file:
            offsets = file.get_tensor(name).tolist()
    except (OSError, ImportError) as error:
        raise InputError(f"{path}: {error}") from error
    return [draft + offset for draft, offset in enumerate(offsets)]


def _scaling(drafter, target):
    if drafter["rope_scaling"] == "none":
        return None
    original = drafter.get("rope_original_positions") or target.get("max_position_embeddings")
    return {"rope_type": drafter["rope_scaling"], "factor": _number(drafter["rope_factor"]),
            "original_max_position_embeddings": original}


def from_export(folder, target_folder):
    settings = read_export_config(folder)
    settings["source"] = "the export's own config.json; name the checkpoint with --checkpoint to compare with the run"
    settings["target_positions"] = target_settings(target_folder)["max_position_embeddings"]
    if settings["kind"] == "eagle3":
        _complete_eagle3(settings, folder)
    return settings


def _complete_eagle3(settings, folder):
    """What only the tensors say."""
    from safetensors import safe_open
    path = os.path.join(folder, "model.safetensors")
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
    settings["head_norms"] = any(name.endswith("q_norm.weight") for name in names)
    settings["kept"] = kept_ids(path, "d2t") if settings["draft_vocab_size"] != settings["vocab_size"] else None
    settings.update({name: bool(settings.get(name)) for name in SWITCHES})
