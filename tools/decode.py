#!/usr/bin/env python3
"""Speculative decoding with an exported DFlash drafter: a reference, greedy, one text at a time.

    decode.py --model DIR --drafter EXPORT prompts.jsonl          prompts as for extract.py
    decode.py --model DIR --drafter EXPORT --shard val-00000.h5   the prompts of a shard's documents

Everything about the drafter is read from its export (z-lab layout: config.json, model.safetensors).
The text must equal the target's own greedy text (with --shard: the document); where it does not, the
gap between the target's two largest logits says whether that is a numerical tie. With --blocks-out
every block is written as `dtrain eval --blocks` writes it. Exit status 1: a difference that is no tie.
"""

import argparse
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dtrain_tools.command import REFUSED, RUN_FAILED  # noqa: E402
from dtrain_tools.documents import InputError, Template, read_sources  # noqa: E402


def build_parser():
    parser = argparse.ArgumentParser(description="greedy speculative decoding with an exported drafter",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("prompts", nargs="*", help="JSONL files of prompts")
    add("--model", help="the target: a Hugging Face model directory")
    add("--gguf", metavar="FILE", help="GGUF file instead of --model")
    add("--drafter", required=True, help="exported drafter in z-lab layout")
    add("--shard", nargs="+", metavar="FILE", help="take prompts and expected text from these shards' documents")
    add("--limit", type=int, help="only the first N prompts or documents")
    add("--max-new-tokens", type=int, default=256, help="longest answer (with --shard: the document's)")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float32"],
        help="of target and drafter; auto: fp32 on a CPU, the target's own on a GPU")
    add("--device", default="auto")
    add("--threads", type=int)
    add("--bf16-features", action="store_true",
        help="round the target's states to bf16 before the drafter sees them, as shards hold them")
    add("--thinking", choices=["on", "off"], help="enable_thinking of the chat template")
    add("--epsilon", type=float, default=1e-3, help="a difference is a tie when the two largest logits are this close")
    add("--blocks-out", metavar="FILE", help="write every block as a JSON line")
    return parser


def texts_of_prompts(args, target, tokenizer):
    """-> (name, prompt ids, longest answer, None) of each prompt."""
    thinking = None if args.thinking is None else args.thinking == "on"
    template = Template(tokenizer, target.end_ids(tokenizer), thinking)
    for number, source in enumerate(read_sources(args.prompts, args.limit)):
        if source.kind == "ids":
            first = source.mask.index(1) if 1 in source.mask else len(source.ids)
            yield ("prompt", number), source.ids[:first], args.max_new_tokens, None
        elif source.kind == "prompt":
            messages = source.messages + [{"role": "user", "content": source.turns[0]}]
            yield ("prompt", number), template.ids(messages, source.where, True), args.max_new_tokens, None
        else:
            raise InputError(f"{source.where}: a finished conversation; expected a prompt")


def texts_of_shards(args):
    """-> (name, prompt ids, longest answer, expected text) of each document's first supervised stretch."""
    import h5py
    import numpy as np
    count = 0
    for path in args.shard:
        try:
            file = h5py.File(path, "r")
            ids, mask, offsets, names = (file[n][:] for n in ("input_ids", "loss_mask", "doc_offsets", "doc_id"))
        except (OSError, KeyError) as error:
            raise InputError(f"{path}: not a feature shard with doc_id: {error}") from error
        with file:
            for number, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:])):
                if count == args.limit:
                    return
                some, marks = ids[begin:end].tolist(), mask[begin:end]
                if not marks.any() or marks[0]:
                    continue
                first = int(np.argmax(marks))
                length = int(np.argmin(np.append(marks[first:], 0)))
                count += 1
                yield ("doc_id", int(names[number])), some[:first], length, some[first:first + length]


class Totals:
    def __init__(self, block_size):
        self.blocks = self.tokens = self.ties = self.differences = self.texts = 0
        self.scored, self.correct = [0] * (block_size - 1), [0] * (block_size - 1)

    def add(self, blocks):
        self.texts += 1
        self.blocks += len(blocks)
        self.tokens += sum(block.accepted + 1 for block in blocks)
        for block in blocks:
            for slot in range(block.scored):
                self.scored[slot] += 1
                self.correct[slot] += slot < block.accepted

    def report(self, epsilon, seconds):
        if not self.blocks:
            print(f"{self.texts} texts, no block")
            return
        print("accepted up to slot: " + " ".join(f"{slot + 1}:{right / scored:.3f}" for slot, (right, scored)
                                                  in enumerate(zip(self.correct, self.scored)) if scored))
        print(f"{self.texts} texts, {self.blocks} blocks, {self.tokens / self.blocks:.4f} tokens per block, "
              f"{self.differences} differences from greedy text, {self.ties} ties (gap below {epsilon:g}), "
              f"{seconds:.1f} s")


def first_difference(text, expected):
    for at, (ours, theirs) in enumerate(zip(text, expected)):
        if ours != theirs:
            return at
    return None if len(text) == len(expected) else min(len(text), len(expected))


def decode_all(args, target, tokenizer, drafter, runner, blocks_file):
    from dtrain_tools.speculation import greedy, speculate, top_gap
    totals, started = Totals(drafter.block_size), time.time()
    end_ids = frozenset(target.end_ids(tokenizer))
    texts = texts_of_shards(args) if args.shard else texts_of_prompts(args, target, tokenizer)
    for (kind, name), prompt, limit, expected in texts:
        text, blocks = speculate(runner, drafter, prompt, limit, end_ids)
        totals.add(blocks)
        if expected is None:
            expected, _ = greedy(runner, prompt, limit, end_ids)
        tokens = sum(block.accepted + 1 for block in blocks)
        print(f"{kind} {name}: {len(text)} tokens, {len(blocks)} blocks, {tokens / max(len(blocks), 1):.2f} tokens "
              f"per block, accepted {' '.join(str(block.accepted) for block in blocks)}", flush=True)
        at = first_difference(text, expected)
        if at is not None:
            gap = top_gap(runner, prompt + expected[:at])
            tie = gap < args.epsilon
            totals.ties += tie
            totals.differences += not tie
            print(f"{kind} {name}: differs from the greedy text at token {at} (position {len(prompt) + at}): "
                  f"top-2 gap {gap:.2e}, {'a tie' if tie else 'NOT a tie'} at --epsilon {args.epsilon:g}", flush=True)
        for block in blocks if blocks_file else ():
            blocks_file.write(json.dumps({kind: name, "anchor": block.anchor, "accepted": block.accepted}) + "\n")
        if blocks_file:
            blocks_file.flush()
    totals.report(args.epsilon, time.time() - started)
    return RUN_FAILED if totals.differences else 0


def run(args):
    import torch
    from dtrain_tools.dflash_drafter import Drafter
    from dtrain_tools.speculation import Runner
    from dtrain_tools.target_model import Target, load_tokenizer
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.model, args.gguf)
    target = Target(args.model, args.gguf, args.device, args.dtype)
    drafter = Drafter(args.drafter, target, target.dtype)
    runner = Runner(target, drafter.layer_ids, args.bf16_features)
    if not args.blocks_out:
        return decode_all(args, target, tokenizer, drafter, runner, None)
    with open(args.blocks_out, "w", encoding="utf-8") as file:
        return decode_all(args, target, tokenizer, drafter, runner, file)


def main():
    parser = build_parser()
    args = parser.parse_args()
    if (args.model is None) == (args.gguf is None):
        parser.error("give either --model or --gguf")
    if bool(args.prompts) == bool(args.shard):
        parser.error("give either prompts or --shard")
    try:
        return run(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main())
