"""The packed rows that dtrain trains on, in its order, for another program to train on the same.

Owns nothing of dtrain: the rules are those of docs/semantics.md and data/packing.c. Whoever uses this compares the
tokens and valid anchors of each row with the run's metrics.jsonl. Needs numpy and h5py.
"""
import dataclasses
import glob

import h5py
import numpy as np

OPEN_ROWS, ORDER = 64, 2
MASK32 = np.uint64(0xFFFFFFFF)


@dataclasses.dataclass
class Documents:
    """All documents of some shards, in the order of the files."""
    ids: np.ndarray       # int32 [N]
    mask: np.ndarray      # uint8 [N]
    begin: np.ndarray     # int64 [D] first token of each document
    length: np.ndarray    # int64 [D]
    identity: np.ndarray  # uint64 [D]
    states: list          # per shard: uint16 [n, P, H], mapped from the file

    @property
    def tokens(self):
        return len(self.ids)


def read_documents(pattern):
    parts, states, at = [], [], 0
    for path in sorted(glob.glob(str(pattern))):
        with h5py.File(path, "r") as file:
            offsets, values = file["doc_offsets"][:], file["hidden_states"]
            states.append(np.memmap(path, np.uint16, "c", values.id.get_offset(), values.shape))
            parts.append((file["input_ids"][:], file["loss_mask"][:], at + offsets[:-1], np.diff(offsets), file["doc_id"][:]))
            at += int(offsets[-1])
    if not parts:
        raise SystemExit(f"{pattern}: no such shard")
    return Documents(*(np.concatenate(column) for column in zip(*parts)), states)


def mix(a, b):
    z = a + np.uint64(0x9E3779B97F4A7C15) * (b + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def philox(key):
    """The first 64 bits of Philox4x32-10 at counter 0, for each 64-bit key."""
    k0, k1 = key & MASK32, key >> np.uint64(32)
    c = [np.zeros_like(key) for _ in range(4)]
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & MASK32, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & MASK32]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK32, (k1 + np.uint64(0xBB67AE85)) & MASK32
    return c[1] << np.uint64(32) | c[0]


def order_of(identity, seed, epoch):
    with np.errstate(over="ignore"):
        zero = np.zeros_like(identity)
        mixed = mix(mix(zero, np.uint64(seed) + zero), np.uint64(epoch) + zero)
        keys = philox(mix(mix(mixed, identity), np.uint64(ORDER) + zero))
    return np.lexsort((np.arange(len(keys)), keys))


def pack(documents, seq_len, seed, epoch):
    """-> rows, each a list of document numbers: best fit among the rows that are open, the fullest gives way."""
    rows, open_rows = [], []  # open_rows: [row, room] in order of opening
    for document in order_of(documents.identity, seed, epoch).tolist():
        length = int(documents.length[document])
        fitting = [entry for entry in open_rows if entry[1] >= length]
        if fitting:
            entry = min(fitting, key=lambda e: e[1])  # the first of equals
        else:
            if len(open_rows) == OPEN_ROWS:
                open_rows.remove(min(open_rows, key=lambda e: e[1]))
            entry = [len(rows), seq_len]
            rows.append([])
            open_rows.append(entry)
        rows[entry[0]].append(document)
        entry[1] -= length
        if entry[1] == 0:
            open_rows.remove(entry)
    return rows


def training_rows(documents, seq_len, seed, count):
    """The first `count` rows of a run, epoch after epoch."""
    if int(documents.length.max()) > seq_len:
        raise SystemExit(f"a document of {int(documents.length.max())} tokens is longer than the row of {seq_len}")
    rows, epoch = [], 0
    while len(rows) < count:
        rows += pack(documents, seq_len, seed, epoch)
        epoch += 1
    return rows[:count]


def row_indices(documents, row):
    """-> token numbers, document in the row, position in the document: int64 [T] each."""
    spans = [np.arange(documents.length[d]) for d in row]
    return (np.concatenate([documents.begin[d] + span for d, span in zip(row, spans)]),
            np.repeat(np.arange(len(row)), [len(span) for span in spans]), np.concatenate(spans))


def valid_anchors(documents, row):
    """Anchors that dtrain may choose: supervised, and so is the next token of the same document."""
    total = 0
    for d in row:
        mask = documents.mask[documents.begin[d]:documents.begin[d] + documents.length[d]]
        total += int((mask[:-1] & mask[1:]).sum())
    return total
