"""Reading the target cache of DeepSpec: manifest.json, samples.idx and shard-*.bin.

samples.idx holds a record of 56 bytes for each sample: its number, its shard, its tokens, and where in the shard five arrays
begin: input_ids int32 [S], attention_mask uint8 [S], loss_mask uint8 [S], target_hidden_states [S, L * H] and
target_last_hidden_states [S, H], which are behind the final norm. States are bf16, or e4m3 or e5m2 codes without a
scale. Layers are outputs of decoder layers from 0; -1 is the embedding. Does not write shards. numpy only.
"""

import os

import numpy as np

from dtrain_tools.documents import InputError, load_json
from dtrain_tools.dumped import check_values, check_vocabulary, make_document, mask_of, refuse, supervised_documents
from dtrain_tools.shards import Float8
from dtrain_tools.tensor_file import e4m3_to_float, e5m2_to_float, float_to_bf16

RECORD = np.dtype([("number", "<u8"), ("shard", "<u4"), ("tokens", "<u4"), ("input_ids", "<u8"),
                   ("attention_mask", "<u8"), ("loss_mask", "<u8"), ("states", "<u8"), ("last", "<u8")])
STATES = {"bfloat16": np.dtype("<u2"), "float8_e4m3fn": np.dtype("u1"), "float8_e5m2": np.dtype("u1")}
WANTED = {"version": 2, "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": RECORD.itemsize}


