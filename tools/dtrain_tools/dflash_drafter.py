"""A DFlash drafter as servers run it, from its export alone (config.json, model.safetensors).

A plain and readable reference: one document, one block at a time. Every fact about the drafter comes
from the export; embedding and head are the target's. Nothing is shared with the trainer, on purpose.
Letters: C context tokens, B block size, L captured layers, H hidden size.
"""

import json
import math
import os

import torch
from safetensors.torch import load_file

from dtrain_tools.documents import InputError

UNSERVED = {"predict_from_anchor": "drafts start in slot 0", "sample_from_anchor": "drafts start in slot 0",
            "sliding_window_non_causal": "sliding layers see the whole block",
            "window_origin": "windows are not measured from the query"}


def read_config(folder):
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    config.update(config.get("dflash_config") or {})
    wanted = ("block_size", "mask_token_id", "target_layer_ids", "num_hidden_layers", "hidden_size",
              "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "layer_types")
    missing = [name for name in wanted if config.get(name) is None]
    if missing:
        raise InputError(f"{path}: no {', '.join(missing)}")
    for name, meaning in UNSERVED.items():
        if config.get(name):
            raise InputError(f"{path}: {name}: {meaning}; no server runs this, so it is not decoded here")
    if "sliding_attention" in config["layer_types"] and not config.get("sliding_window"):
        raise InputError(f"{path}: layer_types has sliding_attention but there is no sliding_window")
    if len(config["layer_types"]) != config["num_hidden_layers"]:
        raise InputError(f"{path}: {len(config['layer_types'])} layer_types for {config['num_hidden_layers']} layers")
    return config


def rope_frequencies(config):
    """-> inverse frequencies [head_dim/2] in fp64, and the factor on cos and sin."""
    dim, theta = config["head_dim"], config["rope_theta"]
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return plain, 1.0
    kind, factor = scaling.get("rope_type", scaling.get("type")), float(scaling.get("factor", 1.0))
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    if kind != "yarn":
        raise InputError(f"rope_scaling: {kind!r} is not known here")
    original = scaling["original_max_position_embeddings"]

    def pair(turns):  # which pair turns that often over the original positions
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
    share = ((torch.arange(dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)).clamp(0, 1)
    return plain / factor * share + plain * (1 - share), 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rms_norm(x, weight, eps):
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x, cos, sin):
    """Rotate-half over the full head. x [tokens, heads, head_dim], cos and sin [tokens, 1, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Drafter:
    def __init__(self, folder, target, dtype):
        self.config, self.target = read_config(folder), target
        path = os.path.join(folder, "model.safetensors")
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file")
        self.weights = {name: tensor.to(target.device, dtype) for name, tensor in load_file(path).items()}
        self.dtype, self.eps = dtype, self.config["rms_norm_eps"]
        self.block_size = self.config["block_size"]
        self.layer_ids = list(self.config["target_layer_ids"])
        self.frequencies, self.rope_factor = rope_frequencies(self.config)
        self._check(folder)
        self.forget()

    def _check(self, folder):
        heads, kv, dim = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        hidden = self.config["hidden_size"]
        shapes = {"fc.weight": (hidden, len(self.layer_ids) * hidden), "norm.weight": (hidden,)}
        for i in range(self.config["num_hidden_layers"]):
            shapes[f"layers.{i}.self_attn.q_proj.weight"] = (heads * dim, hidden)
            shapes[f"layers.{i}.self_attn.k_proj.weight"] = (kv * dim, hidden)
        for name, shape in shapes.items():
            if name not in self.weights or tuple(self.weights[name].shape) != shape:
                raise InputError(f"{folder}: tensor {name} is missing or not {list(shape)} as config.json says")
        if hidden != self.target.hidden_size:
            raise InputError(f"{folder}: hidden_size {hidden}, but the target has {self.target.hidden_size}")
        if max(self.layer_ids) >= len(self.target.layers):
            raise InputError(f"{folder}: target_layer_ids {self.layer_ids}, but the target has "
                             f"{len(self.target.layers)} layers")
        if self.config["mask_token_id"] >= self.target.vocab_size:
            raise InputError(f"{folder}: mask_token_id {self.config['mask_token_id']} has no embedding")

    def _weight(self, layer, name):
        return self.weights[f"layers.{layer}.{name}.weight"]

    def _heads(self, layer, name, x):
        """q, k or v of x [tokens, H] -> [tokens, heads, head_dim]; q and k normed per head."""
        x = (x @ self._weight(layer, f"self_attn.{name}_proj").T).unflatten(1, (-1, self.config["head_dim"]))
        return x if name == "v" else rms_norm(x, self._weight(layer, f"self_attn.{name}_norm"), self.eps)

    def _rope(self, positions):
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.cat([self.frequencies] * 2)
        device = self.target.device
        return [(turn(angles) * self.rope_factor).to(device, self.dtype)[:, None] for turn in (torch.cos, torch.sin)]

    def forget(self):
        """A new document."""
        self.context = [None] * self.config["num_hidden_layers"]  # per layer keys, values [C, kv heads, head_dim]
        self.length = 0

    def see(self, features):
        """Adds context: target states [n, L, H] of the next n positions."""
        fused = features.to(self.dtype).flatten(1) @ self.weights["fc.weight"].T
        fused = rms_norm(fused, self.weights["hidden_norm.weight"], self.eps)
        rope = self._rope(range(self.length, self.length + len(features)))
        for layer, old in enumerate(self.context):
            new = rotate(self._heads(layer, "k", fused), *rope), self._heads(layer, "v", fused)
            self.context[layer] = new if old is None else tuple(torch.cat(pair) for pair in zip(old, new))
        self.length += len(features)

    def _visible(self, layer):
        """bool [B, C + B]: what each slot sees. The anchor is at position C."""
        slots, kv = torch.arange(self.block_size), torch.arange(self.length + self.block_size)
        query = (self.length + slots)[:, None]
        in_context = kv[None] < self.length
        if self.config["layer_types"][layer] == "sliding_attention":
            seen = torch.where(in_context, kv[None] > query - self.config["sliding_window"], kv[None] <= query)
        else:
            seen = torch.ones(self.block_size, len(kv), dtype=torch.bool)
        return seen.to(self.target.device)

    def _attention(self, layer, x, rope):
        q = rotate(self._heads(layer, "q", x), *rope)
        k, v = rotate(self._heads(layer, "k", x), *rope), self._heads(layer, "v", x)
        k, v = torch.cat([self.context[layer][0], k]), torch.cat([self.context[layer][1], v])
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * self.config["head_dim"] ** -0.5
        scores = scores.masked_fill(~self._visible(layer)[None], float("-inf")).softmax(dim=-1).to(v.dtype)
        return torch.einsum("hqk,khd->qhd", scores, v).flatten(1) @ self._weight(layer, "self_attn.o_proj").T

    @torch.inference_mode()
    def block(self, anchor_token):
        """Final states [B, H] of the block whose anchor is the position after the context."""
        ids = [anchor_token] + [self.config["mask_token_id"]] * (self.block_size - 1)
        x = self.target.embedding(torch.tensor(ids, device=self.target.device)).to(self.dtype)
        rope = self._rope(range(self.length, self.length + self.block_size))
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(layer, rms_norm(x, self._weight(layer, "input_layernorm"), self.eps), rope)
            m = rms_norm(x, self._weight(layer, "post_attention_layernorm"), self.eps)
            gate, up = (m @ self._weight(layer, f"mlp.{name}_proj").T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self._weight(layer, "mlp.down_proj").T
        return rms_norm(x, self.weights["norm.weight"], self.eps)

    def draft(self, anchor_token):
        """B - 1 ids for the positions after the anchor; slot 0 drafts nothing."""
        return self.target.logits(self.block(anchor_token)[1:]).argmax(dim=1).tolist()
