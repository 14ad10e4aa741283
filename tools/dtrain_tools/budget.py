"""Batches by a token budget, and what happens when memory runs out.

Documents of similar length run together, longest first, so little is padding and the largest batch
comes first. When a batch does not fit, the budget is halved, the batch is cut accordingly and the work
goes on with the smaller budget: it does not fall to one document at a time.
"""

import torch

PADDING = 0.05  # a batch ends where it would have more than this share, once it holds a quarter of the budget


class Budget:
    def __init__(self, tokens, say):
        self.tokens, self.say = tokens, say

    def _take(self, order, at, length_of):
        """The next documents that fit into the budget with little padding; at least one."""
        longest, real = length_of(order[at]), 0
        for count, item in enumerate(order[at:], 1):
            real += length_of(item)
            padded = count * longest
            much = padded - real > PADDING * padded and 4 * padded > self.tokens
            if count > 1 and (padded > self.tokens or much):
                return order[at:at + count - 1]
        return order[at:]

    def run(self, items, length_of, work):
        """work(group) for groups that cover every item once; yields (group, result)."""
        order = sorted(items, key=length_of, reverse=True)
        at = 0
        while at < len(order):
            group = self._take(order, at, length_of)
            try:
                result = work(group)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                result = None
            if result is None:  # outside of `except`, so that nothing holds the failed batch's tensors
                self._halve(len(group), length_of(group[0]))
                continue
            at += len(group)
            yield group, result

    def _halve(self, documents, longest):
        if documents == 1:
            raise MemoryError(f"out of memory on a single document of {longest} tokens")
        self.tokens = max(min(self.tokens, documents * longest) // 2, longest)
        self.say(f"out of memory with {documents} documents, {documents * longest} tokens; going on with at most "
                 f"{self.tokens} tokens in a batch")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error):
    """CUDA's out of memory, and torch's or Python's on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return "out of memory" in text or "can't allocate memory" in text
