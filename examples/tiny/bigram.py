#!/usr/bin/env python3
"""What a bigram table accepts, as the number that a trained drafter has to beat.

    python3 bigram.py --train shards/train-0.h5 --val shards/val-0.h5 --drafts 7

The table holds the most frequent next token in the supervised text of the training shards. From each
anchor it drafts by following the table. accept_len_walk is the same as `dtrain eval` prints: blocks
are walked through each document as decoding would, a -> a + accepted + 1, a draft is accepted when it
is the teacher's top-1, and a block yields its accepted drafts and one more token.
"""

import argparse

import h5py
import numpy as np


def read_documents(paths, *names):
    """-> per document the named datasets."""
    for path in paths:
        with h5py.File(path, "r") as file:
            columns = [file[name][:] for name in names]
            offsets = file["doc_offsets"][:]
            for begin, end in zip(offsets[:-1], offsets[1:]):
                yield [column[begin:end] for column in columns]


def bigram_table(paths):
    with h5py.File(paths[0], "r") as file:
        vocabulary = int(file.attrs["vocab_size"])
    counts = np.zeros((vocabulary, vocabulary), dtype=np.int64)
    for ids, mask in read_documents(paths, "input_ids", "loss_mask"):
        into = mask[1:] == 1
        np.add.at(counts, (ids[:-1][into], ids[1:][into]), 1)
    return counts.argmax(axis=1)


def supervised_runs(mask):
    """(begin, end) of each stretch of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return zip(edges[0::2], edges[1::2])


def accepted_drafts(table, ids, top1, anchor, end, drafts):
    token, accepted = ids[anchor], 0
    while accepted < min(drafts, end - 1 - anchor):
        token = table[token]
        if token != top1[anchor + accepted]:
            break
        accepted += 1
    return accepted


def walk(table, paths, drafts):
    """-> blocks, tokens: every stretch of supervised text decoded block by block."""
    blocks = tokens = 0
    for ids, mask, top1 in read_documents(paths, "input_ids", "loss_mask", "teacher_top1"):
        for anchor, end in supervised_runs(mask.astype(np.int8)):
            while anchor + 1 < end:
                accepted = accepted_drafts(table, ids, top1, anchor, end, drafts)
                blocks, tokens, anchor = blocks + 1, tokens + accepted + 1, anchor + accepted + 1
    return blocks, tokens


def accept_len(train, val, drafts):
    """accept_len_walk on the shard `val` of a table made from the shard `train`."""
    blocks, tokens = walk(bigram_table([train]), [val], drafts)
    return tokens / blocks


def main():
    parser = argparse.ArgumentParser(description="accept_len_walk of a bigram table")
    parser.add_argument("--train", nargs="+", required=True, help="shards whose text fills the table")
    parser.add_argument("--val", nargs="+", required=True, help="shards that are walked")
    parser.add_argument("--drafts", type=int, default=7, help="drafted tokens in a block (block size - 1)")
    args = parser.parse_args()
    blocks, tokens = walk(bigram_table(args.train), args.val, args.drafts)
    print(f"bigram accept_len_walk {tokens / blocks:.4f}  ({blocks} blocks)")


if __name__ == "__main__":
    main()
