"""Says what a run of this example reached: acceptance before and after, and a bigram drafter's.

    python3 result.py runs/demo     # exit status 1 when the drafter is not clearly better than both

Reads the run folder (metrics.jsonl, config.yaml's drafts through --drafts) and the shards.
"""

import argparse
import json
import os
import sys

import bigram

HERE = os.path.dirname(os.path.abspath(__file__))


def validations(run):
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [line for line in lines if "val_accept_len_walk" in line]


def main():
    parser = argparse.ArgumentParser(description="acceptance of a run, and of a bigram drafter")
    parser.add_argument("run")
    parser.add_argument("--drafts", type=int, default=7, help="drafts per block, block_size - 1")
    args = parser.parse_args()
    found = validations(args.run)
    if len(found) < 2:
        sys.exit(f"{args.run}: no validation before and after training in metrics.jsonl")
    first, best = found[0], max(found[1:], key=lambda line: line["val_accept_len_walk"])
    start, end = first["val_accept_len_walk"], found[-1]["val_accept_len_walk"]
    baseline = bigram.accept_len(os.path.join(HERE, "shards", "train-0.h5"),
                                 os.path.join(HERE, "shards", "val-0.h5"), args.drafts)
    print(f"tokens per block on text the target never saw ({args.drafts} drafts, one token is the target's own):")
    print(f"  before training (step {first['step']}): {start:.3f}")
    print(f"  after training (step {found[-1]['step']}): {end:.3f}")
    print(f"  best (step {best['step']}): {best['val_accept_len_walk']:.3f}")
    print(f"  a bigram drafter: {baseline:.3f}")
    run = os.path.abspath(args.run)
    print(f"results are in {run}")
    print("  metrics.jsonl: numbers of every step; events/: the same for TensorBoard")
    print("  checkpoints/best/: the drafter, ready to serve (model.safetensors, config.json)")
    if not (end > start + 0.2 and end > baseline + 0.2):
        sys.exit("acceptance did not rise clearly")


if __name__ == "__main__":
    main()
