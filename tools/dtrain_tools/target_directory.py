"""The target directory: what training needs of the target, without the target.

config.json as the model has it, and head.safetensors with embed_tokens.weight, norm.weight and, unless
tied, lm_head.weight. Also the usual choice of layers. numpy only.
"""

import os
import shutil

from dtrain_tools.tensor_file import read_tensors, write_tensors


def default_layer_ids(layers, wanted):
    """Evenly spaced decoder layers, from the second to the third from the end, by the usual formula.

    round() is Python's (halves go to the even number), as in the drafters released with this formula.
    """
    if wanted == 1:
        return [layers // 2]
    ids = [round(1 + j * (layers - 4) / (wanted - 1)) for j in range(wanted)]
    if wanted < 1 or layers < 4 or len(set(ids)) != len(ids):
        raise ValueError(f"{wanted} evenly spaced layers do not exist in a model of {layers}; name them")
    return ids


def write_head(folder, config_path, tensors):
    """tensors: {"embed_tokens.weight", "norm.weight", perhaps "lm_head.weight"} as (dtype name, array)."""
    os.makedirs(folder, exist_ok=True)
    write_tensors(os.path.join(folder, "head.safetensors"), tensors)
    shutil.copyfile(config_path, os.path.join(folder, "config.json"))


def write_target_directory(folder, config_path, weights_path):
    """From a model in one safetensors file with the usual names and a tied head."""
    names = {"embed_tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    tensors = read_tensors(weights_path, names.values())
    write_head(folder, config_path, {ours: tensors[theirs] for ours, theirs in names.items()})
