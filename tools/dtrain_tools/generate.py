"""The target answers prompts: batches of similar length, a KV cache, greedy or sampled.

Generated ids are kept as they come out of the model. Which prompts run together does not change what
is drawn: every document has its own stream of random numbers. Documents that end leave the batch.
"""

import hashlib

import numpy as np
import torch
from transformers import DynamicCache


def random_stream(seed, key, sample):
    digest = hashlib.sha256(f"{seed}\0{key}\0{sample}".encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))


def choose(logits, temperature, streams):
    """Next token of each row of fp32 logits [n, V]."""
    if temperature <= 0:
        return logits.argmax(dim=1).tolist()
    total = torch.softmax(logits.double() / temperature, dim=1).cumsum(dim=1)
    drawn = torch.tensor([stream.random() for stream in streams], device=logits.device, dtype=torch.float64)
    picked = (total < (drawn * total[:, -1])[:, None]).sum(dim=1)
    return picked.clamp(max=logits.shape[1] - 1).tolist()


class Generation:
    """One batch. Prompts are padded on the left; positions count real tokens."""

    def __init__(self, target, prompts, streams, end_ids, limit, temperature):
        self.target, self.end_ids, self.limit, self.temperature = target, frozenset(end_ids), limit, temperature
        self.streams = streams
        self.answers = [[] for _ in prompts]
        self.running = list(range(len(prompts)))
        longest = max(map(len, prompts))
        self.mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        self.tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self.mask[row, longest - len(prompt):] = 1
            self.tokens[row, longest - len(prompt):] = torch.tensor(prompt)
        self.mask, self.tokens = self.mask.to(target.device), self.tokens.to(target.device)
        self.cache = DynamicCache(config=target.decoder.config)

    @torch.inference_mode()
    def run(self):
        """-> answers: ids of each, the end token included when there was one."""
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
        while True:
            out = self.target.decoder(input_ids=self.tokens, attention_mask=self.mask, position_ids=positions,
                                      past_key_values=self.cache, use_cache=True)
            logits = self.target.logits(out.last_hidden_state[:, -1])
            nexts = choose(logits, self.temperature, [self.streams[d] for d in self.running])
            positions = positions[:, -1:] + 1
            stay = self._append(nexts)
            if not stay:
                return self.answers
            positions = self._keep_rows(stay, nexts, positions)

    def _append(self, nexts):
        """-> rows that go on."""
        stay = []
        for row, (document, token) in enumerate(zip(self.running, nexts)):
            self.answers[document].append(token)
            if token not in self.end_ids and len(self.answers[document]) < self.limit:
                stay.append(row)
        return stay

    def _keep_rows(self, stay, nexts, positions):
        device = self.target.device
        if len(stay) < len(self.running):
            rows = torch.tensor(stay, device=device)
            self.cache.reorder_cache(rows)  # also known to layers with recurrent states
            self.mask, positions = self.mask[rows], positions[rows]
            self.running = [self.running[row] for row in stay]
        self.tokens = torch.tensor([[nexts[row]] for row in stay], device=device)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(stay), 1)], dim=1)
        return positions
