"""Reading hidden states that Model-Optimizer's collect_hidden_states scripts wrote: FOLDER/CONVERSATION.pt.

Dicts of input_ids [S], aux_hidden_states [S, L * H], hidden_states [S, H] and, in newer ones, loss_mask [S]. Nothing in them
says which script it was: that for Transformers counts layers as outputs and leaves hidden_states behind the
final norm; that for vLLM counts as vLLM does and writes it before the norm. Files are loaded with weights_only.
Masks that a file lacks come from JSON lines {"input_ids", "loss_mask"} with its tokens. Does not write shards. Needs torch.
"""

import hashlib
import os

import numpy as np

from dtrain_tools.documents import InputError
from dtrain_tools.dumped import (DOCUMENT_TOKENS, bits_of, check_values, check_vocabulary, integers_of, make_document,
                                 mask_in, mask_of, planes_of, refuse, supervised_documents)
from dtrain_tools.torch_file import load_torch_file


def masks_by_tokens(rows):
    """rows: (where, number, ids, mask). -> {digest of ids: mask}"""
    masks = {}
    for where, _, ids, mask in rows:
        key = hashlib.sha256(ids.tobytes()).digest()
        if key in masks and not np.array_equal(masks[key], mask):
            raise InputError(f"{where}: the same input_ids as an earlier line, but another loss_mask")
        masks[key] = mask
    return masks


class ModeloptDump:
    def __init__(self, folder, layers, hidden_size, last_hidden, masks=None):
        self.folder, self.layers, self.hidden_size, self.last_hidden = folder, layers, hidden_size, last_hidden
        self.masks = masks
        names = sorted(os.path.relpath(os.path.join(place, name), folder)
                       for place, _, names in os.walk(folder) for name in names if name.endswith(".pt"))
        self.paths = [os.path.join(folder, name) for name in names]
        if not self.paths:
            raise InputError(f"{folder}: no .pt in it")

    def fingerprint(self):
        return [[os.path.relpath(path, self.folder), os.path.getsize(path)] for path in self.paths]

    def _load(self, path):
        return load_torch_file(path, (self.layers + 1) * self.hidden_size * 4 * DOCUMENT_TOKENS)

    def _mask(self, path, data, ids):
        if "loss_mask" in data:
            return mask_in(path, data, ids)
        if self.masks is None:
            refuse(path, 'has no tensor loss_mask; give one with --documents, a file of lines {"input_ids", "loss_mask"}')
        mask = self.masks.get(hashlib.sha256(ids.tobytes()).digest())
        if mask is None:
            refuse(path, "has no tensor loss_mask, and no line of --documents has its input_ids")
        return mask_of(path, ids, mask)

    def _tensors(self, path, data, tokens):
        wanted = {"aux_hidden_states": self.layers}
        if self.last_hidden != "absent":
            wanted["hidden_states"] = 1
        return planes_of(path, data, wanted, tokens, self.hidden_size)

    def list_documents(self, vocab_size, say, masks=None):
        """Every usable document, checked but for the values of its states. -> [DumpedDocument]"""
        documents, unsupervised, whole = [], 0, 0
        for path in self.paths:
            data = self._load(path)
            ids = integers_of(path, data, "input_ids")
            mask = self._mask(path, data, ids)
            if not mask.any():
                unsupervised += 1
                continue
            whole += bool(mask.all())
            check_vocabulary(path, ids, vocab_size)
            self._tensors(path, data, len(ids))
            if masks:
                masks.add(ids, mask)
            documents.append(make_document(path, path, os.path.relpath(path, self.folder), ids, mask))
        if whole:
            say(f"{whole} documents in which every token is supervised, the prompts too: dumped without "
                "--answer-only-loss")
        return supervised_documents(self.folder, documents, unsupervised, say)

    def read(self, document, limit=None):
        """-> ids [S], uint16 bf16 bits [S, P, H], of the first `limit` tokens."""
        data = self._load(document.path)
        ids = integers_of(document.path, data, "input_ids")
        bits = bits_of(self._tensors(document.path, data, len(ids)), self.hidden_size, limit)
        check_values(document.path, bits)
        return ids[:limit], bits
