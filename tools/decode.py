#!/usr/bin/env python3
"""Speculative decoding with an exported drafter, DFlash or EAGLE-3: a reference, one text at a time.

    decode.py --model DIR --drafter EXPORT prompts.jsonl          prompts as for extract.py
    decode.py --model DIR --drafter EXPORT --shard val-00000.h5   the prompts of a shard's documents

Everything about the drafter is read from its export, in whichever layout (config.json, model.safetensors).
Greedy, the text must equal the target's own greedy text (with --shard: the document); where it does not, the
gap between the target's two largest logits says whether that is a numerical tie. With --temperature the text is
a draw from the target's distribution, whatever the drafter. With --blocks-out every block is written as
`dtrain eval --blocks` writes it. Exit status 1: a difference that is no tie.
"""

import argparse
import dataclasses
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dtrain_tools.command import REFUSED, RUN_FAILED, Help  # noqa: E402
from dtrain_tools.documents import InputError, Template, read_sources  # noqa: E402


def build_parser():
    parser = argparse.ArgumentParser(description="speculative decoding with an exported drafter",
                                     formatter_class=Help)
    add = parser.add_argument
    add("prompts", nargs="*", metavar="FILE", help="JSONL files of prompts")
    add("--model", metavar="DIR", help="the target: a Hugging Face model directory")
    add("--gguf", metavar="FILE", help="GGUF file instead of --model")
    add("--drafter", required=True, metavar="DIR", help="what `dtrain export` wrote")
    add("--shard", nargs="+", metavar="FILE", help="take prompts and expected text from these shards' documents")
    add("--limit", type=int, metavar="N", help="only the first N prompts or documents")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (with --shard: the document's)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy; above: speculative sampling")
    add("--seed", type=int, default=1, metavar="N", help="of sampling; every text has its own stream")
    add("--drafts", type=int, metavar="N", help="make N drafts a block, as servers do when told so (default: "
        "block_size - 1; EAGLE-3: what the export says)")
    add("--plain", action="store_true", help="with --shard: decode without the drafter too, to compare the speed")
    add("--dtype", default="auto", choices=["auto", "bfloat16", "float32"],
        help="of target and drafter; auto: fp32 on a CPU, the target's own on a GPU")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")
    add("--threads", type=int, metavar="N", help="CPU threads of torch")
    add("--bf16-features", action="store_true",
        help="round the target's states to bf16 before the drafter sees them, as shards hold them")
    add("--thinking", choices=["on", "off"], help="enable_thinking of the chat template")
    add("--epsilon", type=float, default=1e-3, metavar="X", help="a difference is a tie when the two largest logits are this close")
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


@dataclasses.dataclass
class Clock:
    """Tokens and seconds of one way to decode. The first text, where things are still being set up, is
    counted only when there is no other."""
    first: tuple = (0, 0.0)
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens, seconds):
        if self.first[0]:
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        else:
            self.first = (tokens, seconds)

    @property
    def rate(self):
        tokens, seconds = (self.tokens, self.seconds) if self.tokens else self.first
        return tokens / seconds if seconds else 0.0


class Totals:
    def __init__(self, drafts):
        self.blocks = self.tokens = self.ties = self.differences = self.texts = 0
        self.scored, self.correct, self.lengths = [0] * drafts, [0] * drafts, [0] * (drafts + 1)
        self.speculative, self.plain = Clock(), Clock()

    def add(self, blocks):
        self.texts += 1
        self.blocks += len(blocks)
        self.tokens += sum(block.accepted + 1 for block in blocks)
        for block in blocks:
            self.lengths[block.accepted] += 1
            for slot in range(block.scored):
                self.scored[slot] += 1
                self.correct[slot] += slot < block.accepted

    def report(self, epsilon, seconds, greedy):
        if not self.blocks:
            print(f"{self.texts} texts, no block")
            return
        print("accepted up to slot: " + " ".join(f"{slot + 1}:{right / scored:.3f}" for slot, (right, scored)
                                                  in enumerate(zip(self.correct, self.scored)) if scored))
        print("blocks by accepted drafts: " + " ".join(f"{length}:{count}" for length, count in enumerate(self.lengths)))
        speed = f"{self.speculative.rate:.1f} tokens/s"
        if self.plain.rate:
            speed += f", plain decoding {self.plain.rate:.1f} ({self.speculative.rate / self.plain.rate:.2f} x)"
        print(f"speed: {speed}")
        compared = (f"{self.differences} differences from greedy text, {self.ties} ties (gap below {epsilon:g}), "
                    if greedy else "sampled, ")
        print(f"{self.texts} texts, {self.blocks} blocks, {self.tokens / self.blocks:.4f} tokens per block, "
              f"{compared}{seconds:.1f} s")


