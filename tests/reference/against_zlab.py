#!/usr/bin/env python3
"""z-lab's published generate loop beside dtrain's decoder, block by block.

    against_zlab.py --zlab FOLDER --model DIR --drafter EXPORT --shard FILE.h5 [--limit N]

FOLDER: a checkout of their repository (dflash/model.py). Both decode the same held-out prompts greedily in fp32 with the
same export, each with its own network, caches and loop; what they accept must be the same in every block, up
to the first numerical tie of a text. Only for drafters whose layers are all full: their code knows no windows. Exit
status 77: something that is needed is missing.
"""

import argparse
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
DECODE = os.path.join(HERE, "..", "..", "tools", "decode.py")


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def texts(path, limit):
    """(doc_id, prompt, length of the answer) of each document, as decode.py takes them."""
    import h5py
    import numpy as np

    with h5py.File(path, "r") as file:
        ids, mask, offsets, names = (file[n][:] for n in ("input_ids", "loss_mask", "doc_offsets", "doc_id"))
    count = 0
    for name, begin, end in zip(names, offsets[:-1], offsets[1:]):
        marks = mask[begin:end]
        if count == limit or not marks.any() or marks[0]:
            continue
        first = int(np.argmax(marks))
        count += 1
        yield int(name), ids[begin : begin + first].tolist(), int(np.argmin(np.append(marks[first:], 0)))


def their_blocks(arguments):
    """{doc_id: accepted drafts of each block}"""
    import torch
    from dflash.model import DFlashDraftModel, dflash_generate
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.cuda.synchronize = lambda: None  # they time with it
    target = AutoModelForCausalLM.from_pretrained(arguments.model, torch_dtype=torch.float32).eval()
    draft = DFlashDraftModel.from_pretrained(arguments.drafter, torch_dtype=torch.float32).eval()
    ends = GenerationConfig.from_pretrained(arguments.model).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    blocks = {}
    for name, prompt, length in texts(arguments.shard, arguments.limit):
        done = dflash_generate(
            draft, target=target, input_ids=torch.tensor([prompt]), max_new_tokens=length, stop_token_ids=ends,
            temperature=0.0, return_stats=True,
        )  # fmt: skip
        blocks[name] = [count - 1 for count in done.acceptance_lengths]
        print(f"theirs: {name}: {blocks[name]}", flush=True)
    return blocks


def our_blocks(arguments):
    """{doc_id: accepted drafts of each block}, and the documents where a tie was met."""
    import json

    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "blocks.jsonl")
        command = [
            arguments.python, DECODE, "--model", arguments.model, "--drafter", arguments.drafter, "--shard", arguments.shard,
            "--limit", str(arguments.limit), "--dtype", "float32", "--blocks-out", out,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        print(done.stdout)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr)
        blocks, ties = {}, {int(line.split()[1][:-1]) for line in done.stdout.splitlines() if "differs from" in line}
        with open(out, encoding="utf-8") as file:
            for line in map(json.loads, file):
                blocks.setdefault(line["doc_id"], []).append(line["accepted"])
    return blocks, ties


def compare(ours, theirs, ties):
    """Blocks that are equal and blocks that are not. The last block of a text is cut at its end by ours alone,
    and they go on where ours stop at the length of the document."""
    same = other = 0
    for name, blocks in ours.items():
        pairs = list(zip(blocks, theirs[name]))
        for at, (mine, yours) in enumerate(pairs):
            last = at == len(blocks) - 1
            equal = mine == yours or (last and mine <= yours)
            same, other = same + equal, other + (not equal)
            if not equal:
                print(f"document {name}, block {at}: ours {mine}, theirs {yours}{' (a tie)' if name in ties else ''}")
                break
        if len(blocks) > len(theirs[name]):
            other += 1
            print(f"document {name}: ours has {len(blocks)} blocks, theirs {len(theirs[name])}")
    return same, other


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--zlab", required=True, help="checkout of their repository")
    add("--model", required=True, help="the target")
    add("--drafter", required=True, help="export in z-lab's layout")
    add("--shard", required=True, help="documents that the target wrote greedily")
    add("--limit", type=int, default=10)
    add("--python", default=sys.executable, help="for decode.py, when this Python has the Transformers that theirs wants")
    arguments = parser.parse_args()
    if not os.path.exists(os.path.join(arguments.zlab, "dflash", "model.py")):
        skip(f"{arguments.zlab} has no dflash/model.py")
    sys.path.insert(0, arguments.zlab)
    try:
        theirs = their_blocks(arguments)
    except ImportError as missing:
        skip(missing)
    ours, ties = our_blocks(arguments)
    same, other = compare(ours, theirs, ties)
    print(f"{same} blocks equal, {other} different, in {len(ours)} texts")
    return 1 if other or not same else 0


if __name__ == "__main__":
    sys.exit(main())
