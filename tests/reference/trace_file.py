"""Reads what a step needs: the trace (one safetensors file) and the target directory.

Owns the names in both files and the sizes of the drafter. Does no mathematics: that is dflash_step.py and
eagle3_step.py. Everything is handed on in float64, so that rounding of the reference itself never matters.

Shapes: T tokens of the row, P planes, L captured layers, H hidden, A anchors, B block size, V vocabulary,
Vd draft vocabulary.
"""

import json
import os
from dataclasses import dataclass

import torch
from safetensors import safe_open

# Norms of these targets multiply by w, or by 1 + w. Others are refused: reading one as the other keeps
# most argmaxes and is hard to notice.
PLAIN_NORM = {
    "llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_text",
    "qwen3_vl_moe_text", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss", "phi3", "smollm3", "minimax_m2", "granite",
}  # fmt: skip
GEMMA = {"gemma", "gemma3", "gemma3_text"}  # embeddings times sqrt(H)
ONE_PLUS_NORM = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"} | GEMMA
# Keys that wrap embedding or head in more than a matrix, and the values that mean "does nothing".
UNSUPPORTED_KEYS = {
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
    "scale_emb": (None, 1, 1.0),
}


class Refused(Exception):
    """The files do not say what is needed; the text says which key or tensor."""


@dataclass
class Target:
    """The frozen part of the target, scales folded in. norm is the factor (1 + w where the family stores w)."""

    config: dict
    embed: torch.Tensor  # [V, H]
    head: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H]

    @property
    def norm_eps(self):
        return float(text_config(self.config)["rms_norm_eps"])


@dataclass
class Row:
    """One packed row."""

    input_ids: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T] bool
    doc_offsets: torch.Tensor  # [D+1]
    anchors: torch.Tensor  # [A]; EAGLE-3: none, every position that counts is one
    features: torch.Tensor  # [T, L, H], noise included
    last_hidden: torch.Tensor | None  # [T, H]; None: no teacher


@dataclass
class Shape:
    """Sizes and switches of a DFlash drafter, everything resolved."""

    layers: int
    block_size: int
    mask_token_id: int
    predict_from_anchor: bool
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    rope_scaling: str
    rope_factor: float
    rope_original_positions: int
    layer_types: list
    sliding_window: int | None
    non_causal: bool
    window_origin: str
    markov_rank: int = 0


@dataclass
class Eagle3Shape:
    """Sizes and switches of an EAGLE-3 drafter, everything resolved."""

    layers: int
    ttt_steps: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norms: bool  # style qwen3: norms on queries and keys
    eps: float
    rope_theta: float
    rope_scaling: str
    rope_factor: float
    rope_original_positions: int
    layer_types: list
    sliding_window: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    trainable_head: bool
    markov_rank: int = 0

    @property
    def block_size(self):
        """A position with its predictions is a block, whose slots are the ttt_steps."""
        return self.ttt_steps


def text_config(config):
    """The language model's part of a config.json."""
    return config.get("text_config", config)


def target_rope_theta(config):
    text = text_config(config)
    if text.get("rope_theta") is not None:
        return float(text["rope_theta"])
    parameters = text.get("rope_parameters") or {}
    if parameters.get("rope_theta") is not None:
        return float(parameters["rope_theta"])
    return 10000.0  # what the format means when it says nothing


