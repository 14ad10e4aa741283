#!/usr/bin/env python3
"""What float8 shards cost: the same training from bfloat16 shards and from float8 copies of them, with several seeds.

    float8.py --dtrain build/dtrain --config examples/tiny/dflash.yaml --train T.h5 ... --val V.h5 ... --out FOLDER [--seeds 3]
              [--narrow F.h5 ...] [--jobs 1] [--set key=value ...]

Writes the copies (FOLDER/float8-*.h5; --narrow: the same documents as extract.py --planes float8 wrote them), trains both sides
with each seed and scores every checkpoint on the bfloat16 validation shards, since serving has no float8 states. Prints bytes,
accept_len_walk of each, and the mean difference with its 95 % interval (paired by seed, Student's t). --jobs: trainings side by side.
"""

import argparse
import concurrent.futures
import math
import os
import re
import statistics
import subprocess
import sys

import h5py

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tools"))

from acceptance import STUDENT  # noqa: E402
from dtrain_tools.float8 import quantise_bits  # noqa: E402
from dtrain_tools.shards import ShardWriter  # noqa: E402

GIVEN = ("format", "format_version", "dtype")


def copy_shard(source, path):
    """The float8 shard of a bfloat16 one's states."""
    with h5py.File(source, "r") as file:
        attributes = {name: value for name, value in file.attrs.items() if name not in GIVEN}
        offsets, teacher = file["doc_offsets"][:], "teacher_top1" in file
        writer = ShardWriter(path, attributes, offsets[1:] - offsets[:-1], file["doc_id"][:], teacher, float8=True)
        layers = len(attributes["target_layer_ids"])
        for document, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:])):
            columns = [file[name][begin:end] for name in ("teacher_top1", "teacher_top1_logit", "teacher_lse")
                       ] if teacher else None
            writer.write(document, file["input_ids"][begin:end], file["loss_mask"][begin:end],
                         quantise_bits(file["hidden_states"][begin:end], layers), columns)
        writer.finish()
    return path


def run(args, name, seed, train):
    """Trains and scores. -> accept_len_walk on the bf16 validation shards."""
    folder = os.path.join(args.out, f"{name}-{seed}")
    common = [item for value in (*args.set, f"run.seed={seed}") for item in ("--set", value)]
    shards = ["--set", f"data.train=[{', '.join(train)}]", "--set", f"run.dir={folder}"]
    unjudged = ["--set", "data.val=[]", "--set", "validation.every=0"]  # it would need shards of the same type
    with open(f"{folder}.log", "w", encoding="utf-8") as log:
        subprocess.run([args.dtrain, "train", "--config", args.config, *shards, *common, *unjudged],
                       stdout=log, stderr=log, check=True)
    newest = sorted(os.listdir(os.path.join(folder, "checkpoints")))
    newest = [entry for entry in newest if entry.startswith("step-")][-1]
    scored = subprocess.run([args.dtrain, "eval", "--config", args.config, "--checkpoint",
                             os.path.join(folder, "checkpoints", newest), "--set", f"data.val=[{', '.join(args.val)}]",
                             *common], stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(re.search(r"accept_len_walk\s+([0-9.]+)", scored)[1])


def interval(differences):
    """-> mean, half width of the 95 % interval."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, math.nan
    return mean, STUDENT[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))


def main():
    parser = argparse.ArgumentParser(description="training from float8 shards against bfloat16 ones")
    parser.add_argument("--dtrain", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--val", nargs="+", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--narrow", nargs="+", help="float8 shards of the training documents, where they are there")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 11))
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    args.train, args.val = ([os.path.abspath(path) for path in paths] for paths in (args.train, args.val))
    args.out, args.dtrain = os.path.abspath(args.out), os.path.abspath(args.dtrain)

    narrow = [os.path.abspath(path) for path in args.narrow or []] or [
        copy_shard(path, os.path.join(args.out, f"float8-{number}-{os.path.basename(path)}"))
        for number, path in enumerate(args.train)]
    share = sum(map(os.path.getsize, narrow)) / sum(map(os.path.getsize, args.train))
    print(f"bytes of the training shards: {100 * share:.1f} % of bfloat16's", flush=True)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        sides = [(pool.submit(run, args, "bfloat16", seed, args.train), pool.submit(run, args, "float8", seed, narrow))
                 for seed in range(1, args.seeds + 1)]
        differences = []
        for seed, (wide, narrow) in enumerate(sides, 1):
            differences.append(narrow.result() - wide.result())
            print(f"seed {seed}: accept_len_walk {wide.result():.4f} from bfloat16, {narrow.result():.4f} from float8", flush=True)
    mean, half = interval(differences)
    print(f"float8 minus bfloat16: {mean:+.4f} +- {half:.4f} (95 %, {args.seeds} seeds)")


if __name__ == "__main__":
    main()
