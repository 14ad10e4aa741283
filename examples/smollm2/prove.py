#!/usr/bin/env python3
"""The whole way on a real model: check, train, score, export, decode; then break things on purpose.

    prove.py --dtrain build/dtrain --features OUT/features --model DIR|--gguf FILE --out RESULTS

Proves that what was trained is what a decoder accepts: `dtrain eval`'s walk over held-out documents and
real speculative decoding of the same texts must agree block by block. Then five mutants, each a fault
that trainers have shipped, made by editing the export (layer ids, rotary theta, window) or the shards
(norm applied twice, labels one late): each must lose acceptance. Prints one table. Needs h5py,
safetensors, torch and transformers.
"""
import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

import h5py
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
DECODE = HERE.parent.parent / "tools" / "decode.py"


class Results:
    """Lines of the table, printed and written as they come."""

    def __init__(self, path):
        self.file = open(path, "w")

    def append(self, line):
        for out in (sys.stdout, self.file):
            print(f"{line[0]}: {line[1]}", file=out, flush=True)


def run(command, log, check=True):
    """Runs a command, keeps its output in a log file, returns (status, output)."""
    result = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)
    log.write_text(" ".join(str(word) for word in command) + "\n" + result.stdout)
    if check and result.returncode != 0:
        sys.exit(f"{log}: exit status {result.returncode}\n{result.stdout[-3000:]}")
    return result.returncode, result.stdout


def dtrain_sets(args, val):
    """The example's config with this machine's paths."""
    sets = {"run.dir": args.out / "run", "target.path": args.features / "target",
            "data.train": args.features / "train-*.h5", "data.val": val}
    words = []
    for key, value in sets.items():
        words += ["--set", f"{key}={pathlib.Path(value).resolve()}"]
    for extra in args.set:
        words += ["--set", extra]
    return ["--config", HERE / "smollm2.yaml", *words]


def evaluate(args, val, name):
    """-> (accept_len_walk, blocks by (document, anchor)) of the best checkpoint on a shard."""
    blocks = args.out / f"eval-{name}.jsonl"
    _, text = run([args.dtrain, "eval", *dtrain_sets(args, val), "--checkpoint",
                   args.out / "run/checkpoints/best", "--served", "--blocks", blocks],
                  args.out / f"eval-{name}.log")
    return float(re.search(r"accept_len_walk\s+([\d.]+)", text)[1]), read_blocks(blocks)


def read_blocks(path):
    lines = [json.loads(line) for line in open(path)]
    return {(line["doc_id"], line["anchor"]): line["accepted"] for line in lines}


def tokens_per_block(blocks):
    return sum(blocks.values()) / len(blocks) + 1


def decode(args, drafter, name, documents):
    """-> (blocks by (document, anchor), last line) of real speculative decoding of held-out documents."""
    blocks = args.out / f"decode-{name}.jsonl"
    model = ["--model", args.model] if args.model else ["--gguf", args.gguf]
    _, text = run([sys.executable, DECODE, *model, "--drafter", drafter, "--shard",
                   args.features / "val-00000.h5", "--limit", documents, "--dtype", "float32",
                   "--device", args.device, "--bf16-features", "--blocks-out", blocks],
                  args.out / f"decode-{name}.log", check=False)
    found = read_blocks(blocks)
    if not found:
        sys.exit(f"decode-{name}: no blocks\n{text[-3000:]}")
    return found, text.strip().splitlines()[-1]


def edited_export(args, name, change):
    """A copy of the export whose config.json went through `change`."""
    folder = args.out / f"drafter-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(args.out / "drafter", folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def next_layer_ids(config):
    inner = config["dflash_config"]
    inner["target_layer_ids"] = [i + 1 for i in inner["target_layer_ids"]]


def other_theta(config):
    config["rope_theta"] = config["rope_theta"] / 10


def window_one_block_off(config):
    config["sliding_window"] -= config["block_size"]


def to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def edited_shard(args, name, change):
    """A copy of the validation shard that went through `change(file)`, without checksums."""
    path = args.out / f"val-{name}.h5"
    shutil.copy(args.features / "val-00000.h5", path)
    with h5py.File(path, "r+") as file:
        if "doc_crc32c" in file:
            del file["doc_crc32c"]
        change(file)
    return path