def first_difference(text, expected):
    for at, (ours, theirs) in enumerate(zip(text, expected)):
        if ours != theirs:
            return at
    return None if len(text) == len(expected) else min(len(text), len(expected))


class Decoding:
    """One run over all texts."""

    def __init__(self, args, target, tokenizer, drafter, runner):
        self.args, self.target, self.tokenizer = args, target, tokenizer
        self.drafter, self.runner = drafter, runner
        self.totals = Totals(drafter.draft_count)
        self.end_ids = frozenset(target.end_ids(tokenizer))

    def run(self, blocks_file):
        started = time.time()
        texts = (texts_of_shards(self.args) if self.args.shard
                 else texts_of_prompts(self.args, self.target, self.tokenizer))
        for (kind, name), prompt, limit, expected in texts:
            blocks = self._one(kind, name, prompt, limit, expected)
            for block in blocks if blocks_file else ():
                blocks_file.write(json.dumps({kind: name, "anchor": block.anchor, "accepted": block.accepted}) + "\n")
            if blocks_file:
                blocks_file.flush()
        self.totals.report(self.args.epsilon, time.time() - started, self.args.temperature <= 0)
        return RUN_FAILED if self.totals.differences else 0

    def _chooser(self, kind, name, purpose):
        from dtrain_tools.generate import random_stream
        from dtrain_tools.speculation import Greedy, Sampling
        if self.args.temperature <= 0:
            return Greedy()
        return Sampling(self.args.temperature, random_stream(self.args.seed, f"{kind} {name} {purpose}", 0))

    def _timed(self, clock, decode, *arguments):
        started = time.perf_counter()
        result = decode(*arguments)
        clock.add(len(result[0] if isinstance(result, tuple) else result), time.perf_counter() - started)
        return result

    def _one(self, kind, name, prompt, limit, expected):
        from dtrain_tools.speculation import plain, speculate
        text, blocks = self._timed(self.totals.speculative, speculate, self.runner, self.drafter, prompt, limit,
                                   self.end_ids, self._chooser(kind, name, "speculative"))
        self.totals.add(blocks)
        tokens = sum(block.accepted + 1 for block in blocks)
        print(f"{kind} {name}: {len(text)} tokens, {len(blocks)} blocks, {tokens / max(len(blocks), 1):.2f} tokens "
              f"per block, accepted {' '.join(str(block.accepted) for block in blocks)}", flush=True)
        if expected is None or self.args.plain:
            alone = self._timed(self.totals.plain, plain, self.runner, prompt, limit, self.end_ids,
                                self._chooser(kind, name, "plain"))
            expected = alone if expected is None else expected
        if self.args.temperature <= 0:
            self._compare(f"{kind} {name}", prompt, text, expected)
        return blocks

    def _compare(self, name, prompt, text, expected):
        from dtrain_tools.speculation import top_gap
        at = first_difference(text, expected)
        if at is None:
            return
        gap = top_gap(self.runner, prompt + expected[:at])
        tie = gap < self.args.epsilon
        self.totals.ties += tie
        self.totals.differences += not tie
        print(f"{name}: differs from the greedy text at token {at} (position {len(prompt) + at}): top-2 gap {gap:.2e}, "
              f"{'a tie' if tie else 'NOT a tie'} at --epsilon {self.args.epsilon:g}", flush=True)


def run(args):
    import torch
    from dtrain_tools.exported_drafter import open_drafter
    from dtrain_tools.speculation import Runner
    from dtrain_tools.target_model import Target, load_tokenizer
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.model, args.gguf)
    target = Target(args.model, args.gguf, args.device, args.dtype)
    drafter = open_drafter(args.drafter, target, target.dtype, args.drafts)
    decoding = Decoding(args, target, tokenizer, drafter, Runner(target, drafter.layer_ids, args.bf16_features))
    if not args.blocks_out:
        return decoding.run(None)
    with open(args.blocks_out, "w", encoding="utf-8") as file:
        return decoding.run(file)


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
