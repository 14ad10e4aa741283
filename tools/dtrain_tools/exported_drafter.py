"""What drafters of every kind share when they are run from their export (config.json, model.safetensors): weights, rotary
embedding, own copies of embedding and head, draft vocabulary. Every fact comes from the export; nothing is
shared with the trainer, on purpose.
Letters: H hidden size, V and Vd vocabulary and draft vocabulary.
"""

import os

import torch
from safetensors.torch import load_file

from dtrain_tools.documents import InputError
from dtrain_tools.export_config import read_export_config
from dtrain_tools.rotary import rope_frequencies

# What no server runs; each key's meaning. DSpark has the last two.
UNSERVED = {"predict_from_anchor": "drafts start in slot 0", "sliding_window_non_causal": "sliding layers see the whole block",
            "window_origin": "windows are not measured from the query",
            "sample_from_anchor": "drafts start in slot 0",
            "markov_rank": "a Markov head, which of DFlash drafters has a place in `dtrain export --format speculators` alone"}


def open_drafter(folder, target, dtype, drafts=None):
    """The drafter of an export, of whichever kind. drafts: how many to make, as a server that is told a number."""
    from dtrain_tools.dflash_drafter import Drafter, DSparkDrafter
    from dtrain_tools.eagle3_drafter import Eagle3Drafter
    kinds = {"dflash": Drafter, "dspark": DSparkDrafter, "eagle3": Eagle3Drafter}
    return kinds[read_export_config(folder)["kind"]](folder, target, dtype, drafts)


def read_config(folder):
    config = read_export_config(folder)
    for name, meaning in UNSERVED.items():
        of_dspark = config["kind"] == "dspark" and name in ("sample_from_anchor", "markov_rank")
        if config.get(name) and not of_dspark:
            raise InputError(f"{config['path']}: {name}: {meaning}; no server runs this, so it is not decoded here")
    return config


def rms_norm(x, weight, eps):
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x, cos, sin):
    """Rotate-half over the full head. x [tokens, heads, head_dim], cos and sin [tokens, 1, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def attention(q, k, v, visible):
    """q [tokens, heads, head_dim], k and v [keys, kv heads, head_dim], visible bool [tokens, keys]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible[None], float("-inf")).softmax(dim=-1).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", scores, v).flatten(1)


class ExportedDrafter:
    def __init__(self, folder, target, dtype):
        self.config, self.target = read_config(folder), target
        path = os.path.join(folder, "model.safetensors")
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file")
        self.weights = {name: tensor.to(target.device) for name, tensor in load_file(path).items()}
        for name, tensor in self.weights.items():
            if tensor.is_floating_point():
                self.weights[name] = tensor.to(dtype)
        self.dtype, self.eps = dtype, self.config["rms_norm_eps"]
        self.layer_ids = list(self.config["target_layer_ids"])
        frequencies, self.rope_factor = rope_frequencies(self.config)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float64)

    def check(self, folder, shapes):
        """Tensors as config.json says, and the target as the drafter needs it."""
        for name, shape in shapes.items():
            if name not in self.weights or tuple(self.weights[name].shape) != shape:
                raise InputError(f"{folder}: tensor {name} is missing or not {list(shape)} as config.json says")
        hidden = self.config["hidden_size"]
        if hidden != self.target.hidden_size:
            raise InputError(f"{folder}: hidden_size {hidden}, but the target has {self.target.hidden_size}")
        if max(self.layer_ids) >= len(self.target.layers):
            raise InputError(f"{folder}: target_layer_ids {self.layer_ids}, but the target has "
                             f"{len(self.target.layers)} layers")

    def take_vocabulary(self, folder):
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

    def weight(self, layer, name):
        return self.weights[f"layers.{layer}.{name}.weight"]

    def rope(self, positions):
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.cat([self.frequencies] * 2)
        device = self.target.device
        return [(turn(angles) * self.rope_factor).to(device, self.dtype)[:, None] for turn in (torch.cos, torch.sin)]

    def embed(self, ids):
        ids = torch.tensor(ids, device=self.target.device)
        return (self.target.embedding(ids) if self.embedding is None else self.embedding[ids]).to(self.dtype)

    def mlp(self, layer, x):
        m = rms_norm(x, self.weight(layer, "post_attention_layernorm"), self.eps)
        gate, up = (m @ self.weight(layer, f"mlp.{name}_proj").T for name in ("gate", "up"))
        return x + (torch.nn.functional.silu(gate) * up) @ self.weight(layer, "mlp.down_proj").T

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
