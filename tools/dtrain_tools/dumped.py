"""Documents of dumps that other engines wrote: what is common to all formats. numpy only.

Does not read files; the *_dump.py do. What takes torch tensors needs torch.
"""

import dataclasses
import hashlib

import numpy as np

from dtrain_tools.documents import InputError
from dtrain_tools.shards import document_id

INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")  # types of torch's tensors
FLOATS = ("float32", "bfloat16", "float16")
PIECE_VALUES = 1 << 24     # that are looked at or converted at once
DOCUMENT_TOKENS = 1 << 20  # more than any document has


@dataclasses.dataclass
class DumpedDocument:
    where: str            # DATASET row N, or FILE:LINE
    path: str             # its states, as errors name them
    number: object        # in the dump
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
    return DumpedDocument(where, path, number, key, document_id(f"row {number}", 0, ids, mask), len(ids),
                          np.packbits(mask).tobytes())


def supervised_documents(folder, documents, unsupervised, say):
    """The documents, of which there must be one; unsupervised: how many others were left out."""
    if unsupervised:
        say(f"{unsupervised} documents left out: no supervised token")
    if not documents:
        raise InputError(f"{folder}: no document has a supervised token")
    return documents


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


def tensor_of(path, data, name, dimensions):
    """A tensor of a torch file's dict, without a leading 1."""
    import torch
    tensor = data.get(name)
    if not isinstance(tensor, torch.Tensor):
        refuse(path, f"has no tensor {name}")
    tensor = tensor.detach()
    if tensor.dim() == dimensions + 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != dimensions:
        refuse(path, f"{name}: shape {list(data[name].shape)}; expected {dimensions} dimensions, perhaps with a "
                     "leading 1")
    return tensor


def integers_of(path, data, name):
    """-> int64 [S]."""
    tensor = tensor_of(path, data, name, 1)
    if str(tensor.dtype).removeprefix("torch.") not in INTEGERS:
        refuse(path, f"{name}: {tensor.dtype}; expected integers")
    return tensor.numpy().astype(np.int64)


def mask_in(path, data, ids):
    """loss_mask, whose numbers may be of any kind. -> uint8 [S]"""
    mask = tensor_of(path, data, "loss_mask", 1)
    if str(mask.dtype).removeprefix("torch.") not in (*INTEGERS, *FLOATS, "float64", "bool"):
        refuse(path, f"loss_mask: {mask.dtype}; expected numbers")
    return mask_of(path, ids, mask.double().numpy() if mask.is_floating_point() else mask.numpy())


def planes_of(path, data, planes, tokens, hidden_size):
    """planes: {name: number of planes}. -> tensors [S, planes * H], checked."""
    tensors = [tensor_of(path, data, name, 2) for name in planes]
    for (name, count), tensor in zip(planes.items(), tensors):
        if list(tensor.shape) != [tokens, count * hidden_size]:
            refuse(path, f"{name}: shape {list(tensor.shape)}; expected [{tokens}, {count * hidden_size}] (tokens of "
                         f"input_ids; {count} planes of the target's hidden size {hidden_size})")
        if str(tensor.dtype).removeprefix("torch.") not in FLOATS:
            refuse(path, f"{name}: {tensor.dtype}; expected bf16, fp16 or fp32")
    return tensors


def bits_of(tensors, hidden_size, limit):
    """Tensors of planes_of -> uint16 bf16 bits [S, P, H], of the first `limit` tokens."""
    import torch
    planes = [tensor[:limit].to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
              for tensor in tensors]
    return np.concatenate([plane.reshape(len(plane), -1, hidden_size) for plane in planes], axis=1)