def norm_twice(args):
    """The shard already holds normed states and says pre_norm, so that the trainer norms again."""
    from safetensors.numpy import load_file
    config = json.loads((args.features / "target/config.json").read_text())
    try:
        weight = load_file(str(args.features / "target/head.safetensors"))["norm.weight"]
    except TypeError:  # bfloat16, which numpy does not know
        from safetensors.torch import load_file as load_torch
        weight = load_torch(str(args.features / "target/head.safetensors"))["norm.weight"].float().numpy()

    def change(file):
        last = to_float(file["hidden_states"][:, -1, :])
        scale = 1 / np.sqrt((last**2).mean(axis=1, keepdims=True) + config["rms_norm_eps"])
        file["hidden_states"][:, -1, :] = to_bf16(last * scale * weight)
    return change


def labels_one_late(file):
    """Token t stands where t + 1 stood: every label comes one position late."""
    offsets = file["doc_offsets"][:]
    ids, mask = file["input_ids"][:], file["loss_mask"][:]
    for begin, end in zip(offsets[:-1], offsets[1:]):
        ids[begin:end] = np.roll(ids[begin:end], 1)
        mask[begin:end] = np.roll(mask[begin:end], 1)
        mask[begin] = 0
    file["input_ids"][:], file["loss_mask"][:] = ids, mask


def validation_rise(args):
    lines = [json.loads(line) for line in open(args.out / "run/metrics.jsonl")]
    return [(line["step"], line["val_accept_len_walk"]) for line in lines if "val_accept_len_walk" in line]


def check_data(args, path, name):
    status, text = run([args.dtrain, "data", "check", "--no-verdicts", "--target", args.features / "target", path],
                       args.out / f"check-{name}.log", check=False)
    verdict = [line for line in text.splitlines() if "teacher recomputed" in line]
    return status, verdict[-1].split("top-1", 1)[-1] if verdict else text[-300:]


def train_and_agree(args, results):
    results.append(("data check of the validation shard",
                    "exit status %d; top-1%s" % check_data(args, args.features / "val-00000.h5", "val")))
    if not args.keep:
        run([args.dtrain, *dtrain_sets(args, args.features / "val-*.h5")], args.out / "train.log")
    results.append(("accept_len_walk by step", ", ".join(f"{s}: {a:.3f}" for s, a in validation_rise(args))))
    shutil.rmtree(args.out / "drafter", ignore_errors=True)
    run([args.dtrain, "export", "--checkpoint", args.out / "run/checkpoints/best", "--format", "zlab", "--out",
         args.out / "drafter"], args.out / "export.log")
    walk, scored = evaluate(args, args.features / "val-00000.h5", "val")
    decoded, last = decode(args, args.out / "drafter", "true", args.documents)
    same = sum(scored.get(key) == value for key, value in decoded.items())
    results.append(("eval, all held-out documents", f"{walk:.4f} tokens per block"))
    results.append((f"decoding, {args.documents} of them", last))
    results.append(("blocks of decoding that eval's walk has too, with the same length",
                    f"{same} of {len(decoded)} ({100 * same / len(decoded):.2f} %)"))
    return walk, decoded


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtrain", required=True)
    parser.add_argument("--features", required=True, type=pathlib.Path)
    parser.add_argument("--model")
    parser.add_argument("--gguf")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--mutant-documents", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="of the target when decoding")
    parser.add_argument("--set", action="append", default=[], help="config keys to change")
    parser.add_argument("--keep", action="store_true", help="use the training run that is there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "results.txt")
    walk, decoded = train_and_agree(args, results)
    for name, change in (("layer ids + 1", next_layer_ids), ("rope theta / 10", other_theta),
                         ("window one block short", window_one_block_off)):
        folder = edited_export(args, name.split()[0], change)
        other = decode(args, folder, name.split()[0], args.mutant_documents)[0]
        seen = {document for document, _ in other}
        same = {key: value for key, value in decoded.items() if key[0] in seen}
        results.append((f"mutant of the export: {name}",
                        f"decoding {tokens_per_block(same):.3f} -> {tokens_per_block(other):.3f} tokens per block "
                        f"({len(seen)} documents)"))
    for name, change in (("norm applied twice", norm_twice(args)), ("labels one late", labels_one_late)):
        path = edited_shard(args, name.split()[0], change)
        other = evaluate(args, path, name.split()[0])[0]
        status, verdict = check_data(args, path, name.split()[0])
        results.append((f"mutant of the shards: {name}", f"eval {walk:.3f} -> {other:.3f} tokens per block; "
                                                         f"data check exit status {status}: top-1{verdict}"))


if __name__ == "__main__":
    main()
