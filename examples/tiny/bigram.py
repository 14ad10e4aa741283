"""What a bigram drafter would accept on the same validation documents: the line a drafter must beat.

    python3 bigram.py --train shards/train-0.h5 --val shards/val-0.h5 --drafts 7

The drafter knows one token: after x it proposes the token that followed x most often in what the target
wrote in the training documents, then the most frequent one after that, and so on. Verified as decoding
does it: a draft counts while it is the target's own greedy choice (teacher_top1), the target adds one
token, and the next block starts behind it. Documents, start positions and the mean (tokens per block,
the target's own token included) are those of dtrain's accept_len_walk. Needs numpy and h5py.
"""

import argparse

import h5py
import numpy as np


def documents(path):
    """(ids, mask, teacher_top1) of each document of a shard."""
    with h5py.File(path, "r") as file:
        offsets = file["doc_offsets"][:]
        columns = [file[name][:] for name in ("input_ids", "loss_mask", "teacher_top1")]
    for begin, end in zip(offsets[:-1], offsets[1:]):
        yield [column[begin:end] for column in columns]


def most_frequent_next(path):
    """next[x]: the token that most often follows x at supervised positions; the lowest id of equals."""
    counts = {}
    for ids, mask, _ in documents(path):
        for before, after in zip(ids[:-1][mask[1:] == 1], ids[1:][mask[1:] == 1]):
            row = counts.setdefault(int(before), {})
            row[int(after)] = row.get(int(after), 0) + 1
    return {x: min(row, key=lambda y: (-row[y], y)) for x, row in counts.items()}


def accepted(table, ids, mask, top1, anchor, drafts):
    """Leading drafts of the block at `anchor` that are the target's choice, within the supervised run."""
    token = int(ids[anchor])
    for k in range(1, drafts + 1):
        if anchor + k >= len(ids) or not mask[anchor + k]:
            return k - 1
        token = table.get(token, -1)
        if token != top1[anchor + k - 1]:
            return k - 1
    return drafts


def walk(table, path, drafts):
    """Blocks and tokens when decoding jumps over what it accepts."""
    blocks = tokens = 0
    for ids, mask, top1 in documents(path):
        starts = np.flatnonzero((mask == 1) & (np.r_[0, mask[:-1]] == 0))
        for anchor in starts:
            while anchor + 1 < len(ids) and mask[anchor] and mask[anchor + 1]:
                taken = accepted(table, ids, mask, top1, anchor, drafts)
                blocks, tokens = blocks + 1, tokens + taken + 1
                anchor += taken + 1
    return blocks, tokens


def accept_len(train, val, drafts):
    blocks, tokens = walk(most_frequent_next(train), val, drafts)
    return tokens / blocks


def main():
    parser = argparse.ArgumentParser(description="acceptance of a bigram drafter")
    parser.add_argument("--train", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--drafts", type=int, required=True, help="drafts per block, block_size - 1")
    args = parser.parse_args()
    print(f"{accept_len(args.train, args.val, args.drafts):.3f}")


if __name__ == "__main__":
    main()
