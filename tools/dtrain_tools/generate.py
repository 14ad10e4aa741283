"""The target answers prompts: batches of similar length, a KV cache, greedy or sampled.

Generated ids are kept as they come out of the model. Which prompts run together does not change what
is drawn: every document has its own stream of random numbers. The cache is allocated once, and on a GPU
nothing waits for the device between two looks at which documents have ended; those then leave the batch.
"""

import contextlib
import hashlib

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LOOK_EVERY = {"cpu": 1, "cuda": 16}     # tokens between two looks; a look waits for the device
KEEP_ABOVE = {"cpu": 1.0, "cuda": 0.85}  # while this share of the rows goes on, none is taken out


def random_stream(seed, key, sample):
    digest = hashlib.sha256(f"{seed}\0{key}\0{sample}".encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))


def choose(logits, temperature, drawn):
    """Next token [n] of each row of fp32 logits [n, V]; drawn: uniform numbers [n], unused when greedy."""
    if temperature <= 0:
        return logits.argmax(dim=1)
    total = torch.softmax(logits / temperature, dim=1, dtype=torch.float64).cumsum(dim=1)
    picked = torch.searchsorted(total, (drawn * total[:, -1])[:, None])[:, 0]
    return picked.clamp(max=logits.shape[1] - 1)


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer in buffers with room for every token to come: [n, heads, room, head_dim]."""

    def __init__(self, room):
        super().__init__()
        self.room, self.length, self.buffers = room, 0, None

    def update(self, key_states, value_states, *_args, **_kwargs):
        if self.buffers is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.buffers = [some.new_empty(*some.shape[:2], self.room, some.shape[3])
                            for some in (key_states, value_states)]
        begin, self.length = self.length, self.length + key_states.shape[2]
        for buffer, some in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, begin:self.length] = some
        return self._view()

    def _view(self):
        self.keys, self.values = (buffer[:, :, :self.length] for buffer in self.buffers)
        return self.keys, self.values

    def reorder_cache(self, rows):
        rows = rows.to(self.buffers[0].device)  # layers of a spread model are not all on one device
        for at, buffer in enumerate(self.buffers):
            kept = buffer.new_empty(len(rows), *buffer.shape[1:])
            torch.index_select(buffer[:, :, :self.length], 0, rows, out=kept[:, :, :self.length])
            self.buffers[at] = kept
        self._view()


def grouped_attention(sdpa, module, query, key, value, attention_mask, scaling=None, **options):
    """Attention of one query token without a copy of the keys for every head that shares them.

    query [n, heads, 1, d]; key, value [n, kv heads, length, d]. The heads of a group become its queries.
    """
    n, heads, tokens, dim = query.shape
    groups = heads // key.shape[1]
    special = [name for name, setting in options.items() if setting is not None and name in ("position_bias", "cache")]
    if tokens > 1 or groups == 1 or attention_mask is None or special:
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **options)
    query = query.reshape(n, heads // groups, groups, dim)
    mask = attention_mask.expand(n, heads // groups, groups, key.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(n, 1, heads, dim), None


@contextlib.contextmanager
def attention_in_groups(device):
    """On a GPU without cuDNN's attention, which would plan anew for every length."""
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *inputs, **options: grouped_attention(usual, *inputs, **options)
    try:
        with kernels if device == "cuda" else contextlib.nullcontext():
            yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


class Generation:
    """One batch. Prompts are padded on the left; positions count real tokens."""

    def __init__(self, target, prompts, streams, end_ids, limit, temperature):
        self.target, self.limit, self.temperature = target, limit, temperature
        self.end_ids = frozenset(end_ids)
        device = target.device
        self.ends = torch.tensor(sorted(end_ids), dtype=torch.long, device=device)
        self.answers = [None] * len(prompts)
        self.length = longest = max(map(len, prompts))
        mask = np.zeros((len(prompts), longest + limit), dtype=np.int64)
        tokens = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            mask[row, longest - len(prompt):] = 1
            tokens[row, longest - len(prompt):] = prompt
        # By row, of which there are fewer and fewer:
        self.running = list(range(len(prompts)))                                  # documents
        self.mask = torch.from_numpy(mask).to(device)                             # [n, longest + limit]
        self.tokens = torch.from_numpy(tokens).to(device)                         # [n, 1], at first the prompts
        self.text = torch.zeros(len(prompts), limit, dtype=torch.long, device=device)
        self.ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.drawn = None                                                         # [n, limit]
        if temperature > 0:
            self.drawn = torch.from_numpy(np.stack([stream.random(limit) for stream in streams])).to(device)
        self.cache = DynamicCache(config=target.decoder.config)
        self.cache.layers = [RoomyLayer(longest + limit) if type(layer) is DynamicLayer else layer
                             for layer in self.cache.layers]
        # A mask that is handed over in its final shape costs no look at its values. Layers with windows or
        # recurrent states make their own from the plain one.
        self.plain = getattr(target.decoder.config, "_attn_implementation", None) == "sdpa" and bool(
            self.cache.layers) and all(isinstance(layer, RoomyLayer) for layer in self.cache.layers)

    @torch.inference_mode()
    def run(self):
        """-> answers: ids of each, the end token included when there was one."""
        device = self.target.device.type
        with attention_in_groups(device):
            for number in range(self.limit):
                nexts = self._next(number)
                self.text[:, number] = nexts
                self.ended |= torch.isin(nexts, self.ends)
                self.tokens = nexts[:, None]
                last = number + 1 == self.limit
                if last or (number + 1) % LOOK_EVERY.get(device, 16) == 0:
                    if not self._look(number + 1, last, KEEP_ABOVE.get(device, 0.85)):
                        break
        return self.answers

    def _next(self, number):
        mask = self.mask[:, :self.length + number]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0) if number == 0 else mask.sum(dim=1, keepdim=True) - 1
        if self.plain and number > 0:
            mask = mask[:, None, None].bool()
        out = self.target.decoder(input_ids=self.tokens, attention_mask=mask, position_ids=positions,
                                  past_key_values=self.cache, use_cache=True)
        logits = self.target.logits(out.last_hidden_state[:, -1])
        self.mask[:, self.length + number] = 1
        return choose(logits, self.temperature, None if self.drawn is None else self.drawn[:, number])

    def _look(self, count, last, keep_above):
        """Takes out the documents that have ended. -> whether any goes on."""
        going = (~self.ended).nonzero()[:, 0].tolist()
        if not last and len(going) >= keep_above * len(self.running):
            return True
        stay = set() if last else set(going)
        text = self.text[:, :count].tolist()
        for row, document in enumerate(self.running):
            if row not in stay:
                self.answers[document] = self._cut(text[row])
        if stay:
            self._keep_rows(going)
        return bool(stay)

    def _cut(self, text):
        """Up to the end token."""
        for at, token in enumerate(text):
            if token in self.end_ids:
                return text[:at + 1]
        return text

    def _keep_rows(self, stay):
        rows = torch.tensor(stay, device=self.target.device)
        self.cache.reorder_cache(rows)  # also known to layers with recurrent states
        self.running = [self.running[row] for row in stay]
        for name in ("mask", "tokens", "text", "ended", "drawn"):
            values = getattr(self, name)
            setattr(self, name, None if values is None else values[rows])
