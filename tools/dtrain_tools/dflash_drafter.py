"""A DFlash drafter as servers run it, from its export alone (config.json, model.safetensors).

A plain and readable reference: one document, one block at a time. Every fact about the drafter comes
from the export; embedding and head are the target's, or the export's own copies where its layout has them.
Nothing is shared with the trainer, on purpose.
Letters: C context tokens, B block size, L captured layers, H hidden size, V and Vd vocabulary and draft vocabulary.
"""

import os

import torch
from safetensors.torch import load_file

from dtrain_tools.documents import InputError
from dtrain_tools.export_config import read_export_config
from dtrain_tools.rotary import rope_frequencies

UNSERVED = {"predict_from_anchor": "drafts start in slot 0", "sample_from_anchor": "drafts start in slot 0",
            "sliding_window_non_causal": "sliding layers see the whole block",
            "window_origin": "windows are not measured from the query"}


def read_config(folder):
    config = read_export_config(folder)
    for name, meaning in UNSERVED.items():
        if config.get(name):
            raise InputError(f"{config['path']}: {name}: {meaning}; no server runs this, so it is not decoded here")
    return config


def rms_norm(x, weight, eps):
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x, cos, sin):
    """Rotate-half over the full head. x [tokens, heads, head_dim], cos and sin [tokens, 1, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Drafter:
    """drafts: how many to make, as a server that is told a number: the block is that much shorter."""

    def __init__(self, folder, target, dtype, drafts=None):
        self.config, self.target = read_config(folder), target
        path = os.path.join(folder, "model.safetensors")
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file")
        self.weights = {name: tensor.to(target.device) for name, tensor in load_file(path).items()}
        for name, tensor in self.weights.items():
            if tensor.is_floating_point():
                self.weights[name] = tensor.to(dtype)
        self.dtype, self.eps = dtype, self.config["rms_norm_eps"]
        self.block_size = self.config["block_size"]
        if drafts is not None and not 1 <= drafts < self.block_size:
            raise InputError(f"{folder}: {drafts} drafts from blocks of {self.block_size}; 1 to {self.block_size - 1} can be made")
        self.block_size = self.block_size if drafts is None else drafts + 1
        self.layer_ids = list(self.config["target_layer_ids"])
        frequencies, self.rope_factor = rope_frequencies(self.config)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float64)
        self._check(folder)
        self._take_vocabulary(folder)
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

    def _take_vocabulary(self, folder):
        """Own embedding [V, H], own head [Vd, H] and the table of offsets from draft ids to the target's [Vd]."""
        hidden, vocab = self.config["hidden_size"], self.target.vocab_size
        self.embedding, self.head = self.weights.get("embed_tokens.weight"), self.weights.get("lm_head.weight")
        offsets = self.weights.get("d2t")
        size = self.config.get("draft_vocab_size") or vocab
        for name, tensor, rows in (("embed_tokens.weight", self.embedding, None), ("lm_head.weight", self.head, size)):
            if tensor is not None and (tensor.shape[1] != hidden or rows not in (None, tensor.shape[0])):
                raise InputError(f"{folder}: tensor {name} is {list(tensor.shape)}, not [{rows or vocab}, {hidden}]")
        if size != self.target.head.weight.shape[0] and (self.head is None or offsets is None):
            raise InputError(f"{folder}: draft_vocab_size is {size}, but there is no lm_head.weight with d2t of that size")
        self.ids = None if offsets is None else torch.arange(size, device=offsets.device) + offsets
        if self.ids is not None and not (self.ids.min() >= 0 and self.ids.max() < vocab):
            raise InputError(f"{folder}: d2t leads to tokens outside the target's {vocab}")

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
        ids = torch.tensor(ids, device=self.target.device)
        x = self.target.embedding(ids) if self.embedding is None else self.embedding[ids]
        x = x.to(self.dtype)
        rope = self._rope(range(self.length, self.length + self.block_size))
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(layer, rms_norm(x, self._weight(layer, "input_layernorm"), self.eps), rope)
            m = rms_norm(x, self._weight(layer, "post_attention_layernorm"), self.eps)
            gate, up = (m @ self._weight(layer, f"mlp.{name}_proj").T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self._weight(layer, "mlp.down_proj").T
        return rms_norm(x, self.weights["norm.weight"], self.eps)

    def logits(self, states):
        """fp32 [n, V]; with a draft vocabulary, -inf for every other token."""
        if self.head is None:
            return self.target.logits(states)
        logits = states.float() @ self.head.float().T
        if self.ids is None:
            return logits
        whole = logits.new_full((len(logits), self.target.vocab_size), float("-inf"))
        whole[:, self.ids] = logits
        return whole

    def slots(self, anchor_token):
        """Logits [B - 1, V] for the positions after the anchor; slot 0 drafts nothing."""
        return self.logits(self.block(anchor_token)[1:])
