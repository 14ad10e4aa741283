"""Greedy speculative decoding of one text, and the plain greedy decoding it must equal.

The target keeps a KV cache; a block is the anchor (a token that is known but not yet seen by the
target) and the drafts. The target checks them in one pass, the leading drafts that are its own choice
stay, its next token is the new anchor. Does not batch: this is a reference.
"""

import dataclasses

import torch
from transformers import DynamicCache

from dtrain_tools.documents import InputError


@dataclasses.dataclass
class Block:
    anchor: int    # position in the document
    accepted: int  # drafts kept, those after the end of the text not counted
    scored: int    # drafts that lie within the text


class Runner:
    """The target with a cache that can be cut back, and the states that the drafter wants."""

    def __init__(self, target, layer_ids, rounded):
        self.target, self.layer_ids, self.rounded = target, layer_ids, rounded
        if any(kind != "full_attention" for kind in getattr(target.config, "layer_types", None) or []):
            raise InputError(f"model_type {target.config.model_type!r}: layers with windows or states cannot be "
                             "rolled back by this reference loop")
        self.states = {}
        for layer in layer_ids:
            target.layers[layer].register_forward_hook(self._hook(layer))
        self.forget()

    def _hook(self, layer):
        def hook(_module, _inputs, output):
            self.states[layer] = (output[0] if isinstance(output, tuple) else output)[0]
        return hook

    def forget(self):
        self.cache = DynamicCache(config=self.target.decoder.config)
        self.length = 0

    @torch.inference_mode()
    def see(self, ids):
        """-> logits [n, V] after each of the ids, states [n, L, H]."""
        device = self.target.device
        tokens = torch.tensor([ids], device=device)
        positions = torch.arange(self.length, self.length + len(ids), device=device)[None]
        out = self.target.decoder(input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True)
        self.length += len(ids)
        states = torch.stack([self.states[layer] for layer in self.layer_ids], dim=1) if self.layer_ids else None
        if self.rounded and states is not None:
            states = states.to(torch.bfloat16).to(states.dtype)
        return self.target.logits(out.last_hidden_state[0]), states

    def drop(self, count):
        """Forgets the last `count` positions."""
        if count:
            self.cache.crop(-count)
            self.length -= count


def greedy(runner, prompt, limit, end_ids):
    """-> plain greedy text, and for each of its tokens the gap between the two largest logits."""
    runner.forget()
    text, gaps, ids = [], [], prompt
    while len(text) < limit and not (text and text[-1] in end_ids):
        top = runner.see(ids)[0][-1].topk(2)
        text.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        ids = text[-1:]
    return text, gaps


def speculate(runner, drafter, prompt, limit, end_ids):
    """-> text, blocks."""
    runner.forget()
    drafter.forget()
    logits, states = runner.see(prompt)
    drafter.see(states)
    text, blocks = [int(logits[-1].argmax())], []
    while len(text) < limit and text[-1] not in end_ids:
        anchor = len(prompt) + len(text) - 1
        drafts = drafter.draft(text[-1])
        logits, states = runner.see([text[-1], *drafts])
        choices = logits.argmax(dim=1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        runner.drop(len(drafts) - accepted)
        drafter.see(states[:accepted + 1])
        fresh = cut(choices[:accepted + 1], limit - len(text), end_ids)
        blocks.append(Block(anchor, min(accepted, len(fresh)), len(drafts)))
        text += fresh
    if blocks:  # the text ends inside the last block
        last = blocks[-1]
        last.scored = min(last.scored, len(prompt) + len(text) - 1 - last.anchor)
    return text, blocks


def cut(tokens, room, end_ids):
    """Up to the first end token, which is kept, and at most `room`."""
    for at, token in enumerate(tokens[:room]):
        if token in end_ids:
            return tokens[:at + 1]
    return tokens[:room]


def top_gap(runner, ids):
    """Gap between the two largest logits after `ids`."""
    runner.forget()
    top = runner.see(ids)[0][-1].topk(2).values
    return float(top[0] - top[1])
