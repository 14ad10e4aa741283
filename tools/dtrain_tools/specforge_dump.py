"""Reading hidden states that SpecForge wrote to disk: a torch file a document, perhaps compressed.

FOLDER/rows_A-B/data_N.ckpt or .ckpt.gz, dicts of input_ids, loss_mask and, for EAGLE-3, aux_hidden_state
[1, S, L * H] and hidden_state [1, S, H] (behind the final norm); for DFlash hidden_states [1, S, L * H] and no teacher;
for DSpark also target_last_hidden_states [1, S, H]. The leading 1 may be absent. Files are loaded with weights_only,
so that nothing in them is run. Does not write shards. Needs torch.
"""

import os
import re

from dtrain_tools.documents import InputError
from dtrain_tools.dumped import (DOCUMENT_TOKENS, bits_of, check_values, check_vocabulary, integers_of, make_document,
                                 mask_in, planes_of, refuse, supervised_documents)
from dtrain_tools.torch_file import load_torch_file

NAME = re.compile(r"data_(\d+)\.ckpt(\.gz)?$")
LAST_OF = {"aux_hidden_state": "hidden_state", "hidden_states": "target_last_hidden_states"}  # layers: last


class SpecforgeDump:
    """layers: planes of the layers; last_hidden: as in shards, of what a file must hold beside them."""

    def __init__(self, folder, layers, hidden_size, last_hidden):
        self.folder, self.layers, self.hidden_size, self.last_hidden = folder, layers, hidden_size, last_hidden
        self.files = self._find_files()

    def _find_files(self):
        """-> {number: path}, ascending."""
        files = {}
        for place, _, names in os.walk(self.folder):
            for name in names:
                match, path = NAME.fullmatch(name), os.path.join(place, name)
                if match and files.setdefault(int(match[1]), path) != path:
                    refuse(path, f"the same document as {files[int(match[1])]}; remove one of them")
        if not files:
            raise InputError(f"{self.folder}: no data_N.ckpt or data_N.ckpt.gz in it")
        return dict(sorted(files.items()))

    def fingerprint(self):
        return [[os.path.relpath(path, self.folder), os.path.getsize(path)] for path in self.files.values()]

    def _load(self, path):
        return load_torch_file(path, (self.layers + 1) * self.hidden_size * 4 * DOCUMENT_TOKENS)

    def _states(self, path, data, tokens):
        """-> the tensors of a document, layers [S, L * H] and unless absent last [S, H], checked."""
        layers = next((name for name in LAST_OF if name in data), None)
        if layers is None:
            refuse(path, f"has none of {', '.join(LAST_OF)}; it has {', '.join(map(str, data))}")
        last, planes = LAST_OF[layers], {layers: self.layers}
        if self.last_hidden != "absent":
            if last not in data:
                refuse(path, f"has no {last}: there is no teacher; with --last-hidden absent, only ce_data can be "
                             "trained")
            planes[last] = 1
        elif last in data:
            refuse(path, f"has {last}, but --last-hidden is absent")
        return planes_of(path, data, planes, tokens, self.hidden_size)

    @staticmethod
    def _check_positions(path, data, tokens):
        """A text's positions count up; those of images do not, and shards have no place for them."""
        import torch
        positions = data.get("position_ids")
        if positions is not None and not (isinstance(positions, torch.Tensor) and positions.shape[-1:] == (tokens,) and
                                          (positions == torch.arange(tokens)).all()):
            refuse(path, "position_ids: not 0, 1, 2, ...: a document with images, which shards cannot hold")

    def list_documents(self, vocab_size, say, masks=None):
        """Every usable document, checked but for the values of its states. -> [DumpedDocument]"""
        documents, unsupervised = [], 0
        for number, path in self.files.items():
            data = self._load(path)
            ids = integers_of(path, data, "input_ids")
            mask = mask_in(path, data, ids)
            if not mask.any():
                unsupervised += 1
                continue
            check_vocabulary(path, ids, vocab_size)
            self._states(path, data, len(ids))
            self._check_positions(path, data, len(ids))
            if masks:
                masks.add(ids, mask)
            documents.append(make_document(path, path, number, ids, mask))
        return supervised_documents(self.folder, documents, unsupervised, say)

    def read(self, document, limit=None):
        """-> ids [S], uint16 bf16 bits [S, P, H], of the first `limit` tokens."""
        path, data = document.path, self._load(document.path)
        ids = integers_of(path, data, "input_ids")
        bits = bits_of(self._states(path, data, len(ids)), self.hidden_size, limit)
        check_values(path, bits)
        return ids[:limit], bits
