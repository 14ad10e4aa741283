"""Speculative decoding of one text, greedy or sampled, and the plain decoding that it must equal.

The target keeps a KV cache; a block is the anchor (a token that is known but not yet seen by the
target) and the drafts. The target checks them in one pass, the leading drafts that it accepts
stay, its next token is the new anchor. Does not batch: this is a reference.

Greedy: a draft is accepted when it is the target's own choice. Sampled (Leviathan et al. 2023): a draft x, drawn
from the drafter's q, is accepted with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw
from the positive part of p - q. Whatever the drafter, every token is then a draw from the target's p.
"""

import dataclasses

import torch
from transformers import DynamicCache

from dtrain_tools.documents import InputError

CUT_BACK = {"full_attention", "sliding_attention"}  # layers whose cache can forget its last positions


@dataclasses.dataclass
class Block:
    anchor: int    # position in the document
    accepted: int  # drafts kept, those after the end of the text not counted
    scored: int    # drafts that lie within the text


class Runner:
    """The target with a cache that can be cut back, and the states that the drafter wants."""

    def __init__(self, target, layer_ids, rounded):
        self.target, self.layer_ids, self.rounded = target, layer_ids, rounded
        kinds = set(getattr(target.config, "layer_types", None) or [])
        if kinds - CUT_BACK:
            raise InputError(f"model_type {target.config.model_type!r}: layers of the kind "
                             f"{', '.join(sorted(kinds - CUT_BACK))} cannot be rolled back by this reference loop")
        self.states = {}
        for layer in layer_ids:
            target.layers[layer].register_forward_hook(self._hook(layer))
        self.forget()

    def _hook(self, layer):
        def hook(_module, _inputs, output):
            self.states[layer] = (output[0] if isinstance(output, tuple) else output)[0]
        return hook

    def forget(self):
        self.cache = DynamicCache()  # keeps every position, also of layers with a window: the mask has the window
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


# ---- how tokens are chosen ---------------------------------------------------------------------------


class Greedy:
    def token(self, logits):
        return int(logits.argmax())

    def drafts(self, logits):
        """-> ids of logits [n, V], and what verify() needs of them."""
        return logits.argmax(dim=1).tolist(), None

    def verify(self, drafts, _, logits):
        """-> the drafts that the target accepts and one token of its own; logits [n + 1, V]."""
        choices = logits.argmax(dim=1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        return choices[:accepted + 1]


class Sampling:
    """stream: a numpy generator, the only source of chance."""

    def __init__(self, temperature, stream):
        self.temperature, self.stream = temperature, stream

    def _probabilities(self, logits):
        return torch.softmax(logits.double() / self.temperature, dim=-1)

    def _draw(self, weights):
        """An index of weights [V], which need not add up to 1."""
        total = weights.cumsum(0)
        index = int(torch.searchsorted(total, total[-1] * self.stream.random(), right=True))
        return min(index, int(weights.nonzero()[-1]))

    def token(self, logits):
        return self._draw(self._probabilities(logits))

    def drafts(self, logits):
        chances = self._probabilities(logits)
        return [self._draw(row) for row in chances], chances

    def verify(self, drafts, chances, logits):
        own = self._probabilities(logits)
        for slot, token in enumerate(drafts):
            if self.stream.random() * chances[slot, token] >= own[slot, token]:
                rest = (own[slot] - chances[slot]).clamp(min=0)
                return [*drafts[:slot], self._draw(rest if rest.any() else own[slot])]  # none: equal but for rounding
        return [*drafts, self._draw(own[len(drafts)])]


# ---- the two loops -----------------------------------------------------------------------------------


def plain(runner, prompt, limit, end_ids, chooser):
    """-> the target's text by itself."""
    runner.forget()
    text, ids = [], prompt
    while len(text) < limit and not (text and text[-1] in end_ids):
        text.append(chooser.token(runner.see(ids)[0][-1]))
        ids = text[-1:]
    return text


def speculate(runner, drafter, prompt, limit, end_ids, chooser):
    """-> text, blocks."""
    runner.forget()
    drafter.forget()
    logits, states = runner.see(prompt)
    drafter.see(states, prompt)
    text, blocks = [chooser.token(logits[-1])], []
    while len(text) < limit and text[-1] not in end_ids:
        anchor = len(prompt) + len(text) - 1
        drafts, chances = drafter.drafts(text[-1], chooser)
        logits, states = runner.see([text[-1], *drafts])
        chosen = chooser.verify(drafts, chances, logits)
        accepted = len(chosen) - 1
        runner.drop(len(drafts) - accepted)
        drafter.see(states[:accepted + 1], [text[-1], *drafts[:accepted]])
        fresh = cut(chosen, limit - len(text), end_ids)
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
