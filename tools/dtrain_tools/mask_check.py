"""Masks that are shifted by a token, found from many documents: where supervised stretches begin and end.

A stretch is an answer. It ends with the token that ends a turn, or right before it, and in conversations the token before
it is the last one of a header that is the same everywhere. A mask shifted to the right leaves out an
answer's first token and reaches beyond its end; one shifted to the left takes the header's last token in
and leaves the end out. Where answers have no such end, nothing can be said and nothing is.
"""

import collections
import os

import numpy as np

from dtrain_tools.documents import InputError, load_json

FEWEST = 8       # stretches that a verdict needs
CONSTANT = 0.9   # share of stretches that must agree


def end_tokens(folder):
    """Ids that end a turn, by config.json and generation_config.json of a target directory."""
    ids = set()
    for name in ("config.json", "generation_config.json"):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        config = load_json(path)
        for part in (config, config.get("text_config") or {}):
            value = part.get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return ids


class MaskCheck:
    def __init__(self, ends):
        self.ends = np.array(sorted(ends), dtype=np.int64)
        self.before, self.first = collections.Counter(), collections.Counter()
        self.plain = collections.Counter()  # tokens that no stretch has
        self.stretches = self.documents = self.late = self.early = 0

    def add(self, ids, mask):
        self.documents += 1
        self.plain.update(set(ids[mask == 0].tolist()))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(np.int8)))
        for begin, end in edges.reshape(-1, 2):
            if begin < 2 or end - begin < 3 or end >= len(ids):
                continue
            self.stretches += 1
            self.before[int(ids[begin - 1])] += 1
            self.first[int(ids[begin])] += 1
            last_two = np.isin(ids[end - 2:end], self.ends)
            self.late += bool(last_two[0] and not last_two[1])
            self.early += bool(np.isin(ids[end], self.ends) and not last_two[1])

    def _share(self, count):
        return count / self.stretches

    def refuse_shifted(self):
        if self.stretches < FEWEST:
            return
        (before, before_count), (first, first_count) = (counter.most_common(1)[0]
                                                        for counter in (self.before, self.first))
        if self._share(self.late) >= CONSTANT and self._share(before_count) < CONSTANT:
            self._refuse("right", "reaches one token beyond the end of the answer, and before it stands an answer's "
                         "first token")
        if (self._share(self.early) >= CONSTANT and self._share(first_count) >= CONSTANT and
                self._share(before_count) >= CONSTANT and self.plain[first] >= CONSTANT * self.documents):
            self._refuse("left", f"begins with token {first}, which ends headers, and leaves out the token that ends "
                         "the answer")

    def _refuse(self, side, what):
        raise InputError(f"loss_mask is shifted to the {side} by a token: in {CONSTANT:.0%} or more of "
                         f"{self.stretches} supervised stretches the mask {what}. --unverified masks takes it as it is")
