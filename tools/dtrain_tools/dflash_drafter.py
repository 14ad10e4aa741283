"""A DFlash drafter as servers run it, from its export alone; DSpark, which has a Markov head besides.

A plain and readable reference: one document, one block at a time; embedding and head are the target's, or
the export's own copies where its layout has them.
Letters: C context tokens, B block size, L captured layers, H hidden size, V vocabulary, r rank of a Markov head.
"""

import torch

from dtrain_tools.documents import InputError
from dtrain_tools.exported_drafter import ExportedDrafter, attention, rms_norm, rotate


class Drafter(ExportedDrafter):
    """drafts: how many to make, as a server that is told a number: the block is that much shorter."""

    def __init__(self, folder, target, dtype, drafts=None):
        super().__init__(folder, target, dtype)
        self.block_size, self.first = self.config["block_size"], 0 if self.config.get("sample_from_anchor") else 1
        most = self.block_size - self.first
        if drafts is not None and not 1 <= drafts <= most:
            raise InputError(f"{folder}: {drafts} drafts from blocks of {self.block_size}; 1 to {most} can be made")
        self.draft_count = most if drafts is None else drafts
        self.block_size = self.draft_count + self.first
        self._check(folder)
        self.take_vocabulary(folder)
        self.forget()

    def _check(self, folder):
        heads, kv, dim = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        hidden = self.config["hidden_size"]
        shapes = {"fc.weight": (hidden, len(self.layer_ids) * hidden), "norm.weight": (hidden,)}
        for i in range(self.config["num_hidden_layers"]):
            shapes[f"layers.{i}.self_attn.q_proj.weight"] = (heads * dim, hidden)
            shapes[f"layers.{i}.self_attn.k_proj.weight"] = (kv * dim, hidden)
        self.check(folder, shapes)
        if self.config["mask_token_id"] >= self.target.vocab_size:
            raise InputError(f"{folder}: mask_token_id {self.config['mask_token_id']} has no embedding")

    def _heads(self, layer, name, x):
        """q, k or v of x [tokens, H] -> [tokens, heads, head_dim]; q and k normed per head."""
        x = (x @ self.weight(layer, f"self_attn.{name}_proj").T).unflatten(1, (-1, self.config["head_dim"]))
        return x if name == "v" else rms_norm(x, self.weight(layer, f"self_attn.{name}_norm"), self.eps)

    def forget(self):
        """A new document."""
        self.context = [None] * self.config["num_hidden_layers"]  # per layer keys, values [C, kv heads, head_dim]
        self.length = 0

    def see(self, features, _=None):
        """Adds context: target states [n, L, H] of the next n positions. (Their tokens do not matter here.)"""
        fused = features.to(self.dtype).flatten(1) @ self.weights["fc.weight"].T
        fused = rms_norm(fused, self.weights["hidden_norm.weight"], self.eps)
        rope = self.rope(range(self.length, self.length + len(features)))
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
        return attention(q, k, v, self._visible(layer)) @ self.weight(layer, "self_attn.o_proj").T

    @torch.inference_mode()
    def block(self, anchor_token):
        """Final states [B, H] of the block whose anchor is the position after the context."""
        x = self.embed([anchor_token] + [self.config["mask_token_id"]] * (self.block_size - 1))
        rope = self.rope(range(self.length, self.length + self.block_size))
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(layer, rms_norm(x, self.weight(layer, "input_layernorm"), self.eps), rope)
            x = self.mlp(layer, x)
        return rms_norm(x, self.weights["norm.weight"], self.eps)

    def slots(self, anchor_token):
        """Logits [drafts, V] for the positions after the anchor. Slot 0 drafts nothing, but in DSpark it may."""
        return self.logits(self.block(anchor_token)[self.first:])

    def drafts(self, anchor_token, chooser):
        """-> ids of a block's drafts, and what chooser.verify() needs of them."""
        return chooser.drafts(self.slots(anchor_token))


class DSparkDrafter(Drafter):
    """The Markov head adds to a draft's logits what two tables say to the token in front, w1 [V, r] and w2 [Vd, r]: drafts
    come one after the other. A confidence head, which says how many drafts to try, is left aside.
    """

    def _check(self, folder):
        super()._check(folder)
        rank, kind = self.config["markov_rank"], self.config.get("markov_head_type") or "vanilla"
        if kind != "vanilla":
            raise InputError(f"{folder}: markov_head_type is {kind!r}; only 'vanilla' is decoded here")
        vocab = self.config["vocab_size"]
        self.check(folder, {"markov_head.markov_w1.weight": (vocab, rank),
                            "markov_head.markov_w2.weight": (self.config.get("draft_vocab_size") or vocab, rank)})

    def _bias(self, token):
        """[V] after a token."""
        w1, w2 = (self.weights[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
        bias = w2.float() @ w1[token].float()
        if self.ids is None:
            return bias
        return bias.new_zeros(self.target.vocab_size).index_copy(0, self.ids, bias)

    @torch.inference_mode()
    def drafts(self, anchor_token, chooser):
        ids, chances = [], []
        for logits in self.slots(anchor_token):
            token, chance = chooser.drafts((logits + self._bias(ids[-1] if ids else anchor_token))[None])
            ids += token
            chances.append(chance)
        return ids, None if chances[0] is None else torch.cat(chances)
