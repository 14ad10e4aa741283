"""Documents of dumps that other engines wrote: what is common to all formats. numpy only.

Does not read files; speculators_dump.py and specforge_dump.py do.
"""

import dataclasses
import hashlib

import numpy as np

from dtrain_tools.documents import InputError
from dtrain_tools.shards import document_id

PIECE_VALUES = 1 << 24   # that are looked at or converted at once


@dataclasses.dataclass
class DumpedDocument:
    where: str            # DATASET row N, or FILE:LINE
    path: str             # its states
    key: str              # of the split: equal documents are held out together
    identity: int
    tokens: int
    mask_bits: bytes

    @property
    def mask(self):
        return np.unpackbits(np.frombuffer(self.mask_bits, dtype=np.uint8), count=self.tokens)


def refuse(path, what, cause=None):
    raise InputError(f"{path}: {what}") from cause


def make_document(where, path, number, ids, mask):
    """number: of the document in the dump."""
    key = hashlib.sha256(ids.tobytes()).hexdigest()[:24]
    return DumpedDocument(where, path, key, document_id(f"row {number}", 0, ids, mask), len(ids),
                          np.packbits(mask).tobytes())


def check_vocabulary(where, ids, vocab_size):
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        refuse(where, f"token id {bad[0]} is outside the vocabulary of {vocab_size}")


def check_values(path, bits):
    """Refuses states that no model computes. bits: uint16 bf16 bits [S, P, H]."""
    rows = max(1, PIECE_VALUES // max(1, bits[0].size))
    for first in range(0, len(bits), rows):
        _check_piece(path, bits[first:first + rows], first)


def _check_piece(path, bits, first):
    bad = (bits & 0x7F80) == 0x7F80
    if bad.any():
        row, plane, column = (int(at) for at in np.argwhere(bad)[0])
        refuse(path, f"hidden_states: token {first + row}, plane {plane}, column {column}: NaN or infinity")
    zero = ~(bits & 0x7FFF).any(axis=2)
    if zero.any():
        row, plane = (int(at) for at in np.argwhere(zero)[0])
        refuse(path, f"hidden_states: token {first + row}, plane {plane}: all zero: the state was never computed "
                     "(extraction needs prefix caching switched off)")


def mask_of(where, ids, mask):
    """Checked. -> uint8 [S]."""
    mask = np.asarray(mask)
    if len(mask) != len(ids):
        refuse(where, f"{len(ids)} input_ids but {len(mask)} loss_mask values")
    if not np.isin(mask, (0, 1)).all():
        refuse(where, f"loss_mask holds {mask[~np.isin(mask, (0, 1))][0]}; only 0 and 1 are allowed")
    return mask.astype(np.uint8)
