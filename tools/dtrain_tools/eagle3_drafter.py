"""An EAGLE-3 drafter as servers run it, from its export alone.

A plain and readable reference: one document, one draft at a time. Position t of the drafter takes in the target's states
at t and token t + 1. What the target has verified is written with its true states; behind that the drafter goes on from
its own state and its own draft, and what those positions held is overwritten when the target has looked at them.
Letters: C positions in the cache, L captured layers, H hidden size, V vocabulary.
"""

import torch

from dtrain_tools.documents import InputError
from dtrain_tools.exported_drafter import ExportedDrafter, attention, rms_norm, rotate


class Eagle3Drafter(ExportedDrafter):
    """drafts: how many to make; without it, as many as the export says."""

    def __init__(self, folder, target, dtype, drafts=None):
        super().__init__(folder, target, dtype)
        for old in [name for name in self.weights if name.startswith("midlayer.")]:
            self.weights["layers.0." + old[len("midlayer."):]] = self.weights.pop(old)
        self.draft_count = drafts or self.config.get("drafts")
        if not self.draft_count:
            raise InputError(f"{folder}: this layout does not say how many drafts are made; give --drafts N")
        self.head_norms = "layers.0.self_attn.q_norm.weight" in self.weights
        self._check(folder)
        self.take_vocabulary(folder)
        self.forget()

    def _check(self, folder):
        heads, kv, dim = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        hidden, planes = self.config["hidden_size"], len(self.layer_ids)
        shapes = {"fc.weight": (hidden, planes * hidden), "norm.weight": (hidden,), "layers.0.hidden_norm.weight": (hidden,)}
        if self.config.get("norm_before_fc"):
            shapes["input_norm.weight"] = (planes * hidden,)
        for plane in range(planes if self.config.get("fc_norm") else 0):
            shapes[f"fc_norm.{plane}.weight"] = (hidden,)
        for i in range(self.config["num_hidden_layers"]):
            shapes[f"layers.{i}.self_attn.q_proj.weight"] = (heads * dim, hidden if i else 2 * hidden)
            shapes[f"layers.{i}.self_attn.k_proj.weight"] = (kv * dim, hidden if i else 2 * hidden)
        self.check(folder, shapes)

    def forget(self):
        """A new document."""
        self.cache = [None] * self.config["num_hidden_layers"]  # per layer keys, values [C, kv heads, head_dim]
        self.length = 0  # C
        self.waiting, self.tokens = [], []  # states and tokens of positions that wait for the token after them

    def see(self, features, ids):
        """Target states [n, L, H] of the next n positions, and their tokens."""
        self.waiting.append(features)
        self.tokens += ids

    def _fuse(self, features):
        """g [n, H]"""
        x = features.to(self.dtype)
        if self.config.get("norm_before_fc"):
            x = rms_norm(x.flatten(1), self.weights["input_norm.weight"], self.eps).unflatten(1, x.shape[1:])
        if self.config.get("fc_norm"):
            x = torch.stack([rms_norm(x[:, p], self.weights[f"fc_norm.{p}.weight"], self.eps)
                             for p in range(x.shape[1])], dim=1)
        return x.flatten(1) @ self.weights["fc.weight"].T

    def _heads(self, layer, name, n):
        x = (n @ self.weight(layer, f"self_attn.{name}_proj").T).unflatten(1, (-1, self.config["head_dim"]))
        return rms_norm(x, self.weight(layer, f"self_attn.{name}_norm"), self.eps) if name != "v" and self.head_norms else x

    def _visible(self, layer, count):
        """bool [count, C]: the last `count` positions look at themselves and back."""
        kv, query = torch.arange(self.length)[None], torch.arange(self.length - count, self.length)[:, None]
        seen = kv <= query
        if self.config["layer_types"][layer] == "sliding_attention":
            seen = seen & (kv > query - self.config["sliding_window"])
        return seen.to(self.target.device)

    def _layer(self, layer, x, embedded, rope):
        norm = rms_norm(x, self.weight(layer, "hidden_norm" if layer == 0 else "input_layernorm"), self.eps)
        residual = norm if layer == 0 and self.config.get("norm_before_residual") else x
        if layer == 0:
            norm = torch.cat([rms_norm(embedded, self.weight(0, "input_layernorm"), self.eps), norm], dim=1)
        q = rotate(self._heads(layer, "q", norm), *rope)
        new = rotate(self._heads(layer, "k", norm), *rope), self._heads(layer, "v", norm)
        old = self.cache[layer]
        self.cache[layer] = new if old is None else tuple(torch.cat(pair) for pair in zip(old, new))
        seen = attention(q, *self.cache[layer], self._visible(layer, len(x)))
        return self.mlp(layer, residual + seen @ self.weight(layer, "self_attn.o_proj").T)

    def _forward(self, ids, h):
        """The next positions of the cache: -> states for the head [n, H], states that are fed back [n, H]."""
        embedded = self.embed(ids)
        rope = self.rope(range(self.length + 1, self.length + 1 + len(ids)))
        self.length += len(ids)
        for layer in range(self.config["num_hidden_layers"]):
            h = self._layer(layer, h, embedded, rope)
        normed = rms_norm(h, self.weights["norm.weight"], self.eps)
        return normed, normed if self.config.get("norm_output") else h

    def _cut(self, length):
        self.cache = [tuple(part[:length] for part in pair) for pair in self.cache]
        self.length = length

    @torch.inference_mode()
    def drafts(self, anchor_token, chooser):
        """-> ids of the drafts after the anchor, and what chooser.verify() needs of them."""
        states, h = self._forward(self.tokens[1:] + [anchor_token], self._fuse(torch.cat(self.waiting)))
        self.waiting, self.tokens, verified = [], [], self.length
        ids, chances = [], []
        while True:
            token, chance = chooser.drafts(self.logits(states[-1:]))
            ids += token
            chances.append(chance)
            if len(ids) == self.draft_count:
                break
            states, h = self._forward(token, h[-1:])
        self._cut(verified)
        return ids, None if chances[0] is None else torch.cat(chances)
