"""Reading the ends of a target model from disk: embedding sizes, final norm, number of layers.

From a target directory (config.json, head.safetensors) or a Hugging Face model directory. numpy only.
Does not know what the weights compute; `dtrain data check --target` recomputes the teacher.
"""

import dataclasses
import os

import numpy as np

from dtrain_tools.documents import InputError, load_json
from dtrain_tools.tensor_file import bf16_to_float, read_header, read_tensors

PREFIXES = ("", "model.", "language_model.model.", "model.language_model.", "model.language_model.model.",
            "language_model.")


@dataclasses.dataclass
class TargetHead:
    layers: int
    hidden_size: int
    vocab_size: int         # rows of the embedding
    norm: np.ndarray        # float32 [H], as stored


def _files_of(folder):
    """-> {tensor name: file}, of the one place where this directory has its weights."""
    index = os.path.join(folder, "model.safetensors.index.json")
    for name in ("head.safetensors", "model.safetensors"):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return {tensor: path for tensor in read_header(path)[0]}
    if os.path.exists(index):
        return {tensor: os.path.join(folder, name) for tensor, name in load_json(index)["weight_map"].items()}
    raise InputError(f"{folder}: has neither head.safetensors nor model.safetensors nor its index")


def _find(files, folder, name):
    """-> (dtype name, array mapped from the file)."""
    for prefix in PREFIXES:
        if prefix + name in files:
            return read_tensors(files[prefix + name], [prefix + name])[prefix + name]
    raise InputError(f"{folder}: no tensor {name} under any of the usual prefixes "
                     f"({', '.join(prefix or 'none' for prefix in PREFIXES)})")


def read_target_head(folder):
    path = os.path.join(folder, "config.json")
    config = load_json(path)
    config = config.get("text_config") or config
    if not isinstance(config, dict):
        raise InputError(f"{path}: text_config: expected an object")
    if not isinstance(config.get("num_hidden_layers"), int):
        raise InputError(f"{path}: num_hidden_layers is missing")
    try:
        files = _files_of(folder)
        embedding = _find(files, folder, "embed_tokens.weight")[1]
        dtype, norm = _find(files, folder, "norm.weight")
    except ValueError as error:
        raise InputError(str(error)) from error
    if dtype not in ("BF16", "F32", "F16"):
        raise InputError(f"{folder}: norm.weight is {dtype}; BF16, F16 and F32 are understood")
    norm = bf16_to_float(norm) if dtype == "BF16" else norm.astype(np.float32)
    return TargetHead(config["num_hidden_layers"], embedding.shape[1], embedding.shape[0], norm)