class DeepspecDump:
    """last_hidden: post_norm, or absent to leave it out. float8: read() gives codes where the cache has e4m3."""

    def __init__(self, folder, hidden_size, last_hidden, float8=False):
        self.folder, self.hidden_size = folder, hidden_size
        self.has_last = last_hidden != "absent"
        self.path = os.path.join(folder, "manifest.json")
        self.manifest = self._read_manifest()
        self.layer_ids = self.manifest["target_layer_ids"]
        self.kind, self.float8 = self.manifest["hidden_dtype"], float8
        self.shards = [self._shard(entry, number) for number, entry in enumerate(self.manifest["shards"])]
        self.index = self._read_index()

    def _read_manifest(self):
        if not os.path.isfile(self.path):
            refuse(self.path, "is missing; a cache is finished when it has its manifest")
        manifest = load_json(self.path)
        for name, value in {**WANTED, "hidden_size": self.hidden_size}.items():
            if manifest.get(name) != value:
                refuse(self.path, f"{name} is {manifest.get(name)!r}; {value!r} is expected"
                       f"{' (the hidden size of --target)' if name == 'hidden_size' else ''}")
        if str(manifest.get("hidden_dtype")) not in STATES:
            refuse(self.path, f"hidden_dtype is {manifest.get('hidden_dtype')!r}; {', '.join(STATES)} are understood")
        ids, shards = manifest.get("target_layer_ids"), manifest.get("shards")
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            refuse(self.path, "target_layer_ids: expected a list of integers")
        if not isinstance(shards, list) or manifest.get("num_shards") != len(shards):
            refuse(self.path, f"num_shards is {manifest.get('num_shards')!r}, which is not the length of shards")
        return manifest

    def _shard(self, entry, number):
        """-> path, of a name that stays in the folder."""
        name = entry.get("file_name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or entry.get("shard_id") != number:
            refuse(self.path, f"shards[{number}]: expected shard_id {number} and a file_name")
        if name != os.path.basename(name) or name in ("", ".", ".."):
            refuse(self.path, f"shards[{number}]: file_name {name!r} leaves the folder")
        path = os.path.join(self.folder, name)
        if not os.path.isfile(path):
            refuse(path, "is missing; manifest.json names it")
        return path

    def _read_index(self):
        path = os.path.join(self.folder, "samples.idx")
        if not os.path.isfile(path):
            refuse(path, "is missing")
        size, count = os.path.getsize(path), self.manifest.get("num_samples")
        if type(count) is not int or size != count * RECORD.itemsize:
            refuse(path, f"has {size} bytes; num_samples of manifest.json is {count!r}, of {RECORD.itemsize} bytes each")
        if count == 0:
            raise InputError(f"{path}: holds no samples")
        index = np.memmap(path, dtype=RECORD, mode="r")
        wrong = np.flatnonzero(index["number"] != np.arange(count, dtype=np.uint64))
        if len(wrong):
            refuse(path, f"record {wrong[0]} is of sample {index['number'][wrong[0]]}: records are not in order")
        return index

    def fingerprint(self):
        return [[os.path.basename(path), os.path.getsize(path)] for path in self.shards] + [self.manifest["num_samples"]]

    def _label(self, number):
        return f"{self.folder}: sample {number}"

    def _map(self, number, name, kind, shape):
        """An array of a sample, mapped; its bytes are known to be there."""
        record = self.index[number]
        if int(record["shard"]) >= len(self.shards):
            refuse(self._label(number), f"is in shard {record['shard']}; there are {len(self.shards)}")
        path, begin = self.shards[int(record["shard"])], int(record[name])
        if begin + int(np.prod(shape, dtype=object)) * kind.itemsize > os.path.getsize(path):
            refuse(self._label(number), f"{name}: ends after {path}, which is cut short or not of this index")
        return np.memmap(path, dtype=kind, mode="r", offset=begin, shape=shape)

    def _tokens(self, number):
        tokens = int(self.index[number]["tokens"])
        if tokens == 0:
            refuse(self._label(number), "has no token")
        return tokens

    def _ids(self, number):
        return np.array(self._map(number, "input_ids", np.dtype("<i4"), (self._tokens(number),)), dtype=np.int64)

    def _states(self, number):
        """-> codes or bits [S, L, H], and of the last hidden state [S, 1, H] or None."""
        tokens, kind, width = self._tokens(number), STATES[self.kind], self.hidden_size
        states = self._map(number, "states", kind, (tokens, len(self.layer_ids), width))
        return states, self._map(number, "last", kind, (tokens, 1, width)) if self.has_last else None

    def list_documents(self, vocab_size, say, masks=None):
        """Every usable document, checked but for the values of its states. -> [DumpedDocument]"""
        documents, unsupervised = [], 0
        for number in range(len(self.index)):
            label, ids = self._label(number), self._ids(number)
            shape = (len(ids),)
            if not (self._map(number, "attention_mask", np.dtype("u1"), shape) == 1).all():
                refuse(label, "attention_mask: not all 1: padding among the tokens")
            mask = mask_of(label, ids, self._map(number, "loss_mask", np.dtype("u1"), shape))
            if not mask.any():
                unsupervised += 1
                continue
            check_vocabulary(label, ids, vocab_size)
            self._states(number)
            if masks:
                masks.add(ids, mask)
            documents.append(make_document(label, label, number, ids, mask))
        return supervised_documents(self.folder, documents, unsupervised, say)

    def _bits(self, states):
        if self.kind == "bfloat16":
            return np.array(states)
        to_float = e4m3_to_float if self.kind == "float8_e4m3fn" else e5m2_to_float
        return float_to_bf16(to_float(states)).reshape(states.shape)  # exact: bf16 has all of their values

    def read(self, document, limit=None):
        """-> ids [S], states (bf16 bits [S, P, H], or Float8), of the first `limit` tokens."""
        states, last = self._states(document.number)
        parts = [states[:limit]] if last is None else [states[:limit], last[:limit]]
        bits = np.concatenate([self._bits(part) for part in parts], axis=1)
        check_values(document.path, bits)
        ids = self._ids(document.number)[:limit]
        if not self.float8 or self.kind != "float8_e4m3fn" or limit is not None:
            return ids, bits
        return ids, Float8(np.array(parts[0]), np.ones(states.shape[:2], dtype=np.float32),
                           None if last is None else bits[:, -1])