def make_shape(config, target_config):
    """Drafter sizes from the resolved config; what is not given there comes from the target's config.json."""
    drafter, text = config["drafter"], text_config(target_config)

    def size(key, fallback=None):
        value = drafter.get(key)
        return text.get(key, fallback) if value is None else value

    heads = int(size("num_attention_heads"))
    theta = drafter.get("rope_theta")
    original = drafter.get("rope_original_positions")
    common = {
        "layers": int(drafter["layers"]),
        "heads": heads,
        "kv_heads": int(size("num_key_value_heads", heads)),
        "head_dim": int(size("head_dim") or text["hidden_size"] // heads),
        "eps": float(size("rms_norm_eps")),
        "rope_theta": target_rope_theta(target_config) if theta is None else float(theta),
        "rope_scaling": drafter["rope_scaling"],
        "rope_factor": float(drafter["rope_factor"]),
        "rope_original_positions": int(text["max_position_embeddings"] if original is None else original),
        "layer_types": list(drafter["layer_types"] or ["full_attention"] * int(drafter["layers"])),
        "sliding_window": drafter.get("sliding_window"),
        "markov_rank": int(drafter.get("markov_rank", 0)),
    }
    if drafter["kind"] == "eagle3":
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return Eagle3Shape(
            ttt_steps=int(drafter["ttt_steps"]),
            head_norms=drafter["style"] == "qwen3",
            trainable_head=drafter["lm_head"] == "trainable",
            **{flag: bool(drafter[flag]) for flag in flags},
            **common,
        )
    return Shape(
        block_size=int(drafter["block_size"]),
        mask_token_id=int(drafter["mask_token_id"]),
        predict_from_anchor=bool(drafter["predict_from_anchor"]),
        non_causal=bool(drafter["sliding_window_non_causal"]),
        window_origin=drafter["window_origin"],
        **common,
    )


class Trace:
    """Tensors by name, read when asked for, and the metadata."""

    def __init__(self, path):
        self.file = safe_open(path, framework="pt")
        self.names = set(self.file.keys())
        self.metadata = self.file.metadata() or {}
        if "config" not in self.metadata:
            raise Refused(f"{path}: no `config` in the metadata: not a trace")
        self.config = json.loads(self.metadata["config"])

    def __contains__(self, name):
        return name in self.names

    def get(self, name):
        if name not in self.names:
            raise Refused(f"the trace has no tensor {name}")
        return self.file.get_tensor(name)

    def real(self, name):
        return self.get(name).to(torch.float64)

    def scalar(self, name):
        return float(self.get(f"scalar.{name}").to(torch.float64).reshape(-1)[0])

    def group(self, prefix):
        """Every tensor PREFIX.NAME as {NAME: float64 tensor}."""
        return {n[len(prefix) + 1 :]: self.real(n) for n in sorted(self.names) if n.startswith(prefix + ".")}

    def rows(self):
        result = []
        while f"row{len(result)}.input_ids" in self.names:
            result.append(self._row(f"row{len(result)}."))
        return result

    def _row(self, prefix):
        planes = self.real(prefix + "hidden_states")
        ids = json.loads(self.metadata["target_layer_ids"])
        has_teacher = self.metadata.get("last_hidden") in ("pre_norm", "post_norm")
        if planes.shape[1] != len(ids) + has_teacher:
            raise Refused(f"{prefix}hidden_states: {planes.shape[1]} planes for layers {ids}")
        wanted = self.config["target"].get("layer_ids") or ids
        features = planes[:, [ids.index(i) for i in wanted]]
        if prefix + "noise" in self.names:
            features = features + self.real(prefix + "noise")
        return Row(
            input_ids=self.get(prefix + "input_ids").long(),
            loss_mask=self.get(prefix + "loss_mask") != 0,
            doc_offsets=self.get(prefix + "doc_offsets").long(),
            anchors=self.get(prefix + "anchors").long() if prefix + "anchors" in self.names else None,
            features=features,
            last_hidden=planes[:, -1] if has_teacher else None,
        )

    def kept_ids(self):
        """Target ids of the draft vocabulary, in the order of draft ids. [Vd]; None: the whole vocabulary."""
        if "d2t" not in self.names:
            return None
        offsets = self.get("d2t").long()
        return torch.arange(len(offsets)) + offsets

    def own_target(self):
        """The target that a golden file carries in itself, or None."""
        if "target_config" not in self.metadata:
            return None
        config = json.loads(self.metadata["target_config"])
        tensors = {n: self.get(f"target.{n}") for n in FROZEN if f"target.{n}" in self.names}
        return make_target(config, tensors, "the trace's own target")


FROZEN = ("embed_tokens.weight", "norm.weight", "lm_head.weight")


def make_target(config, tensors, where):
    text = text_config(config)
    kind = text.get("model_type", config.get("model_type"))
    for key, harmless in UNSUPPORTED_KEYS.items():
        if text.get(key) not in harmless:
            raise Refused(f"{where}: {key} = {text[key]} is not implemented")
    if kind not in PLAIN_NORM | ONE_PLUS_NORM:
        raise Refused(f"{where}: model_type {kind}: it is not known whether its norms store w or w - 1")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", kind in GEMMA))
    head = tensors.get("lm_head.weight")
    if head is None and not tied:
        raise Refused(f"{where}: no lm_head.weight, and tie_word_embeddings is not true")
    table = tensors["embed_tokens.weight"]
    scale = float(text.get("embedding_multiplier") or 1.0)
    if kind in GEMMA:  # the model's own code rounds the root to the dtype of the table
        scale = float(torch.tensor(text["hidden_size"] ** 0.5).to(table.dtype))
    norm = tensors["norm.weight"].to(torch.float64)
    return Target(
        config=config,
        embed=table.to(torch.float64) * scale,
        head=(table if head is None else head).to(torch.float64) / float(text.get("logits_scaling") or 1.0),
        norm=norm + 1.0 if kind in ONE_PLUS_NORM else norm,
    )


def _locations(folder):
    """Tensor name -> file of a target directory."""
    single = ("head.safetensors", "model.safetensors")
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index) and not os.path.exists(os.path.join(folder, single[0])):
        with open(index) as file:
            return {n: os.path.join(folder, f) for n, f in json.load(file)["weight_map"].items()}
    for name in single:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with safe_open(path, framework="pt") as file:
                return {n: path for n in file.keys()}
    raise Refused(f"{folder}: neither head.safetensors nor model.safetensors(.index.json)")


def read_target(folder):
    """config.json and the three frozen tensors of a target directory."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    where = _locations(folder)
    embeds = [n for n in where if n == FROZEN[0] or n.endswith("." + FROZEN[0])]
    if len(embeds) != 1:
        raise Refused(f"{folder}: {len(embeds)} tensors named embed_tokens.weight")
    prefix = embeds[0][: -len(FROZEN[0])]
    heads = [n for n in where if n == "lm_head.weight" or n.endswith(".lm_head.weight")]
    names = {FROZEN[0]: embeds[0], FROZEN[1]: prefix + "norm.weight"}
    if heads:
        names[FROZEN[2]] = heads[0]
    tensors = {}
    for short, name in names.items():
        if name not in where:
            raise Refused(f"{folder}: no tensor {name}")
        with safe_open(where[name], framework="pt") as file:
            tensors[short] = file.get_tensor(name)
    return make_target(config, tensors, folder)
